"""Statistics of the columns behind features, gathered batch by batch, in parts, and merged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.numpy_arrow import to_numpy
from sparkdl.columns.statistics import RunningStats
from sparkdl.documents.typed import Count
from sparkdl.errors import SchemaError
from sparkdl.features.hashing import to_buckets
from sparkdl.features.spec import Category, DateParts, Encoded, Feature, Ids, Image, Number, Vector
from sparkdl.features.tokens import Functions, tokens_of
from sparkdl.features.values import Coded, coded, lists_of, numbers_of, times_of, vectors_of

Array = np.ndarray[Any, Any]

PROBABILITIES = (0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)
"""The shares of the quantiles: each quantile is the smallest number that so large a share of rows does not exceed."""

KNOTS = tuple(part / 32 for part in range(1, 32))
"""The shares of the knots, quantiles between which a network may bend its answer."""

LENGTHS = (0, *(2**power for power in range(21)))
"""Edges of the bins in which lengths of rows are counted."""

HASH_BINS = 64
"""Bins in which hashed ids are counted, by their remainder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """What the training rows held of one feature.

    Moments and extremes are of the numbers that are not missing; for lists and texts of their lengths, for vectors of
    all their numbers, for date parts of the year.

    Attributes:
        rows: all of them.
        missing: rows without a value: null, NaN or infinite; null elements and elements of lists do not count.
        count: numbers, or lengths, behind the moments.
        minimum: None if ``count`` is 0, as the three that follow.
        maximum: of them.
        mean: of them.
        variance: of the population.
        scaled_mean: of a number as it is clipped and put on a logarithmic scale; None for other types.
        scaled_variance: likewise.
        quantiles: of a number, at ``PROBABILITIES``; empty for other types and where there is none.
        knots: of a number, at ``KNOTS``; empty likewise, and in what was fitted before there were knots.
        counts: numbers up to each of ``edges_of`` the quantiles and above the last; lengths up to each of ``LENGTHS``
            and above; hashed ids by their remainder modulo ``HASH_BINS``.
        values: of a vocabulary, the most frequent first; equally frequent ones in the order of their code points.
        value_counts: of these.
        total: all values that occurred, each occurrence counted; of a vector all its numbers, missing ones too.
    """

    rows: Count = 0
    missing: Count = 0
    count: Count = 0
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    variance: float | None = None
    scaled_mean: float | None = None
    scaled_variance: float | None = None
    quantiles: tuple[float, ...] = ()
    knots: tuple[float, ...] = ()
    counts: tuple[Count, ...] = ()
    values: tuple[str, ...] = ()
    value_counts: tuple[Count, ...] = ()
    total: Count = 0

    @property
    def others(self) -> int:
        """Occurrences of values that are not among ``values``."""
        return self.total - sum(self.value_counts)


@dataclass(slots=True)
class Running:
    """What is known of one feature so far; values of a vocabulary are counted apart.

    Numbers need two passes: the first finds quantiles, the second counts what lies between them and takes the moments
    of the numbers as they are clipped and put on a logarithmic scale. Means and variances are merged pairwise
    (``columns.statistics``), so that parts in another order give the same to 1e-12; counts are exact in any order.

    Attributes:
        rows: so far.
        missing: so far.
        numbers: moments, as ``Statistics`` has them.
        scaled: moments of clipped, logarithmic numbers.
        counts: by bin.
        total: as ``Statistics`` has it.
    """

    rows: int = 0
    missing: int = 0
    numbers: RunningStats = field(default_factory=RunningStats)
    scaled: RunningStats = field(default_factory=RunningStats)
    counts: list[int] = field(default_factory=list)
    total: int = 0

    def add(
        self, name: str, options: Feature, column: pa.Array, *, quantiles: Sequence[float], functions: Functions
    ) -> Counter[str]:
        """Take in the column of a batch.

        Args:
            name: of the feature's column, for messages.
            options: of the feature.
            column: its raw column.
            quantiles: of a number, from the first pass.
            functions: that cut texts.

        Returns:
            how often each value occurred, for a feature with a vocabulary.
        """
        self.rows += len(column)
        if isinstance(options, Number):
            self._add_numbers(options, numbers_of(name, column), quantiles)
        elif isinstance(options, Vector):
            values, missing = vectors_of(name, column)
            self.missing += int(missing.sum())
            self.total += values[~missing].size
            self.numbers.add(values[~np.isnan(values)])
        elif isinstance(options, DateParts):
            self.missing += column.null_count
            years = pc.year(times_of(name, column, options.timezone).drop_null())
            self.numbers.add(to_numpy(years))
        elif isinstance(options, Image):
            self.missing += column.null_count
        elif isinstance(options, Category):
            codes = coded(name, column)
            self.missing += int((codes.codes < 0).sum())
            return self._add_values(options, codes)
        else:
            lists = lists_of(name, column) if isinstance(options, Ids) else tokens_of(name, column, options, functions)
            self.missing += lists.missing
            self.numbers.add(lists.lengths)
            self._count(lists.lengths, LENGTHS)
            return self._add_values(options, lists.values)
        return Counter()

    def _add_numbers(self, options: Number, values: Array, quantiles: Sequence[float]) -> None:
        present = values[~np.isnan(values)]
        self.missing += len(values) - len(present)
        self.numbers.add(present)
        self.scaled.add(scaled(options, limits_of(options, quantiles), present))
        self._count(present, edges_of(quantiles))

    def _add_values(self, options: Encoded, values: Coded) -> Counter[str]:
        occurred = np.bincount(values.codes[values.codes >= 0], minlength=len(values.distinct))
        self.total += int(occurred.sum())
        if options.buckets is not None:
            if isinstance(options, Category):
                bins = to_buckets(values.distinct, options.buckets) % HASH_BINS
                self._add_counts(np.bincount(bins, weights=occurred, minlength=HASH_BINS).astype(np.int64))
            return Counter()
        counted: Counter[str] = Counter()
        for text, times in zip(values.distinct, occurred.tolist(), strict=True):
            counted[text] += times
        return counted

    def _count(self, numbers: Array, edges: Sequence[float]) -> None:
        bins = np.searchsorted(np.asarray(edges, np.float64), numbers, side="left")
        self._add_counts(np.bincount(bins, minlength=len(edges) + 1))

    def _add_counts(self, counts: Array) -> None:
        self.counts = [
            earlier + added for earlier, added in zip(self.counts or [0] * len(counts), counts.tolist(), strict=True)
        ]

    def merge(self, other: Running) -> None:
        """Take in what another part of the rows holds."""
        self.rows += other.rows
        self.missing += other.missing
        self.total += other.total
        self.numbers.merge(other.numbers)
        self.scaled.merge(other.scaled)
        if other.counts:
            self._add_counts(np.array(other.counts))

    def result(
        self, quantiles: Sequence[float], values: Sequence[tuple[str, int]], knots: Sequence[float] = ()
    ) -> Statistics:
        """The statistics of all rows.

        Args:
            quantiles: of a number, from the first pass.
            values: the vocabulary and how often each value occurred.
            knots: of a number, from the first pass.
        """
        numbers, of_scaled = self.numbers.result(), self.scaled.result()
        return Statistics(
            rows=self.rows,
            missing=self.missing,
            count=numbers.count,
            minimum=None if numbers.min is None else float(numbers.min),
            maximum=None if numbers.max is None else float(numbers.max),
            mean=numbers.mean,
            variance=numbers.variance,
            scaled_mean=of_scaled.mean,
            scaled_variance=of_scaled.variance,
            quantiles=tuple(quantiles),
            knots=tuple(knots),
            counts=tuple(self.counts),
            values=tuple(value for value, _ in values),
            value_counts=tuple(times for _, times in values),
            total=self.total,
        )


