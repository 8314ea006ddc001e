"""The step ``ingest``: windows of the source that are new or have changed, to the table of clean rows.

Each due window replaces its own partition of two Delta tables, ``clean`` (rows that passed, as the transform left them)
and ``quarantine`` (each refused row as JSON, with the one reason it was refused for). The rows pass once: one job
validates, writes and counts them. Nothing is committed unless as many rows of each window left that job as entered it,
where Spark counted them as they were read, and every expectation holds: until then nobody sees the files, and else they
are removed. A transform may leave rows out or add some; a window that it empties is refused.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sparkdl.columns.frames import selected
from sparkdl.columns.names import quoted
from sparkdl.errors import DataError, SchemaError
from sparkdl.observe import logger
from sparkdl.pipeline.rows.checksums import AS_READ, RowChecksum, check_counts, check_files, check_hashes, counted
from sparkdl.pipeline.rows.expect import (
    BROKEN,
    DUPLICATE,
    KEPT,
    OUTCOME,
    SALT,
    SLOT,
    Outcomes,
    check_shares,
    content_hash,
    validated,
)
from sparkdl.pipeline.rows.parquet_rows import ParquetRows, parquet_rows
from sparkdl.pipeline.rows.transform import arrow_types, transformed
from sparkdl.pipeline.rows.validate import QUARANTINE, clean_columns, fingerprints, validate_rows
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.sources.failures import source_errors
from sparkdl.pipeline.sources.read import check_unchanged, of_windows, read_rows
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.pipeline.state.evaluator import Stale, Step
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import Receipt, content_key, replacing
from sparkdl.pipeline.state.run import Run, State
from sparkdl.pipeline.windows import NO_TIME, WHOLE, WINDOW, ahead, deleted_text, due, span
from sparkdl.tables.delta import delta_schema, merged_schema
from sparkdl.tables.staged import StagedWrite

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VERSION = 4
"""The version of how rows are validated and hashed; raise it when that changes."""
_DECIDING = ("spark.sql.session.timeZone", "spark.sql.ansi.enabled", "spark.sql.timestampType", "spark.sql.legacy.")
"""Settings of Spark, or how their names begin, that decide which values the rows of a source have."""
_ROWS_PER_FILE = 1_000_000
_ONE_TASK, _ONE_TASK_WINDOWS = 4 << 20, 32
"""Bytes of a source that one task reads, judges and writes sooner than a shuffle of its rows is planned, and how many
windows, of which each is a file that stays open."""
_HASHED = {"string", "tinyint", "smallint", "int", "bigint", "date", "timestamp", "timestamp_ntz", "boolean", "binary"}
"""Types of which equal values have equal hashes, whatever the session's settings."""


class IngestStep(Step):
    """Windows of the source, replaced one by one in the table of clean rows."""

    name = "ingest"

    def wanted(self, run: Run) -> Mapping[str, str | None] | None:
        """A key by window: those of the source that have begun, and those that are to be emptied."""
        windows = source_windows(run)
        if windows is None:
            return None
        rules, later = rules_of(run.project), set(ahead(windows, run.request.now))
        keys: dict[str, str | None] = {
            name: window_key(rules, version) for name, version in windows.items() if name not in later
        }
        keys |= {name: window_key(rules, windows.get(name, "")) for name in _due(run, windows)}
        return dict(sorted(keys.items()))

    def exists(self, run: Run, receipt: Receipt) -> bool:
        """Whether the table of clean rows is there, if the window has rows in it."""
        return not receipt.read(WindowReceipt).kept or run.state.places.table(run.project.tables.table("clean").uri)

    def forced(self, run: Run, partition: str) -> bool:
        """Whether the window is one of a backfill that is still to be done."""
        return (
            not run.backfilled
            and run.request.again is not None
            and run.request.again[0] <= partition <= run.request.again[1]
        )

    def why(self, run: Run, partition: str, receipt: Receipt | None) -> str:
        """What has changed."""
        windows = source_windows(run)
        if windows is not None and partition not in windows:
            return "the source no longer holds it: its rows are removed"
        if receipt is None:
            return "new"
        if not receipt.key or not self.exists(run, receipt):
            return "its clean rows are gone, or a run that replaced them was cut short"
        window_receipt, rules = receipt.read(WindowReceipt), rules_of(run.project)
        if receipt.key != window_key(rules, window_receipt.fingerprint):
            return "source, transform, expectations, their code or spark.conf differ from those it was made by"
        if windows is not None and window_receipt.fingerprint != windows[partition]:
            return "its rows in the source have changed"
        return "asked for"

    def make(self, run: Run, spark: SparkSession, stale: Stale) -> bool:
        """Judge the rows of the windows that are due, and replace them in the clean rows."""
        ingested, record = ingest(spark, run), run.record
        run.backfilled = True
        record.windows["ingested"] = [receipt.window for receipt in ingested.done]
        record.books = list(ingested.done)
        for name in ("read", "kept", "quarantined", "duplicates"):
            record.rows[name] = sum(getattr(receipt, name) for receipt in ingested.done)
        record.warned = dict(ingested.warned)
        return bool(ingested.done)

    def tell(self, run: Run) -> None:
        """Which windows were ingested, which begin later, and which the source no longer holds."""
        record = run.record
        record.windows.setdefault("ingested", [])
        for name in ("read", "kept", "quarantined", "duplicates"):
            record.rows.setdefault(name, 0)
        if later := ahead(source_windows(run) or (), run.request.now):
            record.windows["ahead"] = later
        tell_deleted(run)
        record.source_state = run.state.snapshot.state
        record.places |= {name: run.project.tables.table(name).uri for name in ("clean", "quarantine", "receipts")}


