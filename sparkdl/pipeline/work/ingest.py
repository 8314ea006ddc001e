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
from sparkdl.errors import ConflictError, SchemaError
from sparkdl.observe import logger
from sparkdl.pipeline.code import code_hash
from sparkdl.pipeline.rows.entered import AS_READ, Entered, check_counts, check_files, check_hashes, counted
from sparkdl.pipeline.rows.expect import (
    BROKEN,
    DUPLICATE,
    KEPT,
    OUTCOME,
    SALT,
    Outcomes,
    check_shares,
    content_hash,
    judged,
)
from sparkdl.pipeline.rows.ledger import WindowBooks
from sparkdl.pipeline.rows.sift import QUARANTINE, clean_columns, fingerprints, sift
from sparkdl.pipeline.rows.transform import transformed
from sparkdl.pipeline.sources import source_of
from sparkdl.pipeline.sources.base import (
    WINDOW,
    SourceSnapshot,
)
from sparkdl.pipeline.sources.failures import source_errors
from sparkdl.pipeline.sources.read import check_unchanged, of_windows, read_rows
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.pipeline.state.context import VERSIONS, Context
from sparkdl.pipeline.state.steps import content_key
from sparkdl.pipeline.windows import NO_TIME, ahead, deleted_text, due
from sparkdl.tables.delta import delta_schema, merged_schema
from sparkdl.tables.staged import StagedWrite

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Ingested", "deleted_windows", "due_windows", "ingest", "rules_of"]

_ROWS_PER_FILE = 1_000_000
_ONE_TASK, _ONE_TASK_WINDOWS = 4 << 20, 32
"""Bytes of a source that one task reads, judges and writes sooner than a shuffle of its rows is planned, and how many
windows, of which each is a file that stays open."""
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
        "source": source_of(spec.source).identity(),
        "transform": transform,
        "code": code,
        "expect": {name: each for name, each in spec.expect.items() if each.action != "warn"},
        "order": [name for name, each in spec.expect.items() if each.action != "warn"],
    }
    return content_key("rules", inputs)


def due_windows(
    spec: PipelineSpec,
    snapshot: SourceSnapshot,
    known: Mapping[str, WindowBooks],
    now: datetime,
    again: tuple[str, str] | None = None,
) -> list[str] | None:
    """The windows that are due as far as files or a table's log tell; None where only Spark can.

    Those that the source no longer holds are among them where they are to be emptied.

    Raises:
        DataError: ``again`` names no window of the source, or the source holds nothing any more.
    """
    return None if snapshot.windows is None else _due(spec, snapshot.windows, known, now, again)


def _due(
    spec: PipelineSpec,
    found: Mapping[str, str],
    known: Mapping[str, WindowBooks],
    now: datetime,
    again: tuple[str, str] | None,
) -> list[str]:
    done = _done(spec, known)
    held = [name for name, books in known.items() if books.read]
    return due(found, done, now=now, again=again, held=held, remove=spec.source.deleted_windows == "remove")


def _done(spec: PipelineSpec, known: Mapping[str, WindowBooks]) -> dict[str, str]:
    """The fingerprint of each window that was done as the file says now."""
    rules = rules_of(spec)
    return {name: books.fingerprint for name, books in known.items() if books.rules == rules}


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
    spec, source, snapshot, now = context.spec, context.source, context.snapshot, context.now
    version = context.tables.version("clean")  # before what is known of its windows: what is decided holds for it alone
    known, source_rows = context.tables.windows(), read_rows(spark, source, snapshot)
    if snapshot.windows is not None:
        found, rows_of = dict(snapshot.windows), {name: size.rows_about for name, size in snapshot.sizes.items()}
    elif spec.transform is None and source.rows_may_change and not _done(spec, known):
        rows_of = counted(source_rows)  # every window is due, and the pass that writes them hashes what it reads
        found = dict.fromkeys(rows_of, AS_READ)
    else:
        found, rows_of = fingerprints(source_rows)
    todo = _due(spec, found, known, now, context.again)
    there, removed = [name for name in todo if name in found], [name for name in todo if name not in found]
    deleted = deleted_windows(found, known, todo)
    context.tables.check_lost(known, deleted)
    _say_deleted(context, deleted)
    later = tuple(ahead(found, now))
    chosen = of_windows(source_rows, source, there)
    rows = transformed(spark, context.file, chosen)
    context.file.check_columns(_types(source_rows), None if spec.transform is None else _types(rows))
    if not todo:
        return Ingested(done=(), warned={}, version=-1, ahead=later)
    most = max(rows_of.get(name, 0) for name in todo)
    before: Mapping[str, int] | None = None
    if spec.transform is not None:
        before = rows_of if snapshot.windows is None else counted(chosen)
        if not source.rows_may_change and spec.source.when is not None:
            source.check_within({name: found[name] for name in there}, fingerprints(chosen)[0])
    done = _ingest(spark, context, rows, {name: found.get(name, "") for name in todo}, most, before, version)
    if removed:
        context.record.windows["removed"] = removed
    return replace(done, ahead=later)