def statistics_of(
    rows: pa.Table | pa.RecordBatch, features: Mapping[str, Feature], functions: Functions | None = None
) -> dict[str, Statistics]:
    """The statistics of rows that lie in memory.

    Args:
        rows: of raw columns.
        features: by name, their options.
        functions: that cut texts.

    Raises:
        SchemaError: a column is missing, or of a type that its feature cannot be made of.
        DataError: its values are none that the feature can be made of.
    """
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
    table = table.combine_chunks()  # 500 columns in 16 chunks each take three times as long
    statistics = {}
    for name, options in features.items():
        source = options.source(name)
        chunks = column_of(table, source).chunks
        at_all = _quantiles(source, chunks) if isinstance(options, Number) else ()
        quantiles, knots = at_all[: len(PROBABILITIES)], at_all[len(PROBABILITIES) :]
        running, counted = Running(), Counter[str]()
        for chunk in chunks:
            counted.update(running.add(source, options, chunk, quantiles=quantiles, functions=functions or {}))
        values = top_values(counted.items(), options) if isinstance(options, Encoded) else []
        statistics[name] = running.result(quantiles, values, knots)
    return statistics


def column_of(rows: pa.Table | pa.RecordBatch, name: str) -> Any:
    """A column by its name.

    Raises:
        SchemaError: it is missing, or there are two.
    """
    places = rows.schema.get_all_field_indices(name)
    if len(places) != 1:
        state = "missing" if not places else "there twice"
        raise SchemaError(f"the column {name!r} is {state}, the rows have {rows.schema.names}: add or rename it")
    return rows.column(places[0])


def top_values(counted: Iterable[tuple[str, int]], options: Encoded) -> list[tuple[str, int]]:
    """The vocabulary: the values that are frequent enough, the most frequent first, and how often they occurred."""
    frequent = [(value, times) for value, times in counted if times >= options.least_count]
    return sorted(frequent, key=lambda pair: (-pair[1], pair[0]))[: options.most_values]


def edges_of(quantiles: Sequence[float]) -> tuple[float, ...]:
    """The edges between which a number is counted: the quantiles, each once.

    A number that stands there twice is frequent by itself, as zeros and defaults are. It has a bin of its own, so that
    other numbers below it, such as a -1 for what is missing, are told from it.
    """
    times = Counter(quantiles)
    alone = (math.nextafter(number, -math.inf) for number, occurrences in times.items() if occurrences > 1)
    return tuple(sorted({*times, *alone}))


def limits_of(options: Number, quantiles: Sequence[float]) -> tuple[float, float] | None:
    """The limits between which a number is clipped."""
    if isinstance(options.clip, tuple):
        return options.clip
    return (quantiles[0], quantiles[-1]) if options.clip == "quantiles" and quantiles else None


def scaled(options: Number, limits: tuple[float, float] | None, values: Array) -> Array:
    """Numbers as they are clipped and put on a logarithmic scale, element by element, in float64."""
    if limits is not None:
        values = np.clip(values, *limits)
    return np.copysign(np.log1p(np.abs(values)), values) if options.log else values


def _quantiles(name: str, chunks: Sequence[pa.Array]) -> tuple[float, ...]:
    """The quantiles of a number, then its knots."""
    values = np.concatenate([numbers_of(name, chunk) for chunk in chunks]) if chunks else np.empty(0)
    values = values[~np.isnan(values)]
    return tuple(np.quantile(values, PROBABILITIES + KNOTS, method="inverted_cdf").tolist()) if values.size else ()
