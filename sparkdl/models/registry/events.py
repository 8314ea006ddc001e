"""The events of a registry's models, and the state that they add up to; no disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, get_args

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.numpy_arrow import from_values, to_rows
from sparkdl.documents.typed import Count, Source, convert, encode, parse
from sparkdl.errors import ConfigError, IntegrityError
from sparkdl.observe import facts_table, metrics_text

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
SIGNED_EVENTS = EVENTS.append(pa.field("signature", pa.string()))
"""The columns once an event was signed: a registry that never saw a key keeps the columns that every sparkdl knows."""

Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Kind = Literal["published", "aliased", "rolled_back", "deleted"]
_JSON = ("metrics", "parameters", "lineage")
_LISTED = 10
"""Names, or numbers, that a refusal lists at most."""
_MOST_BYTES = 4 << 20
"""The most bytes of the JSON of one event; every question reads the events of all versions."""
_CALENDAR = [
    (moment.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    for moment in (datetime.min, datetime.max)
]
"""Microseconds from 1970 on that Python's datetime can hold."""
LOG = Source("the registry's table of events", "it was altered, restore an earlier version of it")


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
        signature: of all of this, see ``signing.py``; None for an event of a registry without a key.
    """

    kind: Kind
    name: str
    version: Count = 0
    alias: str | None = None
    previous: Count | None = None
    reason: str = ""
    artifact: Hash | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    lineage: Mapping[str, Any] = field(default_factory=dict)
    publication: str | None = None
    sequence: int = -1
    time: datetime | None = None
    signature: str | None = None

    def stamped(self, sequence: int, time: datetime) -> Event:
        """The event with its place in the log."""
        return replace(self, sequence=sequence, time=time)

    def to_row(self) -> dict[str, Any]:
        """The event as a row of ``SIGNED_EVENTS``."""
        row = {name: getattr(self, name) for name in SIGNED_EVENTS.names}
        return {
            **row,
            **{name: encode(dict(row[name]), nan=name == "metrics").decode() for name in _JSON},
        }

    def check_readable(self) -> None:
        """Refuse what no reader takes: one such event in the log, and nobody reads the others.

        Raises:
            ConfigError: names the field, and the entry of metrics, parameters or lineage.
        """
        row, encoded_bytes = self.to_row(), 0
        try:
            for name, text in row.items():
                source = Source(f"{name} of {self.name!r}, once committed,", "give shorter, plain values")
                if isinstance(text, str) and name not in _JSON:
                    parse(encode(text), source)
            for name in _JSON:
                for key, value in sorted(getattr(self, name).items()):
                    source = Source(f"{key!r} of {name}, once committed,", "give shorter, plain values")
                    data = encode({key: value}, nan=True)
                    encoded_bytes += len(data)
                    parse(data, source, _MOST_BYTES, nan=True)
            Event.from_row(row)
        except IntegrityError as cause:
            raise ConfigError(str(cause)) from cause
        if encoded_bytes > _MOST_BYTES:
            raise ConfigError(
                f"the metrics, parameters and lineage of {self.name!r} have {encoded_bytes:,} bytes as JSON, a "
                f"registry holds up to {_MOST_BYTES:,} of each version: leave out the largest"
            )

    @classmethod
    def from_row(cls, row: Mapping[str, Any], source: Source = LOG) -> Event:
        """Back from ``to_row``.

        Raises:
            IntegrityError: the row is no event; the message names the column.
        """
        fields = {name: row.get(name) for name in SIGNED_EVENTS.names}
        for name in _JSON:
            if not isinstance(fields[name], str | None):
                raise source.error(f"it is a {type(fields[name]).__name__}", f"$.{name}")
            try:
                fields[name] = parse((fields[name] or "{}").encode(), source, nan=name == "metrics")
            except UnicodeEncodeError as cause:
                raise source.error(f"it is no UTF-8 ({cause.reason})", f"$.{name}") from cause
        return convert(fields, cls, source)


@dataclass(frozen=True, kw_only=True, repr=False)
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
        signature: of its publication; None if it was published without a key.
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
    signature: str | None = None

    def __repr__(self) -> str:
        return f"{self.name}@{self.version}: {'; '.join(self._facts().values())}"

    def _repr_html_(self) -> str:
        return facts_table(f"{self.name}@{self.version}", {**self._facts(), "uri": self.uri})

    def _facts(self) -> dict[str, str]:
        """What is worth seeing at a glance."""
        facts = {
            "aliases": ", ".join(self.aliases) or "no alias",
            "published": f"{self.published:%Y-%m-%d %H:%M} UTC",
            "metrics": metrics_text(self.metrics),
            "table": str(self.lineage.get("source_table") or ""),
        }
        return {name: text for name, text in facts.items() if text}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSummary:
    """A model at a glance.

    Attributes:
        name: of the model.
        versions: how many there are.
        newest: the highest number among all that it ever gave.
        aliases: what each points to.
    """

    name: str
    versions: int
    newest: int
    aliases: Mapping[str, int]


def event_rows(table: pa.Table) -> pa.Table:
    """The columns of ``SIGNED_EVENTS``, oldest event first; columns of a later sparkdl are left out.

    Raises:
        IntegrityError: they are no events; the message names the column.
    """
    absent = [name for name in EVENTS.names if name not in table.column_names]
    if absent:
        raise LOG.error(f"the table has no columns {absent}")
    if "signature" not in table.column_names:
        table = table.append_column(SIGNED_EVENTS.field("signature"), pa.nulls(len(table), pa.string()))
    table = table.select(SIGNED_EVENTS.names).combine_chunks()
    for name, expected, actual in zip(SIGNED_EVENTS.names, SIGNED_EVENTS.types, table.schema.types, strict=True):
        if str(actual).removeprefix("large_").removesuffix("_view") != str(expected):
            raise LOG.error(f"it is a {actual}", f"$.{name}")
    try:
        table = table.cast(SIGNED_EVENTS)
        table.validate(full=True)
    except pa.ArrowInvalid as cause:
        raise LOG.error(cause) from cause
    for name in ("sequence", "kind", "name", "version"):
        if table[name].null_count:
            raise LOG.error("an event has none", f"$.{name}")
    if len(table) and pc.min(table["version"]).as_py() < 0:
        raise LOG.error("it is below 0", "$.version")
    times = pc.min_max(table["time"].cast(pa.int64())).as_py()
    if times["min"] is not None and not (_CALENDAR[0] <= times["min"] and times["max"] <= _CALENDAR[1]):
        raise LOG.error("it is in no year from 1 to 9999", "$.time")
    if not set(pc.unique(table["kind"]).to_pylist()) <= set(get_args(Kind)):
        raise LOG.error(f"it is none of {list(get_args(Kind))}", "$.kind")
    return table.sort_by("sequence")


@dataclass(slots=True)
class _Alias:
    """The version that an alias points to, and how it came there.

    Attributes:
        moves: the versions that a rollback goes back through, the present one last.
        row: of its last move.
    """

    moves: list[int]
    row: int


@dataclass(slots=True)
class _Model:
    """One model.

    Attributes:
        last: the highest number that it ever gave.
        versions: by number, the row of the publication.
        aliases: by name.
    """

    last: int = 0
    versions: dict[int, int] = field(default_factory=dict)
    aliases: dict[str, _Alias] = field(default_factory=dict)


class State:
    """What the events of a registry add up to.

    An event is a row of the registry's table. The state goes over the few columns that say what there is; it decodes
    the metrics, parameters and lineage only of versions that a question is about, as these take most of the time.

    Args:
        rows: of the events table, in any order.
        uri_of: from content hash to the bundle's address.

    Raises:
        IntegrityError: a row is no event, or contradicts those before it; of metrics, parameters, lineage and artifact,
            once a question is about them.
    """

    def __init__(self, rows: pa.Table, uri_of: Callable[[str], str]) -> None:
        self.rows = event_rows(rows)
        self._uri_of = uri_of
        self._models: dict[str, _Model] = {}
        self._publications: list[str | None] = []
        self._fold(self.rows)

    @property
    def count(self) -> int:
        """How many events there were."""
        return len(self.rows)

    def add(self, row: pa.Table) -> None:
        """Let one more event happen.

        Raises:
            IntegrityError: no registry commits it after those before.
        """
        row = event_rows(row)
        self._fold(row)
        self.rows = pa.concat_tables([self.rows, row])

    def _fold(self, rows: pa.Table) -> None:
        complete = pc.and_(rows["artifact"].is_valid(), rows["time"].is_valid())
        columns = [rows[name].to_pylist() for name in ("sequence", "kind", "name", "version", "alias", "publication")]
        for sequence, kind, name, version, alias, publication, is_whole in zip(
            *columns, complete.to_pylist(), strict=True
        ):
            model = self._models.get(name) or self._models.setdefault(name, _Model())
            row, contradiction = len(self._publications), ""
            path = model.aliases.get(alias)
            if kind == "published":
                if not is_whole:
                    contradiction = "has no artifact or time"
                elif version in model.versions:
                    contradiction = "exists"
                model.versions[version] = row
                model.last = max(model.last, version)
            elif version not in model.versions:
                contradiction = "does not exist"
            elif kind == "deleted":
                pointing = [alias_name for alias_name, its in model.aliases.items() if its.moves[-1] == version]
                contradiction = f"is what {pointing} point to" if pointing else ""
                del model.versions[version]
            elif alias is None:
                contradiction = "is given to no alias"
            elif kind == "rolled_back":
                if path is None or version not in path.moves:
                    contradiction = f"{alias!r} never pointed to"
                else:
                    while path.moves[-1] != version:
                        path.moves.pop()
                    path.row = row
            elif path is None:
                model.aliases[alias] = _Alias([version], row)
            else:
                if path.moves[-1] != version:  # else its move was signed again, which is no way back
                    path.moves.append(version)
                path.row = row
            if contradiction:
                raise LOG.error(f"event {sequence} is {kind!r} of {name!r} {version}, which {contradiction}")
            self._publications.append(publication)

    def names(self) -> list[str]:
        """The models with a version."""
        return sorted(name for name, model in self._models.items() if model.versions)

    def summary(self, name: str) -> ModelSummary:
        """A model at a glance; of an unknown name, one without versions."""
        model = self._model(name)
        return ModelSummary(name=name, versions=len(model.versions), newest=model.last, aliases=self.aliases(name))

    def next_version(self, name: str) -> int:
        """One above every number that the model ever had."""
        return self._model(name).last + 1

    def aliases(self, name: str) -> dict[str, int]:
        """Alias to version."""
        return {alias: path.moves[-1] for alias, path in sorted(self._model(name).aliases.items())}

    def move(self, name: str, alias: str) -> Event:
        """The event that pointed an alias to where it points now.

        Raises:
            ConfigError: there is no such alias.
        """
        model = self._model(name)
        if alias in model.aliases:
            return self._event(model.aliases[alias].row)
        if model.aliases:
            raise ConfigError(f"model {name!r} has no alias {alias!r}, only {sorted(model.aliases)}: name one of these")
        newest = max(model.versions, default=1)
        raise ConfigError(
            f"model {name!r} has no alias {alias!r} nor any other: name a version, such as {name}@{newest}, or "
            f"give one the alias by set_alias or `sparkdl models promote REGISTRY {name} {newest}`"
        )

    def versions(self, name: str) -> list[ModelVersion]:
        """The model's versions, oldest first."""
        model, aliases = self._model(name), self.aliases(name)
        rows = self.rows.take(from_values([row for _, row in sorted(model.versions.items())], pa.int64()))
        return [self._described(event, aliases) for event in map(Event.from_row, to_rows(rows))]

    def events(self, name: str) -> list[Event]:
        """All that ever happened to a model, oldest first."""
        return [Event.from_row(row) for row in to_rows(self.rows.filter(pc.equal(self.rows["name"], name)))]

    def event(self, name: str, which: int | str) -> Event:
        """The publication of a version by number or alias.

        Raises:
            ConfigError: there is none.
        """
        model = self._model(name)
        if not model.versions:
            names = self.names()
            more = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
            raise ConfigError(
                f"there is no model {name!r} in this registry, only {names[:_LISTED]}{more}: name one of these"
            )
        number = self.move(name, which).version if isinstance(which, str) else which
        if number in model.versions:
            return self._event(model.versions[number])
        listed = f"{len(model.versions):,} of them up to {model.last}"
        if len(model.versions) <= _LISTED:
            listed = str(sorted(model.versions))
        raise ConfigError(f"model {name!r} has no version {which}, only {listed}: name one of these")

    def get(self, name: str, which: int | str) -> ModelVersion:
        """A version by number or alias.

        Raises:
            ConfigError: there is none.
        """
        return self._described(self.event(name, which), self.aliases(name))

    def by_publication(self, name: str, publication: str) -> ModelVersion | None:
        """The version that a publication made, if it is there."""
        for row in self._model(name).versions.values():
            if self._publications[row] == publication:
                return self._described(self._event(row), self.aliases(name))
        return None

    def before(self, name: str, alias: str) -> int | None:
        """The last version before the current one that the alias pointed to and that still exists."""
        model = self._model(name)
        path = model.aliases.get(alias)
        return (
            next((number for number in reversed(path.moves[:-1]) if number in model.versions), None) if path else None
        )

    def _model(self, name: str) -> _Model:
        return self._models.get(name) or _Model()

    def _event(self, row: int) -> Event:
        return Event.from_row(to_rows(self.rows.slice(row, 1))[0])

    def _described(self, event: Event, aliases: Mapping[str, int]) -> ModelVersion:
        assert event.artifact is not None
        assert event.time is not None
        return ModelVersion(
            name=event.name,
            version=event.version,
            uri=self._uri_of(event.artifact),
            artifact=event.artifact,
            metrics=event.metrics,
            parameters=event.parameters,
            lineage=event.lineage,
            published=event.time,
            aliases=tuple(alias for alias, version in aliases.items() if version == event.version),
            publication=event.publication or "",
            signature=event.signature,
        )
