"""Ctrl-C while Spark starts and works, and SIGTERM, which takes its road."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_SECONDS = 0.02
_ANSWER_SECONDS = 30.0
"""That an interrupt waits for Java's answer."""
_LATE_SECONDS = 1.0
"""In which a further signal is a reminder that comes late, and no second interrupt."""


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


@contextmanager
def interrupts_between_calls(session: Any) -> Iterator[None]:
    """Let Ctrl-C cancel Spark's jobs, and come between calls of Java instead of in one.

    Pyspark raises KeyboardInterrupt where Python waits for Java's answer. py4j then logs tracebacks and may lose the
    connection, and pyspark makes another error of that: a run that was interrupted would end as one that failed. Here
    jobs are cancelled by another thread, which has its own connection, and the interrupt waits for the answer. Seen
    with pyspark 4.2.0 and py4j 0.10.9.9; it can go once an interrupted ``df.schema`` raises KeyboardInterrupt.

    Args:
        session: whose jobs are cancelled; one of Spark Connect changes nothing, nor does another thread than the main.

    Raises:
        KeyboardInterrupt: if one came, whatever else has come of it.
    """
    handler = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or getattr(handler, "__module__", None) != "pyspark.core.context":
        yield
        return
    interrupted_at: float | None = None
    raised, ended = threading.Event(), False

    def cancel_and_remind() -> None:
        every = round(1 / _SECONDS)
        for reminder in range(round(_ANSWER_SECONDS / _SECONDS) + 1):
            if reminder % every == 0:  # again, since another attempt may have begun
                with suppress(Exception):
                    session.sparkContext.cancelAllJobs()
            if raised.wait(_SECONDS):
                return
            os.kill(os.getpid(), signal.SIGINT)

    reminders = threading.Thread(target=cancel_and_remind, daemon=True)

    def interrupt(_: int, frame: FrameType | None) -> None:
        nonlocal interrupted_at
        now = time.monotonic()
        if interrupted_at is None:
            interrupted_at = now
            reminders.start()
        seconds = now - interrupted_at
        is_late = ended or (raised.is_set() and seconds < _LATE_SECONDS)
        waits = not raised.is_set() and seconds < _ANSWER_SECONDS and _in_a_call(frame)
        if not is_late and not waits:
            interrupted_at = now
            raised.set()
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        if interrupted_at is not None:
            raise KeyboardInterrupt from error
        raise
    finally:
        ended = True
        raised.set()
        if reminders.ident is not None:
            reminders.join(_LATE_SECONDS)
        signal.signal(signal.SIGINT, handler)
    if interrupted_at is not None:
        raise KeyboardInterrupt


def _in_a_call(frame: FrameType | None) -> bool:
    """Whether a frame stands in a call of Java, or in Python's import code."""
    while frame is not None:
        file = frame.f_code.co_filename
        if f"{os.sep}py4j{os.sep}" in file or file.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
