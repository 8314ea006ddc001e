"""A fit's or a function's further attempts after a failure, and Horovod's ``run_elastic``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TextIO, TypeVar

from pyspark.sql import SparkSession

from sparkdl.compat.spark_master import is_local
from sparkdl.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    IntegrityError,
    LaunchTimeoutError,
    NonFiniteLossError,
    PreflightError,
    RankFailedError,
    SchemaError,
    SparkdlError,
    StorageError,
    UnreachableError,
    first_line,
)
from sparkdl.launch.driver.slots import hold_slots, slots_of
from sparkdl.observe import logger
from sparkdl.runner import launch_config, run

T = TypeVar("T")

_REPLACEMENT_SECONDS = 10.0
"""How long a cluster has for a new executor before a fit goes on with fewer ranks."""

_TRANSIENT = (RankFailedError, LaunchTimeoutError, UnreachableError, StorageError, CheckpointError)
_OF_SETTINGS = ("ValueError", "OverflowError", "IndexError", "KeyError", "ZeroDivisionError", "AssertionError")
_USERS_BUGS = ("TypeError", "AttributeError", "NameError", "ImportError", "ModuleNotFoundError", "NotImplementedError")


def run_elastic(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Collection[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[T]:
    """Run ``fn`` as ``sparkdl.run`` does, and where a rank fails again, with as many ranks as there are slots by then.

    Unlike Horovod's, each new attempt calls ``fn`` from its beginning on every rank: what ``hvd.elastic.State`` kept in
    memory is gone, and what ``fn`` has saved itself is there. ``TorchEstimator(max_failures=...)`` goes on from its
    checkpoints by itself. Ranks are not added while ``fn`` runs.

    Args:
        fn: the function; ``@hvd.elastic.run`` inside it works.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks of the first attempt; None takes all task slots, or ``max_num_proc`` of them.
        min_num_proc: least number of a later one; ``num_proc`` by default.
        max_num_proc: greatest number of a later one; ``num_proc`` by default.
        start_timeout: as in ``run``, as are all that are not named here.
        elastic_timeout: how long an attempt waits for ``min_num_proc`` slots, seconds; None takes
            HOROVOD_ELASTIC_TIMEOUT, or 600.
        reset_limit: failed attempts after which the next failure is raised; None is 3, as Spark allows a task.
        env: as in ``run``.
        stdout: as in ``run``.
        stderr: as in ``run``.
        verbose: as in ``run``.
        nics: as in ``run``.
        prefix_output_with_timestamp: as in ``run``.
        min_np: Horovod's old name of ``min_num_proc``.
        max_np: Horovod's old name of ``max_num_proc``.

    Raises:
        ConfigError: a number is none, or the numbers of ranks contradict each other.
        SparkdlError: as ``run``, of the last attempt; at once what would fail again, such as a ``TypeError`` in ``fn``.
    """
    counts = {"num_proc": num_proc, "min_num_proc": min_num_proc, "max_num_proc": max_num_proc}
    counts |= {"min_np": min_np, "max_np": max_np}
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise ConfigError(f"{name}={count!r} is no number of ranks: give a whole number of at least 1, or None")
    for name, old_name in (("min_num_proc", "min_np"), ("max_num_proc", "max_np")):
        if counts[name] is not None and counts[old_name] is not None:
            raise ConfigError(
                f"{name}={counts[name]} and {old_name}={counts[old_name]} name one thing: drop {old_name}"
            )
    if isinstance(reset_limit, bool) or (
        reset_limit is not None and not (isinstance(reset_limit, int) and reset_limit >= 0)
    ):
        raise ConfigError(
            f"reset_limit={reset_limit!r} is no number of attempts: give 0 or more, or leave it out for 3"
        )
    timeout = _elastic_timeout(elastic_timeout)
    spark = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
    slots, limit = slots_of(spark), max_num_proc or max_np
    ranks = num_proc or min(slots, limit or slots)
    least, most = min_num_proc or min_np or ranks, limit or ranks
    if ranks > most:
        raise ConfigError(f"num_proc={ranks} is above max_num_proc={most}: correct one of them")
    if least > ranks:
        first = f"num_proc={num_proc}" if num_proc else f"the {ranks} ranks that there are slots for"
        raise ConfigError(f"min_num_proc={least} is above {first}: lower it, or begin with more ranks")
    config = launch_config(
        start_timeout=start_timeout,
        env=env,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose,
        nics=nics,
        prefix_output_with_timestamp=prefix_output_with_timestamp,
    )

    def attempt(ranks: int) -> list[T]:
        with hold_slots(spark, ranks, timeout):
            return run(fn, args, kwargs, num_proc=ranks, verbose=verbose, spark=spark, config=config)

    def ranks_left() -> int:
        logger.warning("fn begins anew: what it kept in memory is gone, what it has saved is there")
        return slots_left(spark, most, least, timeout)

    return repeated(attempt, ranks, 3 if reset_limit is None else reset_limit, ranks_left)[0]


def _elastic_timeout(seconds: float | None) -> float:
    """What was given, else HOROVOD_ELASTIC_TIMEOUT, else 600 seconds."""
    text = os.environ.get("HOROVOD_ELASTIC_TIMEOUT")
    name, value = ("elastic_timeout", seconds) if seconds is not None else ("HOROVOD_ELASTIC_TIMEOUT", text or 600)
    try:
        number = 0.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not number > 0:
        raise ConfigError(f"{name}={value!r} is no number of seconds above 0: correct it, or leave it out for 600")
    return number


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
            logger.warning("attempt %d of %d failed (%s): trying again", number + 1, failures + 1, first_line(error))
            ranks = ranks_left()
    return attempt(ranks), ranks


def is_transient(error: SparkdlError) -> bool:
    """Whether another attempt may go better: not where the rows, the settings or the user's code are at fault."""
    if isinstance(error, RankFailedError):
        return error.cause.partition(":")[0] not in _USERS_BUGS
    return isinstance(error, _TRANSIENT) and not isinstance(error, IntegrityError)


def is_of_settings(error: SparkdlError) -> bool:
    """Whether a training failed by what it was set to, so that others of a search may succeed and it will not."""
    if isinstance(error, RankFailedError):
        return not is_transient(error) or error.cause.partition(":")[0] in _OF_SETTINGS
    return isinstance(error, NonFiniteLossError | ConfigError | DataError | SchemaError)


def slots_left(spark: SparkSession, wanted: int, least: int, timeout: float) -> int:
    """Return how many ranks the next attempt can have; an executor that was lost gets a while to come back."""
    began = time.monotonic()
    while (slots := slots_of(spark)) < wanted and not is_local(spark):
        waited = time.monotonic() - began
        if waited > timeout or (slots >= least and waited > _REPLACEMENT_SECONDS):
            break
        time.sleep(0.5)
    if slots < least:
        raise PreflightError(f"{slots} slots are left for at least {least} ranks: add workers or lower min_num_proc")
    return min(wanted, slots)
