"""The way in: one file, and what can be asked of it.

Until there is something to do, neither Spark nor torch is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sparkdl.errors import ConfigError
from sparkdl.interchange.mlflow import check_installed
from sparkdl.models.trust import never
from sparkdl.pipeline.check import problems_of
from sparkdl.pipeline.code import (
    code_hash,
    importable,
    named_functions,
    saved_functions,
    says_what_it_returns,
    split_target,
    unannotated,
)
from sparkdl.pipeline.file import PipelineFile, draft, load
from sparkdl.pipeline.file.problems import Path
from sparkdl.pipeline.plan import Plan, plan_of
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.session import storage_to_come
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.status import Status, status_of
from sparkdl.pipeline.trials import search_problems
from sparkdl.pipeline.windows import WHOLE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdl.pipeline.work.example import Example

_WINDOW = {"day": r"\d{4}-\d{2}-\d{2}", "hour": r"\d{4}-\d{2}-\d{2}(T\d{2})?"}


class Pipeline:
    """A pipeline, as its file says; ``Pipeline.load("churn.yaml").run()`` is what ``sparkdl run churn.yaml`` does.

    Args:
        file: read and valid.

    Raises:
        PipelineFileError: it names functions that cannot be found, or a package that is not installed; says all lines.
        ConfigError: the folder of its modules is not there.
    """

    def __init__(self, file: PipelineFile) -> None:
        with importable(file.spec.code):
            mistakes = _unusable(file.spec)
        if mistakes:
            raise file.refused(mistakes)
        self.file = file

    @staticmethod
    def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Pipeline:
        """Read a pipeline file.

        Args:
            path: its path or URI.
            overrides: ``section.key=value`` each, which win over the file.

        Raises:
            PipelineFileError: tells every line that is wrong.
            StorageError: the file cannot be read.
        """
        return Pipeline(load(path, overrides))

    @staticmethod
    def init(
        place: str | os.PathLike[str],
        table: str,
        label: str | None = None,
        spark: SparkSession | None = None,
        *,
        label_type: str | None = None,
    ) -> Pipeline:
        """Look at a table, write the folder of a pipeline for it, and read its file.

        Args:
            place: the folder to make; its last part is the pipeline's name.
            table: a path or URI of a Delta table or of Parquet, CSV or JSON files, or ``catalog.schema.table``.
            label: the column to predict; None guesses.
            spark: the session to read a table of a catalog with; None opens one for it.
            label_type: ``regression``, ``binary`` or ``multiclass``; None goes by the label's values.

        Raises:
            ConfigError: the name cannot be one, the folder is there already, or there is no table.
            SchemaError: there is no such label, or Spark could not tell or read some columns.
            DataError: there are no rows, or nothing that can be predicted.
            StorageError: the table cannot be read, or the folder not be written.
        """
        from sparkdl.pipeline.init import init

        return Pipeline(init(os.fspath(place), table, label, spark, label_type=label_type).file)

    def example(self, rows: int = 4) -> Example:
        """What a model of the pipeline is made with and called with, made up: to try a factory before any run.

        Args:
            rows: of the inputs.
        """
        from sparkdl.pipeline.work.example import example_of

        return example_of(self.spec, rows)

    @property
    def spec(self) -> PipelineSpec:
        """What the file says, with defaults."""
        return self.file.spec

    def check(self) -> str:
        """Hold the file against its source and the places that it writes: what would end a run is told before one.

        The columns of the source; ``transform.sql``, which the active session analyses, or a Spark of its own that is
        gone again, and with it the expectations; a label that has one value; places that cannot be written.

        Returns:
            what could not be checked, in words; empty where all of it was.

        Raises:
            PipelineFileError: tells every line that is wrong.
        """
        with self._ready():
            mistakes, unknown = problems_of(Project(self.file))
        if mistakes:
            raise self.file.refused(mistakes)
        return unknown

    @staticmethod
    def check_file(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, offline: bool = False) -> str:
        """Read a pipeline file and ``check`` it, and tell every mistake at once, whichever of both finds it.

        Args:
            path: its path or URI.
            overrides: ``section.key=value`` each, which win over the file.
            offline: look at the file alone, not at its source or places.

        Returns:
            what could not be checked, in words; empty where all of it was.

        Raises:
            PipelineFileError: tells every line that is wrong.
            StorageError: the file cannot be read.
        """
        file, problems = draft(path, overrides)
        unknown = ""
        if file is not None:
            with importable(file.spec.code), storage_to_come(file.spec):
                mistakes = _unusable(file.spec)
                if not offline:
                    project_mistakes, unknown = problems_of(Project(file))
                    mistakes += project_mistakes
            file.add(mistakes, problems)
        if problems.sentences:
            raise problems.error()
        return unknown

    def run(
        self,
        spark: SparkSession | None = None,
        backfill: tuple[str, str] | None = None,
        now: datetime | None = None,
        *,
        until: str | None = None,
        train: bool = True,
    ) -> RunRecord:
        """Do what is due, from the source to predictions.

        Args:
            spark: the session; None opens one by the file, once there is something to do.
            backfill: first and last window to ingest again although nothing has changed, ``("2026-03-01",
                "2026-03-07")``.
            now: the time that it is, with its zone; windows that begin later are left alone.
            until: the last step to do: ``ingest``, ``features``, ``shards``, ``train``, ``evaluate``, ``publish`` or
                ``score``. The next run goes on from there.
            train: False ingests and lets the champion predict, and learns nothing.

        Returns:
            what was done, also in ``runs`` as JSON; ``outcome`` and ``exit_code`` tell how it ended.

        Raises:
            LeaseTakenError: another run of the pipeline is active.
            ConfigError: there is no such step; or ``train`` is False, and there is no champion.
            SparkdlError: what was refused or failed; a record says so, too.
        """
        with self._ready():
            return execute(self._run(backfill, now, until=until, train=train), spark)

    def plan(
        self,
        backfill: tuple[str, str] | None = None,
        now: datetime | None = None,
        *,
        until: str | None = None,
        train: bool = True,
    ) -> Plan:
        """What a run would do now and why; nothing is run, and neither Spark nor torch is loaded.

        Args:
            backfill: as ``run`` takes it.
            now: as ``run`` takes it.
            until: as ``run`` takes it.
            train: as ``run`` takes it.

        Raises:
            DataError: the source has no files, or no window of the backfill.
            StorageError: source or places cannot be read.
        """
        with self._ready():
            return plan_of(self._run(backfill, now, until=until, train=train))

    def status(self) -> Status:
        """Where it stands: last run, champion, windows, and who runs it now; without Spark.

        Raises:
            StorageError: its places cannot be read.
        """
        with self._ready():
            return status_of(Run(Project(self.file)))

    def report(self, run_id: str | None = None) -> str:
        """Where the HTML report of a run lies; written anew from its record if it is gone. Without Spark.

        Args:
            run_id: of the run; None takes the last one that did something.

        Raises:
            ConfigError: there is no such run.
            StorageError: its places cannot be read, or the report cannot be written.
        """
        from sparkdl.pipeline.report import report_of

        with self._ready():
            return report_of(Project(self.file), run_id).uri

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """What the file names can be imported, and S3 be reached as its session will."""
        with importable(self.spec.code), storage_to_come(self.spec):
            yield

    def _run(self, backfill: tuple[str, str] | None, now: datetime | None, *, until: str | None, train: bool) -> Run:
        backfill_windows = None if backfill is None else _windows(self.spec, *backfill)
        return Run(Project(self.file), RunRequest(now=_aware(now), again=backfill_windows, until=until, train=train))


def _unusable(spec: PipelineSpec) -> list[tuple[Path, str]]:
    """What the file names and this Python does not have."""
    problems: list[tuple[Path, str]] = []
    for path, target in named_functions(spec):
        try:
            code_hash(target)
        except ConfigError as error:
            problems.append((path, f": {error}"))
            continue
        if path == ("model", "factory") and not says_what_it_returns(target):
            problems.append((path, f"={unannotated(target)}"))
    for path, target in saved_functions(spec):
        if reason := never(split_target(target)[0]):
            sentence = (
                f": {target}, which a saved model would name, {reason}: write a function of your own that calls it"
            )
            problems.append((path, sentence))
    problems += search_problems(spec)
    if spec.publish.mlflow is not None:
        try:
            check_installed()
        except ConfigError as error:
            problems.append((("publish", "mlflow"), f": {error}"))
    return problems


def _aware(now: datetime | None) -> datetime:
    if now is None:
        return datetime.now(UTC)
    if now.tzinfo is None:
        raise ConfigError(f"now={now.isoformat()} has no time zone: give one, datetime.now(UTC) for instance")
    return now.astimezone(UTC)


def _windows(spec: PipelineSpec, first: str, last: str) -> tuple[str, str]:
    """The windows of a backfill as they are called; a day of a source by the hour is all its hours."""
    every = spec.source.every
    if spec.source.when is None:
        if (first, last) != (WHOLE, WHOLE):
            raise ConfigError(
                f"backfill {first}..{last} names windows of time, and the file has neither source.time nor "
                f"source.partition: write {WHOLE}..{WHOLE} to do all rows again"
            )
        return first, last
    for name in (first, last):
        if not re.fullmatch(_WINDOW[every], name):
            example = "2026-03-02" if every == "day" else "2026-03-02T05"
            raise ConfigError(f"backfill {first}..{last}: {name!r} is no {every}: write it like {example}")
    if every == "hour" and len(last) == len("2026-03-02"):
        last = f"{last}T23"
    if first > last:
        raise ConfigError(f"backfill {first}..{last} ends before it begins: write the earlier window first")
    return first, last
