"""Statistics of columns, gathered in one pass, in parts, and merged exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_CACHED_ROWS = 1024
"""Rows of a matrix that are worked on at once: their float64 copy fits into a core's cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnStats:
    """What one source column holds. Extremes and moments are over its finite, non-null elements, before any filling.

    Attributes:
        count: the finite elements; for arrays and vectors every element counts, for binary each row's length in bytes.
        null_count: nulls (rows, and elements inside arrays).
        nan_count: not-a-numbers.
        inf_count: infinities of either sign.
        min: smallest; None if ``count`` is 0. Exact for integers.
        max: largest; None if ``count`` is 0.
        mean: None if ``count`` is 0.
        variance: of the population (divided by ``count``); None if ``count`` is 0.
        min_length: elements of the shortest row of an array column, a null row having 0; None for other columns.
        max_length: elements of the longest row of an array column.
    """

    count: int = 0
    null_count: int = 0
    nan_count: int = 0
    inf_count: int = 0
    min: float | int | None = None
    max: float | int | None = None
    mean: float | None = None
    variance: float | None = None
    min_length: int | None = None
    max_length: int | None = None


@dataclass(slots=True)
class RunningStats:
    """What is known of one column so far; ``squares`` is the sum of squared distances from ``mean``.

    Mean and variance are merged pairwise (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances", 1979), so nothing cancels, however large the mean and however unequal the parts.
    """

    count: int = 0
    null_count: int = 0
    nan_count: int = 0
    inf_count: int = 0
    min: float | int | None = None
    max: float | int | None = None
    mean: float = 0.0
    squares: float = 0.0
    min_length: int | None = None
    max_length: int | None = None

    def add(self, values: np.ndarray[Any, Any], nulls: int = 0) -> None:
        """Take in a (n,) array of the non-null numbers of a batch, and the number of its nulls."""
        self.merge(_of(values))
        self.null_count += nulls

    def add_lengths(self, lengths: np.ndarray[Any, Any]) -> None:
        """Take in the (rows,) lengths of a batch of arrays."""
        if lengths.size:
            self.merge(RunningStats(min_length=int(lengths.min()), max_length=int(lengths.max())))

    def merge(self, other: RunningStats) -> None:
        """Take in what another part of the column holds."""
        self.null_count += other.null_count
        self.nan_count += other.nan_count
        self.inf_count += other.inf_count
        self.min, self.max = _least(self.min, other.min), _most(self.max, other.max)
        self.min_length = _least(self.min_length, other.min_length)
        self.max_length = _most(self.max_length, other.max_length)
        if not self.count:
            self.count, self.mean, self.squares = other.count, other.mean, other.squares
        elif other.count:
            total = self.count + other.count
            distance = other.mean - self.mean
            if math.isfinite(distance):
                self.mean += distance * (other.count / total)
            else:  # of the least and the greatest number, whose mean is none the less a number
                self.mean = self.mean * (self.count / total) + other.mean * (other.count / total)
            self.squares += other.squares + distance * distance * (self.count * (other.count / total))
            self.count = total

    def result(self) -> ColumnStats:
        """The statistics as they stand in a manifest."""
        fields = asdict(self)
        squares, mean = fields.pop("squares"), fields.pop("mean")
        if not self.count:
            return ColumnStats(**fields)
        return ColumnStats(**fields, mean=mean, variance=squares / self.count)

    def to_json(self) -> dict[str, Any]:
        """The statistics as JSON-able values, exactly."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> RunningStats:
        """What ``to_json`` gave."""
        return cls(**fields)


def add_matrix(columns: Sequence[RunningStats], matrix: np.ndarray[Any, Any]) -> None:
    """Take in an (n, columns) matrix without nulls, each column into its own statistics."""
    for start in range(0, len(matrix), _CACHED_ROWS):
        part = matrix[start : start + _CACHED_ROWS]
        with np.errstate(over="ignore", invalid="ignore"):
            wide = part.T.astype(np.float64, order="C")
            low, high, mean = wide.min(axis=1), wide.max(axis=1), wide.mean(axis=1)
            wide -= mean[:, None]
            squares = np.einsum("ij,ij->i", wide, wide)
        exact = matrix.dtype.kind == "f" or matrix.dtype.itemsize < 8  # float64 holds these numbers as they are
        if not exact or not np.isfinite(squares).all():
            for position, stats in enumerate(columns):
                stats.merge(_of(np.ascontiguousarray(part[:, position])))
            continue
        kind = float if matrix.dtype.kind == "f" else int
        facts = zip(columns, low.tolist(), high.tolist(), mean.tolist(), squares.tolist(), strict=True)
        for stats, least, most, middle, distance in facts:
            stats.merge(RunningStats(count=len(part), min=kind(least), max=kind(most), mean=middle, squares=distance))


def _of(values: np.ndarray[Any, Any]) -> RunningStats:
    """The statistics of one array."""
    if not values.size:
        return RunningStats()
    if values.dtype == np.bool_:
        values = values.view(np.uint8)
    wide = values.astype(np.float64)
    nan_count = inf_count = 0
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(wide.mean())
    if not math.isfinite(mean):
        finite = np.isfinite(values)
        nan_count = int(np.isnan(values).sum())
        inf_count = values.size - int(finite.sum()) - nan_count
        values, wide = values[finite], wide[finite]
        if not values.size:
            return RunningStats(nan_count=nan_count, inf_count=inf_count)
        mean = float((wide / wide.size).sum())  # the sum of finite numbers may be too large, their mean is not
    with np.errstate(over="ignore"):
        wide -= mean
        squares = float(wide @ wide)
    return RunningStats(
        count=values.size,
        nan_count=nan_count,
        inf_count=inf_count,
        min=values.min().item(),
        max=values.max().item(),
        mean=mean,
        squares=squares,
    )


def _least(one: Any, two: Any) -> Any:
    return two if one is None else one if two is None else min(one, two)


def _most(one: Any, two: Any) -> Any:
    return two if one is None else one if two is None else max(one, two)
