"""The step ``ingest``: windows of the source that are new or have changed, to the table of clean rows."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sparkdl.columns.frames import selected
from sparkdl.columns.names import quoted
from sparkdl.errors import DataError, SchemaError
from sparkdl.observe import logger
from sparkdl.pipeline.rows.checksums import AS_READ, RowChecksum, check_counts, check_hashes, counted
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
from sparkdl.pipeline.sources.window_column import newest_first
from sparkdl.pipeline.state.evaluator import Stale, Step, stale_of
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import Receipt, content_key, replacing
from sparkdl.pipeline.state.run import Run
from sparkdl.pipeline.windows import NO_TIME, WHOLE, WINDOW, ahead, deleted_text, emptied, span
from sparkdl.tables.delta import delta_schema, merged_schema
from sparkdl.tables.parquet import FileRow
from sparkdl.tables.staged import StagedWrite

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VERSION = 6
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
    """Windows of the source, each of which is a partition of two tables.

    They are ``clean`` (rows that passed, as the transform left them) and ``quarantine`` (each refused row as JSON, with
    the one reason it was refused for).
    """

    name = "ingest"

    def wanted(self, run: Run) -> Mapping[str, str | None] | None:
        """A key by window: those of the source that have begun, and those that are to be emptied."""
        windows = source_windows(run)
        if windows is None:
            return None
        rules, later = rules_of(run.project), ahead(windows, run.request.now)
        names = ({*windows} - {*later}) | _emptied(run, windows)
        return {name: window_key(rules, windows.get(name, "")) for name in sorted(names)}

    def exists(self, run: Run, receipt: Receipt) -> bool:
        """Whether the table of clean rows is there, if the window has rows in it."""
        return not receipt.read(WindowReceipt).kept or run.places.table(run.project.table("clean").uri)

    def forced(self, run: Run, partition: str) -> bool:
        """Whether the window is one of a backfill that is still to be done."""
        return run.again is not None and run.again[0] <= partition <= run.again[1]

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
        run.record.books = ingest(spark, run)
        run.again = None
        return bool(run.record.books)

    def tell(self, run: Run) -> None:
        """Which windows were ingested, which begin later, and which the source no longer holds."""
        record = run.record
        record.windows["ingested"] = [receipt.window for receipt in record.books]
        for name in ("read", "kept", "quarantined", "duplicates"):
            record.rows[name] = sum(getattr(receipt, name) for receipt in record.books)
        if later := ahead(source_windows(run) or (), run.request.now):
            record.windows["ahead"] = later
        tell_deleted(run)
        record.source_state = run.snapshot.state
        record.places |= {name: run.project.table(name).uri for name in ("clean", "quarantine", "receipts")}


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
    """The key of a window's clean rows; the fingerprint is empty where the source holds nothing for it any more."""
    return content_key("ingest", [rules, fingerprint])


def _source_key(run: Run) -> str | None:
    """What decides the windows of the source and their rows; None where only Spark can tell."""
    if run.snapshot.state is None:
        return None
    inputs = {"version": VERSION, "source": run.project.source.identity(), "state": run.snapshot.state}
    return content_key("source", inputs)


def source_windows(run: Run) -> Mapping[str, str] | None:
    """A hash of what the source holds for each window; None where only Spark can tell.

    Where neither folders nor a table's log tell it, it is known of a source that is as it was when it was last read.
    """
    if run.snapshot.windows is not None:
        return run.snapshot.windows
    if run.windows_read is not None:
        return run.windows_read
    receipt, key = run.receipts.of("source").get(WHOLE), _source_key(run)
    return None if receipt is None or key is None or receipt.key != key else receipt.read(dict[str, str])