def rules_of(project: Project) -> str:
    """What decides which rows of a window are kept, and what they look like: settings and code, as one hash."""
    spec, transform = project.spec, project.spec.transform
    conf = {name: value for name, value in spec.spark.conf.items() if name.startswith(_DECIDING)}
    inputs = {
        "version": VERSION,
        "source": project.source.identity(),
        "transform": transform,
        "code": project.code[transform.function] if transform is not None and transform.function else "",
        "expect": {name: expectation for name, expectation in spec.expect.items() if expectation.action != "warn"},
        "order": [name for name, expectation in spec.expect.items() if expectation.action != "warn"],
        **({"conf": conf} if conf else {}),
    }
    return content_key("rules", inputs)


@functools.lru_cache(maxsize=100_000)
def window_key(rules: str, fingerprint: str) -> str:
    """The key of a window's clean rows.

    Args:
        rules: that they went through.
        fingerprint: of what the source holds for it; empty where it holds nothing any more.
    """
    return content_key("ingest", [rules, fingerprint])


def source_key(project: Project, state: State) -> str | None:
    """What decides the windows of the source and their rows; None where only Spark can tell."""
    if state.snapshot.state is None:
        return None
    inputs = {"version": VERSION, "source": project.source.identity(), "state": state.snapshot.state}
    return content_key("source", inputs)


def source_windows(run: Run) -> Mapping[str, str] | None:
    """A hash of what the source holds for each window; None where only Spark can tell.

    Where neither folders nor a table's log tell it, it is known of a source that is as it was when it was last read.
    """
    state = run.state
    if state.snapshot.windows is not None:
        return state.snapshot.windows
    if run.windows_read is not None:
        return run.windows_read
    receipt, key = state.receipts.of("source").get(WHOLE), source_key(run.project, state)
    return None if receipt is None or key is None or receipt.key != key else receipt.read(dict[str, str])


def keep_source_windows(run: Run, windows: Mapping[str, str]) -> None:
    """Remember which windows the source held as this run read it."""
    state = run.state
    run.windows_read, key = windows, source_key(run.project, state)
    if state.snapshot.windows is None and key is not None:
        receipt = state.receipts.of("source").get(WHOLE)
        if receipt is None or receipt.key != key or receipt.read(dict[str, str]) != windows:  # of some only counted yet
            with replacing(state.receipts, "source", [WHOLE]) as new_receipts:
                new_receipts[WHOLE] = (key, windows)


def deleted_windows(run: Run) -> list[str]:
    """Windows that the source no longer holds and whose rows stay in the clean rows; none where only Spark can tell."""
    windows = source_windows(run)
    if windows is None:
        return []
    expected = {*windows, *_due(run, windows)}
    return [name for name, receipt in run.state.windows().items() if receipt.read and name not in expected]


def tell_deleted(run: Run) -> None:
    """Tell log and record which windows the source no longer holds while their rows stay."""
    if deleted := deleted_windows(run):
        logger.warning("%s", deleted_text(deleted))
        run.record.windows["deleted"] = deleted


