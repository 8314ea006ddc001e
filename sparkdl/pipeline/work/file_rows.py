"""Rows that workers read from a table's files themselves, so that they never enter the JVM.

Spark's reader and the way of each row through Java to Python cost more than the counting (``bench_pipeline.py``: 1.5
million training rows, features in 12 to 15 s instead of 23 to 29).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from sparkdl.compat.column_names import Task
from sparkdl.errors import IntegrityError, StorageError
from sparkdl.features.spec import Image
from sparkdl.features.statistics import KNOTS, PROBABILITIES
from sparkdl.features.values import numbers_of
from sparkdl.observe import logger
from sparkdl.pipeline.rows.expect import SLOT
from sparkdl.pipeline.rows.parts import PART, HashParts, hash_parts, hashes_rows, rows_of, rows_of_parts
from sparkdl.pipeline.spec import PipelineSpec, TimeSplit
from sparkdl.pipeline.windows import WINDOW, Part
from sparkdl.tables.scan.plan import TableScan, Where, tasks_at_once
from sparkdl.tables.scan.read import ScanTask
from sparkdl.tables.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

POINTS = 10_000
"""Numbers that stand for those of a column in a block of rows, each for as many: ranks are off by half of that."""
BLOCK_NUMBERS = 20_000_000
"""Numbers of all columns together that a task holds, 160 MB."""
_BATCH_ROWS = 10_000
LEAST_BYTES = 1 << 20
"""Of a file, on average, from which on workers hash whole rows: 125 files of 24 rows took 4 s more of a run's 30."""
_OTHER_TEXTS = ("__COLLATIONS", "__CHAR_VARCHAR_TYPE_STRING")
"""Marks of columns whose texts Spark hashes by their collation, or fills up with spaces, and not as they lie there."""
_HASHED_BATCH_ROWS = 2_000
"""Where whole rows are read to be hashed, long texts among them that nobody else asks for."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class FileRows:
    """The rows of a scan, or those of some parts.

    Attributes:
        spark: whose workers read.
        scan: the files, and which of their rows.
        parts: that a hash makes of them; None takes all.
    """

    spark: SparkSession
    scan: TableScan
    parts: HashParts | None = None

    def map(self, columns: Sequence[str], tasks: Sequence[Task], schema: str) -> DataFrame:
        """What tasks, one behind the other, make of the rows.

        Args:
            columns: that are read.
            tasks: the first takes batches of these columns.
            schema: of what the last gives.
        """
        read = self._reading(columns, tasks_at_once(self.spark))
        frame: DataFrame = read.mapped(self.spark, [*self._chosen(columns), *tasks], schema)
        return frame

    def collected(self, columns: Sequence[str]) -> pa.Table:
        """The rows themselves, read by the driver."""
        return self._reading(columns, 1).collected(self._chosen(columns)).select(columns)

    def frame(self, schema: StructType, name: str | None = None) -> DataFrame:
        """Columns of the rows as a DataFrame.

        Args:
            schema: of these columns, and of ``name``.
            name: of the column that says of which part a row is; None for none.
        """
        columns = [column for column in schema.names if column != name]
        read = self._reading(columns, tasks_at_once(self.spark))
        frame: DataFrame = read.mapped(self.spark, self._chosen(columns, name), schema)
        return frame

    def width(self, columns: Sequence[str]) -> int:
        """How many columns are read for these: a hash may be of more."""
        return len(self._read(columns))

    def _read(self, columns: Sequence[str]) -> list[str]:
        return list(dict.fromkeys([*columns, *(self.parts.columns if self.parts else ())]))

    def _reading(self, columns: Sequence[str], slots: int) -> ScanTask:
        batch_rows = _HASHED_BATCH_ROWS if self.parts is not None and self.parts.all_columns else _BATCH_ROWS
        return self.scan.task(self._read(columns), slots=slots, batch_rows=batch_rows)

    def _chosen(self, columns: Sequence[str], name: str | None = None) -> list[Task]:
        """What leaves the rows of the parts, with these columns."""
        return [] if self.parts is None else [partial(self.parts.of_batches, columns=list(columns), name=name)]

    def quantiles(self, columns: Sequence[str]) -> dict[str, tuple[float, ...]]:
        """The quantiles at ``PROBABILITIES`` and ``KNOTS``, by column: numbers of the rows.

        Their ranks are off by 1/20,000 of the rows at most. What is missing, NaN or infinite does not count; a column
        without any number is not there.
        """
        points = self.map(columns, [_Points(tuple(columns))], "place int, value double, weight bigint")
        merged = points.groupBy("place").applyInArrow(_quantiles, "place int, quantiles array<double>")
        return {columns[row["place"]]: tuple(row["quantiles"]) for row in merged.collect()}


def part_files(
    spec: PipelineSpec, table: Table, part: Part, windows: Sequence[str], spark: SparkSession
) -> FileRows | None:
    """The labelled rows of a part, as workers read them from files; None where Spark alone can, or does so sooner.

    Of pictures Spark reads the first byte, and whoever reads files all of them: a batch would not fit into memory.

    Args:
        spec: the pipeline.
        table: of the clean rows.
        part: which.
        windows: of that part, or some of them.
        spark: whose workers read.
    """
    if any(isinstance(options, Image) for options in spec.features.values()):
        return None
    scan = _scanned(table, [(WINDOW, "in", windows), *((name, "is not", None) for name in spec.label)])
    if scan is None or isinstance(spec.split, TimeSplit):
        return None if scan is None else FileRows(spark, scan)
    parts = _hash_parts(spec, [part], scan)
    return None if parts is None else FileRows(spark, scan, parts)


def part_frame(
    spec: PipelineSpec,
    table: Table,
    clean: DataFrame,
    windows: Mapping[Part, Sequence[str]],
    columns: Sequence[str] | None = None,
) -> DataFrame:
    """The clean rows of a part as ``rows_of`` gives them, or of several, as ``rows_of_parts`` does.

    Where all that a row holds is hashed, workers read the rows and hash them: Spark takes as long to hash 500 columns
    as to read them, and each pass asks which rows are of a part.

    Args:
        spec: the pipeline.
        table: of the clean rows.
        clean: its rows, see ``Run.clean_to_divide``.
        windows: of each part, or some of them.
        columns: that are asked for, and others may be missing; None for all.
    """
    name = PART if len(windows) > 1 else None
    scan = parts = None
    if hashes_rows(spec) and len(set(map(tuple, windows.values()))) == 1:
        scan = _scanned(table, [(WINDOW, "in", next(iter(windows.values())))])
        parts = None if scan is None else _hash_parts(spec, list(windows), scan)
    if scan is None or parts is None:
        [(part, of_part), *others] = windows.items()
        return rows_of_parts(clean, spec, windows) if others else rows_of(clean, spec, part, of_part)
    fields = [field for field in clean.schema if field.name != SLOT and (columns is None or field.name in columns)]
    schema = StructType(fields) if name is None else StructType(fields).add(name, "string")
    return FileRows(clean.sparkSession, scan, parts).frame(schema, name)


def _hash_parts(spec: PipelineSpec, parts: Sequence[Part], scan: TableScan) -> HashParts | None:
    """How workers find the rows of parts; None where Spark alone can, or keeps the rows of small files in memory."""
    if hashes_rows(spec) and sum(file.bytes for file in scan.files) < LEAST_BYTES * len(scan.files):
        return None
    if any(mark in scan.schema_json for mark in _OTHER_TEXTS):
        return None
    return hash_parts(spec, parts, scan.schema)


def _scanned(table: Table, where: Where) -> TableScan | None:
    """The files of a table's newest version; None where only Spark reads them."""
    try:
        return table.scan(where)
    except IntegrityError:
        raise
    except StorageError as why:
        logger.info("Spark reads the rows of %s: %s", table.uri, why)
        return None


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
