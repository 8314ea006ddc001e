"""Rows of a database through its JDBC driver, read by several tasks at once.

Each task reads a range of one column, the first of the key that is a number or a date, else the time. Every task asks
the database by itself, so that the rows are those of no single moment: whoever reads them twice compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ConfigError
from sparkdl.observe import logger
from sparkdl.pipeline.sources.base import Source, SourceSnapshot
from sparkdl.pipeline.spec.source import JdbcSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_DRIVERS: Mapping[str, str] = {
    "postgresql": "org.postgresql.Driver",
    "mysql": "com.mysql.cj.jdbc.Driver",
    "mariadb": "org.mariadb.jdbc.Driver",
    "sqlserver": "com.microsoft.sqlserver.jdbc.SQLServerDriver",
    "oracle": "oracle.jdbc.OracleDriver",
    "db2": "com.ibm.db2.jcc.DB2Driver",
}
"""Classes that Java does not find by itself in a JAR that Spark was given."""
_HOW_READ = frozenset(
    ("user", "driver", "fetchsize", "numpartitions", "partitioncolumn", "lowerbound", "upperbound", "querytimeout")
)
_ROWS_PER_TASK, _MOST_TASKS = 50_000, 256
_WHOLE = ("byte", "short", "integer", "long", "decimal")
_IN_TIME = ("date", "timestamp")  # Spark divides no timestamp_ntz


@dataclass(frozen=True)
class Database(Source):
    """A table or a query of a database."""

    section: JdbcSource

    def identity(self) -> list[Any]:
        """Without the options by which rows are read, and not which."""
        name, settings, code = super().identity()
        options = {option: value for option, value in settings["options"].items() if option.lower() not in _HOW_READ}
        return [name, settings | {"options": options}, code]

    def frame(self, spark: SparkSession, snapshot: SourceSnapshot) -> DataFrame:
        """The rows as they are when a task asks for its share.

        Raises:
            ConfigError: tasks are to share them by a column whose ranges cannot be counted off.
        """
        source = self.section
        kind = source.url.split(":")[1].lower()
        rows = source.table or f"({str(source.query).strip().rstrip(';')}\n) sparkdl_rows"
        # Without the first, PostgreSQL's driver keeps a task's rows in memory at once; without the second, what has no
        # time zone is taken to have Java's.
        options: dict[str, Any] = {"fetchsize": 10_000, "prefertimestampntz": True}
        options |= {"driver": _DRIVERS[kind]} if kind in _DRIVERS else {}
        options |= {name.lower(): value for name, value in source.options.items()}
        reader = spark.read.format("jdbc")
        if "lowerbound" in options:  # the user has divided the rows, or Spark says what is missing for it
            return reader.options(**options, url=source.url, dbtable=rows).load()
        column, tasks = options.pop("partitioncolumn", None), _tasks(options.pop("numpartitions", None))
        reader = reader.options(**options, url=source.url)
        frame = reader.option("dbtable", rows).load()
        _tell_of_rounding(frame)
        column = _divided_by(frame, source, column, tasks)
        if column is None or tasks == 1:
            return frame
        quote = "`" if kind in ("mysql", "mariadb") else '"'
        name = quote + column.replace(quote, 2 * quote) + quote
        bounds_query = f"(SELECT MIN({name}) low, MAX({name}) high, COUNT(*) total FROM {rows}) sparkdl_bounds"
        bounds = reader.option("dbtable", bounds_query).load().toDF("low", "high", "total")
        as_text = "string({0})" if frame.schema[column].dataType.typeName() in _IN_TIME else "try_cast({0} AS bigint)"
        low, high, total = bounds.selectExpr(*map(as_text.format, ("low", "high")), "bigint(total)").collect()[0]
        tasks = tasks or min(_MOST_TASKS, -(-total // _ROWS_PER_TASK))
        if low is None or high is None or tasks < 2:
            return frame
        logger.info("%d rows of the database are read by %d tasks, each a range of %s", total, tasks, column)
        reader = reader.option("dbtable", rows).option("partitionColumn", column).option("numPartitions", tasks)
        return reader.option("lowerBound", low).option("upperBound", high).load()


def _tasks(asked: Any) -> int | None:
    """The option numPartitions, which Spark takes as a text, too."""
    try:
        return None if asked is None else int(asked)
    except ValueError as error:
        raise ConfigError(
            f"source.options.numPartitions={asked!r} is no whole number: write one, or leave it out"
        ) from error


def _divided_by(frame: DataFrame, source: JdbcSource, asked: str | None, tasks: int | None) -> str | None:
    """The column whose ranges tasks share; None where no range can be counted off, and nobody has asked for that."""
    kinds = {field.name: field.dataType.typeName() for field in frame.schema.fields}
    named = [asked] if asked else [*source.key, *filter(None, [source.when])]
    column = next((name for name in named if kinds.get(name) in (*_WHOLE, *_IN_TIME)), None)
    if column is None and (asked or tasks):
        option = f"partitionColumn={asked!r}" if asked else f"numPartitions={tasks}"
        columns = {name: kinds[name] for name in named if name in kinds} or list(kinds)
        raise ConfigError(
            f"source.options.{option} divides the rows by a whole number, a date or a timestamp, and there is "
            f"{columns}: name another partitionColumn, or leave it out"
        )
    return column


def _tell_of_rounding(frame: DataFrame) -> None:
    """Say which columns may lose digits: a numeric of PostgreSQL without precision is 38 digits to Spark, 18 behind."""
    loose = [field.name for field in frame.schema.fields if field.dataType.simpleString() == "decimal(38,18)"]
    if loose:
        logger.warning("Spark rounds %s to 18 decimal places: cast them in source.query if that is too few", loose)