def _due(run: Run, windows: Mapping[str, str]) -> list[str]:
    project, state = run.project, run.state
    rules, lost = rules_of(project), lost_windows(project, state)
    done_versions = {
        name: windows[name]
        for name, receipt in state.receipts.of("ingest").items()
        if name in windows and name not in lost and receipt.key == window_key(rules, windows[name])
    }
    return due(
        windows,
        done_versions,
        now=run.request.now,
        again=None if run.backfilled else run.request.again,
        held=[name for name, receipt in state.windows().items() if receipt.read],
        remove=project.spec.source.deleted_windows == "remove",
    )


def lost_windows(project: Project, state: State) -> set[str]:
    """The windows whose clean rows are gone with their table."""
    with_rows = {name for name, receipt in state.windows().items() if receipt.kept}
    return set() if not with_rows or state.places.table(project.tables.table("clean").uri) else with_rows


def check_lost(project: Project, state: State, deleted: list[str]) -> None:
    """Say that the table of clean rows is gone, where it is.

    Args:
        project: the pipeline.
        state: what there is of it.
        deleted: windows that the source no longer holds, and that are to stay.

    Raises:
        DataError: rows were in it that the source no longer holds.
    """
    lost, uri = lost_windows(project, state), project.tables.table("clean").uri
    lost_for_good = [name for name in deleted if name in lost]
    if lost_for_good:
        raise DataError(
            f"the clean rows {uri} are gone, and the source no longer holds {span(lost_for_good)} of them: restore the "
            "table, or take these windows out with source.deleted_windows=remove"
        )
    if lost:
        logger.warning("the clean rows %s are gone: all windows are taken in again", uri)


@dataclass(frozen=True, kw_only=True)
class Ingested:
    """What an ingestion did.

    Attributes:
        done: the receipts of the windows that were due, in order.
        warned: rows of these windows by the warning that they broke.
    """

    done: tuple[WindowReceipt, ...]
    warned: Mapping[str, int]


@source_errors()
def ingest(spark: SparkSession, run: Run) -> Ingested:
    """Bring the table of clean rows up to date with the source.

    Args:
        spark: the session.
        run: that asks for it.

    Raises:
        DataError: rows were lost or multiplied, an expectation failed, or a window or the source has no valid row.
        PipelineFileError: the file reads columns that there are not, or that are of types that their use does not fit.
        SchemaError: a column is of another type than in the table of clean rows, or of one that it cannot hold.
        ConfigError: a condition, query or function is wrong.
        StorageError: source or tables cannot be read or written.
    """
    project, state = run.project, run.state
    spec, source, snapshot = project.spec, project.source, state.snapshot
    version = project.tables.version("clean")  # before what is known of its windows: what is decided holds for it alone
    files, windows = parquet_rows(spark, spec, source, snapshot), source_windows(run)
    source_rows = read_rows(spark, source, snapshot) if files is None else files.frame
    row_counts: Mapping[str, int]
    rules, known_windows = rules_of(project), state.windows()
    made_by_rules = (
        receipt.key and known_windows[name].rules == rules for name, receipt in state.receipts.of("ingest").items()
    )
    if windows is not None and snapshot.windows is not None:
        row_counts = {name: size.rows_about for name, size in snapshot.sizes.items()}
    elif windows is not None:  # the source is as it was when its windows were last told
        row_counts = counted(source_rows) if files is None else files.rows
    elif spec.transform is None and source.rows_may_change and not any(made_by_rules):
        # every window is due, and the pass that writes them hashes what it reads
        row_counts = counted(source_rows) if files is None else files.rows
        windows = dict.fromkeys(row_counts, AS_READ)
        run.windows_read = windows
    else:
        windows, row_counts = fingerprints(source_rows, None if files is None else files.read)
        check_unchanged(source, snapshot)
        keep_source_windows(run, windows)
    todo = {name: windows.get(name, "") for name in _due(run, windows)}
    todo_in_source = [name for name in todo if name in windows]
    check_lost(project, state, deleted_windows(run))
    if files is not None and not files.keys_are_unique(todo_in_source, spec.source.key):
        files, source_rows = None, read_rows(spark, source, snapshot)
    due_rows = of_windows(source_rows, source, todo_in_source) if files is None else source_rows
    rows = transformed(spark, project.file, due_rows)
    project.file.check_columns(arrow_types(source_rows), None if spec.transform is None else arrow_types(rows))
    if not todo:
        return Ingested(done=(), warned={})
    largest = max(row_counts.get(name, 0) for name in todo)
    rows_before: Mapping[str, int] | None = None
    if spec.transform is not None:
        rows_before = row_counts
        if snapshot.windows is not None:  # whose sizes tell them about: the source's files may know, else Spark counts
            counts = source.rows_by_window(snapshot)
            rows_before = (
                counted(due_rows)
                if counts is None
                else {name: counts[name] for name in todo_in_source if name in counts}
            )
        if not source.rows_may_change and spec.source.when is not None:
            source.check_within({name: windows[name] for name in todo_in_source}, fingerprints(due_rows)[0])
    ingested = _replace_windows(spark, run, rows, todo, largest, rows_before, version, files)
    if snapshot.windows is None:
        read = {receipt.window: receipt.fingerprint for receipt in ingested.done if receipt.window in windows}
        keep_source_windows(run, {**windows, **read})
    if removed := [name for name in todo if name not in windows]:
        run.record.windows["removed"] = removed
    return ingested


