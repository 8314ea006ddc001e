"""Rows that workers read from a table's files themselves, so that they never enter the JVM.

Spark's reader and the way of each row through Java to Python cost more than the counting (``bench_pipeline.py``: 1.5
million training rows, features in 12 to 15 s instead of 23 to 29).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sparkdl.compat.column_names import Task
from sparkdl.features.statistics import KNOTS, PROBABILITIES
from sparkdl.features.values import numbers_of
from sparkdl.tables.scan.plan import TableScan, tasks_at_once

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

POINTS = 10_000
"""Numbers that stand for those of a column in a block of rows, each for as many: ranks are off by half of that."""
BLOCK_NUMBERS = 20_000_000
"""Numbers of all columns together that a task holds, 160 MB."""
_BATCH_ROWS = 10_000

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class FileRows:
    """The rows of a scan.

    Attributes:
        spark: whose workers read.
        scan: the files, and which of their rows.
    """

    spark: SparkSession
    scan: TableScan

    def map(self, columns: Sequence[str], tasks: Sequence[Task], schema: str) -> DataFrame:
        """What tasks, one behind the other, make of the rows.

        Args:
            columns: that are read.
            tasks: the first takes batches of these columns.
            schema: of what the last gives.
        """
        read = self.scan.task(columns, slots=tasks_at_once(self.spark), batch_rows=_BATCH_ROWS)
        frame: DataFrame = read.mapped(self.spark, tasks, schema)
        return frame

    def collected(self, columns: Sequence[str]) -> pa.Table:
        """The rows themselves, read by the driver."""
        return self.scan.task(columns, slots=1, batch_rows=_BATCH_ROWS).collected()

    def quantiles(self, columns: Sequence[str]) -> dict[str, tuple[float, ...]]:
        """The quantiles at ``PROBABILITIES`` and ``KNOTS``, by column: numbers of the rows.

        Their ranks are off by 1/20,000 of the rows at most. What is missing, NaN or infinite does not count; a column
        without any number is not there.
        """
        points = self.map(columns, [_Points(tuple(columns))], "place int, value double, weight bigint")
        merged = points.groupBy("place").applyInArrow(_quantiles, "place int, quantiles array<double>")
        return {columns[row["place"]]: tuple(row["quantiles"]) for row in merged.collect()}


@dataclass(frozen=True)
class _Points:
    """At most ``POINTS`` numbers of each column and block of rows, with how many each stands for."""

    columns: tuple[str, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        arrays_by_column: list[list[Array]] = [[] for _ in self.columns]
        rows = 0
        for batch in batches:
            for into, name, column in zip(arrays_by_column, self.columns, batch.columns, strict=True):
                into.append(numbers_of(name, column))
            rows += batch.num_rows
            if rows * len(arrays_by_column) >= BLOCK_NUMBERS:
                yield _points(arrays_by_column)
                arrays_by_column, rows = [[] for _ in self.columns], 0
        if rows:
            yield _points(arrays_by_column)


def _points(columns: Sequence[Sequence[Array]]) -> pa.RecordBatch:
    blocks = []
    for position, parts in enumerate(columns):
        values = np.concatenate(parts)
        values = np.sort(values[~np.isnan(values)])
        edges = np.arange(min(POINTS, len(values)) + 1) * len(values) // max(1, min(POINTS, len(values)))
        chosen = values[(edges[:-1] + edges[1:]) // 2]
        blocks.append((np.full(len(chosen), position, np.int32), chosen, np.diff(edges)))
    return pa.RecordBatch.from_arrays(
        [pa.array(np.concatenate(arrays)) for arrays in zip(*blocks, strict=True)], ["place", "value", "weight"]
    )


def _quantiles(points: pa.Table) -> pa.Table:
    """The quantiles of one column, of the points of all blocks."""
    value, weight = points["value"].to_numpy(), points["weight"].to_numpy()
    order = np.argsort(value, kind="stable")
    upto = np.cumsum(weight[order])
    at = np.searchsorted(upto, np.ceil(np.array(PROBABILITIES + KNOTS) * upto[-1] - 1e-9), side="left")
    quantiles = value[order][np.minimum(at, len(order) - 1)].tolist()
    return pa.table({"place": points["place"][:1], "quantiles": pa.array([quantiles], pa.list_(pa.float64()))})
