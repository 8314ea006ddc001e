"""A pipeline file against the Arrow types of the columns that there are; no rows are read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from sparkdl.columns.types import held_by
from sparkdl.features.spec import DateParts
from sparkdl.pipeline.file.conditions import misspelt
from sparkdl.pipeline.file.problems import Path, choices
from sparkdl.pipeline.spec import ColumnSplit, HashSplit, PipelineSpec

Columns = Mapping[str, pa.DataType | None]
Mistakes = Iterator[tuple[Path, str]]

Kinds = tuple[Collection[str], str]
"""What a column can hold, and the same for people."""

_NUMBER: Kinds = (frozenset(("truth value", "whole number", "fraction")), "numbers")
_CLASS: Kinds = (frozenset(("truth value", "whole number", "text")), "texts, whole numbers or truth values")
# what can be told apart as ids; of numbers with fractions the rows decide
_VALUE: Kinds = ({*_NUMBER[0], "text", "date"}, "texts, whole numbers, truth values or dates")
_SCALAR: Kinds = ({*_VALUE[0], "timestamp", "bytes", "other"}, "numbers, texts or dates")
_ANYTHING: Kinds = ((), "")
_FEATURES: dict[str, Kinds] = {
    "number": _NUMBER,
    "category": _VALUE,
    "ids": ([f"list of {kind}" for kind in _VALUE[0]], f"lists of {_VALUE[1]}"),
    "vector": (["vector", *(f"list of {kind}" for kind in _NUMBER[0])], "lists or vectors of numbers"),
    "text": (["text"], "texts"),
    "image": (["bytes"], "bytes of encoded pictures"),
    "date_parts": (["date", "timestamp"], "dates or timestamps"),
}
"""What each type of feature reads; a test holds this table against the types that there are."""


def misfits(spec: PipelineSpec, source: Columns, transformed: Columns | None) -> Mistakes:
    """Yield what ``spec`` reads and the columns do not have, or have with another type.

    Args:
        spec: what the file says.
        source: type of each column of the source; None where it cannot be told.
        transformed: the same after the transform; None where there is none, or where nobody knows yet.
    """
    yield from _missing(_of_source(spec), source, "the source")
    row_columns = source if spec.transform is None else transformed
    if row_columns is not None:
        owner = "the source" if spec.transform is None else "the transform"
        yield from _missing(_of_rows(spec), row_columns, owner)
        for name, expectation in spec.expect.items():
            for word, near in misspelt(expectation.check, list(row_columns)):
                yield (
                    ("expect", name, "check"),
                    f"={expectation.check!r} reads {word!r}, which is no column of {owner}: write {near}",
                )


def read_of_source(spec: PipelineSpec) -> list[str]:
    """The columns of the source that a file reads by name, each once; a transform may read others."""
    rows = _of_rows(spec) if spec.transform is None else ()
    return list(dict.fromkeys(use.column for use in (*_of_source(spec), *rows)))


@dataclass(frozen=True, slots=True)
class _Use:
    """One column that a file reads.

    Attributes:
        path: of the value that names it.
        column: its name.
        kinds: what it can hold.
        remedy: what to do about another type.
    """

    path: Path
    column: str
    kinds: Kinds
    remedy: str = "cast it, or take what you need of it, in transform, or choose another type or column"


def _of_source(spec: PipelineSpec) -> Iterator[_Use]:
    source = spec.source
    yield from _listed(("source", "key"), source.key, _SCALAR)
    if source.when is not None:
        key = "time" if source.time is not None else "partition"
        kinds = (["timestamp", "text"], "timestamps or texts")
        if source.every == "day":
            kinds = (["date", *kinds[0]], f"dates, {kinds[1]}")
        yield _Use(("source", key), source.when, kinds, "name another column, or make one in the source")


def _of_rows(spec: PipelineSpec) -> Iterator[_Use]:
    for name, options in spec.features.items():
        path: Path = ("features", name) if options.column is None else ("features", name, "column")
        use = _Use(path, options.source(name), _FEATURES[str(type(options).__struct_config__.tag)])
        if isinstance(options, DateParts) and {"hour", "minute"} & set(options.parts):
            coarse = [part for part in options.parts if part not in ("hour", "minute")] or ["month", "weekday"]
            remedy = f"cast it in transform, or of a date write {{type: date_parts, parts: [{', '.join(coarse)}]}}"
            use = replace(use, kinds=(["timestamp"], "timestamps, which have hours,"), remedy=remedy)
        yield use
    for name, label in spec.label.items():
        yield _Use(("label", name), name, _NUMBER if label.type in ("regression", "quantiles") else _CLASS)
    if spec.weight is not None:
        yield _Use(("weight",), spec.weight, _NUMBER)
    if isinstance(spec.split, ColumnSplit):
        yield _Use(("split", "column"), spec.split.column, _CLASS)
    if isinstance(spec.split, HashSplit) and spec.split.group != spec.source.key:
        yield from _listed(("split", "group"), spec.split.group, _SCALAR)
    yield from _listed(("score", "keep"), spec.score.keep, _ANYTHING)
    yield from _listed(("report", "slices"), spec.report.slices, _SCALAR)


def _listed(path: Path, columns: Sequence[str], kinds: Kinds) -> Iterator[_Use]:
    for position, column in enumerate(columns):
        yield _Use((*path, position), column, kinds)


def _missing(uses: Iterator[_Use], columns: Columns, owner: str) -> Mistakes:
    for use in uses:
        value = "" if use.path in (("features", use.column), ("label", use.column)) else f"={use.column!r}"
        kind, (fits, wanted) = columns.get(use.column), use.kinds
        if use.column not in columns:
            yield use.path, f"{value} is no column of {owner}: {_instead(use.column, columns)}"
        elif kind is not None and fits and held_by(kind) not in fits:
            yield use.path, f"{value} is a column of {kind}, and {wanted} are needed: {use.remedy}"


def _instead(column: str, columns: Columns) -> str:
    parent, dot, _ = column.partition(".")
    if dot and parent in columns:
        return f"it may be a field of {parent}, which is {columns[parent]}: take it out in transform"
    return choices(column, columns, columns=True)
