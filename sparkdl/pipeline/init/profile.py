"""What the values of a column look like, in a sample of a table's rows: numbers, and the words for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.types import held_by
from sparkdl.pipeline.init.count import in_calendar

Kind = Literal["number", "bool", "text", "when", "list", "vector", "bytes", "other"]
_KINDS: Mapping[str, Kind] = {
    "truth value": "bool", "whole number": "number", "fraction": "number", "text": "text", "date": "when",
    "timestamp": "when", "vector": "vector", "bytes": "bytes",
}  # fmt: skip
SKEWED = 2.0
"""Skew from which on numbers are said to be skewed."""
_TOP = 1000


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One column of a sample; what is asked of it is counted once.

    Attributes:
        name: of it.
        type: of its values.
        kind: of it.
        rows: looked at.
        values: those that are there, as they came; NaN, infinities and times beyond the year 9999 are as good as none.
    """

    name: str
    type: pa.DataType
    kind: Kind
    rows: int
    values: pa.Array = field(repr=False)

    @property
    def present(self) -> int:
        """Rows with a value."""
        return len(self.values)

    @property
    def missing(self) -> int:
        """Rows without a value."""
        return self.rows - self.present

    @cached_property
    def _counts(self) -> Any:
        return self.values.value_counts() if self.kind in ("number", "bool", "text", "when") else pa.nulls(0)

    @property
    def distinct(self) -> int:
        """Different values; 0 where they cannot be told apart."""
        return len(self._counts)

    @cached_property
    def top(self) -> tuple[tuple[Any, int], ...]:
        """The most frequent values with their rows, at most a thousand."""
        if not self.distinct:
            return ()
        values, counts = self._counts.flatten()
        order = pa.array(np.argsort(-np.asarray(counts), kind="stable")[:_TOP])
        return tuple(zip(values.take(order).to_pylist(), counts.take(order).to_pylist(), strict=True))

    @property
    def is_whole(self) -> bool:
        """Whether the type has no fractions, as integers and decimals without places."""
        return bool(pa.types.is_integer(self.type) or (pa.types.is_decimal(self.type) and self.type.scale == 0))

    @cached_property
    def numbers(self) -> Any:
        """Numbers as float64; none of any other kind."""
        values = self.values if self.kind == "number" else pa.nulls(0)
        return np.asarray(values.cast(pa.float64(), safe=False))

    @cached_property
    def integers(self) -> bool:
        """Whether all numbers are whole, and float64 tells them apart."""
        numbers = self.numbers
        return bool(len(numbers)) and bool(np.all(numbers == np.round(numbers)) and np.abs(numbers).max() < 2**53)

    @cached_property
    def _ends(self) -> tuple[Any, Any]:
        if self.kind == "when":
            return tuple(pc.min_max(self.values).as_py().values())
        convert = int if self.integers else float
        return (convert(self.numbers.min()), convert(self.numbers.max())) if len(self.numbers) else (None, None)

    @property
    def low(self) -> Any:
        """The least number or time; None where there is none."""
        return self._ends[0]

    @property
    def high(self) -> Any:
        """The greatest number or time."""
        return self._ends[1]

    @cached_property
    def skew(self) -> float:
        """Of the numbers; 0 where there is no spread."""
        return _skew(self.numbers)

    @cached_property
    def is_of_products(self) -> bool:
        """Whether the numbers are skewed, and their logarithms, as the option ``log`` takes them, less than half so."""
        logarithms = np.sign(self.numbers) * np.log1p(np.abs(self.numbers))
        return abs(self.skew) > SKEWED and abs(_skew(logarithms)) < abs(self.skew) / 2

    @cached_property
    def lengths(self) -> tuple[int, int, int, int]:
        """Of texts in words, of lists in elements: least, median, 99 %, greatest."""
        values = pc.utf8_split_whitespace(self.values.cast(pa.string())) if self.kind == "text" else self.values
        lengths = np.asarray(pc.list_value_length(values), dtype=np.int64)
        if not len(lengths):
            return (0, 0, 0, 0)
        median, most = np.quantile(lengths, (0.5, 0.99), method="higher")
        return int(lengths.min()), int(median), int(most), int(lengths.max())

    @property
    def gap(self) -> str:
        """How much is missing, in words; empty if nothing is."""
        return f"{share_of(self.missing, self.rows)} missing" if self.missing else ""

    @property
    def span(self) -> str:
        """The least and the greatest value, in words."""
        return f"{_shown(self.low)}..{_shown(self.high)}" if self.low is not None else ""


def profiles_of(rows: pa.Table) -> dict[str, Profile]:
    """Look at every column."""
    profiles = {}
    for name in rows.column_names:
        column = rows.column(name).combine_chunks()
        values, held = column.filter(has_value(column)), held_by(column.type)
        kind = "list" if held.startswith("list of") else _KINDS.get(held, "other")
        if kind == "when":
            values = in_calendar(values)
        profiles[name] = Profile(name=name, type=column.type, kind=kind, rows=len(column), values=values)
    return profiles


def has_value(column: Any) -> Any:
    """Which values are there, and neither NaN nor infinite."""
    return pc.is_finite(column).fill_null(False) if pa.types.is_floating(column.type) else column.is_valid()


def share_of(part: int, total: int) -> str:
    """A share in percent, as people write it; never 0 % of something nor 100 % of less than all."""
    percent = 100 * part / max(1, total)
    if 0 < percent < 0.1 or 99.9 < percent < 100:
        return "under 0.1 %" if percent < 50 else "over 99.9 %"
    return f"{percent:.3g} %"


def _skew(numbers: Any) -> float:
    skew = pc.skew(numbers / (np.abs(numbers).max() or 1.0)).as_py()  # the cube of 1e300 is infinite
    return skew if math.isfinite(skew) else 0.0


def _shown(value: Any) -> str:
    if isinstance(value, datetime):
        return (value.astimezone(UTC) if value.tzinfo else value).strftime("%Y-%m-%d %H:%M")
    if isinstance(value, date):
        return value.isoformat()
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