def keep_source_windows(run: Run, windows: Mapping[str, str]) -> None:
    """Remember which windows the source held as this run read it."""
    run.windows_read, key = windows, _source_key(run)
    if key is not None:
        receipt = run.receipts.of("source").get(WHOLE)
        if receipt is None or receipt.key != key or receipt.read(dict[str, str]) != windows:  # of some only counted yet
            with replacing(run.receipts, "source", [WHOLE]) as new_receipts:
                new_receipts[WHOLE] = (key, windows)


def deleted_windows(run: Run) -> list[str]:
    """Windows that the source no longer holds and whose rows stay in the clean rows; none where only Spark can tell."""
    windows = source_windows(run)
    return [] if windows is None else sorted({*_held(run)} - {*windows} - _emptied(run, windows))


def tell_deleted(run: Run) -> None:
    """Tell log and record which windows the source no longer holds while their rows stay."""
    if deleted := deleted_windows(run):
        logger.warning("%s", deleted_text(deleted))
        run.record.windows["deleted"] = deleted


def _emptied(run: Run, windows: Mapping[str, str]) -> set[str]:
    """The windows that are to be emptied, of a source that holds these."""
    remove = run.spec.source.deleted_windows == "remove"
    return emptied(windows, _held(run), now=run.request.now, again=run.again, remove=remove)


def _held(run: Run) -> list[str]:
    """The windows that rows were written of, in either table."""
    return [name for name, receipt in run.windows().items() if receipt.read]


def _check_lost(run: Run) -> None:
    """Say that the table of clean rows is gone, where it is.

    Raises:
        DataError: rows were in it that the source no longer holds.
    """
    with_rows, uri = [name for name in _held(run) if run.windows()[name].kept], run.project.table("clean").uri
    if not with_rows or run.places.table(uri):
        return
    lost_for_good = [name for name in deleted_windows(run) if name in with_rows]
    if lost_for_good:
        raise DataError(
            f"the clean rows {uri} are gone, and the source no longer holds {span(lost_for_good)} of them: restore the "
            "table, or take these windows out with source.deleted_windows=remove"
        )
    logger.warning("the clean rows %s are gone: all windows are taken in again", uri)


