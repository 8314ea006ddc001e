"""A pipeline file against the Arrow types of the columns that there are; no rows are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from sparkdl.columns.types import is_list, is_text, is_vector, number_dtype
from sparkdl.features.spec import DateParts
from sparkdl.pipeline.file.conditions import misspelt
from sparkdl.pipeline.file.problems import Path, choices
from sparkdl.pipeline.spec import ColumnSplit, HashSplit, PipelineSpec

Columns = Mapping[str, pa.DataType | None]
Mistakes = Iterator[tuple[Path, str]]


def misfits(spec: PipelineSpec, source: Columns, transformed: Columns | None) -> Mistakes:
    """Yield what ``spec`` reads and the columns do not have, or have with another type.

    Args:
        spec: what the file says.
        source: type of each column of the source; None where it cannot be told.
        transformed: the same after the transform; None where there is none, or where nobody knows yet.
    """
    yield from _missing(_of_source(spec), source, "the source")
    later = source if spec.transform is None else transformed
    if later is not None:
        owner = "the source" if spec.transform is None else "the transform"
        yield from _missing(_of_rows(spec), later, owner)
        for name, expectation in spec.expect.items():
            for word, near in misspelt(expectation.check, list(later)):
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
        fits: whether an Arrow type can be used so.
        wanted: the types that can, in words.
        remedy: what to do about another type.
    """

    path: Path
    column: str
    fits: Callable[[pa.DataType], bool]
    wanted: str
    remedy: str = "cast it, or take what you need of it, in transform, or choose another type or column"


def _of_source(spec: PipelineSpec) -> Iterator[_Use]:
    source = spec.source
    for position, column in enumerate(source.key):
        yield _Use(("source", "key", position), column, _is_scalar, "numbers, texts or dates")
    if source.when is not None:
        key = "time" if source.time is not None else "partition"
        fits, kinds = (_is_moment, "timestamps or texts") if source.every == "hour" else (_says_when, _WHEN)
        remedy = "name another column, or make one in the source"
        yield _Use(("source", key), source.when, fits, kinds, remedy)


def _of_rows(spec: PipelineSpec) -> Iterator[_Use]:
    for name, options in spec.features.items():
        fits, kinds = _FEATURES[str(type(options).__struct_config__.tag)]
        path: Path = ("features", name) if options.column is None else ("features", name, "column")
        yield _Use(path, options.source(name), fits, kinds)
        if isinstance(options, DateParts) and {"hour", "minute"} & set(options.parts):
            coarser = [part for part in options.parts if part not in ("hour", "minute")] or ["month", "weekday"]
            remedy = f"write {{type: date_parts, parts: [{', '.join(coarser)}]}}"
            yield _Use(path, options.source(name), _is_no_date, "timestamps, which have hours,", remedy)
    for name, label in spec.label.items():
        fits, kinds = (_is_number, "numbers") if label.type in ("regression", "quantiles") else (_is_class, _CLASSES)
        yield _Use(("label", name), name, fits, kinds)
    if spec.weight is not None:
        yield _Use(("weight",), spec.weight, _is_number, "numbers")
    if isinstance(spec.split, ColumnSplit):
        yield _Use(("split", "column"), spec.split.column, _is_class, _CLASSES)
    if isinstance(spec.split, HashSplit):
        for position, column in enumerate(spec.split.group if spec.split.group != spec.source.key else ()):
            yield _Use(("split", "group", position), column, _is_scalar, "numbers, texts or dates")
    for position, column in enumerate(spec.score.keep):
        yield _Use(("score", "keep", position), column, lambda kind: True, "")
    for position, column in enumerate(spec.report.slices):
        yield _Use(("report", "slices", position), column, _is_scalar, "numbers, texts or dates")


def _missing(uses: Iterator[_Use], columns: Columns, owner: str) -> Mistakes:
    for use in uses:
        shown = "" if use.path[-1] == use.column else f"={use.column!r}"
        kind = columns.get(use.column)
        if use.column not in columns:
            yield use.path, f"{shown} is no column of {owner}: {_instead(use.column, columns)}"
        elif kind is not None and not use.fits(kind):
            yield use.path, f"{shown} is a column of {kind}, and {use.wanted} are needed: {use.remedy}"


def _instead(column: str, columns: Columns) -> str:
    parent, dot, _ = column.partition(".")
    if dot and parent in columns:
        return f"it may be a field of {parent}, which is {columns[parent]}: take it out in transform"
    return choices(column, columns, columns=True)


def _is_number(kind: pa.DataType) -> bool:
    return number_dtype(kind) is not None


def _is_whole(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _is_class(kind: pa.DataType) -> bool:
    return _is_whole(kind) or is_text(kind)


def _is_value(kind: pa.DataType) -> bool:
    """Whether values can be told apart as ids; of numbers with fractions the rows decide."""
    return is_text(kind) or _is_number(kind) or bool(pa.types.is_date(kind))


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def _is_no_date(kind: pa.DataType) -> bool:
    return not pa.types.is_date(kind)


def _says_when(kind: pa.DataType) -> bool:
    return _is_time(kind) or is_text(kind)


def _is_moment(kind: pa.DataType) -> bool:
    return _says_when(kind) and _is_no_date(kind)


def _is_scalar(kind: pa.DataType) -> bool:
    return not pa.types.is_nested(kind)


def _is_binary(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind))


def _is_list_of_values(kind: pa.DataType) -> bool:
    return is_list(kind) and _is_value(kind.value_type)


def _is_list_of_numbers(kind: pa.DataType) -> bool:
    return is_vector(kind) or (is_list(kind) and _is_number(kind.value_type))


_WHEN = "dates, timestamps or texts"
_CLASSES = "texts, whole numbers or truth values"
_VALUES = "texts, whole numbers, truth values or dates"
_FEATURES: dict[str, tuple[Callable[[pa.DataType], bool], str]] = {
    "number": (_is_number, "numbers"),
    "category": (_is_value, _VALUES),
    "ids": (_is_list_of_values, f"lists of {_VALUES}"),
    "vector": (_is_list_of_numbers, "lists or vectors of numbers"),
    "text": (is_text, "texts"),
    "image": (_is_binary, "bytes of encoded pictures"),
    "date_parts": (_is_time, "dates or timestamps"),
}
"""What each type of feature reads; a test holds this table against the types that there are."""
