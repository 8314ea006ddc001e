"""What the transform of a pipeline file makes of the rows: a function of the user's, or one SELECT."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pyarrow as pa

from sparkdl.compat.spark_errors import unlogged_queries
from sparkdl.errors import SchemaError, first_line
from sparkdl.pipeline.file import PipelineFile
from sparkdl.pipeline.sources import source_of
from sparkdl.pipeline.sources.function import frame_of
from sparkdl.pipeline.sources.read import with_windows
from sparkdl.pipeline.windows import WINDOW

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType


def transformed(spark: SparkSession, file: PipelineFile, rows: DataFrame) -> DataFrame:
    """The rows as the transform leaves them; it may drop ``_window`` as long as it keeps the column that decides it.

    Raises:
        PipelineFileError: its SQL cannot be analysed.
        SchemaError: it drops what says which window a row belongs to.
        ConfigError: its function cannot be called, or returns no DataFrame.
    """
    from pyspark.errors import AnalysisException

    transform = file.spec.transform
    if transform is None:
        return rows
    if transform.sql is not None:
        try:
            frame = select_from_source(spark, transform.sql, rows)
        except AnalysisException as error:
            raise file.refused([(("transform", "sql"), f": {sql_refused(error)}")]) from error
    else:
        frame = frame_of("transform.function", str(transform.function), rows, **transform.arguments)
    if WINDOW in frame.columns:
        return frame
    when = file.spec.source.when
    if when is not None and when not in frame.columns:
        raise SchemaError(
            f"the transform drops {when!r}, which says which window a row belongs to, and {WINDOW}: keep one of them"
        )
    return with_windows(frame, source_of(file.spec.source))


def select_from_source(spark: SparkSession, sql: str, rows: DataFrame) -> DataFrame:
    """What one SELECT makes of ``rows``, which it calls ``source`` or ``{source}``.

    Only a text with ``{source}`` is a format, in which other braces are doubled. No view is made of that name.

    Raises:
        AnalysisException: it is no SQL, or reads what is not there.
    """
    select = sql.rstrip().rstrip(";")
    if "{source}" in select:
        select = select.replace("{source}", "source").replace("{{", "{").replace("}}", "}")
    select = select.replace("{", "{{").replace("}", "}}")
    with unlogged_queries():
        return spark.sql(f"WITH source AS (SELECT * FROM {{source}}) (\n{select}\n)", source=rows)


def arrow_types(rows: DataFrame) -> dict[str, pa.DataType]:
    """The Arrow type of each column but the window's; of one that Arrow does not know, an empty struct.

    Nothing in a file reads either.
    """
    types = {field.name: arrow_type(field.dataType) for field in rows.schema if field.name != WINDOW}
    return {name: pa.struct([]) if kind is None else kind for name, kind in types.items()}


def arrow_type(kind: DataType) -> pa.DataType | None:
    """The Arrow type of one of Spark's; None of one that Arrow does not know."""
    from pyspark.errors import PySparkTypeError
    from pyspark.sql.pandas.types import to_arrow_type

    try:
        return to_arrow_type(kind, timezone="UTC")
    except PySparkTypeError:
        return None


def sql_refused(error: Exception) -> str:
    """What Spark has against a text of SQL, as the end of a sentence."""
    reason = first_line(error).partition("; line ")[0]
    return re.sub(r"^\[[\w.]+\] |, `_window`| SQLSTATE: \w+| \(line \d+, pos \d+\)", "", reason).rstrip(". ")
