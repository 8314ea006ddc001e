"""Ingestion: the windows of the source that are due, to the table of clean rows, with their books.

Enters: a source, its transform and expectations, and what the ledger knows. Leaves, in Delta tables by window:

    clean        rows that passed, as the transform left them
    quarantine   each refused row as JSON, with the one reason it was refused for
    ledger       one row a window, see ledger.py; committed last

Each due window replaces its own partition and nothing else. The rows pass once: one job judges, counts and keeps
them; an independent count of the source must agree before anything is written, and what was written must agree with
both. A run that is cut short between the commits leaves windows that are due again, and are replaced again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from sparkdl.columns.names import quoted
from sparkdl.errors import DataError, SchemaError
from sparkdl.pipeline.code import code_hash
from sparkdl.pipeline.rows.expect import (
    DUPLICATE,
    KEPT,
    OUTCOME,
    OWN,
    Outcomes,
    check_shares,
    content_hash,
    judged,
    outcomes_of,
)
from sparkdl.pipeline.rows.ledger import Tables, WindowBooks
from sparkdl.pipeline.rows.source import MALFORMED, WINDOW, Look, frame_of, read_rows, source_identity, window_column
from sparkdl.pipeline.rows.windows import due
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.steps import content_key

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Ingested", "due_windows", "ingest", "rules_of"]

_ROWS_PER_FILE = 1_000_000
_RULES = 1
"""Version of what this module does to rows; raise it when that changes, and every window is due again."""


@dataclass(frozen=True, kw_only=True)
class Ingested:
    """What an ingestion did.

    Attributes:
        done: books of the windows that were due, in order.
        warned: rows of these windows by the warning that they broke.
        version: of the table of clean rows; -1 where nothing was due.
    """

    done: tuple[WindowBooks, ...]
    warned: Mapping[str, int]
    version: int


def rules_of(spec: PipelineSpec) -> str:
    """What decides which rows of a window are kept, and what they look like: settings and code, as one hash."""
    transform = spec.transform
    code = code_hash(transform.function) if transform is not None and transform.function else ""
    inputs = {
        "version": _RULES,
        "source": source_identity(spec.source),
        "transform": transform,
        "code": code,
        "expect": {name: each for name, each in spec.expect.items() if each.action != "warn"},
        "order": [name for name, each in spec.expect.items() if each.action != "warn"],
    }
    return content_key("rules", inputs)


def due_windows(
    spec: PipelineSpec,
    look: Look,
    known: Mapping[str, WindowBooks],
    now: datetime,
    again: tuple[str, str] | None = None,
) -> list[str] | None:
    """The windows that are due as far as files or a table's log tell; None where only Spark can.

    Raises:
        DataError: ``again`` names no window of the source.
    """
    if look.windows is None:
        return None
    rules = rules_of(spec)
    done = {name: books.fingerprint for name, books in known.items() if books.rules == rules}
    return due(look.windows, done, now=now, again=again)


def ingest(spark: SparkSession, context: Context) -> Ingested:
    """Bring the table of clean rows up to date with the source.

    Args:
        spark: the session.
        context: of the run.

    Raises:
        DataError: rows were lost or multiplied, an expectation failed, or a window has no sound row.
        PipelineFileError: the file reads columns that there are not, or that are of types that their use does not fit.
        SchemaError: columns differ from those of the table of clean rows.
        ConfigError: a condition, query or function is wrong.
        StorageError: source or tables cannot be read or written.
    """
    from pyspark.sql import functions as F

    spec, tables, look, now, again = context.spec, context.tables, context.look, context.now, context.again
    known, source = tables.ledger.windows(), read_rows(spark, spec.source, look)
    todo = due_windows(spec, look, known, now, again)
    found = dict(look.windows or {})
    if todo is None:
        found = _fingerprints(source)
        rules = rules_of(spec)
        done = {name: books.fingerprint for name, books in known.items() if books.rules == rules}
        todo = due(found, done, now=now, again=again)
    rows = _transformed(spark, spec, source.where(F.col(WINDOW).isin(*todo)))
    context.file.check_columns(_types(source), None if spec.transform is None else _types(rows))
    if not todo:
        return Ingested(done=(), warned={}, version=-1)
    return _ingest(spec, tables, rows, {name: found[name] for name in todo}, context.record.run_id)


def _fingerprints(source: DataFrame) -> dict[str, str]:
    """A hash of the columns and the rows of each window, in one pass over the source."""
    from pyspark.sql import functions as F

    columns = [[field.name, field.dataType.simpleString()] for field in source.schema.fields]
    named, hashed = content_key("columns", {"columns": columns}), content_hash(source)
    sums = source.groupBy(WINDOW).agg(
        F.count("*").alias("rows"),
        F.bit_xor(hashed).alias("mixed"),
        F.sum(F.pmod(hashed, F.lit(2**31 - 1))).alias("added"),
    )
    return {row[WINDOW]: f"{named}.{row['rows']}.{row['mixed']}.{row['added']}" for row in sums.collect()}


def _types(rows: DataFrame) -> dict[str, pa.DataType]:
    """The Arrow type of each column; of one that Arrow does not know, an empty struct, which nothing reads."""
    from pyspark.errors import PySparkTypeError
    from pyspark.sql.pandas.types import to_arrow_type

    found = {}
    for field in rows.schema.fields:
        try:
            found[field.name] = to_arrow_type(field.dataType, timezone="UTC")
        except PySparkTypeError:
            found[field.name] = pa.struct([])
    return found


def _ingest(spec: PipelineSpec, tables: Tables, prepared: DataFrame, todo: Mapping[str, str], run_id: str) -> Ingested:
    newest = spec.source.time if spec.source.time in prepared.columns else None
    rows = judged(prepared, spec.expect, spec.source.key, newest).persist()
    try:
        found = outcomes_of(rows)
        counts = {row[WINDOW]: row["count"] for row in prepared.groupBy(WINDOW).count().collect()}
        _check_counts(spec, todo, counts, found)
        check_shares(found, spec.expect)
        whole = set(tables.ledger.windows()) <= set(todo)
        version = _write(tables, rows, todo, found, whole=whole)
    finally:
        rows.unpersist()
    rules = rules_of(spec)
    books = tuple(
        WindowBooks(
            window=name,
            fingerprint=fingerprint,
            rules=rules,
            read=counts.get(name, 0),
            kept=found[name].rows.get(KEPT, 0) if name in found else 0,
            quarantined=sum(found[name].quarantined.values()) if name in found else 0,
            duplicates=found[name].rows.get(DUPLICATE, 0) if name in found else 0,
            outcomes=found[name].quarantined if name in found else {},
            content=found[name].content if name in found else "",
            version=version,
            run_id=run_id,
        )
        for name, fingerprint in sorted(todo.items())
    )
    tables.ledger.write(books)
    warned: dict[str, int] = {}
    for outcomes in found.values():
        for name, count in outcomes.warned.items():
            warned[name] = warned.get(name, 0) + count
    return Ingested(done=books, warned=warned, version=version)


def _transformed(spark: SparkSession, spec: PipelineSpec, rows: DataFrame) -> DataFrame:
    """The rows as the transform leaves them; it may drop ``_window`` as long as it keeps the column that decides it."""
    transform = spec.transform
    if transform is None:
        return rows
    if transform.sql is not None:
        frame = spark.sql(transform.sql, source=rows)
    else:
        frame = frame_of("transform.function", str(transform.function), rows, **transform.arguments)
    if WINDOW in frame.columns:
        return frame
    when = spec.source.when
    if when is not None and when not in frame.columns:
        raise SchemaError(
            f"the transform drops {when!r}, which says which window a row belongs to, and {WINDOW}: keep one of them"
        )
    return frame.withColumn(WINDOW, window_column(frame, spec.source))


def _check_counts(
    spec: PipelineSpec, todo: Mapping[str, str], counts: Mapping[str, int], found: Mapping[str, Outcomes]
) -> None:
    """Refuse rows that were lost or multiplied between two readings, that left their window, and days without a row."""
    strangers = sorted(set(counts) - set(todo))
    if strangers:
        raise DataError(
            f"the transform moved {counts[strangers[0]]} rows into the window {strangers[0]}, which is not due: change "
            "the column that says when a row happened in the source, not in the transform"
        )
    for name in todo:
        judged_rows = found[name].total if name in found else 0
        if counts.get(name, 0) != judged_rows:
            raise DataError(
                f"window {name} had {counts.get(name, 0)} rows when they were counted and {judged_rows} when they "
                "were judged: the source changed meanwhile, or the transform is not the same twice; run again"
            )
        if judged_rows and not found[name].rows.get(KEPT) and name != "none":
            reason, rows = max(found[name].quarantined.items(), key=lambda item: item[1])
            raise DataError(
                f"all {judged_rows} rows of window {name} are refused, {rows} of them for {reason!r}: deliver the "
                "window again, or correct the expectation"
            )


def _write(
    tables: Tables, rows: DataFrame, todo: Mapping[str, str], found: Mapping[str, Outcomes], *, whole: bool
) -> int:
    """Replace the windows in both tables, one commit each, and return the version of the clean rows.

    Where all windows there are are replaced, the clean rows may have other columns than before.
    """
    from pyspark.sql import functions as F

    columns = [name for name in rows.columns if name not in OWN]
    bad = rows.where(~F.col(OUTCOME).isin(KEPT, DUPLICATE))
    garbled = F.col(MALFORMED) if MALFORMED in rows.columns else F.lit(None).cast("string")
    raw = F.to_json(F.struct(*[F.col(quoted(name)) for name in columns]), {"ignoreNullFields": "false"})
    quarantine = bad.select(WINDOW, F.col(OUTCOME).alias("reason"), F.coalesce(garbled, raw).alias("row"))
    clean = rows.where(F.col(OUTCOME) == KEPT).select(WINDOW, *[quoted(name) for name in columns])
    expected = {
        "quarantine": sum(sum(each.quarantined.values()) for each in found.values()),
        "clean": sum(each.rows.get(KEPT, 0) for each in found.values()),
    }
    partitions, version = [{WINDOW: name} for name in todo], -1
    for name, frame in (("quarantine", quarantine), ("clean", clean)):
        table = tables.table(name)
        files = 1 + expected[name] // (_ROWS_PER_FILE * len(todo))  # a window becomes one file, a large one several
        salt = [F.pmod(content_hash(frame), F.lit(files))] if files > 1 else []
        spread = frame.repartition(WINDOW, *salt)
        if whole and name == "clean" and table.exists():
            written = table.write(spread, "overwrite", partition_by=[WINDOW], overwrite_schema=True)
        else:
            written = table.write(spread, "replace", partition_by=[WINDOW], partitions=partitions)
        if written.rows != expected[name]:
            raise DataError(
                f"{table.uri} got {written.rows} rows and {expected[name]} were counted: the source changed meanwhile, "
                "so run again"
            )
        version = written.version
    return version
