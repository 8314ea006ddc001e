"""A port that lets in whoever proves to hold the secret of the run, and is not filled by those who do not.

Given an address, a secret, and what to do with a connection, it serves authenticated connections, each on a thread.

Connections that have proved nothing yet are counted apart: at most 64, the oldest dropped for a new one, each with ten
seconds for its handshake of 64 bytes. A rank that is dropped in a crowd comes again (``wire.connect``).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

from sparkdl.errors import ClusterError
from sparkdl.launch.wire import Connection

__all__ = ["MAX_UNPROVEN", "Listener"]

MAX_UNPROVEN = 64
_RETRY_SECONDS = 0.05


class Listener:
    """Listens on one interface until it is closed.

    Args:
        bind_host: address to listen on.
        secret: of the run.
        serve: called on a thread of its own with every authenticated connection, which is closed when it returns.
        backlog: connections that the kernel may hold until they are accepted.
        send_seconds: after which a send to an end that takes nothing in fails with BlockingIOError.

    Attributes:
        address: host and port.

    Raises:
        ClusterError: the address cannot be bound.
    """

    def __init__(
        self,
        bind_host: str,
        secret: bytes,
        serve: Callable[[Connection], None],
        *,
        backlog: int = 128,
        send_seconds: float = 60.0,
    ) -> None:
        family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
        try:
            self._socket = socket.create_server((bind_host, 0), family=family, backlog=max(128, backlog))
        except OSError as error:
            raise ClusterError(
                f"the driver cannot listen on {bind_host} ({error}): set driver_host to one of this host's addresses"
            ) from error
        self.address = (bind_host, int(self._socket.getsockname()[1]))
        self._secret, self._serve, self._send_seconds = secret, serve, send_seconds
        self._lock = threading.Lock()
        self._closing = False
        self._unproven: dict[int, socket.socket] = {}  # in the order of their arrival
        self._connections: set[Connection] = set()
        self._threads = [threading.Thread(target=self._accept, name="sparkdl-channel", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Hang up on everybody and wait for the threads; idempotent."""
        with self._lock:
            self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            connections = list(self._connections)
            for sock in self._unproven.values():
                _drop(sock)
        for connection in connections:
            connection.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=15)

    def _accept(self) -> None:
        number = 0
        while not self._closing:
            try:
                sock, _ = self._socket.accept()
            except OSError:  # closed; or out of descriptors, which passes
                time.sleep(0 if self._closing else _RETRY_SECONDS)
                continue
            number += 1
            with self._lock:
                if len(self._unproven) >= MAX_UNPROVEN:
                    _drop(self._unproven.pop(next(iter(self._unproven))))
                self._unproven[number] = sock
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(target=self._admit, args=(number, sock), name="sparkdl-channel-end", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _admit(self, number: int, sock: socket.socket) -> None:
        connection = self._proven(sock)
        with self._lock:
            self._unproven.pop(number, None)
            if connection is not None:
                self._connections.add(connection)
        if connection is None:
            sock.close()
            return
        try:
            if not self._closing:
                self._serve(connection)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _proven(self, sock: socket.socket) -> Connection | None:
        try:
            # An end that is frozen fills its buffers: without a limit, whoever sends to it would wait with it.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(self._send_seconds))
            return Connection(sock, self._secret, server=True)
        except (OSError, ClusterError):
            return None  # Nothing of what it sent was used.


def _drop(sock: socket.socket) -> None:
    """Wake the thread that waits for ``sock``, which then closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
