"""How every job starts and ends: settings in, an exit code and a result record out.

Enters: a command line. Leaves: an exit code, ``record.json`` in the run's folder, at most one sentence on stderr.

Exit codes of every job, returned by ``spark-submit`` in client mode too (in cluster mode read ``record.json``):

    0    done, or nothing to do
    1    refused: configuration, data, schema, storage, or a cluster with too few slots; nothing is half-written
    2    the cluster failed: ranks could not be started, or a rank failed
    3    training failed: loss not finite, a checkpoint or a model that does not fit
    4    an error nobody foresaw; the traceback stands on stderr
    130  interrupted
"""

from __future__ import annotations

import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from jobs.record import RunRecord, print_summary, versions, without_secrets, write_record
from jobs.settings import PathSettings, Settings, load_settings
from sparkdl.errors import (
    CancelledError,
    ClusterError,
    PreflightError,
    SparkdlError,
    TrainingError,
)
from sparkdl.observe import span
from sparkdl.storage import Storage, check_places

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Run", "exit_code_of", "open_session", "run_job", "spark_is_configured"]


@dataclass
class Run:
    """One run of a job, as its body sees it.

    Attributes:
        settings: the configuration.
        record: what the run leaves; the body fills its sections in.
        console: the terminal.
    """

    settings: Settings
    record: RunRecord
    console: Console

    @property
    def folder(self) -> str:
        """The run's own folder: record, report, checkpoints."""
        return f"{self.settings.paths.of('runs')}/{self.record.run_id}"

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block as the stage ``name`` of the summary."""
        with span(name, into=self.record.stages):
            yield

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def nothing_new(self, reason: str) -> None:
        """Mark the run as one that had nothing to do; the exit code stays 0."""
        self.record.status, self.record.message = "nothing new", reason


def run_job(job: str, body: Callable[[Run], None], argv: Sequence[str] | None = None, *, summary: bool = False) -> int:
    """Run a job from its command line to its exit code; every outcome leaves a record.

    Args:
        job: its name.
        body: the work; raises what it refuses.
        argv: the command line; None takes this process's.
        summary: print the ten-second summary at the end.

    Returns:
        The exit code, see the module.
    """
    started = time.perf_counter()
    now = datetime.now(UTC)
    record = RunRecord(
        job=job,
        run_id=f"{now:%Y%m%dT%H%M%S}-{job}-{uuid.uuid4().hex[:6]}",
        started_at=now.isoformat(timespec="seconds"),
        versions=versions(),
    )
    run = Run(Settings(), record, Console())
    paths = PathSettings()
    try:
        run.settings = load_settings(sys.argv[1:] if argv is None else argv, job)
        paths, record.settings = run.settings.paths, without_secrets(asdict(run.settings))
        body(run)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:  # --help
            return 0
        _fail(record, error)
    record.seconds = time.perf_counter() - started
    place = f"{paths.of('runs')}/{record.run_id}/record.json"
    record.places["record"] = place
    try:
        write_record(record, place)
    except SparkdlError as error:
        print(f"{job}: {error}", file=sys.stderr)
        record.exit_code = record.exit_code or 1
    if summary and record.exit_code == 0:
        print_summary(record, run.console)
    return record.exit_code


def exit_code_of(error: BaseException) -> int:
    """Return the exit code that an error ends a job with, see the module."""
    if isinstance(error, KeyboardInterrupt | CancelledError):
        return 130
    if isinstance(error, ClusterError) and not isinstance(error, PreflightError):
        return 2
    if isinstance(error, TrainingError):
        return 3
    return 1 if isinstance(error, SparkdlError) else 4


def _fail(record: RunRecord, error: BaseException) -> None:
    record.exit_code = exit_code_of(error)
    record.status = {1: "refused", 130: "interrupted"}.get(record.exit_code, "failed")
    text = str(error).strip()
    if record.exit_code == 4:  # foreign errors carry whole stack traces, which stand on stderr already
        text = text.split("\n")[0]
    if record.exit_code == 1:  # a refusal is one sentence, also where it quotes a foreign library that is not
        text = " ".join(text.split())
    record.error, record.message = type(error).__name__, text or type(error).__name__
    if record.exit_code == 4:
        traceback.print_exception(error)
    elif getattr(error, "rank_traceback", ""):
        print(*error.log_tail, error.rank_traceback, sep="\n", file=sys.stderr)
    print(f"{record.job}: {record.error}: {record.message}", file=sys.stderr)


def open_session(settings: Settings, *writes: str) -> SparkSession:
    """Return the active Spark session, or start one by the ``spark`` section; look at the places of the job.

    Args:
        settings: the configuration.
        writes: names of the ``paths`` section that the job will write to.

    Raises:
        StorageError: some of these cannot be reached or written; names each of them.
    """
    session = _session(settings)
    check_places({f"paths.{name}": Storage.of(settings.paths.of(name)) for name in writes}, session)
    return session


def spark_is_configured(settings: Settings) -> bool:
    """Whether anything may tell Spark what a path without a scheme means; by itself it takes this machine's."""
    named = ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE", "SPARK_HOME", "SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR")
    configured = any(key.startswith("spark.hadoop.") for key in settings.spark.conf)
    return configured or any(name in os.environ for name in named)


def _session(settings: Settings) -> SparkSession:
    """Return the active Spark session, or start one.

    Under ``spark-submit`` the JVM is already there, and its master, memory and settings win. Python workers get the
    folder of the package ``jobs`` on their path, so that they can import the model; on a cluster pass
    ``--py-files jobs.zip`` instead.
    """
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    builder = SparkSession.builder.appName(settings.name)
    if "SPARK_REMOTE" in os.environ:  # Spark Connect: the server's settings are its own
        return builder.getOrCreate()
    ours = {
        "spark.master": settings.spark.master,
        "spark.driver.memory": settings.spark.driver_memory,
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.executorEnv.PYTHONPATH": str(Path(__file__).resolve().parents[1]),
    }
    if settings.spark.shuffle_partitions:
        ours["spark.sql.shuffle.partitions"] = str(settings.spark.shuffle_partitions)
    given = _submitted()
    wanted = ours | settings.spark.conf | given
    if wanted["spark.master"].startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else workers take the first python3 of PATH
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # nobody else has to reach a session of one machine
    for name in wanted.keys() - given.keys():
        builder = builder.config(name, wanted[name])
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")  # Spark's warnings would bury the progress bar and the summary
    return session


def _submitted() -> dict[str, str]:
    """Return the settings that ``spark-submit`` was given."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())
