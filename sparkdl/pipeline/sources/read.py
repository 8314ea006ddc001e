"""The rows of a source, each with the window that it belongs to."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import TYPE_CHECKING

from sparkdl.columns.names import quoted
from sparkdl.errors import DataError, SchemaError, first_line
from sparkdl.pipeline.sources.base import Source, SourceSnapshot
from sparkdl.pipeline.sources.failures import source_errors
from sparkdl.pipeline.sources.window_column import window_column
from sparkdl.pipeline.windows import NO_TIME, WHOLE, WINDOW, Span, spans

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_MOMENTS = ("date", "timestamp", "timestamp_ntz")
_AROUND = timedelta(days=2)
"""What a range of time has more at its ends: session and database may tell midnight by zones 26 hours apart."""


def check_unchanged(source: Source, snapshot: SourceSnapshot) -> None:
    """Refuse what was read if a file is another one than at the snapshot; files that came since are for the next run.

    Raises:
        DataError: names the first file.
    """
    if not snapshot.files:  # a table's version never changes
        return
    now = source.snapshot().files
    for file, stamp in snapshot.files.items():
        if now.get(file) != stamp:
            change = "is gone" if file not in now else f"has {now[file][0]} bytes instead of {stamp[0]}, or is newer"
            raise DataError(f"the source changed while it was read: {file} {change}; run again")


def read_rows(spark: SparkSession, source: Source, snapshot: SourceSnapshot) -> DataFrame:
    """The rows as they were at the snapshot, each with its window.

    Args:
        spark: the session.
        source: of the rows.
        snapshot: that was taken of it; the files that it saw are read, and no others.

    Raises:
        SchemaError: the column that says when a row happened is not there, or is no date.
        ConfigError: the function cannot be called, or returns no DataFrame.
        DataError: a file that was there is gone.
    """
    from pyspark.errors import PySparkException

    try:
        with source_errors():
            frame = source.frame(spark, snapshot)
    except PySparkException as error:
        raise SchemaError(
            f"the source cannot be read: {first_line(error)}; correct source, or how it is written"
        ) from error
    return with_windows(frame, source)


def with_windows(frame: DataFrame, source: Source) -> DataFrame:
    """The rows of a source, each with its window.

    Raises:
        SchemaError: there is such a column already, or none that tells the window.
    """
    if WINDOW in frame.columns:
        raise SchemaError(f"the source has a column {WINDOW}, which the pipeline adds: rename it in the source")
    return frame.withColumn(WINDOW, window_column(frame, source.section, source.partition_is_text))


def of_windows(rows: DataFrame, source: Source, windows: Collection[str]) -> DataFrame:
    """The rows of some windows, and for those who can pass over others unread, a range of time beside.

    Args:
        rows: as ``read_rows`` leaves them.
        source: of the rows; asked again, if it can be, for the time that the windows cover.
        windows: their names.

    Raises:
        ConfigError: the function fails, or returns no DataFrame.
        SchemaError: what it returns has no column that says when a row happened.
    """
    from pyspark.sql import functions as F

    timed = bool(windows) and not {NO_TIME, WHOLE} & {*windows}
    if timed:
        covered = spans(windows, timedelta(0))
        within = source.frame_within(rows.sparkSession, Span(covered[0].start, covered[-1].end))
        rows = rows if within is None else with_windows(within, source)
    chosen = rows.where(F.col(WINDOW).isin(*windows))
    time = source.section.time
    if time is None or not timed:
        return chosen
    kind, column = rows.schema[time].dataType.typeName(), quoted(time)
    if kind not in _MOMENTS:
        return chosen
    ranges = [[f"{kind}'{end.date().isoformat()}'" for end in span] for span in spans(windows, _AROUND)]
    return chosen.where(" OR ".join(f"({column} >= {first} AND {column} < {end})" for first, end in ranges))
