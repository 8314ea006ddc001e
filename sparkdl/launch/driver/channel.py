"""The driver's end of the channel: one port per run, on one interface, one thread per connection."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkdl.errors import ClusterError
from sparkdl.launch.rank.link import ConnectionInfo
from sparkdl.launch.store import KeyValueStore, Service
from sparkdl.launch.wire import Connection, Listener, WireError, authenticated

_QUEUE_REPORTS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Something that happened.

    Attributes:
        kind: what a rank sent (``registration``, ``log``, ``event``, ``beat``, ``result``, ``error``, ``stopped``,
            ``where``), or ``lost`` when its connection ended without a good-bye, ``silent`` when nothing went through
            it, or what the launcher put in (``ended``).
        slot: which slot it is about, None for the launcher's own reports.
        time: when it arrived, by the driver's monotonic clock, seconds.
        message: the fields that were sent.
        parts: of the value that came with it.
    """

    kind: str
    slot: int | None = None
    time: float = field(default_factory=time.monotonic)
    message: Mapping[str, Any] = field(default_factory=dict)
    parts: list[bytearray] = field(default_factory=list)


class Channel:
    """Listens on one interface for the ranks of one run; a context manager that leaves nothing behind.

    The store that the ranks meet at is held here too, on the same port.

    Reports come out of one bounded queue, in the order of the driver's clock.

    Args:
        bind_host: address to listen on.
        num_proc: how many ranks there should be.
        silence_seconds: a rank that takes in nothing for this long counts as dead, and one that says nothing can.
        preload: modules that ranks may import while the others are on their way.
        services: what each rank enters while its function runs.
        interface: that the ranks talk over; None leaves it to the route.
    """

    def __init__(
        self,
        bind_host: str,
        num_proc: int,
        silence_seconds: float = 60.0,
        *,
        preload: Sequence[str] = (),
        services: Sequence[Service] = (),
        interface: str | None = None,
    ) -> None:
        secret = secrets.token_bytes(32)
        self._silence_seconds = silence_seconds
        self._reports: queue.Queue[Report] = queue.Queue(_QUEUE_REPORTS)
        self._connections: dict[int, Connection] = {}
        # When each slot was last heard of: kept here, so that a slow reader of the reports takes nobody for dead.
        self._heard: dict[int, float] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._store = KeyValueStore()
        self._listener = Listener(bind_host, authenticated(secret, silence_seconds), self._serve, backlog=num_proc)
        self.connection_info = ConnectionInfo(
            address=self._listener.address,
            secret=secret,
            num_proc=num_proc,
            preload=tuple(preload),
            services=tuple(services),
            interface=interface,
            beat_seconds=min(5.0, silence_seconds / 4),
        )

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next(self, timeout_seconds: float) -> Report | None:
        """Return the next report, or None when nothing happened for ``timeout_seconds``."""
        try:
            return self._reports.get(timeout=max(timeout_seconds, 0.0))
        except queue.Empty:
            return None

    def put(self, report: Report) -> None:
        """Add a report of the driver's own; gives up when the channel closes."""
        while not self._closing:
            try:
                self._reports.put(report, timeout=0.1)
            except queue.Full:
                continue
            break

    def send(self, slot: int, message: Mapping[str, Any], parts: list[memoryview] | None = None) -> None:
        """Send to the rank in ``slot``; one that is gone, or takes in nothing, is reported as lost or silent."""
        connection = self._connections.get(slot)
        if connection is None:
            return
        try:
            if parts is None:
                connection.send(message)
            else:
                connection.send_value(message, parts)
        except BlockingIOError:
            why = f"took in nothing for {self._silence_seconds:g} s"
            self.put(Report(kind="silent", slot=slot, message={"why": why}))
            connection.close()
        except OSError:
            pass  # Its own thread reports the loss.

    def hang_up(self, slot: int) -> None:
        """Expect nothing more of the rank in ``slot``; it ends when it notices."""
        with self._lock:
            connection = self._connections.pop(slot, None)
        if connection is not None:
            connection.close()

    def stop_all(self, grace_seconds: float) -> None:
        """Tell every rank that is still connected to end."""
        for slot in list(self._connections):
            self.send(slot, {"kind": "stop", "grace_seconds": grace_seconds})

    def silence(self, slot: int) -> float:
        """How long nothing has come from the rank in ``slot``, seconds."""
        return time.monotonic() - self._heard.get(slot, time.monotonic())

    def hears(self, slot: int) -> bool:
        """Whether the rank in ``slot`` is connected now."""
        return slot in self._connections

    @property
    def connected(self) -> int:
        """How many ranks are connected now."""
        return len(self._connections)

    def close(self) -> None:
        """Hang up on everybody, forget the store, and wait for the threads; idempotent."""
        self._closing = True
        self._store.close()
        self._listener.close()

    def _serve(self, connection: Connection) -> None:
        try:
            message, _ = connection.receive()
            if message["kind"] == "store":
                self._store.serve(connection, message)
                return
            slot = int(message["slot"])
        except (OSError, ClusterError, KeyError, ValueError):
            return  # It holds the secret, and is no rank: one that was ended as it began to speak.
        with self._lock:
            self._connections[slot] = connection
            self._heard[slot] = time.monotonic()
        self.put(Report(kind="registration", slot=slot, message=message))
        try:
            self._listen(slot, connection)
        except (OSError, WireError) as error:
            self.put(Report(kind="lost", slot=slot, message={"why": str(error)}))
        finally:
            with self._lock:
                self._connections.pop(slot, None)

    def _listen(self, slot: int, connection: Connection) -> None:
        while True:
            message, parts = connection.receive()
            self._heard[slot] = time.monotonic()
            if message["kind"] == "leaving":
                connection.send({"kind": "bye"})
                self.put(Report(kind="left", slot=slot))
                return
            self.put(Report(kind=str(message["kind"]), slot=slot, message=message, parts=parts))
