"""Ctrl-C while Spark starts.

What: pyspark deletes the folder that its JVM answers through when it is interrupted before the answer; the JVM then
fails to answer, and stays behind without a parent. An interrupt waits here until the session is there, some seconds.
Seen with: pyspark 4.2.0. Gain: no JVM of 200 MiB that nobody ends. Can go: once an interrupted ``getOrCreate`` leaves
no process.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["interrupts_wait"]


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block; outside of the main thread, which alone gets it, nothing changes.

    Raises:
        KeyboardInterrupt: when the block is done, if one came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _: Any) -> None:
        came.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is note:  # else pyspark has set its own, which ends jobs first
            signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
