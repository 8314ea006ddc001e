"""The small HTTP key-value store that Horovod's gloo ranks meet at: PUT, GET and DELETE of ``/scope/key``.

Enters: requests of ranks. Leaves: values other ranks put, and which ranks are missing. It listens on one interface,
where Horovod's own server listens on all of them, and it holds a GET back until the key is there, where Horovod's has
ranks ask every 10 ms.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from sparkdl.errors import ClusterError

__all__ = ["HttpStore", "RollCall", "call_roll"]

MAX_VALUE_BYTES = 2**20
HOLD_SECONDS = 1.0
REQUEST_SECONDS = 10.0
JOINED = "sparkdl-joined"


class RollCall(NamedTuple):
    """Who came to a store.

    Attributes:
        missing: ranks that did not come in time.
        objections: why ranks that came cannot go on, by rank.
    """

    missing: list[int]
    objections: dict[int, str]


def call_roll(host: str, port: int, rank: int, size: int, seconds: float, objection: str = "") -> RollCall:
    """Announce ``rank`` at the store, and wait for the others, at most ``seconds``.

    All ranks that are not told of missing ones are told the same. Horovod's own store, which a user may host, calls
    no roll: nobody is missing there.

    Raises:
        OSError: the store cannot be reached.
    """
    deadline = time.monotonic() + seconds
    times = _request(host, port, "PUT", f"/{JOINED}/{rank}", objection.encode())
    if not times:
        return RollCall([], {rank: objection} if objection else {})
    while True:
        answer = json.loads(_request(host, port, "GET", f"/{JOINED}/{int(times)}.{size}"))
        if not answer["missing"] or time.monotonic() >= deadline:
            return RollCall(answer["missing"], {int(key): text for key, text in answer["objections"].items()})


def _request(host: str, port: int, method: str, path: str, body: bytes | None = None) -> bytes:
    connection = HTTPConnection(host, port, timeout=REQUEST_SECONDS)
    try:
        connection.request(method, path, body=body)
        return connection.getresponse().read()
    except HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


class HttpStore:
    """A store in a thread of this process.

    Attributes:
        port: where it listens, chosen by the kernel as it was bound.
    """

    def __init__(self, host: str, *, backlog: int = 128) -> None:
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            kind = type("_Server", (_Server,), {"address_family": family, "request_queue_size": backlog})
            self._server: _Server = kind((host, 0), _Handler)
        except OSError as error:
            raise ClusterError(
                f"no store can listen on {host} ({error}): name an address of this host's own interfaces"
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="sparkdl-http-store", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.values: dict[tuple[str, str], bytes] = {}
        self.rounds: dict[int, list[str]] = {}  # by rank: its objection, or none, each time that it came
        self.changed = threading.Condition()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # The class above asks the resolver for its own name here, which may take seconds, and uses it for nothing.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        """A rank that hung up mid-request is that rank's affair."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_SECONDS

    def do_PUT(self) -> None:
        key, size = self._key(), int(self.headers.get("Content-Length", "0"))
        if key is None or not 0 <= size <= MAX_VALUE_BYTES:
            self._answer(400)
            return
        value = self.rfile.read(size)
        if key[0] == JOINED:
            self._answer(200, str(self._join(int(key[1]), value.decode())).encode())
            return
        with self.server.changed:
            self.server.values[key] = value
            self.server.changed.notify_all()
        self._answer(200)

    def do_GET(self) -> None:
        key = self._key()
        if key is None:
            self._answer(400)
            return
        if key[0] == JOINED:
            self._answer(200, json.dumps(self._roll(*(int(part) for part in key[1].split(".")))).encode())
            return
        with self.server.changed:
            self.server.changed.wait_for(lambda: key in self.server.values, HOLD_SECONDS)
            value = self.server.values.get(key)
        self._answer(404) if value is None else self._answer(200, value)

    def do_DELETE(self) -> None:
        """A rank that has connected takes back its own entries, so that the next round in this scope starts empty."""
        key = self._key()
        if key is None:
            self._answer(400)
            return
        scope, rank = key
        with self.server.changed:
            for name in (rank, f"rank_{rank}"):
                self.server.values.pop((scope, name), None)
        self._answer(200)

    def _join(self, rank: int, objection: str) -> int:
        """Count that ``rank`` has come once more; return how often it has."""
        with self.server.changed:
            rounds = self.server.rounds.setdefault(rank, [])
            rounds.append(objection)
            self.server.changed.notify_all()
            return len(rounds)

    def _roll(self, times: int, size: int) -> dict[str, Any]:
        """Wait a while for all of ``size`` ranks to have come ``times`` times."""
        rounds = self.server.rounds

        def missing() -> list[int]:
            return [rank for rank in range(size) if len(rounds.get(rank, ())) < times]

        with self.server.changed:
            self.server.changed.wait_for(lambda: not missing(), HOLD_SECONDS)
            absent = missing()
            present = [rank for rank in range(size) if rank not in absent]
            texts = {rank: rounds[rank][times - 1] for rank in present}
            return {"missing": absent, "objections": {rank: text for rank, text in texts.items() if text}}

    def _key(self) -> tuple[str, str] | None:
        parts = self.path.split("/")
        return (parts[1], parts[2]) if len(parts) == 3 else None

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a request is no news."""
