"""Fits and other work of one session at once: how many have room, and how all end when one of them fails."""

from __future__ import annotations

import contextvars
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from sparkdl.errors import SparkdlError
from sparkdl.launch.driver.slots import slots_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Value = TypeVar("Value")


def room_for_fits(spark: SparkSession, ranks: int, most_slots: int | None = None) -> int:
    """How many fits of so many ranks each run at once; one in any case.

    Args:
        spark: the session.
        ranks: of one fit.
        most_slots: that they may take together; None takes all there are.
    """
    slots = slots_of(spark)
    return max(1, min(slots, most_slots or slots) // ranks)


def run_side_by_side(tasks: Sequence[Callable[[], Value]], spark: SparkSession, width: int) -> list[Value]:
    """Run tasks, ``width`` at a time; return what they return, in their order.

    Raises:
        BaseException: the first of a task, in their order. Once one has failed, none begins any more; those that have
            begun end first, but where the user wants it to end now.
    """
    if width <= 1:
        return [task() for task in tasks]
    tag, has_failed = f"sparkdl-fits-{uuid.uuid4().hex}", threading.Event()

    def tagged(task: Callable[[], Value]) -> Value:
        if has_failed.is_set():
            raise CancelledError
        spark.addTag(tag)
        try:
            return task()
        except BaseException:
            has_failed.set()
            raise
        finally:
            spark.removeTag(tag)

    pool, futures = ThreadPoolExecutor(width, thread_name_prefix="side-by-side"), list[Future[Value]]()
    try:
        futures += [pool.submit(contextvars.copy_context().run, tagged, task) for task in tasks]
        return [future.result() for future in futures]
    except BaseException as error:
        for future in futures:
            future.cancel()
        if not isinstance(error, SparkdlError):  # the user wants it to end now
            spark.interruptTag(tag)
        raise
    finally:
        pool.shutdown(wait=True)
