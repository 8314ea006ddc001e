"""What a run in MLflow says of a version: parameters, metrics, tags and the table it was trained on.

Enters: a version of the registry, and what its bundle says of the training. Leaves: plain values under names that
MLflow takes, cut into requests that it takes. Curves of the epochs are called ``epoch.loss``, ``epoch.val_loss``; what
the version was published with keeps its name, so that the figure beside a run is that of the weights that were kept.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sparkdl.documents.typed import encode
from sparkdl.models.registry import ModelVersion
from sparkdl.storage import sha256_hex

__all__ = ["IDENTITY", "Curve", "Table", "batches", "curves_of", "identity_of", "params_of", "table_of", "tags_of"]

T = TypeVar("T")

IDENTITY = "sparkdl.publication"
"""The tag by which a version is found again."""

MOST_METRICS, MOST_OTHERS = 1000, 100
"""In one request of MLflow's ``log_batch``; of parameters and tags each."""
MOST_BYTES = 400_000
"""Of parameters, and of tags, in one request, which MLflow bounds by a million in all."""

_KEY_LETTERS, _VALUE_LETTERS = 250, 6000
_NOT_CURVES = ("epoch", "step", "rows", "seconds")


@dataclass(frozen=True, slots=True)
class Curve:
    """One point of a metric.

    Attributes:
        key: of the metric.
        value: of it; NaN where it was not finite.
        step: the epoch, 0 for a figure of the whole version.
    """

    key: str
    value: float
    step: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """The table that a version was trained on, as MLflow notes a dataset.

    Attributes:
        name: at most 500 letters.
        digest: at most 36 letters, equal for equal rows: of the shards, or else of address and version.
        source: MLflow's JSON of a Delta table.
    """

    name: str
    digest: str
    source: str


def identity_of(version: ModelVersion) -> str:
    """64 digits, equal for the same version of the same registry, whatever the address it is reached by."""
    return sha256_hex(f"{version.name}/{version.version}/{version.publication}".encode())


def params_of(version: ModelVersion) -> dict[str, str]:
    """Parameters, nested ones by dotted names."""
    return _named((name, _text(value)) for name, value in _flat(version.parameters))


def curves_of(version: ModelVersion, history: Sequence[Mapping[str, float | int | None]]) -> list[Curve]:
    """The metrics of a version, and those of its epochs."""
    keys = _named((name, name) for name in version.metrics)
    found = [Curve(key, version.metrics[name]) for key, name in keys.items()]
    names = list(dict.fromkeys(name for row in history for name in row if name not in _NOT_CURVES))
    for key, name in _named((f"epoch.{name}", name) for name in names).items():
        for place, row in enumerate(history):
            if name in row:
                value = row[name]
                found.append(Curve(key, math.nan if value is None else float(value), int(row.get("epoch") or place)))
    return found


def tags_of(registry: str, version: ModelVersion) -> dict[str, str]:
    """Where the version lies, and what it was made with."""
    lineage = version.lineage
    software = {f"sparkdl.software.{name}": one for name, one in (lineage.get("versions") or {}).items()}
    known = {
        IDENTITY: identity_of(version),
        "sparkdl.registry": registry,
        "sparkdl.model": version.name,
        "sparkdl.version": str(version.version),
        "sparkdl.artifact": version.artifact,
        "sparkdl.shard_key": lineage.get("shard_key"),
        "mlflow.source.git.commit": lineage.get("code_version"),
    }
    return _named((name, _text(value)) for name, value in {**software, **known}.items() if value)


def table_of(version: ModelVersion) -> Table | None:
    """The table that it was trained on; None if nobody knows."""
    address, number = version.lineage.get("source_table"), version.lineage.get("source_version")
    if not address:
        return None
    named = "/" not in address and address.count(".") == 2
    # MLflow's own class leaves out version 0, and asks Databricks about names of three parts
    source = {"delta_table_name" if named else "path": address, "delta_table_version": number}
    digest = version.lineage.get("shard_key") or sha256_hex(f"{address}@{number}".encode())
    known = {name: value for name, value in source.items() if value is not None}
    return Table(str(address)[-500:], str(digest)[:36], json.dumps(known))


def batches(
    metrics: Sequence[Curve], params: Mapping[str, str], tags: Mapping[str, str]
) -> Iterator[tuple[list[Curve], dict[str, str], dict[str, str]]]:
    """Cut what is logged into requests: at most 1,000 items, 100 parameters and 100 tags each, and a million bytes."""
    parts = [_chunks(list(part.items()), MOST_OTHERS) for part in (params, tags)]
    few = MOST_METRICS - 2 * MOST_OTHERS
    points = [list(metrics[start : start + few]) for start in range(0, len(metrics), few)]
    for place in range(max(len(points), *map(len, parts))):
        first, second = (dict(part[place]) if place < len(part) else {} for part in parts)
        yield points[place] if place < len(points) else [], first, second


def _chunks(items: list[tuple[str, str]], most: int) -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    room = 0
    for key, value in items:
        size = len(json.dumps([key, value]))
        if not found or len(found[-1]) == most or size > room:
            found.append([])
            room = MOST_BYTES
        found[-1].append((key, value))
        room -= size
    return found


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else encode(value, nan=True).decode()
    return text if len(text) <= _VALUE_LETTERS else f"{text[: _VALUE_LETTERS - 3]}..."


def _named(items: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Under keys that MLflow takes: letters, digits and ``_-.: ``; two that became one are told apart by a number."""
    found: dict[str, T] = {}
    for name, value in items:
        plain = re.sub(r"[^\w.\- :]", "_", name)[: _KEY_LETTERS - 10]
        plain = f"_{plain}" if not plain.strip(".") or plain.startswith("..") else plain
        key, number = plain, 2
        while key in found:
            key, number = f"{plain} {number}", number + 1
        found[key] = value
    return found
