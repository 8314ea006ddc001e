"""Ingestion: the windows of the source that are due, to the table of clean rows, with their books.

Enters: a source, its transform and expectations, and what the ledger knows. Leaves, in Delta tables by window:

    clean        rows that passed, as the transform left them
    quarantine   each refused row as JSON, with the one reason it was refused for
    ledger       one row a window, see ledger.py; committed last

Each due window replaces its own partition and nothing else. The rows pass once: one job judges, writes and counts
them. What entered that job, as Spark counted it where they were read, must come out of it, and every expectation hold,
before anything is committed: until then nobody sees the files, and they are removed if it is not so. A transform may
leave rows out or add some: the ledger keeps how many there were before it, and a window that it empties is refused. A
run that is cut short between the commits leaves windows that are due again, and are replaced again: what the ledger
says of them is struck out before the first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from sparkdl.columns.names import quoted
from sparkdl.errors import DataError, SchemaError
from sparkdl.observe import logger
from sparkdl.pipeline.code import code_hash
from sparkdl.pipeline.rows.entered import Entered, check_counts, check_files, check_hashes, counted
from sparkdl.pipeline.rows.expect import (
    BROKEN,
    DUPLICATE,
    KEPT,
    OUTCOME,
    SALT,
    Outcomes,
    check_shares,
    columns_hash,
    content_hash,
    judged,
)
from sparkdl.pipeline.rows.failures import source_errors
from sparkdl.pipeline.rows.ledger import Tables, WindowBooks
from sparkdl.pipeline.rows.sift import QUARANTINE, clean_columns, sift
from sparkdl.pipeline.rows.source import (
    WINDOW,
    Look,
    check_unchanged,
    frame_of,
    of_windows,
    read_rows,
    source_identity,
)
from sparkdl.pipeline.rows.window_column import window_column
from sparkdl.pipeline.rows.windows import NO_TIME, ahead, deleted_text, due
from sparkdl.pipeline.spec import FunctionSource, PipelineSpec
from sparkdl.pipeline.state.context import VERSIONS, Context
from sparkdl.pipeline.state.steps import content_key
from sparkdl.storage import Storage, check_places
from sparkdl.tables.delta import delta_schema, merged_schema
from sparkdl.tables.staged import StagedWrite

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Ingested", "deleted_windows", "due_windows", "ingest", "rules_of"]

_ROWS_PER_FILE = 1_000_000
_HASHED = {"string", "tinyint", "smallint", "int", "bigint", "date", "timestamp", "timestamp_ntz", "boolean", "binary"}
"""Types of which equal values have equal hashes, whatever the session's settings."""


@dataclass(frozen=True, kw_only=True)
class Ingested:
    """What an ingestion did.

    Attributes:
        done: books of the windows that were due, in order.
        warned: rows of these windows by the warning that they broke.
        version: of the table of clean rows; -1 where nothing was due.
        ahead: windows of the source that begin later than now, and were left alone.
    """

    done: tuple[WindowBooks, ...]
    warned: Mapping[str, int]
    version: int
    ahead: tuple[str, ...] = ()


