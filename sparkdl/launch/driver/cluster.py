"""The cluster as a Spark session tells it, and Spark's errors as ours."""

from __future__ import annotations

import re
import time
from typing import Any

from sparkdl.compat.spark_errors import OTHER_PYTHON, worker_python_error
from sparkdl.compat.spark_master import is_connect, is_local, master_of
from sparkdl.config import LaunchConfig
from sparkdl.errors import CancelledError, ClusterError, PreflightError, UnreachableError, first_line
from sparkdl.launch.addresses import address_of
from sparkdl.launch.driver.preflight import ClusterFacts

_GROWING_SECONDS = 60.0
Session = Any  # A SparkSession, classic or Connect; this module imports neither.


def bind_address(spark: Session, config: LaunchConfig) -> str:
    """Return the one address of this host to listen on: where executors look for the driver.

    Raises:
        ClusterError: the host name does not resolve.
    """
    if config.driver_host:
        return address_of(config.driver_host)
    return "127.0.0.1" if is_local(spark) else address_of(_setting(spark, "spark.driver.host", "localhost"))


def cluster_facts(spark: Session, profile: Any = None, lost_within: float = 0.0) -> ClusterFacts:
    """Ask ``spark`` what the pre-flight check needs to know; milliseconds.

    The session, classic or Connect, is used by its methods alone.

    Args:
        spark: the session.
        profile: the JVM's resource profile that the ranks will run under; None takes the default one.
        lost_within: seconds for which an executor that is gone counts as one that is being replaced.

    Raises:
        PreflightError: the session has been stopped.
    """
    master = master_of(spark) or None
    facts: dict[str, Any] = {
        "master": master,
        # Spark ignores the setting where the driver is the only executor, and cluster-wide defaults often set it.
        "dynamic_allocation": not is_local(spark)
        and _setting(spark, "spark.dynamicAllocation.enabled", "false").lower() == "true",
        "task_cpus": int(_setting(spark, "spark.task.cpus", "1")),
        "task_gpus": float(_setting(spark, "spark.task.resource.gpu.amount", "0")),
    }
    if is_connect(spark):
        match = re.fullmatch(r"local\[(\d+)(?:,\d+)?\]", master or "")
        return ClusterFacts(**facts, slots=int(match[1]) if match else None)
    behind: Any = spark.sparkContext._jsc  # The one place that looks behind the session.
    if behind is None:
        raise PreflightError("this Spark session has been stopped: make a new one with SparkSession.builder")
    scheduler = behind.sc()
    default = scheduler.resourceProfileManager().defaultResourceProfile()
    if profile is not None:
        scheduler.resourceProfileManager().addResourceProfile(profile)
    age = time.time() - float(scheduler.startTime()) / 1000
    executors = int(scheduler.getExecutorMemoryStatus().size())
    return ClusterFacts(
        **facts,
        slots=int(scheduler.maxNumConcurrentTasks(profile or default)),
        total_slots=int(spark.sparkContext.defaultParallelism),
        executors=executors if is_local(spark) else executors - 1,
        may_grow=not is_local(spark) and age < _GROWING_SECONDS,
        lost_slots=0 if is_local(spark) else _lost_slots(scheduler, lost_within),
    )


def _lost_slots(scheduler: Any, within: float) -> int:
    """The slots of executors that Spark removed in the last ``within`` seconds and has not replaced since."""
    summaries = scheduler.statusStore().executorList(False)
    executors = [summaries.apply(index) for index in range(summaries.size())]
    since = (time.time() - within) * 1000
    lost = [
        executor for executor in executors if not executor.isActive() and executor.removeTime().get().getTime() >= since
    ]
    if not lost:
        return 0
    first = min(executor.removeTime().get().getTime() for executor in lost)
    replacements = [executor for executor in executors if executor.isActive() and executor.addTime().getTime() >= first]
    return max(
        0,
        sum(int(executor.maxTasks()) for executor in lost) - sum(int(executor.maxTasks()) for executor in replacements),
    )


def _setting(spark: Session, name: str, default: str) -> str:
    return str(spark.conf.get(name, default))


def as_cluster_error(error: BaseException) -> BaseException:
    """Translate what Spark raised for the job of the ranks; what is not known is told as it is.

    The message is matched, for Spark gives these cases no type of their own.
    """
    if not isinstance(error, Exception) or isinstance(error, ClusterError):
        return error
    text = str(error)
    translated: ClusterError | None = None
    if "SPARK-24819" in text or "more slots than the total number of slots" in text:
        translated = PreflightError(
            "the barrier stage needs more task slots than the cluster has: lower num_proc, or add executors"
        )
    elif "SPARK-24942" in text:
        translated = PreflightError(
            "a barrier stage cannot run with spark.dynamicAllocation.enabled=true: set it to false"
        )
    elif "PYTHON_VERSION_MISMATCH" in text or ("different version" in text and "PYSPARK_PYTHON" in text):
        translated = PreflightError(OTHER_PYTHON)
    elif unreached := re.search(r"sparkdl\.errors\.UnreachableError: (.+)", text):
        translated = UnreachableError(unreached[1].strip())
    elif missing := worker_python_error(error):
        translated = missing
    elif "cancelled" in text.lower() or "OPERATION_CANCELED" in text:
        translated = CancelledError("the Spark job of the ranks was cancelled, and every rank was ended")
    elif "maxResultSize" in text or "OutOfMemoryError" in text:
        translated = ClusterError(
            "the ranks' values exceed Spark's memory or spark.driver.maxResultSize: raise them, return less, or set "
            "driver_host, so that values do not pass through Spark"
        )
    elif type(error).__module__.startswith(("pyspark", "py4j")):
        translated = ClusterError(
            f"Spark could not run the ranks ({first_line(error)[:500]}): its own error is the cause below"
        )
    if translated is None:
        return error
    translated.__cause__ = error
    return translated
