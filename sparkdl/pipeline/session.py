"""The Spark session of a run that was given none.

Enters: the section ``spark`` of a pipeline file, and what ``spark-submit`` said, which wins. Leaves: a session whose
Python workers can import the modules that the file names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sparkdl.compat.interrupts import interrupts_wait
from sparkdl.pipeline.code import code_folder
from sparkdl.pipeline.functions import named_functions
from sparkdl.pipeline.spec import PipelineSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["code_for_workers", "open_session"]


def open_session(spec: PipelineSpec) -> SparkSession:
    """The active session, or a new one; on one machine with what suits short jobs there."""
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    builder = SparkSession.builder.appName(f"sparkdl-{spec.name}")
    if "SPARK_REMOTE" in os.environ:  # the server's settings are its own
        return builder.getOrCreate()
    given = {name: _text(value) for name, value in spec.spark.conf.items()}
    if spec.spark.master is not None:
        given["spark.master"] = spec.spark.master
    submitted = _submitted()
    wanted = {**_ours(spec), **given, **submitted}
    if wanted["spark.master"].startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else workers take the first python3 of PATH
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # nobody else has to reach a session of one machine
    for name in wanted.keys() - submitted.keys():
        builder = builder.config(name, wanted[name])
    with interrupts_wait():
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")  # Spark's warnings would bury the progress bar and the summary
    return session


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
    }


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _submitted() -> dict[str, str]:
    """The settings that ``spark-submit`` was given."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())