def _say_deleted(context: Context, kept: Sequence[str]) -> None:
    """Let log and record say which windows the source no longer holds while their rows stay."""
    if kept:
        logger.warning("%s", deleted_text(kept))
        context.record.windows["deleted"] = list(kept)


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
    version: int,
) -> Ingested:
    """Judge, write and count the rows of the windows that are due.

    Args:
        spark: the session.
        context: of the run.
        prepared: the rows, as the transform left them.
        todo: fingerprint of each window; empty for one that the source no longer holds, which is replaced by nothing.
        most: rows of the largest window, about.
        before: rows of the windows before the transform; None without one.
        version: of the table of clean rows when it was decided what is due; -1 without one.
    """
    spec, tables = context.spec, context.tables
    taken = sorted({OUTCOME, BROKEN, SALT} & set(prepared.columns))
    if taken:
        raise SchemaError(f"the rows have a column {taken[0]}, which the pipeline adds: rename it in the transform")
    newest = spec.source.time if spec.source.time in prepared.columns else None
    entered = Entered()
    stored = context.snapshot.bytes
    small = stored is not None and stored <= _ONE_TASK and len(todo) <= _ONE_TASK_WINDOWS
    rows = judged(_gathered(entered.observe(prepared), spec, most, small), spec.expect, spec.source.key, newest)
    clean, quarantine = _staged(spark, context, rows, todo, version)
    try:
        into = clean.task, quarantine.task
        sound, refused, found = sift(rows, spec.label, *into) if any(todo.values()) else ([], [], {})
        check_counts(todo, found, before or {})
        if any(todo.values()):  # else every window is emptied, and nothing was read
            entered.check({name: each.total for name, each in found.items()}, prepared)
        if context.snapshot.windows is None and before is None:
            check_hashes(todo, found, alive=context.source.rows_may_change)
        check_unchanged(context.source, context.snapshot)
        check_shares(found, spec.expect)
        check_files(sound, sum(each.rows.get(KEPT, 0) for each in found.values()), clean.plan.uri)
        check_files(refused, sum(sum(each.quarantined.values()) for each in found.values()), quarantine.plan.uri)
        if known := [books for name, books in tables.ledger.windows().items() if name in todo]:
            tables.ledger.write((books.struck_out() for books in known), context.transaction())
    except BaseException:
        clean.abandon()
        quarantine.abandon()
        raise
    try:
        quarantine.commit(refused)
    except ConflictError:  # which takes its own files away, as the next commit does
        clean.abandon()
        raise
    version = clean.commit(sound).version
    books = _books(context, todo, found, before, version)
    tables.ledger.write(books, context.transaction())
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
            fingerprint=outcomes.everything if fingerprint == AS_READ else fingerprint,
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


def _gathered(rows: DataFrame, spec: PipelineSpec, most: int, small: bool) -> DataFrame:
    """The rows with those of a window, and of a key in it, in few tasks, so that a window becomes few files.

    Where partition folders already hold each window by itself, and no keys are compared, rows stay where they are read.

    Args:
        rows: with their window.
        spec: the pipeline.
        most: rows of the largest window, about.
        small: whether one task does all of it.
    """
    from pyspark.sql import functions as F

    if small and spec.transform is None and most < _ROWS_PER_FILE:
        return rows.coalesce(1)
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
    spark: SparkSession, context: Context, rows: DataFrame, todo: Mapping[str, str], version: int
) -> tuple[StagedWrite, StagedWrite]:
    """The replacement of the windows in both tables.

    Where all windows that have rows are replaced, the clean rows have the columns of these rows, and no others: a new
    table, which is committed only while the one before is the ``version`` that this was decided on. Where some stay,
    new columns come beside those that there are, and what one side lacks is null in it.
    """
    from pyspark.sql.types import StringType, StructField, StructType

    tables = context.tables
    partitions = [{WINDOW: name} for name in todo]
    table, held = tables.table("clean"), [name for name, books in tables.ledger.windows().items() if books.kept]
    schema = rows.select(*map(quoted, clean_columns(rows))).schema.json()
    if version >= 0 and set(held) <= set(todo):
        clean = table.stage(
            schema,
            "overwrite",
            partition_by=[WINDOW],
            overwrite_schema=True,
            transaction=context.transaction(),
            expected_version=version,
        )
    else:
        if version >= 0:
            windows = sorted({*held, *todo} - {NO_TIME})
            remedy = f"do all windows again with --backfill {windows[0]}..{windows[-1]}, or change the source back"
            merged_schema(table.uri, table.schema_json(), delta_schema(schema).to_json(), remedy)
        clean = table.stage_partitions(
            schema,
            [WINDOW],
            partitions,
            transaction=context.transaction(),
            expected_version=None if version >= 0 else -1,
        )
    texts = StructType([StructField(name, StringType()) for name in QUARANTINE]).json()
    quarantine = tables.table("quarantine").stage(
        texts, "replace", partition_by=[WINDOW], partitions=partitions, transaction=context.transaction()
    )
    return clean, quarantine
