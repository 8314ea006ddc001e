"""The Spark session of a run that was given none.

What ``spark-submit`` or ``PYSPARK_SUBMIT_ARGS`` say wins over the file, the file over the environment, that over
``spark-defaults.conf``; ours is what nobody has said anything of.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from sparkdl.compat.interrupts import interrupts_wait
from sparkdl.compat.java_classes import java_options
from sparkdl.compat.spark_errors import jar_error, unlogged_tasks
from sparkdl.compat.spark_master import is_local
from sparkdl.errors import ConfigError
from sparkdl.launch.daemon import DEFAULT_PRELOAD
from sparkdl.observe import logger
from sparkdl.pipeline.code import code_folder, named_functions
from sparkdl.pipeline.file.resolved import shown_setting
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.pipeline.spec.base import spelled
from sparkdl.storage import Configuration
from sparkdl.storage.session import spark_defaults

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SMALL = 128 << 20
"""Bytes of a source below which Java's quick compiler alone is faster from end to end, on one machine.

20,000 rows of 500 columns, 80 MB, take 73 s with it and 86 with both; 800,000 rows of a CSV file of 90 MB, to their
shards, 22.6 and 24.5. So does the collector that works in one thread: 200,000 rows from files to predictions take
38 s of Java's processor time with it, and 42 with G1.
"""
_BYTES_PER_TASK = 16 << 20
_VARIABLES = {"MASTER": "spark.master", "SPARK_DRIVER_MEMORY": "spark.driver.memory"}
"""Variables that ``spark-submit`` takes settings of ours from."""
_FLAGS = {
    "--master": "spark.master",
    "--driver-memory": "spark.driver.memory",
    "--executor-memory": "spark.executor.memory",
    "--executor-cores": "spark.executor.cores",
    "--num-executors": "spark.executor.instances",
    "--queue": "spark.yarn.queue",
    "--name": "spark.app.name",
    "--jars": "spark.jars",
    "--packages": "spark.jars.packages",
    "--driver-java-options": "spark.driver.extraJavaOptions",
}
"""Words of ``PYSPARK_SUBMIT_ARGS``."""
_JAVA_VARIABLES = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS")
_FILE, _OURS = "the pipeline file", "sparkdl"
_TOLD = ("spark.master", "spark.driver.memory", "spark.sql.session.timeZone")
"""Those of our own settings that the log names."""
Layer = tuple[str, Mapping[str, str]]
_PRELOAD = "SPARKDL_PRELOAD"
_PRELOAD_LATER = "SPARKDL_PRELOAD_LATER"
_ETL_PRELOAD = "pyspark.worker"
"""What workers have loaded when they are born, until torch is needed: ETL does not wait for its import."""


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
    builder = SparkSession.builder
    if "SPARK_REMOTE" in os.environ:  # the server's settings are its own
        return builder.appName(f"sparkdl-{spec.name}").getOrCreate()
    layers = _layers(spec, size, configured_elsewhere())
    merged, origins = _merged(layers), {name: origin for origin, settings in layers for name in settings}
    if merged["spark.master"].startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else workers take the first python3 of PATH
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # nobody else has to reach a session of one machine
    for name, origin in origins.items():
        if origin in (_FILE, _OURS):  # Spark itself takes the others from where they are
            builder = builder.config(name, merged[name])
    if merged.get("spark.submit.deployMode") == "cluster" and origins["spark.submit.deployMode"] != "spark-submit":
        builder = builder.config("spark.submit.deployMode", "client")  # this process is the driver
    _log_origins(merged, origins)
    try:
        with interrupts_wait():
            session = builder.getOrCreate()
            session.sparkContext.setLogLevel("ERROR")  # its warnings would bury the progress bar and the summary
            unlogged_tasks(session)
    except Exception as error:
        refused = jar_error(error)
        if refused is None:
            raise
        raise refused from error
    return session


def settings_of(spec: PipelineSpec, size: int | None, configured: Sequence[Layer]) -> dict[str, str]:
    """The settings of a session: of each name what the last has said, ours first.

    Args:
        spec: the pipeline.
        size: bytes of its source; None if nobody knows.
        configured: see ``configured_elsewhere``.
    """
    return _merged(_layers(spec, size, configured))


def configured_elsewhere() -> list[Layer]:
    """What the user said outside of the file: by origin, the weakest first; the last, the command line, beats it.

    Of a program that ``spark-submit`` runs, all of it is in the configuration that this has made, and one layer.
    """
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        from pyspark import SparkConf, SparkContext

        SparkContext._ensure_initialized()
        return [("spark-submit", dict(SparkConf().getAll()))]
    variables = {name: os.environ[variable] for variable, name in _VARIABLES.items() if os.environ.get(variable)}
    arguments = os.environ.get("PYSPARK_SUBMIT_ARGS", "")
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise ConfigError(f"PYSPARK_SUBMIT_ARGS are no words of spark-submit ({error}): correct them") from error
    pairs = [word.partition("=")[::2] if "=" in word else (word, argument) for word, argument in pairwise([*words, ""])]
    flags = {_FLAGS[word]: value for word, value in pairs if word in _FLAGS}
    confs = [value for word, value in pairs if word in ("--conf", "-c")]
    flags |= {name: value for name, _, value in (conf.partition("=") for conf in confs)}
    return [spark_defaults(), ("the environment", variables), ("PYSPARK_SUBMIT_ARGS", flags)]


def _layers(spec: PipelineSpec, size: int | None, configured: Sequence[Layer]) -> list[Layer]:
    """All that is said of a session's settings, the weakest first."""
    of_file = {name: spelled(value) for name, value in spec.spark.conf.items()}
    if spec.spark.master is not None:
        of_file["spark.master"] = spec.spark.master
    layers = [(_OURS, _ours(spec)), *configured[:-1], (_FILE, of_file), *configured[-1:]]
    merged = _merged(layers)
    if size is not None and merged["spark.master"].startswith("local"):
        layers.insert(0, (_OURS, _by_size(size, merged)))
    return [(_OURS, _java(java_options())), *layers]


