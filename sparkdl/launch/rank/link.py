"""The rank's end of the channel: it reports to the driver, and leaves when the driver is gone or says stop."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sparkdl.errors import ClusterError, UnreachableError
from sparkdl.launch.rank.process_memory import look
from sparkdl.launch.store import Service
from sparkdl.launch.wire import connect

EXIT_DRIVER_GONE = 75
EXIT_STOPPED = 76
_GOODBYE_SECONDS = 20.0
_LOOK_SECONDS = 0.25
_TOLD_SHARE = 1 / 50


class Stopped(BaseException):
    """The driver ended the run; no ``except Exception`` of a user's function holds it up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionInfo:
    """What a rank needs to reach its driver.

    Attributes:
        address: host and port of the driver's channel.
        secret: of this run alone; whoever holds it may take part.
        num_proc: how many ranks there should be.
        preload: modules to import while the others are on their way.
        services: what each rank enters while its function runs.
        interface: that the ranks talk over; None leaves it to the route.
        beat_seconds: between two signs of life.
    """

    address: tuple[str, int]
    secret: bytes = field(repr=False)
    num_proc: int
    preload: tuple[str, ...] = ()
    services: tuple[Service, ...] = ()
    interface: str | None = None
    beat_seconds: float = 5.0


class Link:
    """A rank's connection to the driver.

    Raises:
        UnreachableError: the driver cannot be reached.
    """

    def __init__(self, info: ConnectionInfo) -> None:
        host, port = info.address
        self._beat_seconds = info.beat_seconds
        try:
            self._connection = connect(info.address, info.secret)
        except OSError as error:
            raise UnreachableError(
                f"{socket.gethostname()} does not reach the driver at {host}:{port} ({error}): set driver_host, or "
                f"spark.driver.host, to an address of the driver that executors reach"
            ) from error
        self._plan: tuple[dict[str, Any], list[bytearray]] | None = None
        self._planned = threading.Event()
        self._released = threading.Event()
        self._state = threading.Lock()
        self._running = self._leaving = self.stopped = False
        self._at_work = threading.get_ident()
        threading.Thread(target=self._listen, name="sparkdl-link-listen", daemon=True).start()

    def register(self, registration: Mapping[str, Any]) -> None:
        """Send the first message, by which the driver knows this rank, and signs of life from now on."""
        self.send(registration)
        threading.Thread(target=self._beat, name="sparkdl-link-beat", daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send ``message``; a driver that is gone ends this process elsewhere, so a failed send is not an error."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def send_value(self, message: Mapping[str, Any], parts: list[memoryview]) -> None:
        """Send ``message`` with a value that ``dump_value`` took apart."""
        with contextlib.suppress(OSError):
            self._connection.send_value(message, parts)

    def wait_for_plan(self) -> tuple[dict[str, Any], list[bytearray]]:
        """Wait until the driver has heard of every rank; return its launch plan and the function's parts.

        Raises:
            Stopped: the driver ended the run instead, or is gone.
        """
        self._planned.wait()
        if self._plan is None:
            raise Stopped
        return self._plan

    @contextlib.contextmanager
    def interruptible(self) -> Any:
        """Let a stop raise KeyboardInterrupt here, within the block, and end the process after its grace.

        Raises:
            Stopped: the driver ended the run.
        """
        in_main = threading.current_thread() is threading.main_thread()
        self._at_work = threading.get_ident()
        try:
            with self._state:
                if self.stopped:
                    raise Stopped
                self._running = in_main
            yield
        finally:
            with self._state:
                self._running = False
        if self.stopped:
            raise Stopped

    def leave(self) -> None:
        """Wait until the driver has read everything, then hang up."""
        self._leaving = True
        self.send({"kind": "leaving"})
        self._released.wait(_GOODBYE_SECONDS)
        self._connection.close()

    def _listen(self) -> None:
        try:
            while True:
                message, parts = self._connection.receive()
                if message["kind"] == "go":
                    self._plan = message, parts
                    self._planned.set()
                elif message["kind"] == "bye":
                    return
                elif message["kind"] == "where":
                    self.send({"kind": "where", "traceback": stack_of(self._at_work), "memory": look()})
                elif message["kind"] == "stop":
                    self._stop(float(message["grace_seconds"]))
        except (OSError, ClusterError):
            if not self._leaving and self._planned.is_set():
                _leave_now(EXIT_DRIVER_GONE)
        finally:
            self._leaving = True
            for event in (self._planned, self._released):
                event.set()

    def _stop(self, grace_seconds: float) -> None:
        with self._state:
            self.stopped = True
            if self._running:
                # A real signal: unlike an interrupt set from Python, it also wakes a sleeping system call.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        self._planned.set()
        threading.Thread(target=self._end, args=(grace_seconds,), daemon=True).start()

    def _end(self, grace_seconds: float) -> None:
        if not self._released.wait(grace_seconds):
            _leave_now(EXIT_STOPPED)

    def _beat(self) -> None:
        """Give signs of life, more often while memory comes and goes: the last one before a kill should say why."""
        reported: dict[str, int] = {}
        next_beat = 0.0
        while not self._released.wait(min(self._beat_seconds, _LOOK_SECONDS)):
            memory = look()
            moved = abs(memory.get("free", 0) - reported.get("free", 0)) > memory.get("limit", 0) * _TOLD_SHARE
            if moved or time.monotonic() >= next_beat:
                self.send({"kind": "beat", "time": time.time(), "memory": memory, "where": stack_of(self._at_work)})
                reported, next_beat = memory, time.monotonic() + self._beat_seconds


def _leave_now(code: int) -> None:
    """End this process and whatever its function has started, without another word."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(code)


def stack_of(thread: int) -> str:
    """Return the stack of ``thread``, which runs a rank's function, as far as it is the function's own."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame is not None else []
    ours = [number for number, entry in enumerate(stack) if Path(entry.filename).parent == Path(__file__).parent]
    return "".join(traceback.format_list(stack[ours[-1] + 1 if ours else 0 :]))
