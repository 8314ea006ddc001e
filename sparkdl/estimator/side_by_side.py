"""Several fits of one session at once: how many have room, and how all end when one of them fails."""

from __future__ import annotations

import contextvars
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from sparkdl.errors import SparkdlError
from sparkdl.launch.driver.slots import slots_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["room_for_fits", "run_side_by_side"]


def room_for_fits(spark: SparkSession, ranks: int, most_slots: int | None = None) -> int:
    """How many fits of so many ranks each run at once; one in any case.

    Args:
        spark: the session.
        ranks: of one fit.
        most_slots: that they may take together; None takes all there are.
    """
    slots = slots_of(spark)
    return max(1, min(slots, most_slots or slots) // ranks)


def run_side_by_side(tasks: Sequence[Callable[[], None]], spark: SparkSession, width: int) -> None:
    """Run tasks, ``width`` at a time.

    Raises:
        BaseException: the first of a task. Tasks that have begun end first, but where the user wants it to end now.
    """
    if width <= 1:
        for task in tasks:
            task()
        return
    tag = f"sparkdl-fits-{uuid.uuid4().hex}"

    def tagged(task: Callable[[], None]) -> None:
        spark.addTag(tag)
        try:
            task()
        finally:
            spark.removeTag(tag)

    pool, futures = ThreadPoolExecutor(width, thread_name_prefix="trial"), list[Future[None]]()
    try:
        futures += [pool.submit(contextvars.copy_context().run, tagged, task) for task in tasks]
        for future in futures:
            future.result()
    except BaseException as error:
        for future in futures:
            future.cancel()
        if not isinstance(error, SparkdlError):  # the user wants it to end now
            spark.interruptTag(tag)
        raise
    finally:
        pool.shutdown(wait=True)
