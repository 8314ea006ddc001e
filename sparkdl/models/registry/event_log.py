"""The registry's event log, and what its events add up to.

Enters: rows of the events table. Leaves: a ``State`` that answers which versions and aliases there are. Pure values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
import pyarrow as pa

from sparkdl.documents.typed import Count, Source, convert, encode, parse
from sparkdl.errors import ConfigError

__all__ = ["EVENTS", "Event", "ModelVersion", "State", "fold"]

EVENTS = pa.schema(
    [
        ("sequence", pa.int64()),
        ("time", pa.timestamp("us", "UTC")),
        ("kind", pa.string()),
        ("name", pa.string()),
        ("version", pa.int32()),
        ("alias", pa.string()),
        ("previous", pa.int32()),
        ("reason", pa.string()),
        ("artifact", pa.string()),
        ("metrics", pa.string()),
        ("parameters", pa.string()),
        ("lineage", pa.string()),
        ("publication", pa.string()),
    ]
)
"""Columns of the events table; metrics, parameters and lineage are JSON objects."""

_JSON = ("metrics", "parameters", "lineage")
_LOG = Source("the registry's table of events", "it was altered, restore an earlier version of it")


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened to a model.

    Attributes:
        kind: ``"published"``, ``"aliased"``, ``"rolled_back"`` or ``"deleted"``.
        name: of the model.
        version: that it is about; 0 until a publication gets its number.
        alias: that moved.
        previous: where the alias pointed before.
        reason: why.
        artifact: content hash of the bundle.
        metrics: by name.
        parameters: JSON values.
        lineage: JSON values.
        publication: identity of the publication.
        sequence: position among all events of the registry.
        time: of the commit.
    """

    kind: Literal["published", "aliased", "rolled_back", "deleted"]
    name: str
    version: Count = 0
    alias: str | None = None
    previous: Count | None = None
    reason: str = ""
    artifact: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    lineage: Mapping[str, Any] = field(default_factory=dict)
    publication: str | None = None
    sequence: int = -1
    time: datetime | None = None

    def numbered(self, version: int) -> Event:
        """The event with the number that its publication gets."""
        return replace(self, version=version)

    def stamped(self, sequence: int, time: datetime) -> Event:
        """The event with its place in the log."""
        return replace(self, sequence=sequence, time=time)

    def to_row(self) -> dict[str, Any]:
        """As a row of ``EVENTS``."""
        row = {name: getattr(self, name) for name in EVENTS.names}
        return {
            **row,
            **{name: encode(dict(sorted(row[name].items())), nan=name == "metrics").decode() for name in _JSON},
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any], source: Source = _LOG) -> Event:
        """Back from ``to_row``; columns of a later sparkdl are left out.

        Raises:
            IntegrityError: the row is no event; the message names the column.
        """
        absent = [name for name in EVENTS.names if name not in row]
        if absent:
            raise source.error(f"the table has no columns {absent}")
        fields = {name: row[name] for name in EVENTS.names}
        for name in _JSON:
            if not isinstance(fields[name], str | None):
                raise source.error(f"it is a {type(fields[name]).__name__}", f"$.{name}")
            try:
                fields[name] = parse((fields[name] or "{}").encode(), source, nan=name == "metrics")
            except UnicodeEncodeError as cause:
                raise source.error(f"it is no UTF-8 ({cause.reason})", f"$.{name}") from cause
        return convert(fields, cls, source)


@dataclass(frozen=True, kw_only=True)
class ModelVersion:
    """One published version of a model.

    Attributes:
        name: of the model.
        version: from 1 on.
        uri: of its bundle.
        artifact: content hash of the bundle.
        metrics: by name.
        parameters: it was trained with.
        lineage: where it comes from.
        published: when.
        aliases: those that point to it now.
        publication: identity of its publication.
    """

    name: str
    version: int
    uri: str
    artifact: str
    metrics: Mapping[str, float]
    parameters: Mapping[str, Any]
    lineage: Mapping[str, Any]
    published: datetime
    aliases: tuple[str, ...] = ()
    publication: str = ""


