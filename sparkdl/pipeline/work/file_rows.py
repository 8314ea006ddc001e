"""Rows that workers read from a table's files themselves, so that they never enter the JVM.

Spark's reader and the way of each row through Java to Python cost more than the counting (``bench_pipeline.py``: 1.5
million training rows, features in 12 to 15 s instead of 23 to 29).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.types import StructType

from sparkdl.columns.batches import merge_small
from sparkdl.compat.column_names import Task
from sparkdl.errors import IntegrityError, StorageError
from sparkdl.features.spec import Image
from sparkdl.observe import logger
from sparkdl.pipeline.rows.expect import SLOT
from sparkdl.pipeline.rows.parts import PART, HashParts, hash_parts, hashes_rows, rows_of, rows_of_parts
from sparkdl.pipeline.spec import PipelineSpec, TimeSplit
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.windows import WINDOW, Part
from sparkdl.tables.scan.plan import TableScan, Where, tasks_at_once
from sparkdl.tables.scan.read import ScanTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BATCH_ROWS = 10_000
_HASHED_ROWS, _HASHED_BYTES = 2_000, 32 << 20
"""Whole rows are read few at a time where they are hashed, long texts among them that nobody else asks for, and hashed
many at a time, where that is so many bytes at most: of 2,000 rows numpy's calls take as long as their arithmetic."""
LEAST_BYTES = 1 << 20
"""Of a file, on average, from which on workers hash whole rows: 125 files of 24 rows took 4 s more of a run's 30."""
_OTHER_TEXTS = ("__COLLATIONS", "__CHAR_VARCHAR_TYPE_STRING")
"""Marks of columns whose texts Spark hashes by their collation, or fills up with spaces, and not as they lie there."""


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

    def map(
        self, columns: Sequence[str], tasks: Sequence[Task], schema: str | StructType, part_column: str | None = None
    ) -> DataFrame:
        """What tasks, one behind the other, make of the rows; without a task, the rows.

        Args:
            columns: that are read.
            tasks: the first takes batches of these columns.
            schema: of what the last gives.
            part_column: name of another column, at the end, that says of which part a row is; None for none.
        """
        read = self._reading(columns, tasks_at_once(self.spark))
        frame: DataFrame = read.mapped(self.spark, [*self._chosen(columns, part_column), *tasks], schema)
        return frame

    def collected(self, columns: Sequence[str]) -> pa.Table:
        """The rows themselves, read by the driver."""
        return self._reading(columns, 1).collected(self._chosen(columns)).select(columns)

    def width(self, columns: Sequence[str]) -> int:
        """How many columns are read for these: a hash may be of more."""
        return len(self._read(columns))

    def _read(self, columns: Sequence[str]) -> list[str]:
        return list(dict.fromkeys([*columns, *(self.parts.columns if self.parts else ())]))

    def _reading(self, columns: Sequence[str], slots: int) -> ScanTask:
        batch_rows = _HASHED_ROWS if self._hashes_rows else _BATCH_ROWS
        return self.scan.task(self._read(columns), slots=slots, batch_rows=batch_rows)

    def _chosen(self, columns: Sequence[str], part_column: str | None = None) -> list[Task]:
        """What leaves the rows of the parts, with these columns."""
        if self.parts is None:
            return []
        merged = [partial(merge_small, rows=_BATCH_ROWS, most_bytes=_HASHED_BYTES)] if self._hashes_rows else []
        return [*merged, partial(self.parts.of_batches, columns=list(columns), name=part_column)]

    @property
    def _hashes_rows(self) -> bool:
        return self.parts is not None and self.parts.all_columns


def part_files(project: Project, part: Part, windows: Sequence[str], spark: SparkSession) -> FileRows | None:
    """The labelled rows of a part, as workers read them from files; None where Spark alone can, or does so sooner.

    Args:
        project: the pipeline.
        part: which.
        windows: of that part, or some of them.
        spark: whose workers read.
    """
    if _has_images(project.spec):
        return None
    where = [(WINDOW, "in", windows), *((name, "is not", None) for name in project.spec.label)]
    return _file_rows(project, [part], where, spark)


def files_of_parts(project: Project, windows: Mapping[Part, Sequence[str]], spark: SparkSession) -> FileRows | None:
    """The rows of several parts, as ``part_files`` has those of one, with and without labels.

    Where windows make the parts these tell of which a row is, else the column that ``FileRows.map`` adds.
    """
    in_windows = list(map(tuple, windows.values()))
    if _has_images(project.spec) or not (isinstance(project.spec.split, TimeSplit) or len(set(in_windows)) == 1):
        return None
    return _file_rows(project, list(windows), [(WINDOW, "in", list(dict.fromkeys(chain(*in_windows))))], spark)


def part_frame(
    project: Project,
    clean: DataFrame,
    windows: Mapping[Part, Sequence[str]],
    columns: Sequence[str] | None = None,
) -> DataFrame:
    """The clean rows of a part as ``rows_of`` gives them, or of several, as ``rows_of_parts`` does.

    Where all that a row holds is hashed, workers read the rows and hash them: Spark takes as long to hash 500 columns
    as to read them, and each pass asks which rows are of a part.

    Args:
        project: the pipeline.
        clean: its clean rows, see ``Run.clean_to_divide``.
        windows: of each part, or some of them.
        columns: that are asked for, and others may be missing; None for all.
    """
    spec, files = project.spec, None
    if hashes_rows(spec) and len(set(map(tuple, windows.values()))) == 1:
        where = [(WINDOW, "in", next(iter(windows.values())))]
        files = _file_rows(project, list(windows), where, clean.sparkSession)
    if files is None:
        [(part, of_part), *others] = windows.items()
        return rows_of_parts(clean, spec, windows) if others else rows_of(clean, spec, part, of_part)
    fields = [field for field in clean.schema if field.name != SLOT and (columns is None or field.name in columns)]
    names, schema, part_column = [field.name for field in fields], StructType(fields), None
    if len(windows) > 1:
        schema, part_column = schema.add(PART, "string"), PART
    return files.map(names, [], schema, part_column)


def _has_images(spec: PipelineSpec) -> bool:
    """Whether pictures are read, of which a batch of files' rows would not fit into memory."""
    return any(isinstance(options, Image) for options in spec.features.values())


def _file_rows(project: Project, parts: Sequence[Part], where: Where, spark: SparkSession) -> FileRows | None:
    """The rows of parts in the newest version of the clean table; None where Spark alone reads or divides them.

    Of small files whose rows are hashed whole Spark keeps the rows in memory.
    """
    spec, table = project.spec, project.table("clean")
    try:
        scan = table.scan(where)
    except IntegrityError:
        raise
    except StorageError as why:
        logger.info("Spark reads the rows of %s: %s", table.uri, why)
        return None
    if isinstance(spec.split, TimeSplit):
        return FileRows(spark, scan)
    if hashes_rows(spec) and sum(file.bytes for file in scan.files) < LEAST_BYTES * len(scan.files):
        return None
    if any(mark in scan.schema_json for mark in _OTHER_TEXTS):
        return None
    hashed = hash_parts(spec, parts, scan.schema)
    return None if hashed is None else FileRows(spark, scan, hashed)