@source_errors()
def ingest(spark: SparkSession, run: Run) -> list[WindowReceipt]:
    """Bring the table of clean rows up to date with the source.

    One job validates, writes and counts the rows. Nothing is committed unless as many rows of each window left that job
    as entered it, and every expectation holds: until then nobody sees the files, and else they are removed. A transform
    may leave rows out or add some; a window that it empties is refused.

    Returns:
        the receipts of the windows that were due, in order.

    Raises:
        DataError: rows were lost or multiplied, an expectation failed, or a window or the source has no valid row.
        PipelineFileError: the file reads columns that there are not, or that are of types that their use does not fit.
        SchemaError: a column is of another type than in the table of clean rows, or of one that it cannot hold.
        ConfigError: a condition, query or function is wrong.
        StorageError: source or tables cannot be read or written.
    """
    project, spec, source, snapshot = run.project, run.spec, run.project.source, run.snapshot
    table = project.table("clean")
    version = table.version() if table.exists() else -1  # before what is known of its windows: it holds for this alone
    files = parquet_rows(spark, spec, source, snapshot)
    source_rows = read_rows(spark, source, snapshot) if files is None else files.frame
    windows, row_counts = _look(run, source_rows, files)
    due = {name: windows.get(name, "") for name in stale_of(IngestStep(), run).keys}  # empty: to be emptied
    due_in_source = [name for name in due if name in windows]
    _check_lost(run)
    if files is not None and not files.can_judge(due_in_source, spec.source.key):
        files, source_rows = None, read_rows(spark, source, snapshot)
    due_rows = of_windows(source_rows, source, due_in_source) if files is None else source_rows
    prepared = _transformed(run, source_rows, due_rows)
    if not due:
        return []
    rows_before: Mapping[str, int] | None = None  # the transform
    if spec.transform is not None:
        rows_before = row_counts
        if snapshot.windows is not None:  # whose sizes tell them about: the source's files may know, else Spark counts
            counts = source.rows_by_window(snapshot)
            rows_before = counted(due_rows) if counts is None else counts
        if not source.rows_may_change and spec.source.when is not None:
            source.check_within({name: windows[name] for name in due_in_source}, fingerprints(due_rows)[0])
    if reserved := sorted({OUTCOME, BROKEN, SALT, SLOT} & set(prepared.columns)):
        raise SchemaError(f"the rows have a column {reserved[0]}, which the pipeline adds: rename it in the transform")
    checksum, rows = RowChecksum(), prepared
    if files is None:
        time = spec.source.time
        newest = newest_first(prepared, time) if time is not None and time in prepared.columns else []
        largest = max(row_counts.get(name, 0) for name in due)
        gathered = _gathered(checksum.observe(prepared), run, largest, len(due))
        rows = validated(gathered, spec.expect, spec.source.key, newest)
    clean, quarantine = _staged(run, rows, list(due), version)
    pending, rules = {"quarantine": quarantine, "clean": clean}, rules_of(project)
    valid: list[FileRow] = []
    invalid: list[FileRow] = []
    outcomes_by_window: dict[str, Outcomes] = {}
    try:
        if any(due.values()):  # else every window is emptied, and nothing is read
            read = None if files is None else files.read_judged(due)
            valid, invalid, outcomes_by_window = validate_rows(rows, spec.label, clean.task, quarantine.task, read)
            check_counts(due, outcomes_by_window, rows_before or {})
            counts_after = {name: outcomes.total for name, outcomes in outcomes_by_window.items()}
            if files is None:
                checksum.check(counts_after, prepared)
            else:
                files.check(counts_after, due)
            if snapshot.windows is None and rows_before is None:
                check_hashes(due, outcomes_by_window, alive=source.rows_may_change)
            check_unchanged(source, snapshot)
            check_shares(outcomes_by_window, spec.expect)
        with replacing(run.receipts, "ingest", due) as new_receipts:
            pending.pop("quarantine").commit(invalid)  # which takes its own files away where it is refused
            version = pending.pop("clean").commit(valid).version
            for name, fingerprint in due.items():
                outcomes = outcomes_by_window.get(name, Outcomes())
                receipt = WindowReceipt(
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
                    version=version,
                    run_id=run.run_id,
                )
                new_receipts[name] = (window_key(rules, receipt.fingerprint), receipt)
    except BaseException:
        for staged in pending.values():
            staged.abandon()
        raise
    done: list[WindowReceipt] = [receipt for _, receipt in new_receipts.values()]
    if snapshot.windows is None:
        as_read = {receipt.window: receipt.fingerprint for receipt in done if receipt.window in windows}
        keep_source_windows(run, {**windows, **as_read})
    if removed := [name for name in due if name not in windows]:
        run.record.windows["removed"] = removed
    run.record.warned = dict(sum((Counter(outcomes.warned) for outcomes in outcomes_by_window.values()), Counter()))
    return done


def _look(run: Run, source_rows: DataFrame, files: ParquetRows | None) -> tuple[Mapping[str, str], Mapping[str, int]]:
    """A hash of what the source holds for each window, which the run knows from then on, and its rows, about."""
    source, snapshot, windows = run.project.source, run.snapshot, source_windows(run)
    if snapshot.windows is not None:
        return snapshot.windows, {name: size.rows_about for name, size in snapshot.sizes.items()}
    made_by_rules = (
        receipt.key and run.windows()[name].rules == rules_of(run.project)
        for name, receipt in run.receipts.of("ingest").items()
    )
    every_window_is_due = run.spec.transform is None and source.rows_may_change and not any(made_by_rules)
    if windows is not None or every_window_is_due:
        row_counts = counted(source_rows) if files is None else files.rows
        if windows is None:  # the pass that writes them hashes what it reads
            run.windows_read = windows = dict.fromkeys(row_counts, AS_READ)
        return windows, row_counts
    windows, row_counts = fingerprints(source_rows, None if files is None else files.read)
    check_unchanged(source, snapshot)
    keep_source_windows(run, windows)
    return windows, row_counts


