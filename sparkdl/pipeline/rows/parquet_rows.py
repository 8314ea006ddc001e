"""Rows of Parquet files that tasks read, judge and write in Arrow, where no SQL has to be asked of them.

Spark's reader and the way of each row through Java to Python cost more than all that is done with it: so of such a
source no row enters the JVM. What is judged, counted and hashed is what the way through Spark gives, to the bit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.batches import merge_small
from sparkdl.columns.numpy_arrow import from_values
from sparkdl.compat.column_names import Task
from sparkdl.errors import DataError, StorageError
from sparkdl.pipeline.rows.arrow_conditions import Judge, arrow_condition
from sparkdl.pipeline.rows.expect import OWN
from sparkdl.pipeline.rows.validate import REPORT
from sparkdl.pipeline.sources.base import ParquetFooters, Source, SourceSnapshot
from sparkdl.pipeline.sources.parquet_times import times_of_spark
from sparkdl.pipeline.sources.read import with_windows
from sparkdl.pipeline.sources.window_column import window_names
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.pipeline.windows import WINDOW
from sparkdl.tables.parquet import OPEN_FILES
from sparkdl.tables.record import TableFile
from sparkdl.tables.scan.plan import shares_of, tasks_at_once
from sparkdl.tables.scan.read import FilePart, ScanTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BATCH_ROWS = 10_000
_MERGED_ROWS, _MERGED_BYTES = 100_000, 128 << 20
"""Rows that tell their windows themselves are written so many at a time: of many windows each is a file."""
_MOST_ROWS = 10_000_000
"""Values of keys, or of times, that the driver looks at."""


@dataclass(frozen=True, kw_only=True)
class ParquetRows:
    """The rows of a source.

    Attributes:
        spark: whose workers read.
        frame: no rows, with the columns that Spark would read, and the window.
        footers: of the files.
        windows: of each file its rows by window; a window without rows is not there.
        schema: of the batches that tasks get: the window, then the columns.
        time: the column that tells the window of a row, and how long a window is; None where a file is of one.
        judge: tells what becomes of each row.
    """

    spark: SparkSession
    frame: DataFrame
    footers: ParquetFooters
    windows: Mapping[str, Mapping[str, int]]
    schema: pa.Schema
    time: tuple[str, str] | None
    judge: Judge

    @property
    def rows(self) -> dict[str, int]:
        """Rows by window, as the footers or their times tell; a window without rows is not there."""
        counts: Counter[str] = Counter()
        for rows_by_window in self.windows.values():
            counts.update(rows_by_window)
        return dict(counts)

    def read(self, task: Task) -> DataFrame:
        """The reports of a task on all rows."""
        return self._reports([task], self.rows)

    def read_judged(self, windows: Collection[str]) -> Callable[[Task], DataFrame]:
        """The reports of a task on the rows of some windows, each with its outcome, as ``validate_rows`` takes it."""
        return lambda task: self._reports([self.judge, task], windows)

    def can_judge(self, windows: Collection[str], key: Sequence[str]) -> bool:
        """Whether tasks judge the rows of some windows: no two of a window have one key, and few files are written."""
        return (self.time is None or self._writes_few_files(windows)) and self._keys_are_unique(windows, key)

    def _keys_are_unique(self, windows: Collection[str], key: Sequence[str]) -> bool:
        """Whether no two rows of a window have the same key; False also where that takes Spark to tell."""
        if not key:
            return True
        count = sum(rows for name, rows in self.rows.items() if name in windows)
        kinds = [self.schema.field(name).type for name in key]
        if count * len(key) > _MOST_ROWS or any(pa.types.is_floating(kind) for kind in kinds):
            return False
        names = list(dict.fromkeys([WINDOW, *key, *(self.time or ())[:1]]))
        scan = self._scan(names, windows, slots=1)
        keys = scan.collected(self._as_spark_reads(names, windows)).select([WINDOW, *key]).drop_null()
        return bool(keys.group_by(keys.column_names).aggregate([]).num_rows == keys.num_rows)

    def _writes_few_files(self, windows: Collection[str]) -> bool:
        """Whether tasks that write rows as they lie write about as many files as there are windows."""
        shares = self._scan([WINDOW], windows, slots=tasks_at_once(self.spark)).shares
        return sum(self._files_of(share, windows) for share in shares) <= 2 * len(windows) + OPEN_FILES

    def _files_of(self, share: Sequence[FilePart], windows: Collection[str]) -> int:
        """About how many files the task of a share writes: a batch of more windows than are open opens each anew."""
        batches: list[tuple[set[str], int]] = []
        for path in dict.fromkeys(part.path for part in share):
            counts = {name: rows for name, rows in self.windows[path].items() if name in windows}
            names, rows = {*counts}, sum(counts.values())
            if batches and batches[-1][1] + rows <= _MERGED_ROWS:
                earlier_names, earlier_rows = batches.pop()
                names, rows = names | earlier_names, rows + earlier_rows
            batches.append((names, rows))
        files, still_open = 0, set[str]()
        for names, rows in batches:
            few = len(names) <= OPEN_FILES
            files += len(names - still_open) * (1 if few else math.ceil(rows / _MERGED_ROWS))
            still_open = names if few else set()
        return files

    def check(self, left: Mapping[str, int], windows: Collection[str]) -> None:
        """Refuse what left the tasks, rows by window, if it is not what footers or times told.

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
        frame: DataFrame = scan.mapped(self.spark, [*self._as_spark_reads(self.schema.names, windows), *tasks], REPORT)
        return frame

    def _scan(self, columns: Sequence[str], windows: Collection[str], *, slots: int) -> ScanTask:
        files = [file for file in self.footers.files if not self.windows[file.path].keys().isdisjoint(windows)]
        return _scan(self.footers, columns, files, slots=slots)

    def _as_spark_reads(self, columns: Sequence[str], windows: Collection[str]) -> list[Task]:
        """What makes of columns of files what Spark would, and leaves out the rows of other windows."""
        schema = pa.schema([self.schema.field(name) for name in columns])
        typed = partial(_typed, schema=schema)
        if self.time is None:
            return [typed]
        in_windows = partial(_in_windows, time=self.time, windows=tuple(windows))
        return [typed, in_windows, partial(merge_small, rows=_MERGED_ROWS, most_bytes=_MERGED_BYTES)]