def rules_of(spec: PipelineSpec) -> str:
    """What decides which rows of a window are kept, and what they look like: settings and code, as one hash."""
    transform = spec.transform
    code = code_hash(transform.function) if transform is not None and transform.function else ""
    inputs = {
        "version": VERSIONS["ingest"],
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

    Those that the source no longer holds are among them where they are to be emptied.

    Raises:
        DataError: ``again`` names no window of the source, or the source holds nothing any more.
    """
    return None if look.windows is None else _due(spec, look.windows, known, now, again)


def _due(
    spec: PipelineSpec,
    found: Mapping[str, str],
    known: Mapping[str, WindowBooks],
    now: datetime,
    again: tuple[str, str] | None,
) -> list[str]:
    rules = rules_of(spec)
    done = {name: books.fingerprint for name, books in known.items() if books.rules == rules}
    held = [name for name, books in known.items() if books.read]
    return due(found, done, now=now, again=again, held=held, remove=spec.source.deleted_windows == "remove")


def deleted_windows(found: Collection[str], known: Mapping[str, WindowBooks], todo: Collection[str]) -> list[str]:
    """Windows that the source no longer holds and whose rows stay in the clean rows.

    Args:
        found: windows of the source.
        known: what the ledger knows.
        todo: windows that are due, those among them that are to be emptied.
    """
    return [name for name, books in known.items() if books.read and name not in found and name not in todo]


def ingest(spark: SparkSession, context: Context) -> Ingested:
    """Bring the table of clean rows up to date with the source.

    Args:
        spark: the session.
        context: of the run.

    Raises:
        DataError: rows were lost or multiplied, an expectation failed, or a window or the source has no sound row.
        PipelineFileError: the file reads columns that there are not, or that are of types that their use does not fit.
        SchemaError: a column is of another type than in the table of clean rows, or of one that it cannot hold.
        ConfigError: a condition, query or function is wrong.
        StorageError: source or tables cannot be read or written.
    """
    with source_errors():
        return _ingest_due(spark, context)


def _ingest_due(spark: SparkSession, context: Context) -> Ingested:
    spec, look, now = context.spec, context.look, context.now
    known, source = context.tables.windows(), read_rows(spark, spec.source, look)
    if look.windows is None:
        found, rows_of = _fingerprints(source)
    else:
        found, rows_of = dict(look.windows), {name: size.rows_about for name, size in look.sizes.items()}
    todo = _due(spec, found, known, now, context.again)
    there, removed = [name for name in todo if name in found], [name for name in todo if name not in found]
    deleted = deleted_windows(found, known, todo)
    context.tables.check_lost(known, deleted)
    _say_deleted(context, deleted)
    later = tuple(ahead(found, now))
    chosen = of_windows(source, spec.source, there)
    rows = _transformed(spark, spec, chosen)
    context.file.check_columns(_types(source), None if spec.transform is None else _types(rows))
    if not todo:
        return Ingested(done=(), warned={}, version=-1, ahead=later)
    most = max(rows_of.get(name, 0) for name in todo)
    before: Mapping[str, int] | None = None
    if spec.transform is not None:
        before = rows_of if look.windows is None else counted(chosen)
        if isinstance(spec.source, FunctionSource) and spec.source.when is not None:
            _check_function(spec.source, {name: found[name] for name in there}, _fingerprints(chosen)[0])
    done = _ingest(spark, context, rows, {name: found.get(name, "") for name in todo}, most, before)
    if removed:
        context.record.windows["removed"] = removed
    return replace(done, ahead=later)


def _say_deleted(context: Context, kept: Sequence[str]) -> None:
    """Let log and record say which windows the source no longer holds while their rows stay."""
    if kept:
        logger.warning("%s", deleted_text(kept))
        context.record.windows["deleted"] = list(kept)


def _fingerprints(source: DataFrame) -> tuple[dict[str, str], dict[str, int]]:
    """A hash of the columns and the rows of each window, and their number, in one pass over the source."""
    from pyspark.sql import functions as F

    named, hashed = columns_hash(source), content_hash(source)
    sums = source.groupBy(WINDOW).agg(
        F.count("*").alias("rows"),
        F.bit_xor(hashed).alias("mixed"),
        F.sum(F.pmod(hashed, F.lit(2**31 - 1))).alias("added"),
    )
    rows = sums.collect()
    found = {row[WINDOW]: f"{named}.{row['rows']}.{row['mixed']}.{row['added']}" for row in rows}
    return found, {row[WINDOW]: row["rows"] for row in rows}


def _check_function(source: FunctionSource, whole: Mapping[str, str], asked: Mapping[str, str]) -> None:
    """Refuse a function that returns other rows of a window when it is asked for windows than when asked for all."""
    for name, fingerprint in whole.items():
        if asked.get(name) != fingerprint:
            raise DataError(
                f"source.function={source.function} returns other rows of the window {name} with a window and without: "
                "leave out only what lies before window.start, or not before window.end"
            )


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


def _ingest(
    spark: SparkSession,
    context: Context,
    prepared: DataFrame,
    todo: Mapping[str, str],
    most: int,
    before: Mapping[str, int] | None,
) -> Ingested:
    """Judge, write and count the rows of the windows that are due.

    Args:
        spark: the session.
        context: of the run.
        prepared: the rows, as the transform left them.
        todo: fingerprint of each window; empty for one that the source no longer holds, which is replaced by nothing.
        most: rows of the largest window, about.
        before: rows of the windows before the transform; None without one.
    """
    spec, tables = context.spec, context.tables
    taken = sorted({OUTCOME, BROKEN, SALT} & set(prepared.columns))
    if taken:
        raise SchemaError(f"the rows have a column {taken[0]}, which the pipeline adds: rename it in the transform")
    newest = spec.source.time if spec.source.time in prepared.columns else None
    entered = Entered()
    rows = judged(_gathered(entered.observe(prepared), spec, most), spec.expect, spec.source.key, newest)
    clean, quarantine = _staged(spark, tables, rows, todo)
    try:
        into = clean.task, quarantine.task
        sound, refused, found = sift(rows, spec.label, *into) if any(todo.values()) else ([], [], {})
        check_counts(todo, found, before or {})
        if any(todo.values()):  # else every window is emptied, and nothing was read
            entered.check({name: each.total for name, each in found.items()}, prepared)
        if context.look.windows is None and before is None:
            check_hashes(todo, found, alive=not isinstance(spec.source, FunctionSource))
        check_unchanged(spec.source, context.look)
        check_shares(found, spec.expect)
        check_files(sound, sum(each.rows.get(KEPT, 0) for each in found.values()), clean.plan.uri)
        check_files(refused, sum(sum(each.quarantined.values()) for each in found.values()), quarantine.plan.uri)
        if known := [books for name, books in tables.ledger.windows().items() if name in todo]:
            tables.ledger.write(books.struck_out() for books in known)
    except BaseException:
        clean.abandon()
        quarantine.abandon()
        raise
    quarantine.commit(refused)
    version = clean.commit(sound).version
    books = _books(context, todo, found, before, version)
    tables.ledger.write(books)
    warned: dict[str, int] = {}
    for outcomes in found.values():
        for name, count in outcomes.warned.items():
            warned[name] = warned.get(name, 0) + count
    return Ingested(done=books, warned=warned, version=version)


def _books(
    context: Context,
    todo: Mapping[str, str],
    found: Mapping[str, Outcomes],
    before: Mapping[str, int] | None,
    version: int,
) -> tuple[WindowBooks, ...]:
    rules, books = rules_of(context.spec), []
    for name, fingerprint in sorted(todo.items()):
        outcomes = found.get(name, Outcomes())
        made = WindowBooks(
            window=name,
            fingerprint=fingerprint,
            rules=rules,
            source_rows=outcomes.total if before is None else before.get(name, 0),
            read=outcomes.total,
            kept=outcomes.rows.get(KEPT, 0),
            quarantined=sum(outcomes.quarantined.values()),
            duplicates=outcomes.rows.get(DUPLICATE, 0),
            outcomes=outcomes.quarantined,
            content=outcomes.content,
            unlabelled=outcomes.unlabelled,
            version=version,
            run_id=context.record.run_id,
        )
        books.append(made)
    return tuple(books)


def _gathered(rows: DataFrame, spec: PipelineSpec, most: int) -> DataFrame:
    """The rows with those of a window, and of a key in it, in few tasks, so that a window becomes few files.

    Where partition folders already hold each window by itself, and no keys are compared, rows stay where they are read.

    Args:
        rows: with their window.
        spec: the pipeline.
        most: rows of the largest window, about.
    """
    from pyspark.sql import functions as F

    if spec.source.partition is not None and not spec.source.key and spec.transform is None:
        return rows
    files = 1 + most // _ROWS_PER_FILE
    if files == 1:
        return rows.repartition(WINDOW)
    plain = [F.col(quoted(name)) for name in spec.source.key if rows.schema[name].dataType.simpleString() in _HASHED]
    hashed = F.xxhash64(*plain) if plain else content_hash(rows)
    if spec.source.key and not plain:  # values of these types may be equal and have different hashes
        return rows.repartition(WINDOW)
    return rows.withColumn(SALT, F.pmod(hashed, F.lit(files))).repartition(WINDOW, SALT)


def _staged(
    spark: SparkSession, tables: Tables, rows: DataFrame, todo: Mapping[str, str]
) -> tuple[StagedWrite, StagedWrite]:
    """The replacement of the windows in both tables.

    Where all windows that have rows are replaced, the clean rows have the columns of these rows, and no others. Where
    some stay, new columns come beside those that there are, and what one side lacks is null in it.
    """
    from pyspark.sql.types import StringType, StructField, StructType

    check_places({"places.tables": Storage.of(tables.folder)}, spark)
    partitions = [{WINDOW: name} for name in todo]
    table, held = tables.table("clean"), [name for name, books in tables.ledger.windows().items() if books.kept]
    schema = rows.select(*map(quoted, clean_columns(rows))).schema.json()
    if table.exists() and set(held) <= set(todo):
        clean = table.stage(schema, "overwrite", partition_by=[WINDOW], overwrite_schema=True)
    else:
        if table.exists():
            windows = sorted({*held, *todo} - {NO_TIME})
            remedy = f"do all windows again with --backfill {windows[0]}..{windows[-1]}, or change the source back"
            merged_schema(table.uri, table.schema_json(), delta_schema(schema).to_json(), remedy)
        clean = table.stage_partitions(schema, [WINDOW], partitions)
    texts = StructType([StructField(name, StringType()) for name in QUARANTINE]).json()
    return clean, tables.table("quarantine").stage(texts, "replace", partition_by=[WINDOW], partitions=partitions)


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
