"""The store of the run as Horovod's C++ client takes it: HTTP, from this process to itself."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

from sparkdl.errors import ClusterError
from sparkdl.launch.store import StoreClient
from sparkdl.launch.wire import Listener

CYCLE_MS = 5.0
"""How often Horovod's thread looks for work, ms, where nobody chose: see ``HorovodCollective``."""

_HOLD_SECONDS = 1.0
_MAX_VALUE_BYTES = 1 << 20


@contextmanager
def horovod_rendezvous(store: StoreClient) -> Iterator[dict[str, str]]:
    """Serve ``store`` to this process for the block; yield the variables with which ``hvd.init()`` finds it.

    Horovod's ranks meet at a server that answers PUT, GET and DELETE of ``/scope/key`` for whoever asks. So each rank
    gets one of its own, on the loopback interface, under a path that nobody can guess: Horovod 0.28.1 builds its
    addresses as ``http://ADDR:PORT/scope/key`` out of two variables, and ADDR may hold a port and the beginning of a
    path.
    """
    token = secrets.token_urlsafe(32)

    def answer(sock: socket.socket) -> None:
        with contextlib.suppress(ValueError):  # of a length that is no number
            _Request(sock, store, token)

    # A request that is being answered has proved nothing: a crowd of silent ones keeps nobody out.
    listener = Listener("127.0.0.1", answer)
    try:
        yield {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"127.0.0.1:{listener.address[1]}/{token}",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "0",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_CYCLE_TIME": str(CYCLE_MS),
        }
    finally:
        listener.close()


class _Request(BaseHTTPRequestHandler):
    """One request of Horovod's, answered when it is made."""

    timeout = 10.0  # seconds for each read of the request

    def __init__(self, sock: socket.socket, store: StoreClient, token: str) -> None:
        self._store, self._token = store, token
        super().__init__(sock, None, None)  # type: ignore[arg-type]

    def parse_request(self) -> bool:
        """Refuse a path that does not begin as only this process knows."""
        if not super().parse_request():
            return False
        parts = self.path.split("/")
        is_ours = len(parts) == 4 and compare_digest(parts[1].encode(), f"{self._token}:0".encode())
        if is_ours:
            self._scope, self._name = f"horovod/{parts[2]}", parts[3]
        else:
            self._answer(400)
        return is_ours

    def do_PUT(self) -> None:
        size = int(self.headers.get("Content-Length", "0"))
        if not 0 <= size <= _MAX_VALUE_BYTES:
            self._answer(400)
            return
        try:
            self._store.set(f"{self._scope}/{self._name}", self.rfile.read(size))
        except ClusterError:
            self._answer(507)
        else:
            self._answer(200)

    def do_GET(self) -> None:
        """Hold the answer back until the key is there, where Horovod would ask every 10 ms."""
        try:
            self._answer(200, self._store.get(f"{self._scope}/{self._name}", _HOLD_SECONDS))
        except (ClusterError, TimeoutError):
            self._answer(404)

    def do_DELETE(self) -> None:
        """A rank that has connected takes back its own entries, so that the next round in this scope starts empty."""
        with contextlib.suppress(ClusterError):
            for name in (self._name, f"rank_{self._name}"):
                self._store.delete(f"{self._scope}/{name}")
        self._answer(200)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a request is no news."""


class RollCall(NamedTuple):
    """Who came to a store.

    Attributes:
        missing: ranks that did not come in time.
        refusals: why ranks that came cannot go on, by rank.
    """

    missing: list[int]
    refusals: dict[int, str]


def call_roll(store: StoreClient, scope: str, rank: int, size: int, seconds: float, refusal: str = "") -> RollCall:
    """Announce ``rank`` at ``store``, for the first time or once more, and wait for the others, at most ``seconds``.

    All ranks that are not told of missing ones are told the same.
    """
    times = store.add(f"{scope}/times/{rank}", 1)
    names = [f"{scope}/{times}/{peer}" for peer in range(size)]
    store.set(names[rank], refusal.encode())
    if not store.wait(names, seconds):
        return RollCall([peer for peer, name in enumerate(names) if not store.wait([name], 0)], {})
    texts = {peer: store.get(name, seconds).decode() for peer, name in enumerate(names)}
    return RollCall([], {peer: text for peer, text in texts.items() if text})
