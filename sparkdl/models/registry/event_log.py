"""What happens to the models of a registry, as events: rows of its table.

Enters: rows of the events table. Leaves: typed events, and the same rows again. Pure values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
import pyarrow as pa

from sparkdl.documents.typed import Count, Source, convert, encode, parse
from sparkdl.errors import ConfigError, IntegrityError
from sparkdl.observe import facts_table, metrics_text

__all__ = ["EVENTS", "LOG", "SIGNED_EVENTS", "Event", "ModelVersion"]

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
"""The same once an event was signed: a registry that never saw a key keeps the columns that every sparkdl knows."""

_JSON = ("metrics", "parameters", "lineage")
_MOST_BYTES = 4 << 20
"""Of the JSON of one event: a page of a checkpoint holds dozens of them."""
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
    signature: str | None = None

    def numbered(self, version: int) -> Event:
        """The event with the number that its publication gets."""
        return replace(self, version=version)

    def stamped(self, sequence: int, time: datetime) -> Event:
        """The event with its place in the log."""
        return replace(self, sequence=sequence, time=time)

    def to_row(self) -> dict[str, Any]:
        """As a row of ``SIGNED_EVENTS``."""
        row = {name: getattr(self, name) for name in SIGNED_EVENTS.names}
        return {
            **row,
            **{name: encode(dict(sorted(row[name].items())), nan=name == "metrics").decode() for name in _JSON},
        }

    def check_readable(self) -> None:
        """Refuse what no reader takes, or no page of a checkpoint: one such event in the log, and nobody reads any.

        Raises:
            ConfigError: names the field, and the entry of metrics, parameters or lineage.
        """
        row, held = self.to_row(), 0
        try:
            for name, text in row.items():
                source = Source(f"{name} of {self.name!r}, once committed,", "give shorter, plain values")
                if isinstance(text, str) and name not in _JSON:
                    parse(encode(text), source)
            for name in _JSON:
                for key, value in sorted(getattr(self, name).items()):
                    source = Source(f"{key!r} of {name}, once committed,", "give shorter, plain values")
                    data = encode([[[{key: value}]]], nan=True)  # as deep as it lies in a page
                    held += len(data)
                    parse(data, source, _MOST_BYTES, nan=True)
            Event.from_row(row)
        except IntegrityError as cause:
            raise ConfigError(str(cause)) from cause
        if held > _MOST_BYTES:
            raise ConfigError(
                f"the metrics, parameters and lineage of {self.name!r} have {held:,} bytes as JSON, a registry holds "
                f"up to {_MOST_BYTES:,} of each version: leave out the largest"
            )

    @classmethod
    def from_row(cls, row: Mapping[str, Any], source: Source = LOG) -> Event:
        """Back from ``to_row``; columns of a later sparkdl are left out.

        Raises:
            IntegrityError: the row is no event; the message names the column.
        """
        absent = [name for name in EVENTS.names if name not in row]
        if absent:
            raise source.error(f"the table has no columns {absent}")
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
