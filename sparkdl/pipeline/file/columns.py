"""A pipeline file against the Arrow types of the columns that there are; no rows are read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa

from sparkdl.columns.types import held_by
from sparkdl.features.spec import DateParts
from sparkdl.pipeline.file.conditions import misspelt
from sparkdl.pipeline.file.problems import Path, choices
from sparkdl.pipeline.spec import ColumnSplit, HashSplit, PipelineSpec

Columns = Mapping[str, pa.DataType | None]
Mistakes = Iterator[tuple[Path, str]]

_NUMBERS = frozenset(("truth value", "whole number", "fraction"))
_CLASSES = frozenset(("truth value", "whole number", "text"))
_VALUES = _NUMBERS | {"text", "date"}
"""What can be told apart as ids; of numbers with fractions the rows decide."""
_SCALARS = _VALUES | {"timestamp", "bytes", "other"}
_CLASS_WORDS, _VALUE_WORDS = "texts, whole numbers or truth values", "texts, whole numbers, truth values or dates"
_FEATURES: dict[str, tuple[Collection[str], str]] = {
    "number": (_NUMBERS, "numbers"),
    "category": (_VALUES, _VALUE_WORDS),
    "ids": ([f"list of {kind}" for kind in _VALUES], f"lists of {_VALUE_WORDS}"),
    "vector": (["vector", *(f"list of {kind}" for kind in _NUMBERS)], "lists or vectors of numbers"),
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
        fits: what it can hold; empty where anything will do.
        wanted: the same for people.
        remedy: what to do about another type.
    """

    path: Path
    column: str
    fits: Collection[str]
    wanted: str
    remedy: str = "cast it, or take what you need of it, in transform, or choose another type or column"


def _of_source(spec: PipelineSpec) -> Iterator[_Use]:
    source = spec.source
    for position, column in enumerate(source.key):
        yield _Use(("source", "key", position), column, _SCALARS, "numbers, texts or dates")
    if source.when is not None:
        key = "time" if source.time is not None else "partition"
        fits, wanted = ["timestamp", "text"], "timestamps or texts"
        if source.every == "day":
            fits, wanted = ["date", *fits], f"dates, {wanted}"
        yield _Use(("source", key), source.when, fits, wanted, "name another column, or make one in the source")


def _of_rows(spec: PipelineSpec) -> Iterator[_Use]:
    for name, options in spec.features.items():
        path: Path = ("features", name) if options.column is None else ("features", name, "column")
        fits, wanted = _FEATURES[str(type(options).__struct_config__.tag)]
        use = _Use(path, options.source(name), fits, wanted)
        if isinstance(options, DateParts) and {"hour", "minute"} & set(options.parts):
            coarse = [part for part in options.parts if part not in ("hour", "minute")] or ["month", "weekday"]
            remedy = f"cast it in transform, or of a date write {{type: date_parts, parts: [{', '.join(coarse)}]}}"
            use = replace(use, fits=["timestamp"], wanted="timestamps, which have hours,", remedy=remedy)
        yield use
    for name, label in spec.label.items():
        is_number = label.type in ("regression", "quantiles")
        yield _Use(("label", name), name, *((_NUMBERS, "numbers") if is_number else (_CLASSES, _CLASS_WORDS)))
    if spec.weight is not None:
        yield _Use(("weight",), spec.weight, _NUMBERS, "numbers")
    if isinstance(spec.split, ColumnSplit):
        yield _Use(("split", "column"), spec.split.column, _CLASSES, _CLASS_WORDS)
    if isinstance(spec.split, HashSplit):
        for position, column in enumerate(spec.split.group if spec.split.group != spec.source.key else ()):
            yield _Use(("split", "group", position), column, _SCALARS, "numbers, texts or dates")
    for position, column in enumerate(spec.score.keep):
        yield _Use(("score", "keep", position), column, (), "")
    for position, column in enumerate(spec.report.slices):
        yield _Use(("report", "slices", position), column, _SCALARS, "numbers, texts or dates")


def _missing(uses: Iterator[_Use], columns: Columns, owner: str) -> Mistakes:
    for use in uses:
        value = "" if use.path in (("features", use.column), ("label", use.column)) else f"={use.column!r}"
        kind = columns.get(use.column)
        if use.column not in columns:
            yield use.path, f"{value} is no column of {owner}: {_instead(use.column, columns)}"
        elif kind is not None and use.fits and held_by(kind) not in use.fits:
            yield use.path, f"{value} is a column of {kind}, and {use.wanted} are needed: {use.remedy}"


def _instead(column: str, columns: Columns) -> str:
    parent, dot, _ = column.partition(".")
    if dot and parent in columns:
        return f"it may be a field of {parent}, which is {columns[parent]}: take it out in transform"
    return choices(column, columns, columns=True)
