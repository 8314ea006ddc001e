"""The wire between the driver and its ranks: a port, and authenticated frames over TCP."""

from __future__ import annotations

import contextlib
import functools
import hmac
import json
import os
import pickle
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from sparkdl.compat.pickles import dumps
from sparkdl.errors import ClusterError, ConfigError

MAX_UNPROVEN = 64
"""Connections to a ``Listener`` that may be open at once without having proved anything."""

_HEADER = struct.Struct("!BI")
_TAG_BYTES = 16
_NONCE_BYTES = 32
_MESSAGE, _DATA = 1, 2
_CHUNK_BYTES = 4 << 20
_SMALL_BYTES = 16 << 10
_MAX_MESSAGE_BYTES = 4 << 20
_HANDSHAKE_SECONDS = 10.0
_CONNECT_SECONDS = 20.0
_RETRY_SECONDS = (0.02, 0.1)
_ACCEPT_AGAIN_SECONDS = 0.05
_REFUSAL = bytes(32)


class WireError(ClusterError):
    """The other end is not who it should be, or sent what it should not."""


def dump_value(value: Any) -> list[memoryview]:
    """Return ``value`` as one pickle and the large buffers it refers to; whatever cloudpickle carries is welcome."""
    buffers: list[pickle.PickleBuffer] = []

    def stays_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        if memoryview(buffer).nbytes < _SMALL_BYTES:  # a frame of its own takes longer than a copy
            return True
        buffers.append(buffer)
        return False

    head = dumps(value, protocol=5, buffer_callback=stays_in_pickle)
    return [memoryview(head), *(buffer.raw() for buffer in buffers)]


def dump_function(function: Any) -> list[memoryview]:
    """Return a function that is to travel, with all that it refers to, as ``dump_value`` does.

    Raises:
        ConfigError: it refers to something that cannot leave this process.
    """
    try:
        return dump_value(function)
    except Exception as error:
        raise ConfigError(
            f"the function, or something it refers to or is given, cannot be sent to the ranks ({error}): open "
            f"sessions, files, sockets and locks inside the function, and pass it plain data"
        ) from error


def load_value(parts: list[bytearray]) -> Any:
    """Rebuild what ``dump_value`` took apart; large arrays are views of ``parts[1:]``."""
    return pickle.loads(parts[0], buffers=parts[1:])