def _merged(layers: Sequence[Layer]) -> dict[str, str]:
    return {name: value for _, settings in layers for name, value in settings.items()}


def _log_origins(settings: Mapping[str, str], origins: Mapping[str, str]) -> None:
    """Say in the log which settings the session has from where; values as far as they are nobody's secret."""
    by_origin: dict[str, list[str]] = {}
    for name, origin in sorted(origins.items()):
        if origin == _OURS and name not in _TOLD:
            continue
        # What the file says may have come from the environment.
        value = "" if origin == _FILE else f"={shown_setting(name, settings[name])}"
        by_origin.setdefault(origin, []).append(f"{name}{value}")
    parts = [f"from {origin} {', '.join(names)}" for origin, names in by_origin.items()]
    logger.getChild("session").info("the Spark session takes %s", "; ".join(parts))


@contextmanager
def storage_to_come(spec: PipelineSpec) -> Iterator[None]:
    """Reach S3 and HDFS, and take plain paths, during the block as the session will that a run opens."""
    if "SPARK_REMOTE" in os.environ:
        to_come = Configuration.of_server(os.environ["SPARK_REMOTE"])
    else:
        to_come = Configuration.to_come(settings_of(spec, None, configured_elsewhere()))
    with to_come.applied():
        yield


@contextmanager
def code_for_workers(spark: SparkSession, spec: PipelineSpec) -> Iterator[None]:
    """Let Python workers that start in the block import from the folder ``code``, if the file names functions.

    That holds for sessions that were there before, on one machine or wherever that folder can be seen; a server of
    Spark Connect decides itself what its workers import.
    """
    environment, folder = _environment(spark), code_folder(spec.code) if any(named_functions(spec)) else None
    earlier = environment.get("PYTHONPATH")
    if folder is None or folder in (earlier or "").split(os.pathsep):
        yield
        return
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, earlier]))
    try:
        yield
    finally:
        if earlier is None:
            del environment["PYTHONPATH"]
        else:
            environment["PYTHONPATH"] = earlier