def check_columns(spark: SparkSession, project: Project, state: State) -> None:
    """Hold the file against the columns of the source and of the transform, where no window is due.

    Raises:
        PipelineFileError: the file reads columns that there are not, or that are of types that their use does not fit.
    """
    with source_errors():
        rows = read_rows(spark, project.source, state.snapshot)
        transformed_types = (
            None if project.spec.transform is None else arrow_types(transformed(spark, project.file, rows))
        )
        project.file.check_columns(arrow_types(rows), transformed_types)


def _replace_windows(
    spark: SparkSession,
    run: Run,
    prepared: DataFrame,
    todo: Mapping[str, str],
    largest: int,
    rows_before: Mapping[str, int] | None,
    version: int,
    files: ParquetRows | None,
) -> Ingested:
    """Judge, write and count the rows of the windows that are due, in one job, and commit them.

    Args:
        spark: the session.
        run: the run.
        prepared: the rows, as the transform left them.
        todo: fingerprint of each window; empty for one that the source no longer holds, which is replaced by nothing.
        largest: rows of the largest window, about.
        rows_before: rows of the windows before the transform; None without one.
        version: of the table of clean rows when it was decided what is due; -1 without one.
        files: that tasks read the rows from; None where Spark reads them.
    """
    project, state = run.project, run.state
    spec = project.spec
    reserved = sorted({OUTCOME, BROKEN, SALT, SLOT} & set(prepared.columns))
    if reserved:
        raise SchemaError(f"the rows have a column {reserved[0]}, which the pipeline adds: rename it in the transform")
    newest = spec.source.time if spec.source.time in prepared.columns else None
    checksum = RowChecksum()
    stored = state.snapshot.bytes
    small = stored is not None and stored <= _ONE_TASK and len(todo) <= _ONE_TASK_WINDOWS
    rows = prepared
    if files is None:
        rows = validated(
            _gathered(checksum.observe(prepared), spec, largest, small), spec.expect, spec.source.key, newest
        )
    clean, quarantine = _staged(project, state, rows, todo, version)
    pending = {"quarantine": quarantine, "clean": clean}
    try:
        into = clean.task, quarantine.task
        read = None if files is None else files.read_judged(todo)
        valid, invalid, outcomes_by_window = (
            validate_rows(rows, spec.label, *into, read) if any(todo.values()) else ([], [], {})
        )
        check_counts(todo, outcomes_by_window, rows_before or {})
        if any(todo.values()):  # else every window is emptied, and nothing was read
            row_counts = {name: outcomes.total for name, outcomes in outcomes_by_window.items()}
            if files is None:
                checksum.check(row_counts, prepared)
            else:
                files.check(row_counts, todo)
        if state.snapshot.windows is None and rows_before is None:
            check_hashes(todo, outcomes_by_window, alive=project.source.rows_may_change)
        check_unchanged(project.source, state.snapshot)
        check_shares(outcomes_by_window, spec.expect)
        kept_rows = sum(outcomes.rows.get(KEPT, 0) for outcomes in outcomes_by_window.values())
        check_files(valid, kept_rows, clean.plan.uri)
        quarantined_rows = sum(sum(outcomes.quarantined.values()) for outcomes in outcomes_by_window.values())
        check_files(invalid, quarantined_rows, quarantine.plan.uri)
        receipts = _window_receipts(run, todo, outcomes_by_window, rows_before)
        with replacing(state.receipts, "ingest", todo) as new_receipts:
            pending.pop("quarantine").commit(invalid)  # which takes its own files away where it is refused
            version = pending.pop("clean").commit(valid).version
            rules = rules_of(project)
            for receipt in receipts:
                new_receipts[receipt.window] = (
                    window_key(rules, receipt.fingerprint),
                    replace(receipt, version=version),
                )
    except BaseException:
        for staged in pending.values():
            staged.abandon()
        raise
    warned: Counter[str] = Counter()
    for outcomes in outcomes_by_window.values():
        warned.update(outcomes.warned)
    return Ingested(done=tuple(replace(receipt, version=version) for receipt in receipts), warned=warned)


