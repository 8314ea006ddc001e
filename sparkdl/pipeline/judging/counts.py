"""What drift compares: how many rows of a feature fall into which cell, seen from the statistics that a model carries.

A list or text has both a histogram and categories: its values by its own name, and ``"NAME (length)"``. Vectors, images
and date parts have one cell, which tells of missing values alone.

A window is counted between the quantiles of the training rows, and its ``values`` are the vocabulary's, however rare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkdl.documents.typed import Count
from sparkdl.features.spec import Category, Encoded, Feature, Number
from sparkdl.features.statistics import LENGTHS, Statistics, edges_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """How many values of a number lie between edges, which are those of the reference.

    Attributes:
        counts: rows a cell, from the lowest values to the highest.
        missing: rows without a value.
    """

    counts: tuple[Count, ...]
    missing: Count = 0

    @property
    def present(self) -> int:
        """Rows with a value."""
        return sum(self.counts)

    @property
    def independent(self) -> int:
        """Values that do not come with each other."""
        return self.present


@dataclass(frozen=True, kw_only=True, slots=True)
class Categories:
    """How often each named value stands there.

    Attributes:
        counts: occurrences by value.
        other: occurrences of values that have no name here.
        missing: rows without a value.
        minimum: how often a value stands in the reference at least to be named there; 0 where the most frequent are.
        rows: in which they stand, where a row holds many: only rows are independent. None is one row an occurrence.
    """

    counts: Mapping[str, Count]
    other: Count = 0
    missing: Count = 0
    minimum: Count = 1
    rows: Count | None = None

    @property
    def total(self) -> int:
        """All occurrences."""
        return sum(self.counts.values()) + self.other

    @property
    def present(self) -> int:
        """Rows with a value."""
        return self.total if self.rows is None else self.rows

    @property
    def independent(self) -> int:
        """Values that do not come with each other."""
        return min(self.present, self.total)


Counts = Histogram | Categories


def counts_of(options: Mapping[str, Feature], statistics: Mapping[str, Statistics]) -> dict[str, Counts]:
    """Return the counts of each feature that both tell of, in the order of the statistics."""
    counts: dict[str, Counts] = {}
    for name, of_feature in statistics.items():
        feature, missing = options[name], of_feature.missing
        present = of_feature.rows - missing
        if isinstance(feature, Number):
            counts[name] = _histogram(of_feature, edges_of(of_feature.quantiles))
        elif not isinstance(feature, Encoded):
            counts[name] = Histogram(counts=(present,), missing=missing)
        elif feature.buckets is None:
            counts[name] = Categories(
                counts=dict(zip(of_feature.values, of_feature.value_counts, strict=True)),
                other=of_feature.others,
                missing=missing,
                minimum=feature.least_count if len(of_feature.values) < feature.most_values else 0,
                rows=None if isinstance(feature, Category) else present,
            )
        elif isinstance(feature, Category):
            hashed = {str(remainder): count for remainder, count in enumerate(of_feature.counts)}
            counts[name] = Categories(counts=hashed, missing=missing)
        if isinstance(feature, Encoded) and not isinstance(feature, Category):
            counts[f"{name} (length)"] = _histogram(of_feature, LENGTHS)
    return counts


def _histogram(statistics: Statistics, edges: Sequence[float]) -> Histogram:
    return Histogram(counts=statistics.counts or (0,) * (len(edges) + 1), missing=statistics.missing)
