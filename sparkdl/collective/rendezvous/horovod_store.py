"""The store of the run as Horovod's C++ client takes it: HTTP, from this process to itself.

Enters: the store that the launcher offers. Leaves: the variables with which ``hvd.init()`` in this rank finds it.

Horovod's ranks meet at a server that answers PUT, GET and DELETE of ``/scope/key`` for whoever asks. So each rank gets
one of its own, on the loopback interface, under a path that nobody can guess: Horovod 0.28.1 builds its addresses as
``http://ADDR:PORT/scope/key`` out of two variables, and ADDR may hold a port and the beginning of a path.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sparkdl.collective.rendezvous.store import Store, offered
from sparkdl.errors import ClusterError

__all__ = ["CYCLE_MS", "HorovodRendezvous"]

CYCLE_MS = 5.0
"""How often Horovod's thread looks for work, ms, where nobody chose: see ``HorovodCollective``."""

_HOLD_SECONDS = 1.0
_REQUEST_SECONDS = 10.0
_MAX_VALUE_BYTES = 1 << 20
_MAX_CONNECTIONS = 64


class HorovodRendezvous:
    """Offers Horovod the store of the run."""

    @contextmanager
    def join(self, store: Store) -> Iterator[dict[str, str]]:
        """Serve ``store`` to this process for the block; yield the variables with which ``hvd.init()`` finds it."""
        with offered(store), _Server(store) as server:
            yield {
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"127.0.0.1:{server.server_port}/{server.token}",
                "HOROVOD_GLOO_RENDEZVOUS_PORT": "0",
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                "HOROVOD_CYCLE_TIME": str(CYCLE_MS),
            }


class _Server(ThreadingHTTPServer):
    """Holds at most 64 connections; a new one takes the place of the oldest, for Horovod's are short."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # of the class above 5: whoever comes sixth is let in a second later, or three

    def __init__(self, store: Store) -> None:
        self.store, self.token = store, secrets.token_urlsafe(32)
        self._held: dict[int, socket.socket] = {}
        self._holding = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="sparkdl-horovod-store")
        self._thread.daemon = True
        self._thread.start()

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def server_bind(self) -> None:
        # The class above asks the resolver for its own name here, which may take seconds, and uses it for nothing.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._holding:
            if len(self._held) >= _MAX_CONNECTIONS:
                oldest = self._held.pop(next(iter(self._held)))
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._held[id(request)] = request
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._holding:
            self._held.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hung up mid-request is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_SECONDS

    def do_PUT(self) -> None:
        key, size = self._key(), int(self.headers.get("Content-Length", "0"))
        if key is None or not 0 <= size <= _MAX_VALUE_BYTES:
            self._answer(400)
            return
        try:
            self.server.store.set(key, self.rfile.read(size))
        except ClusterError:
            self._answer(507)
        else:
            self._answer(200)

    def do_GET(self) -> None:
        """Hold the answer back until the key is there, where Horovod would ask every 10 ms."""
        key = self._key()
        if key is None:
            self._answer(400)
            return
        try:
            self._answer(200, self.server.store.get(key, _HOLD_SECONDS))
        except (ClusterError, TimeoutError):
            self._answer(404)

    def do_DELETE(self) -> None:
        """A rank that has connected takes back its own entries, so that the next round in this scope starts empty."""
        key = self._key()
        if key is None:
            self._answer(400)
            return
        scope, _, rank = key.rpartition("/")
        with contextlib.suppress(ClusterError):
            for name in (rank, f"rank_{rank}"):
                self.server.store.delete(f"{scope}/{name}")
        self._answer(200)

    def _key(self) -> str | None:
        """Return the key that the path names, None where the path does not begin as only this process knows."""
        parts = self.path.split("/")
        if len(parts) != 4 or not compare_digest(parts[1].encode(), f"{self.server.token}:0".encode()):
            return None
        return f"horovod/{parts[2]}/{parts[3]}"

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a request is no news."""
