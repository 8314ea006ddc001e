"""The cluster's task slots, shared by launches that run at the same time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from sparkdl.config import LaunchConfig
from sparkdl.errors import LaunchTimeoutError, PreflightError
from sparkdl.launch.driver import barrier

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SlotGate:
    """A fair semaphore over the task slots of one Spark application.

    First come, first served. Spark itself holds a barrier stage back until all its tasks fit, but lets small stages
    overtake it for ever, and a launch that waits there counts as one that does not start. So fits of one driver wait
    here instead, where waiting costs nothing.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._taken = 0
        self._queue: deque[object] = deque()

    @contextmanager
    def hold(self, count: int, *, total: int, timeout: float | None = None) -> Iterator[None]:
        """Hold ``count`` of ``total`` slots for the block.

        Args:
            count: slots needed; more than ``total`` waits for all others to leave, and the launch says what is wrong.
            total: slots of the cluster now.
            timeout: seconds to wait; None waits for ever.

        Raises:
            LaunchTimeoutError: they did not become free in time.
        """
        count = min(count, total)
        me = object()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            self._queue.append(me)
            try:
                while self._queue[0] is not me or self._taken + count > total:
                    remaining_seconds = None if deadline is None else deadline - time.monotonic()
                    if remaining_seconds is not None and remaining_seconds <= 0:
                        raise LaunchTimeoutError(
                            f"{count} of {total} slots did not become free in {timeout:g} seconds, {self._taken} are "
                            "held by other fits: raise timeout, or lower num_proc or the parallelism of the search"
                        )
                    self._condition.wait(remaining_seconds)
                self._taken += count
            finally:
                self._queue.remove(me)
                self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._taken -= count
                self._condition.notify_all()


_gates: dict[str, SlotGate] = {}
_lock = threading.Lock()


def gate_of(application: str) -> SlotGate:
    """The one gate of a Spark application, by its id."""
    with _lock:
        return _gates.setdefault(application, SlotGate())


def slots_of(spark: SparkSession) -> int:
    """How many ranks the cluster can run at once.

    Raises:
        PreflightError: the session does not tell.
    """
    return barrier.slots(spark, LaunchConfig())


def hold_slots(spark: SparkSession, count: int, timeout: float | None = None) -> AbstractContextManager[None]:
    """Hold ``count`` slots of the cluster for a block; see ``SlotGate.hold``."""
    try:
        total = slots_of(spark)
    except PreflightError:  # Spark Connect does not always tell: then one at a time
        total = count
    if count > total:
        return nullcontext()  # waiting would not help: the launch refuses it at once
    application = str(spark.conf.get("spark.app.id", "") or spark.conf.get("spark.app.name", "") or "spark")
    return gate_of(application).hold(count, total=total, timeout=timeout)
