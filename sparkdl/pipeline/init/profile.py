"""What the values of a column look like, in a sample of a table's rows: numbers, and the words for them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.types import is_list, is_text, is_vector, number_dtype
from sparkdl.pipeline.init.count import in_calendar

Kind = Literal["number", "bool", "text", "when", "list", "vector", "bytes", "other"]
SKEWED = 2.0
"""Skew from which on numbers are said to be skewed."""
_TOP = 1000


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One column of a sample.

    Attributes:
        name: of it.
        type: of its values.
        kind: of it.
        rows: looked at.
        missing: rows without a value, NaN, infinities and times beyond the year 9999 among them.
        distinct: different values; 0 where they cannot be told apart.
        low: the least number or time.
        high: the greatest.
        integers: whether all numbers are whole.
        skew: of the numbers; 0 where there is no spread.
        log_skew: of their logarithms, as the option ``log`` takes them.
        top: the most frequent values with their rows, at most a thousand.
        lengths: of texts in words, of lists in elements: least, median, 99 %, greatest.
        values: those that are there, as they came.
    """

    name: str
    type: pa.DataType
    kind: Kind
    rows: int
    missing: int
    distinct: int = 0
    low: Any = None
    high: Any = None
    integers: bool = False
    skew: float = 0.0
    log_skew: float = 0.0
    top: tuple[tuple[Any, int], ...] = ()
    lengths: tuple[int, int, int, int] = (0, 0, 0, 0)
    values: pa.Array = field(default_factory=lambda: pa.nulls(0), repr=False)

    @property
    def is_whole(self) -> bool:
        """Whether the type has no fractions, as integers and decimals without places."""
        return bool(pa.types.is_integer(self.type) or (pa.types.is_decimal(self.type) and self.type.scale == 0))

    @property
    def present(self) -> int:
        """Rows with a value."""
        return self.rows - self.missing

    @property
    def is_of_products(self) -> bool:
        """Whether the numbers are skewed, and their logarithms less than half as much."""
        return abs(self.skew) > SKEWED and abs(self.log_skew) < abs(self.skew) / 2

    @property
    def gap(self) -> str:
        """How much is missing, in words; empty if nothing is."""
        return f"{share_of(self.missing, self.rows)} missing" if self.missing else ""

    @property
    def span(self) -> str:
        """The least and the greatest value."""
        return f"{_shown(self.low)}..{_shown(self.high)}" if self.low is not None else ""


def share_of(part: int, total: int) -> str:
    """A share in percent, as people write it; never 0 % of something nor 100 % of less than all."""
    percent = 100 * part / max(1, total)
    if 0 < percent < 0.1 or 99.9 < percent < 100:
        return "under 0.1 %" if percent < 50 else "over 99.9 %"
    return f"{percent:.3g} %"


def count_of(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def profile_of(name: str, column: pa.ChunkedArray) -> Profile:
    """Look at one column."""
    values = column.combine_chunks()
    if isinstance(values, pa.ChunkedArray):  # without a row
        values = pa.array([], column.type)
    kind = _kind(column.type)
    present = values.drop_null()
    common: dict[str, Any] = {"name": name, "type": column.type, "kind": kind, "rows": len(values)}
    if kind == "number":
        return _numbers(common, present)
    if kind == "when":
        present = in_calendar(present)
    missing = len(values) - len(present)
    common |= {"missing": missing, "values": present}
    if kind in ("bool", "text", "when"):
        common |= _counted(present)
    if kind == "when":
        span = pc.min_max(present).as_py()
        common |= {"low": span["min"], "high": span["max"]}
    if kind == "text":
        words = pc.list_value_length(pc.utf8_split_whitespace(present.cast(pa.string())))
        common |= {"lengths": _lengths(words)}
    if kind == "list":
        common |= {"lengths": _lengths(pc.list_value_length(present))}
    return Profile(**common)


def _kind(kind: pa.DataType) -> Kind:
    if pa.types.is_boolean(kind):
        return "bool"
    if is_text(kind):
        return "text"
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return "when"
    if is_vector(kind):
        return "vector"
    if is_list(kind):
        return "list"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return "bytes"
    return "number" if number_dtype(kind) is not None else "other"


def _counted(present: pa.Array) -> dict[str, Any]:
    counts = present.value_counts()
    values, numbers = counts.field("values"), counts.field("counts")
    order = np.argsort(-np.asarray(numbers), kind="stable")[:_TOP]
    top = tuple((values[int(index)].as_py(), int(numbers[int(index)].as_py())) for index in order)
    return {"distinct": len(counts), "top": top}


def _numbers(common: dict[str, Any], present: pa.Array) -> Profile:
    numbers = np.asarray(present.cast(pa.float64(), safe=False), dtype=np.float64)
    finite = np.isfinite(numbers)
    present, numbers = present.filter(pa.array(finite)), numbers[finite]
    common |= {"missing": common["rows"] - len(numbers), "values": present}
    if not len(numbers):
        return Profile(**common)
    low, high = float(numbers.min()), float(numbers.max())
    are_integers = bool(np.all(numbers == np.round(numbers))) and max(abs(low), abs(high)) < 2**53
    return Profile(
        **common,
        **_counted(present),
        low=int(low) if are_integers else low,
        high=int(high) if are_integers else high,
        integers=are_integers,
        skew=_skew(numbers),
        log_skew=_skew(np.sign(numbers) * np.log1p(np.abs(numbers))),
    )


def _skew(numbers: Any) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = numbers / (np.abs(numbers).max() or 1.0)  # the cube of 1e300 is infinite
        spread = numbers - numbers.mean()
        deviation = math.sqrt(float(np.mean(spread**2)))
        skew = float(np.mean((spread / deviation) ** 3)) if deviation > 0 else 0.0
    return skew if math.isfinite(skew) else 0.0


def _lengths(lengths: pa.Array) -> tuple[int, int, int, int]:
    counts = np.asarray(lengths.drop_null(), dtype=np.int64)
    if not len(counts):
        return (0, 0, 0, 0)
    median, most = np.quantile(counts, (0.5, 0.99), method="higher")
    return int(counts.min()), int(median), int(most), int(counts.max())


def _shown(value: Any) -> str:
    if isinstance(value, datetime):
        return (value.astimezone(UTC) if value.tzinfo else value).strftime("%Y-%m-%d %H:%M")
    if isinstance(value, date):
        return value.isoformat()
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
