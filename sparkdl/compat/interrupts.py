"""Ctrl-C while Spark starts, and SIGTERM, which takes its road."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SECONDS = 0.02


@contextmanager
def termination_interrupts() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, and neither while Python's own import code runs; for the main thread alone.

    Python drops an exception that a signal raises inside of its import machinery's callbacks, and can leave the lock of
    all imports taken: the run goes on, or hangs. A signal that comes there waits some milliseconds. Seen with Python
    3.11; it can go once importlib holds no lock when it is interrupted.

    Raises:
        KeyboardInterrupt: when either comes.
    """

    def interrupt(_: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGINT)  # by now it may be pyspark's, which ends jobs first
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    ours = {signal.SIGTERM: _outside_imports(interrupt)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, or somebody else's
        ours[signal.SIGINT] = _outside_imports(signal.default_int_handler)
    handlers = {number: signal.signal(number, handler) for number, handler in ours.items()}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is ours[number]:  # pyspark leaves its own
                signal.signal(number, handler)


def _outside_imports(does: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
            again = threading.Timer(_SECONDS, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
        else:
            does(number, frame)

    return handle


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block; outside of the main thread, which alone gets it, nothing changes.

    pyspark deletes the folder that its JVM answers through when it is interrupted before the answer; the JVM then fails
    to answer, and stays behind without a parent. An interrupt waits here until the session is there, some seconds, and
    leaves no JVM of 200 MiB that nobody ends. Seen with pyspark 4.2.0; it can go once an interrupted ``getOrCreate``
    leaves no process.

    Raises:
        KeyboardInterrupt: when the block is done, if one came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals: list[int] = []

    def note(number: int, _: Any) -> None:
        signals.append(number)

    handler = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is note:  # else pyspark has set its own, which ends jobs first
            signal.signal(signal.SIGINT, handler)
    if signals:
        raise KeyboardInterrupt