def torch_for_workers(spark: SparkSession) -> None:
    """Let Python workers that start from here on have torch loaded when they are born.

    Spark keeps a daemon for each set of variables: those of ETL stay as they are, ranks and scorers come from a second
    one. Sessions that this module did not open are left alone, and so is a SPARKDL_PRELOAD of the user's.
    """
    environment = _environment(spark)
    if environment.get(_PRELOAD) == _ETL_PRELOAD:
        modules = ",".join(name for name in DEFAULT_PRELOAD if importlib.util.find_spec(name.partition(".")[0]))
        environment[_PRELOAD_LATER if is_local(spark) else _PRELOAD] = modules


def start_torch_daemon(spark: SparkSession) -> None:
    """Start the daemon of ``torch_for_workers`` on this machine beside other work, since loading torch takes seconds.

    On a cluster it starts with its first worker, on each executor.
    """
    environment = _environment(spark)
    if environment.get(_PRELOAD) != _ETL_PRELOAD or not is_local(spark):
        return

    def twice(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield from (batch, batch)

    torch_for_workers(spark)
    # It keeps the variables of now. Its worker, born before torch is loaded, ends with it: who has a row reads no more,
    # and Spark keeps those workers alone that it has read to the end.
    first_row = spark.range(0, 1, 1, 1).mapInArrow(twice, "id long").limit(1)
    del environment[_PRELOAD_LATER]

    def work() -> None:
        with suppress(Exception):  # the session may be stopped meanwhile; whoever needs the workers is told
            first_row.collect()

    threading.Thread(target=work, daemon=True).start()


def _environment(spark: SparkSession) -> dict[str, Any]:
    """The variables that Python workers start with; empty with Spark Connect, whose server decides."""
    spark_context = getattr(spark, "_sc", None)
    return {} if spark_context is None else spark_context.environment


def _ours(spec: PipelineSpec) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [code_folder(spec.code), os.environ.get("PYTHONPATH", "")]))
    return {
        "spark.app.name": f"sparkdl-{spec.name}",
        "spark.master": "local[*]",
        "spark.driver.memory": "2g",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.python.daemon.module": "sparkdl.launch.daemon",
        "spark.executorEnv.PYTHONPATH": path,
        f"spark.executorEnv.{_PRELOAD}": os.environ.get(_PRELOAD, _ETL_PRELOAD),
    }


def _by_size(size: int, settings_elsewhere: Mapping[str, str]) -> dict[str, str]:
    """Settings of a session on one machine that small and large work want different.

    Java compiles what runs often twice: soon, then well. A few million rows pay for the second, and a few hundred
    thousand are read before it is done. Tasks are so many that each has some megabytes, which Spark's own 200 are not.

    Args:
        size: bytes of the source.
        settings_elsewhere: all others; one that names a garbage collector has it, since Java does not start with two.
    """
    settings = {"spark.sql.shuffle.partitions": str(min(200, max(4, -(-size // _BYTES_PER_TASK))))}
    if size < SMALL:
        driver = [name for name in settings_elsewhere if name.startswith("spark.driver.") and "JavaOptions" in name]
        options = [settings_elsewhere[name] for name in driver] + [os.environ.get(name, "") for name in _JAVA_VARIABLES]
        has_collector = any(re.search(r"-XX:[+-]Use\w*GC\b", option) for option in options)
        settings |= _java("-XX:TieredStopAtLevel=1", "" if has_collector else "-XX:+UseSerialGC", java_options())
    return settings


def _java(*options: str) -> dict[str, str]:
    """Options of the driver's Java, before its `extraJavaOptions`, which stay the user's."""
    words = " ".join(filter(None, options))
    return {"spark.driver.defaultJavaOptions": words} if words else {}