class Connection:
    """One end of an authenticated connection; any thread may send, one thread receives.

    Both ends prove that they hold the secret of the run before either reads anything else (HMAC-SHA256 over fresh
    nonces, within one deadline for the whole handshake), and every frame after that carries a tag over its position,
    header and body, so nothing can be slipped in, replayed or altered. Frames are not encrypted:
    ``docs/threat-model.md`` says what does that.

    A frame is ``kind (1 byte) | length (4 bytes) | body | tag (16 bytes)``. Values are pickled with out-of-band buffers
    (PEP 574) and sent in chunks of at most 4 MiB, so that an array larger than memory's half still arrives, without a
    copy.

    Args:
        sock: a connected socket, owned from now on.
        secret: the secret of the run, the same at both ends.
        server: whether this is the end that listened.
        send_seconds: after which a send to an end that takes nothing in fails with BlockingIOError; 0 waits for ever.

    Raises:
        WireError: the other end does not hold the secret.
    """

    def __init__(self, sock: socket.socket, secret: bytes, *, server: bool, send_seconds: float = 0.0) -> None:
        self._sock = sock
        self._sending, self._sending_value = threading.Lock(), threading.Lock()
        self._sent = self._received = 0
        self._arriving: tuple[dict[str, Any], list[bytearray]] | None = None
        self._awaited: list[memoryview] = []  # where the chunks go that are to come of the value that is arriving
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # An end that is frozen fills its buffers: without a limit, whoever sends to it would wait with it.
        limit = struct.pack("ll", int(send_seconds), int(send_seconds % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        # The kernel notices within half a minute that the host at the other end has vanished.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        # One deadline for all of the handshake: who sends a byte now and then does not move it.
        self._deadline: float | None = time.monotonic() + _HANDSHAKE_SECONDS
        sock.settimeout(_HANDSHAKE_SECONDS)
        self._send_key, self._receive_key = self._shake_hands(secret, server)
        self._deadline = None
        sock.settimeout(None)

    def _shake_hands(self, secret: bytes, server: bool) -> tuple[bytes, bytes]:
        own_nonce = os.urandom(_NONCE_BYTES)
        self._sock.sendall(own_nonce)
        other_nonce = bytes(self._read(bytearray(_NONCE_BYTES)))
        nonces = own_nonce + other_nonce if server else other_nonce + own_nonce
        roles = (b"server", b"client") if server else (b"client", b"server")
        own_proof, other_proof = (hmac.digest(secret, role + nonces, "sha256") for role in roles)
        # The client proves itself first: an unknown end learns nothing about the secret.
        if not server:
            self._sock.sendall(own_proof)
        if not hmac.compare_digest(other_proof, bytes(self._read(bytearray(len(other_proof))))):
            if server:
                self._sock.sendall(_REFUSAL)  # An end that was only dropped may come again; this one need not.
            raise WireError("the other end of a connection does not hold this run's secret: it was turned away")
        if server:
            self._sock.sendall(own_proof)
        directions = (b"to client", b"to server") if server else (b"to server", b"to client")
        send_key, receive_key = (hmac.digest(secret, direction + nonces, "sha256") for direction in directions)
        return send_key, receive_key

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one JSON-able message of at most 4 MiB."""
        body = json.dumps(message, separators=(",", ":"), default=str).encode()
        if len(body) > _MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {len(body):,} bytes exceeds {_MAX_MESSAGE_BYTES:,}: send it as a value")
        self._send_frame(_MESSAGE, memoryview(body))

    def send_value(self, message: Mapping[str, Any], parts: list[memoryview]) -> None:
        """Send ``message`` with a value that ``dump_value`` took apart; other messages may pass between the chunks."""
        with self._sending_value:
            self.send({**message, "bytes": [part.nbytes for part in parts]})
            for part in parts:
                flat = part.cast("B")
                for start in range(0, flat.nbytes, _CHUNK_BYTES):
                    self._send_frame(_DATA, flat[start : start + _CHUNK_BYTES])

    def receive(self) -> tuple[dict[str, Any], list[bytearray]]:
        """Wait for the next message; return it with the parts of its value, none for a plain message.

        Raises:
            ConnectionError: the other end is gone.
            WireError: a frame is not what the other end would send.
        """
        while True:
            header = self._read(bytearray(_HEADER.size))
            kind, length = _HEADER.unpack(header)
            if kind == _MESSAGE and length <= _MAX_MESSAGE_BYTES:
                body = memoryview(bytearray(length))
            elif kind == _DATA and self._awaited and 0 < length <= min(self._awaited[0].nbytes, _CHUNK_BYTES):
                body, remainder = self._awaited[0][:length], self._awaited[0][length:]
                self._awaited[:1] = [remainder] if remainder.nbytes else []
            else:
                raise WireError(f"a frame of kind {kind} and {length:,} bytes was not expected: the stream is damaged")
            self._read(body)
            tag = _tag(self._receive_key, self._received, header, body)
            self._received += 1
            if not hmac.compare_digest(tag, bytes(self._read(bytearray(_TAG_BYTES)))):
                raise WireError("a frame does not carry this run's tag: somebody else wrote into the connection")
            if kind == _MESSAGE:
                message: dict[str, Any] = json.loads(bytes(body))
                if "bytes" not in message:
                    return message, []
                parts = [bytearray(size) for size in message.pop("bytes")]
                self._arriving, self._awaited = (message, parts), [memoryview(part) for part in parts if part]
            if self._arriving is not None and not self._awaited:
                arrived, self._arriving = self._arriving, None
                return arrived

    def close(self) -> None:
        """Close the connection; a thread that waits in ``receive`` at either end is woken. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _send_frame(self, kind: int, body: memoryview) -> None:
        with self._sending:
            header = _HEADER.pack(kind, body.nbytes)
            tag = _tag(self._send_key, self._sent, header, body)
            self._sent += 1
            for piece in (b"".join((header, body, tag)),) if body.nbytes < 65536 else (header, body, tag):
                self._sock.sendall(piece)

    def _read(self, into: bytearray | memoryview) -> bytearray | memoryview:
        view = memoryview(into)
        while view.nbytes:
            if self._deadline is not None:
                self._sock.settimeout(max(self._deadline - time.monotonic(), 1e-3))
            count = self._sock.recv_into(view)
            if count == 0:
                raise ConnectionResetError("the other end closed the connection")
            view = view[count:]
        return into


def _tag(key: bytes, position: int, header: bytes | bytearray | memoryview, body: memoryview) -> bytes:
    mac = hmac.new(key, position.to_bytes(8, "big"), "sha256")
    mac.update(header)
    mac.update(body)
    return mac.digest()[:_TAG_BYTES]


def connect(address: tuple[str, int], secret: bytes, timeout_seconds: float = _CONNECT_SECONDS) -> Connection:
    """Connect to the listener at ``address`` that holds ``secret``.

    A listener that is crowded drops the oldest of those that have proved nothing so far: who was dropped comes again.

    Raises:
        OSError: nobody listens there, or it dropped this end until the time was up.
        WireError: the listener holds another secret.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        sock = socket.create_connection(address, timeout=max(deadline - time.monotonic(), 1.0))
        try:
            return Connection(sock, secret, server=False)
        except (ConnectionError, TimeoutError):
            sock.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(random.uniform(*_RETRY_SECONDS))
        except BaseException:
            sock.close()
            raise


def authenticated(secret: bytes, send_seconds: float = 60.0) -> Callable[[socket.socket], Connection]:
    """Return what a ``Listener`` admits by: whoever proves to hold ``secret``; ``send_seconds`` as ``Connection``."""
    return functools.partial(Connection, secret=secret, server=True, send_seconds=send_seconds)


class Listener:
    """A port on one interface that lets in who proves itself, and is not filled by those who do not.

    Sockets that have proved nothing yet are counted apart: at most 64, the oldest dropped for a new one.

    Args:
        bind_host: address to listen on.
        admit: called on a thread of its own with every socket; returns the ``Connection`` of an end that has proved
            itself, None for one that is done with. What it raises of OSError and ClusterError turns the end away.
        serve: called on that thread with the connection, which is closed when it returns.
        backlog: connections that the kernel may hold until they are accepted.

    Attributes:
        address: host and port.

    Raises:
        ClusterError: the address cannot be bound.
    """

    def __init__(
        self,
        bind_host: str,
        admit: Callable[[socket.socket], Connection | None],
        serve: Callable[[Connection], None] = Connection.close,
        *,
        backlog: int = 128,
    ) -> None:
        family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
        try:
            self._socket = socket.create_server((bind_host, 0), family=family, backlog=max(128, backlog))
        except OSError as error:
            raise ClusterError(
                f"the driver cannot listen on {bind_host} ({error}): set driver_host to one of this host's addresses"
            ) from error
        self.address = (bind_host, int(self._socket.getsockname()[1]))
        self._admit, self._serve = admit, serve
        self._lock = threading.Lock()
        self._closing = False
        self._unproven: dict[socket.socket, None] = {}  # in the order of their arrival
        self._sockets: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, name="sparkdl-channel", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Hang up on everybody and wait for the threads; idempotent."""
        with self._lock:
            self._closing = True
            for sock in (self._socket, *self._sockets):
                _drop(sock)
        self._socket.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=15)

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._socket.accept()
            except OSError:  # closed; or out of descriptors, which passes
                time.sleep(0 if self._closing else _ACCEPT_AGAIN_SECONDS)
                continue
            with self._lock:
                if len(self._unproven) >= MAX_UNPROVEN:
                    oldest = next(iter(self._unproven))
                    del self._unproven[oldest]
                    _drop(oldest)
                self._unproven[sock] = None
                self._sockets.add(sock)
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(target=self._attend, args=(sock,), name="sparkdl-channel-end", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _attend(self, sock: socket.socket) -> None:
        try:
            try:
                connection = None if self._closing else self._admit(sock)
            finally:
                with self._lock:
                    self._unproven.pop(sock, None)
            if connection is not None:
                self._serve(connection)
        except (OSError, ClusterError):
            pass  # It was turned away, and nothing of what it sent was used; or it is gone.
        finally:
            with self._lock:
                self._sockets.discard(sock)
            _drop(sock)
            sock.close()


def _drop(sock: socket.socket) -> None:
    """End the connection of ``sock``; the thread that waits for it wakes, and closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