@dataclass(frozen=True, kw_only=True)
class State:
    """What the events add up to.

    Attributes:
        events: in order.
    """

    events: Sequence[Event]
    _live: Mapping[tuple[str, int], ModelVersion]
    _moves: Mapping[tuple[str, str], Sequence[int]]

    def names(self) -> list[str]:
        """The models with a version."""
        return sorted({name for name, _ in self._live})

    def next_version(self, name: str) -> int:
        """One above every number that the model ever had."""
        return 1 + max((event.version for event in self.events if event.name == name), default=0)

    def aliases(self, name: str) -> dict[str, int]:
        """Alias to version."""
        return {alias: moves[-1] for (model, alias), moves in sorted(self._moves.items()) if model == name and moves}

    def versions(self, name: str) -> list[ModelVersion]:
        """The model's versions, oldest first."""
        pointing = self.aliases(name)
        found = [version for (model, _), version in self._live.items() if model == name]
        return [
            replace(one, aliases=tuple(alias for alias, version in pointing.items() if version == one.version))
            for one in sorted(found, key=lambda one: one.version)
        ]

    def get(self, name: str, which: int | str) -> ModelVersion:
        """A version by number or alias.

        Raises:
            ConfigError: there is none.
        """
        versions = {one.version: one for one in self.versions(name)}
        if not versions:
            raise ConfigError(f"there is no model {name!r} in this registry, only {self.names()}: name one of these")
        pointing = self.aliases(name)
        if isinstance(which, str):
            if which not in pointing:
                raise ConfigError(f"model {name!r} has no alias {which!r}, only {sorted(pointing)}: name one of these")
            return versions[pointing[which]]
        if which not in versions:
            raise ConfigError(f"model {name!r} has no version {which}, only {sorted(versions)}: name one of these")
        return versions[which]

    def by_publication(self, name: str, publication: str) -> ModelVersion | None:
        """The version that a publication made, if it is there."""
        return next((one for one in self.versions(name) if one.publication == publication), None)

    def before(self, name: str, alias: str) -> int | None:
        """The last version before the current one that the alias pointed to and that still exists."""
        moves = self._moves.get((name, alias), ())
        return next((version for version in reversed(moves[:-1]) if (name, version) in self._live), None)

    def artifacts(self) -> set[str]:
        """Content hashes of all versions."""
        return {version.artifact for version in self._live.values()}


def fold(rows: Iterable[Mapping[str, Any]], uri_of: Callable[[str], str]) -> State:
    """Add the events up.

    Args:
        rows: of the events table, in any order.
        uri_of: from content hash to the bundle's address.

    Raises:
        IntegrityError: a row is no event, or contradicts those before it.
    """
    events = sorted((Event.from_row(row) for row in rows), key=lambda event: event.sequence)
    live: dict[tuple[str, int], ModelVersion] = {}
    moves: dict[tuple[str, str], list[int]] = {}
    for event in events:
        key = (event.name, event.version)
        _check(event, live, moves)
        if event.kind == "published":
            assert event.artifact is not None
            assert event.time is not None
            live[key] = ModelVersion(
                name=event.name,
                version=event.version,
                uri=uri_of(event.artifact),
                artifact=event.artifact,
                metrics=event.metrics,
                parameters=event.parameters,
                lineage=event.lineage,
                published=event.time,
                publication=event.publication or "",
            )
        elif event.kind == "deleted":
            del live[key]
        else:
            assert event.alias is not None
            path = moves.setdefault((event.name, event.alias), [])
            if event.kind == "rolled_back":
                while len(path) > 1 and path[-1] != event.version:
                    path.pop()
            else:
                path.append(event.version)
    return State(events=events, _live=live, _moves=moves)


def _check(
    event: Event, live: Mapping[tuple[str, int], ModelVersion], moves: Mapping[tuple[str, str], Sequence[int]]
) -> None:
    """Refuse an event that no registry commits after those before it."""
    key = (event.name, event.version)
    if event.kind == "published":
        wrong = "has no artifact or time" if not (event.artifact and event.time) else "exists" if key in live else ""
    elif key not in live:
        wrong = "does not exist"
    elif event.kind == "deleted":
        pointing = [alias for (name, alias), path in moves.items() if name == event.name and path[-1] == event.version]
        wrong = f"is what {pointing} point to" if pointing else ""
    elif event.alias is None:
        wrong = "is given to no alias"
    else:
        before = moves.get((event.name, event.alias), ())
        unknown = event.kind == "rolled_back" and event.version not in before
        wrong = f"{event.alias!r} never pointed to" if unknown else ""
    if wrong:
        raise _LOG.error(f"event {event.sequence} is {event.kind!r} of {event.name!r} {event.version}, which {wrong}")
