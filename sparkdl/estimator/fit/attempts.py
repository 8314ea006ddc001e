"""Runs the ranks of a fit, and after a failure runs them again.

Enters: a ``FitJob`` and how many ranks, failures and seconds there may be. Leaves: the ranks' reports. A new attempt
goes on from the last checkpoint, on fewer ranks if slots are gone.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from sparkdl import observe
from sparkdl.documents.payload import Payload
from sparkdl.errors import (
    CheckpointError,
    ConfigError,
    IntegrityError,
    LaunchTimeoutError,
    PreflightError,
    RankFailedError,
    SparkdlError,
    StorageError,
    UnreachableError,
)
from sparkdl.estimator.fit import settings
from sparkdl.estimator.fit.rank import FitJob, train_in_backend, train_on_rank
from sparkdl.estimator.params.backend import Backend, is_own
from sparkdl.estimator.params.params import CheckedParams
from sparkdl.launch.driver.slots import hold_slots, slots_of
from sparkdl.observe import logger
from sparkdl.progress import Progress
from sparkdl.runner import run
from sparkdl.worker import RankReport

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["is_transient", "repeated", "run_ranks", "slots_left"]

T = TypeVar("T")

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
    backend = params.getOrDefault("backend")
    if options["backend"] == "auto" and num_proc == 1:
        options["backend"] = "torch"  # the cheapest meeting place where there is nobody to meet

    def attempt(ranks: int) -> Sequence[Any]:
        with _progress(params, run_id) as progress:
            if is_own(backend):
                return _run_in(backend, job, ranks, progress)
            with hold_slots(spark, ranks, timeout):
                return run(train_on_rank, (job,), num_proc=ranks, spark=spark, on_event=progress, **options)

    def ranks_left() -> int:
        least = params.getOrDefault("min_num_proc") or num_proc
        return num_proc if is_own(backend) else slots_left(spark, num_proc, least, timeout)

    made, ranks = repeated(attempt, num_proc, params.getOrDefault("max_failures"), ranks_left)
    return [report.open(share=True) for report in made], ranks


def repeated(attempt: Callable[[int], T], num_proc: int, failures: int, ranks_left: Callable[[], int]) -> tuple[T, int]:
    """Call ``attempt(num_proc)``, and after a failure that may pass again, with as many ranks as are left.

    Returns:
        What the attempt that succeeded returned, and its number of ranks.

    Raises:
        SparkdlError: of attempt number ``failures + 1``, or of the first that would fail again.
    """
    ranks = num_proc
    for number in range(failures):
        try:
            return attempt(ranks), ranks
        except SparkdlError as error:
            if not is_transient(error):
                raise
            headline = str(error).splitlines()[0]
            logger.warning("attempt %d of %d failed (%s): trying again", number + 1, failures + 1, headline)
            ranks = ranks_left()
    return attempt(ranks), ranks


def _run_in(backend: Backend, job: FitJob, num_proc: int, progress: Progress) -> Sequence[Any]:
    """Run the ranks where a user's own backend runs them; the events of those in this process are shown.

    Raises:
        ConfigError: it returned something else than the ranks' values.
    """
    before = observe.set_sink(lambda event: progress({"rank": 0, **event}))
    try:
        made = backend.run(train_in_backend, args=(job, num_proc, secrets.token_hex(16)), kwargs={}, env={})
    finally:
        observe.set_sink(before)
    if not isinstance(made, Sequence) or len(made) != num_proc or not all(isinstance(one, Payload) for one in made):
        raise ConfigError(
            f"run() of the backend, a {type(backend).__name__} of {num_proc} processes, returned {str(made)[:200]}: "
            "return what fn returned on each of them, in rank order"
        )
    return made


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


def slots_left(spark: SparkSession, wanted: int, least: int, timeout: float) -> int:
    """Return how many ranks the next attempt can have; an executor that was lost gets a while to come back."""
    began = time.monotonic()
    while (slots := slots_of(spark)) < wanted and not str(spark.conf.get("spark.master", "")).startswith("local["):
        waited = time.monotonic() - began
        if waited > timeout or (slots >= least and waited > _REPLACEMENT_SECONDS):
            break
        time.sleep(0.5)
    if slots < least:
        raise PreflightError(f"{slots} slots are left for at least {least} ranks: add workers or lower min_num_proc")
    return min(wanted, slots)
