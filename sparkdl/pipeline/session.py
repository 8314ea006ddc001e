"""The Spark session of a run that was given none.

Enters: the section ``spark`` of a pipeline file, and what ``spark-submit`` said, which wins. Leaves: a session whose
Python workers can import the modules that the file names.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sparkdl.compat.interrupts import interrupts_wait
from sparkdl.compat.spark_errors import jar_error
from sparkdl.launch.daemon import DEFAULT_PRELOAD
from sparkdl.pipeline.code import code_folder
from sparkdl.pipeline.functions import named_functions
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.storage import Configuration

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["SMALL", "code_for_workers", "open_session", "settings_of", "storage_to_come"]


SMALL = 24 << 20
"""Bytes of a source below which Java's quick compiler alone is faster from end to end, on one machine."""
_BYTES_PER_TASK = 16 << 20


def open_session(spec: PipelineSpec, size: int | None = None) -> SparkSession:
    """The active session, or a new one by the file; what it leaves open suits one machine, and the size of the work.

    Args:
        spec: the pipeline.
        size: bytes of its source; None if nobody knows.

    Raises:
        ConfigError: its JARs are of another Spark.
    """
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    builder = SparkSession.builder.appName(f"sparkdl-{spec.name}")
    if "SPARK_REMOTE" in os.environ:  # the server's settings are its own
        return builder.getOrCreate()
    submitted = _submitted()
    wanted = settings_of(spec, size, submitted)
    if wanted["spark.master"].startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else workers take the first python3 of PATH
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # nobody else has to reach a session of one machine
    for name in wanted.keys() - submitted.keys():
        builder = builder.config(name, wanted[name])
    try:
        with interrupts_wait():
            session = builder.getOrCreate()
    except Exception as error:
        refused = jar_error(error)
        if refused is None:
            raise
        raise refused from error
    session.sparkContext.setLogLevel("ERROR")  # Spark's warnings would bury the progress bar and the summary
    return session


def settings_of(spec: PipelineSpec, size: int | None, submitted: Mapping[str, str]) -> dict[str, str]:
    """The settings of a session: what ``spark-submit`` said, then the file, then what suits the work.

    Args:
        spec: the pipeline.
        size: bytes of its source; None if nobody knows.
        submitted: what ``spark-submit`` was given.
    """
    given = {name: _text(value) for name, value in spec.spark.conf.items()}
    if spec.spark.master is not None:
        given["spark.master"] = spec.spark.master
    wanted = {**_ours(spec), **given, **submitted}
    if size is None or not wanted["spark.master"].startswith("local"):
        return wanted
    return {**_by_size(size), **wanted}


@contextmanager
def storage_to_come(spec: PipelineSpec) -> Iterator[None]:
    """Reach S3 during the block as the session will that a run opens, while there is none."""
    settings = {} if "SPARK_REMOTE" in os.environ else settings_of(spec, None, _submitted())
    with Configuration.to_come(settings).applied():
        yield


@contextmanager
def code_for_workers(spark: SparkSession, spec: PipelineSpec) -> Iterator[None]:
    """Let Python workers that start in the block import from the folder ``code``, if the file names functions.

    That holds for sessions that were there before, on one machine or wherever that folder can be seen; a server of
    Spark Connect decides itself what its workers import.
    """
    context = getattr(spark, "_sc", None)
    folder = code_folder(spec.code) if any(named_functions(spec)) else None
    before = None if context is None else context.environment.get("PYTHONPATH")
    if context is None or folder is None or folder in (before or "").split(os.pathsep):
        yield
        return
    context.environment["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, before]))
    try:
        yield
    finally:
        if before is None:
            del context.environment["PYTHONPATH"]
        else:
            context.environment["PYTHONPATH"] = before


def _ours(spec: PipelineSpec) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [code_folder(spec.code), os.environ.get("PYTHONPATH", "")]))
    return {
        "spark.master": "local[*]",
        "spark.driver.memory": "2g",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.python.daemon.module": "sparkdl.launch.daemon",
        "spark.executorEnv.PYTHONPATH": path,
        "spark.executorEnv.SPARKDL_PRELOAD": os.environ.get("SPARKDL_PRELOAD", _preload()),
    }


def _preload() -> str:
    """What workers have loaded when they are born: with what ranks import at their first step, once for all of them."""
    names = (*DEFAULT_PRELOAD, "torch._dynamo")
    return ",".join(name for name in names if importlib.util.find_spec(name.partition(".")[0]))


def _by_size(size: int) -> dict[str, str]:
    """Settings of a session on one machine that small and large work want different.

    Java compiles what runs often twice: soon, then well. A few million rows pay for the second, and a few hundred
    thousand are read before it is done. Tasks are so many that each has some megabytes, which Spark's own 200 are not.
    """
    found = {"spark.sql.shuffle.partitions": str(min(200, max(4, -(-size // _BYTES_PER_TASK))))}
    if size < SMALL:  # before `extraJavaOptions`, which stay the user's
        found["spark.driver.defaultJavaOptions"] = "-XX:TieredStopAtLevel=1"
    return found


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _submitted() -> dict[str, str]:
    """The settings that ``spark-submit`` was given."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())