def check_columns(spark: SparkSession, run: Run) -> None:
    """Hold the file against the columns of the source and of the transform, where no window is due.

    Raises:
        PipelineFileError: the file reads columns that there are not, or that are of types that their use does not fit.
    """
    with source_errors():
        rows = read_rows(spark, run.project.source, run.snapshot)
        _transformed(run, rows, rows)


def _transformed(run: Run, source_rows: DataFrame, due_rows: DataFrame) -> DataFrame:
    """What the transform makes of the rows that are due, if the file fits its columns and those of the source."""
    file = run.project.file
    rows = transformed(source_rows.sparkSession, file, due_rows)
    file.check_columns(arrow_types(source_rows), None if run.spec.transform is None else arrow_types(rows))
    return rows


def _gathered(rows: DataFrame, run: Run, rows_of_largest: int, windows: int) -> DataFrame:
    """The rows with those of a window, and of a key in it, in few tasks, so that a window becomes few files.

    Where partition folders already hold each window by itself, and no keys are compared, rows stay where they are read.
    """
    from pyspark.sql import functions as F

    spec, stored = run.spec, run.snapshot.bytes
    small = stored is not None and stored <= _ONE_TASK and windows <= _ONE_TASK_WINDOWS
    if small and spec.transform is None and rows_of_largest < _ROWS_PER_FILE:
        return rows.coalesce(1)
    if spec.source.partition is not None and not spec.source.key and spec.transform is None:
        return rows
    files = 1 + rows_of_largest // _ROWS_PER_FILE
    if files == 1:
        return rows.repartition(WINDOW)
    plain = [F.col(quoted(name)) for name in spec.source.key if rows.schema[name].dataType.simpleString() in _HASHED]
    hashed = F.xxhash64(*plain) if plain else content_hash(rows)
    if spec.source.key and not plain:  # values of these types may be equal and have different hashes
        return rows.repartition(WINDOW)
    return rows.withColumn(SALT, F.pmod(hashed, F.lit(files))).repartition(WINDOW, SALT)


def _staged(run: Run, rows: DataFrame, due: Sequence[str], version: int) -> tuple[StagedWrite, StagedWrite]:
    """The replacement of the windows in both tables.

    Where all windows that have rows are replaced, the clean rows have the columns of these rows, and no others: a new
    table, which is committed only while the one before is the ``version`` that this was decided on. Where some stay,
    new columns come beside those that there are, and what one side lacks is null in it.
    """
    from pyspark.sql.types import StringType, StructField, StructType

    partitions = [{WINDOW: name} for name in due]
    table = run.project.table("clean")
    windows_with_rows = [name for name, receipt in run.windows().items() if receipt.kept]
    schema = selected(rows, clean_columns(rows)).schema.json()
    if version >= 0 and set(windows_with_rows) <= set(due):
        clean = table.stage(
            schema,
            "overwrite",
            partition_by=[WINDOW],
            overwrite_schema=True,
            transaction=run.transaction(),
            expected_version=version,
        )
    else:
        if version >= 0:
            windows = sorted({*windows_with_rows, *due} - {NO_TIME})
            remedy = f"do all windows again with --backfill {windows[0]}..{windows[-1]}, or change the source back"
            merged_schema(table.uri, table.schema_json(), delta_schema(schema).to_json(), remedy)
        clean = table.stage_partitions(
            schema,
            [WINDOW],
            partitions,
            transaction=run.transaction(),
            expected_version=None if version >= 0 else -1,
        )
    texts = StructType([StructField(name, StringType()) for name in QUARANTINE]).json()
    quarantine = run.project.table("quarantine").stage(
        texts, "replace", partition_by=[WINDOW], partitions=partitions, transaction=run.transaction()
    )
    return clean, quarantine
