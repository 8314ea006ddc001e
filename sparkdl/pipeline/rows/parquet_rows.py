"""Rows of Parquet files that tasks read, judge and write in Arrow, where no SQL has to be asked of them.

Spark's reader and the way of each row through Java to Python cost more than all that is done with it: so of such a
source no row enters the JVM. What is judged, counted and hashed is what the way through Spark gives, to the bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from sparkdl.compat.column_names import Task
from sparkdl.errors import DataError
from sparkdl.pipeline.rows.arrow_conditions import Judge, arrow_condition
from sparkdl.pipeline.rows.expect import OWN
from sparkdl.pipeline.rows.validate import REPORT
from sparkdl.pipeline.sources.base import ParquetFooters, Source, SourceSnapshot
from sparkdl.pipeline.sources.read import with_windows
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.pipeline.windows import WINDOW
from sparkdl.tables.scan.plan import shares_of, tasks_at_once
from sparkdl.tables.scan.read import ScanTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BATCH_ROWS = 10_000
_MOST_KEYS = 10_000_000
"""Values of keys that the driver compares."""


@dataclass(frozen=True, kw_only=True)
class ParquetRows:
    """The rows of a source.

    Attributes:
        spark: whose workers read.
        frame: no rows, with the columns that Spark would read, and the window.
        footers: of the files.
        schema: of the batches that tasks get: the window, then the columns.
        judge: tells what becomes of each row.
    """

    spark: SparkSession
    frame: DataFrame
    footers: ParquetFooters
    schema: pa.Schema
    judge: Judge

    @property
    def rows(self) -> dict[str, int]:
        """Rows by window, as the footers tell; a window without rows is not there."""
        counts: Counter[str] = Counter()
        for file in self.footers.files:
            counts[str(file.partition[WINDOW])] += file.rows or 0
        return dict(+counts)

    def read(self, task: Task) -> DataFrame:
        """The reports of a task on all rows."""
        return self._reports([task], self.rows)

    def read_judged(self, windows: Collection[str]) -> Callable[[Task], DataFrame]:
        """The reports of a task on the rows of some windows, each with its outcome, as ``validate_rows`` takes it."""
        return lambda task: self._reports([self.judge, task], windows)

    def keys_are_unique(self, windows: Collection[str], key: Sequence[str]) -> bool:
        """Whether no two rows of a window have the same key; False also where that takes Spark to tell."""
        if not key:
            return True
        count = sum(rows for name, rows in self.rows.items() if name in windows)
        kinds = [self.schema.field(name).type for name in key]
        if count * len(key) > _MOST_KEYS or any(pa.types.is_floating(kind) for kind in kinds):
            return False
        scan = self._scan([WINDOW, *key], windows, slots=1)
        keys = scan.collected().drop_null()
        return bool(keys.group_by(keys.column_names).aggregate([]).num_rows == keys.num_rows)

    def check(self, left: Mapping[str, int], windows: Collection[str]) -> None:
        """Refuse what left the tasks, rows by window, if it is not what the footers told.

        Raises:
            DataError: names the first window.
        """
        rows = self.rows
        for name in sorted({*left, *windows}):
            expected = rows.get(name, 0)
            if left.get(name, 0) != expected:
                raise DataError(
                    f"window {name} had {expected} rows when it was looked at and {left.get(name, 0)} when they were "
                    "judged: the source changed meanwhile; run again"
                )

    def _reports(self, tasks: Sequence[Task], windows: Collection[str]) -> DataFrame:
        scan = self._scan(self.schema.names, windows, slots=tasks_at_once(self.spark))
        frame: DataFrame = scan.mapped(self.spark, tasks, REPORT)
        return frame

    def _scan(self, columns: Sequence[str], windows: Collection[str], *, slots: int) -> ScanTask:
        files = [file for file in self.footers.files if file.partition[WINDOW] in windows]
        return ScanTask(
            root=self.footers.root,
            schema=pa.schema([self.schema.field(name) for name in columns]),
            names={name: name for name in columns},
            layout=tuple(self.footers.files[0].partition),
            where=(),
            batch_rows=_BATCH_ROWS,
            shares=shares_of(files, {}, slots),
        )


def parquet_rows(
    spark: SparkSession, spec: PipelineSpec, source: Source, snapshot: SourceSnapshot
) -> ParquetRows | None:
    """The rows of a source that tasks read themselves; None where Spark has to read them.

    That is so where the file has a transform, or asks what only SQL answers, and where Spark's settings or the files
    leave in doubt whether Arrow reads the same.
    """
    if spec.transform is not None:
        return None
    footers = source.footers(snapshot)
    if footers is None or not set(spec.source.key) <= set(footers.schema.names) or OWN & set(footers.schema.names):
        return None
    if not _times_read_alike(spark, footers.schema):
        return None
    conditions = {name: arrow_condition(expectation.check, footers.schema) for name, expectation in spec.expect.items()}
    translated = {name: condition for name, condition in conditions.items() if condition is not None}
    if len(translated) < len(conditions):
        return None
    from pyspark.sql.pandas.types import from_arrow_schema

    columns = from_arrow_schema(footers.schema, prefer_timestamp_ntz=True)
    frame = with_windows(spark.createDataFrame([], columns), source)
    zone = str(spark.conf.get("spark.sql.session.timeZone"))
    fields = [(WINDOW, pa.string()), *((field.name, _in_zone(field.type, zone)) for field in footers.schema)]
    judge = Judge(
        conditions=translated,
        reasons=tuple(name for name, expectation in spec.expect.items() if expectation.action != "warn"),
        named=tuple(name for name, expectation in spec.expect.items() if expectation.action != "quarantine"),
    )
    return ParquetRows(spark=spark, frame=frame, footers=footers, schema=pa.schema(fields), judge=judge)


def _times_read_alike(spark: SparkSession, schema: pa.Schema) -> bool:
    """Whether Spark's settings let it read times as they are stored."""
    required_settings = {}
    if any(pa.types.is_temporal(kind) for kind in schema.types):
        required_settings["spark.sql.parquet.datetimeRebaseModeInRead"] = "CORRECTED"
    if any(pa.types.is_timestamp(kind) and kind.tz is None for kind in schema.types):
        required_settings["spark.sql.parquet.inferTimestampNTZ.enabled"] = "true"
    return all(str(spark.conf.get(name)).lower() == value.lower() for name, value in required_settings.items())


def _in_zone(kind: pa.DataType, zone: str) -> pa.DataType:
    """The type with times as Spark gives them to Python: in the session's time zone."""
    return pa.timestamp("us", zone) if pa.types.is_timestamp(kind) and kind.tz is not None else kind
