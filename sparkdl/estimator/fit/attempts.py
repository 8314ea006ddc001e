"""Runs the ranks of a fit, and after a failure runs them again.

Enters: a ``FitJob`` and how many ranks, failures and seconds there may be. Leaves: the ranks' reports. A new attempt
goes on from the last checkpoint, on fewer ranks if slots are gone.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from sparkdl.errors import (
    CheckpointError,
    ClusterError,
    IntegrityError,
    LaunchTimeoutError,
    PreflightError,
    RankFailedError,
    SparkdlError,
    StorageError,
    UnreachableError,
)
from sparkdl.estimator.fit import settings
from sparkdl.estimator.fit.rank import FitJob, train_on_rank
from sparkdl.estimator.params.params import CheckedParams
from sparkdl.launch.driver.slots import hold_slots, slots_of
from sparkdl.observe import logger
from sparkdl.progress import Progress
from sparkdl.runner import run
from sparkdl.worker import RankReport

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["is_transient", "run_ranks"]

_REPLACEMENT_SECONDS = 10.0
"""How long a cluster has for a new executor before a fit goes on with fewer ranks."""

_TRANSIENT = (RankFailedError, LaunchTimeoutError, UnreachableError, StorageError, CheckpointError)
_USERS_BUGS = ("TypeError", "AttributeError", "NameError", "ImportError", "ModuleNotFoundError", "NotImplementedError")


def run_ranks(
    params: CheckedParams, job: FitJob, spark: SparkSession, num_proc: int, run_id: str
) -> tuple[list[RankReport], int]:
    """Run the ranks; return their reports and how many they were in the last attempt.

    Raises:
        SparkdlError: of the last attempt that max_failures allows, or of the first that would fail again.
    """
    options = settings.launch_settings(params)
    timeout = options["config"].start_timeout_seconds
    failures, least = params.getOrDefault("max_failures"), params.getOrDefault("min_num_proc") or num_proc
    if options["backend"] == "auto" and num_proc == 1:
        options["backend"] = "torch"  # the cheapest meeting place where there is nobody to meet
    ranks = num_proc
    for attempt in range(failures + 1):
        try:
            with hold_slots(spark, ranks, timeout), _progress(params, run_id) as progress:
                made = run(train_on_rank, (job,), num_proc=ranks, spark=spark, on_event=progress, **options)
            return [report.open(share=True) for report in made], ranks
        except SparkdlError as error:
            if attempt == failures or not is_transient(error):
                raise
            headline = str(error).splitlines()[0]
            logger.warning("attempt %d of %d failed (%s): trying again", attempt + 1, failures + 1, headline)
            ranks = _ranks_left(spark, num_proc, least, timeout)
    raise ClusterError("unreachable: the last attempt returns or raises")


def is_transient(error: SparkdlError) -> bool:
    """Whether another attempt may go better: not where the rows, the settings or the user's code are at fault."""
    if isinstance(error, RankFailedError):
        return error.cause.partition(":")[0] not in _USERS_BUGS
    return isinstance(error, _TRANSIENT) and not isinstance(error, IntegrityError)


def _progress(params: CheckedParams, run_id: str) -> Progress:
    if not params.getOrDefault("verbose"):
        return Progress("off")
    if threading.current_thread() is threading.main_thread():
        return Progress()
    return Progress("lines", name=run_id)  # fits side by side, as of a CrossValidator, would draw over each other's bar


def _ranks_left(spark: SparkSession, wanted: int, least: int, timeout: float) -> int:
    """How many ranks the next attempt can have; an executor that was lost gets a while to come back."""
    began = time.monotonic()
    while (slots := slots_of(spark)) < wanted and not str(spark.conf.get("spark.master", "")).startswith("local["):
        waited = time.monotonic() - began
        if waited > timeout or (slots >= least and waited > _REPLACEMENT_SECONDS):
            break
        time.sleep(0.5)
    if slots < least:
        raise PreflightError(f"{slots} slots are left for at least {least} ranks: add workers or lower min_num_proc")
    return min(wanted, slots)
