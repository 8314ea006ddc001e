"""Predictions for a table in another one, without Spark's reader: workers read, score and write files."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from sparkdl.columns.frames import map_row
from sparkdl.columns.names import quoted
from sparkdl.errors import IntegrityError, StorageError
from sparkdl.observe import logger
from sparkdl.scoring.score import Predictor, ScoringPlan, plan_scoring
from sparkdl.storage import check_places
from sparkdl.tables.engine import WriteResult, is_name
from sparkdl.tables.scan.conditions import Condition, conditions_of
from sparkdl.tables.scan.plan import TableScan, Where, tasks_at_once
from sparkdl.tables.scan.read import Chain, ScanTask
from sparkdl.tables.table import Table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TableScore:
    """What the scoring of a table did.

    Attributes:
        version: of the table that was scored.
        files: how many of its files were read; None where Spark read them.
        skipped: how many others the version has, which hold no row for which ``where`` is true.
        written: the commit of the predictions.
    """

    version: int
    files: int | None
    skipped: int | None
    written: WriteResult


def score_table(
    spark: SparkSession,
    table: Table,
    predictor: Callable[[DataFrame], Predictor],
    target: Table,
    *,
    version: int | None = None,
    where: Where = (),
    keep: Sequence[str] | None = None,
    write: Mapping[str, Any] | None = None,
) -> TableScore:
    """Score the rows of a table into another one.

    The commit names the version that was read. The driver plans from the log alone which files are read, and by whom;
    the rows never enter the JVM. Where the reader does not know a feature of the table, or only a catalog knows the
    table, Spark reads it: the same predictions, more slowly.

    Args:
        spark: whose workers do it.
        table: that is read.
        predictor: the model, for a frame with the table's columns and no rows.
        target: gets ``keep`` and the predictions, in one commit.
        version: of ``table``; None takes the newest, which is pinned when this is called.
        where: ``[("day", ">=", "2026-03-01"), ...]``, all of which a row must meet, see ``sparkdl.tables.scan``.
        keep: columns of ``table`` in the result; all by default. Fewer cost less.
        write: what ``Table.write`` takes beside rows: ``mode``, ``partition_by``, ``transaction`` ...

    Raises:
        SparkdlError: as ``score`` and ``Table.write``; nothing is left in ``target`` then.
    """
    write = dict(write or {})
    try:
        if is_name(table.uri):
            raise StorageError(f"{table.uri} is a name, whose files its catalog knows")
        scan = table.scan(where, version)
        frame = spark.createDataFrame([], _spark_schema(scan))
        chosen = predictor(frame)
        plan = plan_scoring(frame, chosen, keep, packed=False)
        read = scan.task(list(plan.transport.columns), slots=tasks_at_once(spark), batch_rows=chosen.config.batch_rows)
    except IntegrityError:
        raise
    except StorageError as why:
        logger.info("Spark reads the rows to score: %s", why)
        return _by_spark(spark, table, predictor, target, version, where, keep, write)
    facts = _facts(table, scan.version, plan)
    written = _by_workers(spark, read, plan, target, write, facts)
    logger.info(
        "scored %s at version %d: %d files of %d",
        table.uri,
        scan.version,
        len(scan.files),
        len(scan.files) + scan.skipped,
    )
    return TableScore(version=scan.version, files=len(scan.files), skipped=scan.skipped, written=written)


def _by_workers(
    spark: SparkSession,
    read: ScanTask,
    plan: ScoringPlan,
    target: Table,
    write: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> WriteResult:
    """Let each task read its share, score it, and write it where the target's engine lets it."""
    count = max(1, len(read.shares))
    numbers = spark.range(0, count, 1, count)
    if not target.can_stage(spark):
        return target.write(numbers.mapInArrow(Chain((read, plan.scorer)), plan.schema), **write, metadata=facts)
    mark = write.get("transaction")
    if mark is not None and mark.committed(target.uri, target.transaction_version(mark.application)):
        return WriteResult(version=target.version(), rows=0, files=0, bytes=0, partitions=(), committed=False)
    staged = target.stage(plan.schema.json(), **write, metadata=facts)
    check_places({"predictions": staged.root}, spark)
    return staged.run(numbers, Chain((read, plan.scorer, staged.task)))


def _by_spark(
    spark: SparkSession,
    table: Table,
    predictor: Callable[[DataFrame], Predictor],
    target: Table,
    version: int | None,
    where: Where,
    keep: Sequence[str] | None,
    write: Mapping[str, Any],
) -> TableScore:
    """Score the rows as Spark reads them."""
    pinned = table.version() if version is None else version
    rows = table.read(spark, pinned)
    for condition in conditions_of(where, _arrow_schema(rows.schema)):
        rows = rows.where(_column(condition))
    plan = plan_scoring(rows, predictor(rows), keep, packed=True)
    scored = map_row(rows, plan.transport.row, plan.scorer, plan.schema)
    written = target.write(scored, **write, metadata=_facts(table, pinned, plan))
    return TableScore(version=pinned, files=None, skipped=None, written=written)


def _facts(table: Table, version: int, plan: ScoringPlan) -> dict[str, Any]:
    """What the commit of the predictions says of where they come from."""
    return {"sparkdl.source": table.uri, "sparkdl.sourceVersion": version, "sparkdl.model": plan.scorer.source.key}


def _spark_schema(scan: TableScan) -> T.StructType:
    """The table's columns without what Delta notes of them for itself."""
    schema = T.StructType.fromJson(json.loads(scan.schema_json))
    for field in schema.fields:
        field.metadata = {key: value for key, value in field.metadata.items() if not key.startswith("delta.")}
    return schema


def _arrow_schema(schema: T.StructType) -> pa.Schema:
    """The columns' Arrow types; null for those that Arrow has none for, which nothing is compared with."""
    fields = []
    for field in schema.fields:
        try:
            fields.append(pa.field(field.name, to_arrow_type(field.dataType, timezone="UTC")))
        except PySparkTypeError:
            fields.append(pa.field(field.name, pa.null()))
    return pa.schema(fields)


def _column(condition: Condition) -> Column:
    """A condition as Spark's expression."""
    column, value = F.col(quoted(condition.column)), condition.value
    if pa.types.is_floating(condition.kind):  # as an expression, which no reader compares with statistics without NaN
        column = column.cast("double") + F.lit(0.0)
    if condition.operator in ("is", "is not"):
        return column.isNull() if condition.operator == "is" else column.isNotNull()
    if condition.operator in ("in", "not in"):
        is_in = column.isin([_value(entry) for entry in value])
        return is_in if condition.operator == "in" else ~is_in & column.isNotNull()  # of an empty list, too
    met: Column = _COMPARE[condition.operator](column, _value(value))
    return met


def _value(value: pa.Scalar) -> Column:
    """A value of a condition; a time as its text, which no time zone of this process moves."""
    if not pa.types.is_temporal(value.type):
        return F.lit(value.as_py())
    kind = "date" if pa.types.is_date(value.type) else "timestamp" if value.type.tz else "timestamp_ntz"
    return F.lit(value.as_py().isoformat()).cast(kind)
