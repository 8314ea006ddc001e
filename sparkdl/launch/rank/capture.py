"""The output of a rank, line by line, whoever prints it: Python, C++ libraries, child processes."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

TAIL_LINES = 100
_MAX_LINE_CHARACTERS = 4000
_PATIENCE_SECONDS = 0.5


class LineSplitter:
    r"""Cuts a stream of bytes into lines; of a progress bar that redraws itself with ``\r``, the last state."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Take in ``data``; return the lines it completed."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > 4 * _MAX_LINE_CHARACTERS:
            lines += [self._rest]
            self._rest = b""
        return [_shortened(line) for line in lines]

    def flush(self) -> list[str]:
        """Return what stands without a line end, and forget it."""
        remainder, self._rest = self._rest, b""
        return [_shortened(remainder)] if remainder.strip() else []


class RateLimit:
    """A bucket of bytes: a burst passes whole, an endless flood is cut to a trickle and counted.

    Args:
        burst_bytes: what passes at once.
        bytes_per_second: what passes for ever.
    """

    def __init__(self, burst_bytes: float, bytes_per_second: float) -> None:
        self._capacity = self._level = burst_bytes
        self._rate = bytes_per_second
        self._last = time.monotonic()
        self._dropped = 0

    def pass_through(self, lines: list[str]) -> list[str]:
        """Return those of ``lines`` that may pass, and a line of their own for those that did not."""
        now = time.monotonic()
        self._level = min(self._capacity, self._level + (now - self._last) * self._rate)
        self._last = now
        passed: list[str] = []
        for line in lines:
            if self._level >= len(line) + 1:
                self._level -= len(line) + 1
                if self._dropped:
                    passed.append(f"({self._dropped:,} lines dropped: more than {self._rate / 1024:.0f} KiB/s)")
                    self._dropped = 0
                passed.append(line)
            else:
                self._dropped += 1
        return passed


class Capture:
    """Reads descriptors 1 and 2 of this process while it is active; a context manager.

    Complete lines are handed out within half a second, a bounded number of bytes of them; the last 100 stay in memory
    for the day the rank fails.

    Args:
        on_lines: called on a thread of its own with the lines that may travel, and whence: ``"stdout"``, ``"stderr"``,
            or ``""`` where the two are not told apart.
        keep: whether the original descriptors get everything as well (an executor's own log file).
        limit: what bounds the lines that travel; the tail is kept whatever it drops.
        apart: whether lines of the two descriptors are told apart; their order among each other is then that of
            arrival, otherwise exact.
    """

    def __init__(
        self, on_lines: Callable[[list[str], str], None], *, keep: bool, limit: RateLimit, apart: bool = False
    ) -> None:
        self._on_lines = on_lines
        self._keep = keep
        self._limit = limit
        self._apart = apart
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    def __enter__(self) -> Capture:
        self._streams = sys.stdout, sys.stderr
        _flush()
        self._saved = os.dup(1), os.dup(2)
        self._wake, self._waker = os.pipe()
        self._sources: dict[int, str] = {}
        for name, descriptors in {"stdout": (1,), "stderr": (2,)}.items() if self._apart else [("", (1, 2))]:
            source, write_end = os.pipe()
            os.set_blocking(source, False)
            self._sources[source] = name
            for descriptor in descriptors:
                os.dup2(write_end, descriptor)
            os.close(write_end)
        # Streams over the bare descriptors 1 and 2: a logging handler that keeps one still works after the block.
        sys.stdout, sys.stderr = (_line_buffered(descriptor) for descriptor in (1, 2))
        # The stack of a crash must not go into a pipe that nobody reads any more; Spark may have a place for it.
        self._shows_crashes = not faulthandler.is_enabled()
        if self._shows_crashes:
            faulthandler.enable(self._saved[1])
        self._reader = threading.Thread(target=self._read, name="sparkdl-capture", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        _flush()
        if self._shows_crashes:
            faulthandler.disable()
        sys.stdout, sys.stderr = self._streams
        for descriptor, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, descriptor)
        os.close(self._waker)
        self._reader.join()
        for descriptor in (*self._saved, *self._sources, self._wake):
            os.close(descriptor)

    def _read(self) -> None:
        splitters = {source: LineSplitter() for source in self._sources}
        for source, data in self._chunks():
            if data and self._keep:
                with contextlib.suppress(OSError):
                    os.write(self._saved[1], data)
            lines = splitters[source].feed(data) if data else splitters[source].flush()
            if lines:
                self.tail.extend(lines)
                self._on_lines(self._limit.pass_through(lines), self._sources[source])

    def _chunks(self) -> Iterator[tuple[int, bytes]]:
        """Yield what arrives and whence; an empty chunk of each after half a second of silence and at the end."""
        poll = select.poll()
        for descriptor in (*self._sources, self._wake):
            poll.register(descriptor, select.POLLIN)
        ending = silent = False
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(None if silent else _PATIENCE_SECONDS * 1000)}
            ending = ending or self._wake in ready
            silent = True
            for source in (
                self._sources if ending or not ready else [stream for stream in self._sources if stream in ready]
            ):
                try:
                    data = os.read(source, 1 << 16) if ready else b""
                except BlockingIOError:
                    data = b""
                yield source, data
                silent = silent and not data
            if ending and silent:
                return


def _shortened(line: bytes) -> str:
    text = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")
    return text if len(text) <= _MAX_LINE_CHARACTERS else text[:_MAX_LINE_CHARACTERS] + "..."


def _line_buffered(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL(None).fflush(None)
