"""The wire between the driver and its ranks: authenticated frames over TCP.

Enters: a connected socket and the secret of the run. Leaves: small JSON messages and values of any size.

Both ends prove that they hold the secret before either reads anything else (HMAC-SHA256 over fresh nonces, within one
deadline for the whole handshake), and every frame after that carries a tag over its position, header and body, so
nothing can be slipped in, replayed or altered. Frames are not encrypted: ``docs/threat-model.md`` says what does that.

A frame is ``kind (1 byte) | length (4 bytes) | body | tag (16 bytes)``. Values are pickled with out-of-band buffers
(PEP 574) and sent in chunks of at most 4 MiB, so that an array larger than memory's half still arrives, without a copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import pickle
import random
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

import cloudpickle

from sparkdl.errors import ClusterError, ConfigError

__all__ = ["Connection", "WireError", "connect", "dump_function", "dump_value", "load_value"]

_HEADER = struct.Struct("!BI")
_TAG_BYTES = 16
_NONCE_BYTES = 32
_MESSAGE, _DATA = 1, 2
_CHUNK_BYTES = 4 << 20
_MAX_MESSAGE_BYTES = 4 << 20
_HANDSHAKE_SECONDS = 10.0
_CONNECT_SECONDS = 20.0
_RETRY_SECONDS = (0.02, 0.1)
_REFUSAL = bytes(32)


class WireError(ClusterError):
    """The other end is not who it should be, or sent what it should not."""


def dump_value(value: Any) -> list[memoryview]:
    """Return ``value`` as one pickle and the buffers it refers to; whatever cloudpickle carries is welcome."""
    buffers: list[pickle.PickleBuffer] = []
    head = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
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
    """Rebuild what ``dump_value`` took apart; arrays are views of ``parts[1:]``."""
    return pickle.loads(parts[0], buffers=parts[1:])


class Connection:
    """One end of an authenticated connection; any thread may send, one thread receives.

    Args:
        sock: a connected socket, owned from now on.
        secret: the secret of the run, the same at both ends.
        server: whether this is the end that listened.

    Raises:
        WireError: the other end does not hold the secret.
    """

    def __init__(self, sock: socket.socket, secret: bytes, *, server: bool) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._sending_value = threading.Lock()
        self._incoming: _Arriving | None = None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(sock)
        # One deadline for all of the handshake: who sends a byte now and then does not move it.
        self._deadline: float | None = time.monotonic() + _HANDSHAKE_SECONDS
        sock.settimeout(_HANDSHAKE_SECONDS)
        self._send_key, self._receive_key = self._shake_hands(secret, server)
        self._sent = self._received = 0
        self._deadline = None
        sock.settimeout(None)

    def _shake_hands(self, secret: bytes, server: bool) -> tuple[bytes, bytes]:
        mine = os.urandom(_NONCE_BYTES)
        self._sock.sendall(mine)
        theirs = bytes(self._read(bytearray(_NONCE_BYTES)))
        both = mine + theirs if server else theirs + mine
        proofs = [hmac.digest(secret, role + both, "sha256") for role in (b"server", b"client")]
        own, other = proofs if server else reversed(proofs)
        # The client proves itself first: an unknown end learns nothing about the secret.
        if not server:
            self._sock.sendall(own)
        if not hmac.compare_digest(other, bytes(self._read(bytearray(len(other))))):
            if server:
                self._sock.sendall(_REFUSAL)  # An end that was only dropped may come again; this one need not.
            raise WireError("the other end of a connection does not hold this run's secret: it was turned away")
        if server:
            self._sock.sendall(own)
        keys = [hmac.digest(secret, role + both, "sha256") for role in (b"to client", b"to server")]
        return (keys[0], keys[1]) if server else (keys[1], keys[0])

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one JSON-able message of at most 4 MiB."""
        body = json.dumps(message, separators=(",", ":"), default=str).encode()
        if len(body) > _MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {len(body):,} bytes exceeds {_MAX_MESSAGE_BYTES:,}: send it as a value")
        with self._sending:
            self._send_frame(_MESSAGE, memoryview(body))

    def send_value(self, message: Mapping[str, Any], parts: list[memoryview]) -> None:
        """Send ``message`` with a value that ``dump_value`` took apart; other messages may pass between the chunks."""
        with self._sending_value:
            self.send({**message, "bytes": [part.nbytes for part in parts]})
            for part in parts:
                flat = part.cast("B")
                for start in range(0, flat.nbytes, _CHUNK_BYTES):
                    with self._sending:
                        self._send_frame(_DATA, flat[start : start + _CHUNK_BYTES])

    def receive(self) -> tuple[dict[str, Any], list[bytearray]]:
        """Wait for the next message; return it with the parts of its value, none for a plain message.

        Raises:
            ConnectionError: the other end is gone.
            WireError: a frame is not what the other end would send.
        """
        while True:
            header = bytearray(_HEADER.size)
            self._read(header)
            kind, length = _HEADER.unpack(header)
            if kind == _DATA and self._incoming is not None:
                body = self._incoming.room(length)
            elif kind == _MESSAGE and length <= _MAX_MESSAGE_BYTES:
                body = memoryview(bytearray(length))
            else:
                raise WireError(f"a frame of kind {kind} and {length:,} bytes was not expected: the stream is damaged")
            self._read(body)
            self._check(header, body)
            if kind == _MESSAGE:
                message: dict[str, Any] = json.loads(bytes(body))
                if "bytes" not in message:
                    return message, []
                self._incoming = _Arriving(message)
            if self._incoming is not None and self._incoming.complete:
                arrived, self._incoming = self._incoming, None
                return arrived.message, arrived.parts

    def close(self) -> None:
        """Close the connection; a thread that waits in ``receive`` at either end is woken. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _send_frame(self, kind: int, body: memoryview) -> None:
        header = _HEADER.pack(kind, body.nbytes)
        tag = _tag(self._send_key, self._sent, header, body)
        self._sent += 1
        if body.nbytes < 65536:
            self._sock.sendall(b"".join((header, body, tag)))
        else:
            self._sock.sendall(header)
            self._sock.sendall(body)
            self._sock.sendall(tag)

    def _check(self, header: bytes | bytearray, body: memoryview) -> None:
        expected = _tag(self._receive_key, self._received, header, body)
        self._received += 1
        if not hmac.compare_digest(expected, bytes(self._read(bytearray(_TAG_BYTES)))):
            raise WireError("a frame does not carry this run's tag: somebody else wrote into the connection")

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


def _keep_alive(sock: socket.socket) -> None:
    """Let the kernel notice within half a minute that the host at the other end has vanished."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class _Arriving:
    """A value whose chunks are still coming, received in place."""

    def __init__(self, message: dict[str, Any]) -> None:
        sizes = message.pop("bytes")
        self.message = message
        self.parts = [bytearray(size) for size in sizes]
        self._rest = [memoryview(part) for part in self.parts if part]

    @property
    def complete(self) -> bool:
        return not self._rest

    def room(self, length: int) -> memoryview:
        """Where the next ``length`` bytes belong."""
        current = self._rest[0]
        if not 0 < length <= min(current.nbytes, _CHUNK_BYTES):
            raise WireError(f"a chunk of {length:,} bytes does not fit the value announced: the stream is damaged")
        self._rest[0] = current[length:]
        if not self._rest[0]:
            del self._rest[0]
        return current[:length]


def _tag(key: bytes, position: int, header: bytes | bytearray, body: memoryview) -> bytes:
    mac = hmac.new(key, position.to_bytes(8, "big"), hashlib.sha256)
    mac.update(header)
    mac.update(body)
    return mac.digest()[:_TAG_BYTES]