def _scan(footers: ParquetFooters, columns: Sequence[str], files: Sequence[TableFile], *, slots: int) -> ScanTask:
    stored = {field.name: field.type for field in footers.stored} | {WINDOW: pa.string()}
    return ScanTask(
        root=footers.root,
        schema=pa.schema([(name, stored[name]) for name in columns]),
        names={name: name for name in columns},
        layout=tuple(footers.files[0].partition),
        where=(),
        batch_rows=_BATCH_ROWS,
        shares=shares_of(files, {}, slots),
    )


def _in_windows(
    batches: Iterator[pa.RecordBatch], *, time: tuple[str, str], windows: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """The rows of some windows, each with its window in the place of the first column."""
    column, every = time
    for rows in batches:
        names = window_names(rows.column(column), every)
        chosen = pc.is_in(names, value_set=from_values(windows, pa.string()))
        yield rows.set_column(0, WINDOW, names).filter(chosen)


def _typed(batches: Iterator[pa.RecordBatch], *, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows with times in microseconds and in the session's time zone, as Spark gives them to Python."""
    for batch in batches:
        yield times_of_spark(batch).cast(schema)


def _windows_of(footers: ParquetFooters, time: tuple[str, str] | None) -> dict[str, Mapping[str, int]] | None:
    """The rows by window of each file, by its path; None where Spark has to tell."""
    if time is None:
        return {file.path: {str(file.partition[WINDOW]): file.rows} if file.rows else {} for file in footers.files}
    if sum(file.rows or 0 for file in footers.files) > _MOST_ROWS:
        return None
    windows: dict[str, Mapping[str, int]] = {}
    try:
        for file in footers.files:
            counts: Counter[str] = Counter()
            for batch in _scan(footers, [time[0]], [file], slots=1).collected().to_batches():
                names = window_names(times_of_spark(batch).column(0), time[1])
                counts.update({count["values"]: count["counts"] for count in names.value_counts().to_pylist()})
            windows[file.path] = counts
    except StorageError:  # Spark says which file cannot be read
        return None
    return windows


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
    time = None if spec.source.time is None else (spec.source.time, spec.source.every)
    windows = _windows_of(footers, time)
    if windows is None:
        return None
    zone = str(spark.conf.get("spark.sql.session.timeZone"))
    fields = [(WINDOW, pa.string()), *((field.name, _in_zone(field.type, zone)) for field in footers.schema)]
    judge = Judge(
        conditions=translated,
        reasons=tuple(name for name, expectation in spec.expect.items() if expectation.action != "warn"),
        named=tuple(name for name, expectation in spec.expect.items() if expectation.action != "quarantine"),
    )
    return ParquetRows(
        spark=spark, frame=frame, footers=footers, windows=windows, schema=pa.schema(fields), time=time, judge=judge
    )


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