def _window_receipts(
    run: Run,
    todo: Mapping[str, str],
    outcomes_by_window: Mapping[str, Outcomes],
    rows_before: Mapping[str, int] | None,
) -> tuple[WindowReceipt, ...]:
    """What is known of each window."""
    rules, receipts = rules_of(run.project), []
    for name, fingerprint in sorted(todo.items()):
        outcomes = outcomes_by_window.get(name, Outcomes())
        window_receipt = WindowReceipt(
            window=name,
            fingerprint=outcomes.everything if fingerprint == AS_READ else fingerprint,
            rules=rules,
            source_rows=outcomes.total if rows_before is None else rows_before.get(name, 0),
            read=outcomes.total,
            kept=outcomes.rows.get(KEPT, 0),
            quarantined=sum(outcomes.quarantined.values()),
            duplicates=outcomes.rows.get(DUPLICATE, 0),
            outcomes=outcomes.quarantined,
            content=outcomes.content,
            unlabelled=outcomes.unlabelled,
            run_id=run.run_id,
        )
        receipts.append(window_receipt)
    return tuple(receipts)


def _gathered(rows: DataFrame, spec: PipelineSpec, largest: int, small: bool) -> DataFrame:
    """The rows with those of a window, and of a key in it, in few tasks, so that a window becomes few files.

    Where partition folders already hold each window by itself, and no keys are compared, rows stay where they are read.

    Args:
        rows: with their window.
        spec: the pipeline.
        largest: rows of the largest window, about.
        small: whether one task does all of it.
    """
    from pyspark.sql import functions as F

    if small and spec.transform is None and largest < _ROWS_PER_FILE:
        return rows.coalesce(1)
    if spec.source.partition is not None and not spec.source.key and spec.transform is None:
        return rows
    files = 1 + largest // _ROWS_PER_FILE
    if files == 1:
        return rows.repartition(WINDOW)
    plain = [F.col(quoted(name)) for name in spec.source.key if rows.schema[name].dataType.simpleString() in _HASHED]
    hashed = F.xxhash64(*plain) if plain else content_hash(rows)
    if spec.source.key and not plain:  # values of these types may be equal and have different hashes
        return rows.repartition(WINDOW)
    return rows.withColumn(SALT, F.pmod(hashed, F.lit(files))).repartition(WINDOW, SALT)


def _staged(
    project: Project, state: State, rows: DataFrame, todo: Mapping[str, str], version: int
) -> tuple[StagedWrite, StagedWrite]:
    """The replacement of the windows in both tables.

    Where all windows that have rows are replaced, the clean rows have the columns of these rows, and no others: a new
    table, which is committed only while the one before is the ``version`` that this was decided on. Where some stay,
    new columns come beside those that there are, and what one side lacks is null in it.
    """
    from pyspark.sql.types import StringType, StructField, StructType

    tables = project.tables
    partitions = [{WINDOW: name} for name in todo]
    table = tables.table("clean")
    windows_with_rows = [name for name, receipt in state.windows().items() if receipt.kept]
    schema = selected(rows, clean_columns(rows)).schema.json()
    if version >= 0 and set(windows_with_rows) <= set(todo):
        clean = table.stage(
            schema,
            "overwrite",
            partition_by=[WINDOW],
            overwrite_schema=True,
            transaction=state.transaction(),
            expected_version=version,
        )
    else:
        if version >= 0:
            windows = sorted({*windows_with_rows, *todo} - {NO_TIME})
            remedy = f"do all windows again with --backfill {windows[0]}..{windows[-1]}, or change the source back"
            merged_schema(table.uri, table.schema_json(), delta_schema(schema).to_json(), remedy)
        clean = table.stage_partitions(
            schema,
            [WINDOW],
            partitions,
            transaction=state.transaction(),
            expected_version=None if version >= 0 else -1,
        )
    texts = StructType([StructField(name, StringType()) for name in QUARANTINE]).json()
    quarantine = tables.table("quarantine").stage(
        texts, "replace", partition_by=[WINDOW], partitions=partitions, transaction=state.transaction()
    )
    return clean, quarantine
