"""The key-value store that the ranks of a run meet at, over authenticated connections.

Enters: requests of ranks, one JSON message each. Leaves: their answers. One process holds a ``KeyValueStore`` (the
driver, or the task of slot 0 where executors do not reach it), every rank a ``StoreClient``; both sides speak through
``wire.Connection``, so nobody without the secret of the run reads or writes a key. It is bounded in keys and bytes, and
gone with the run.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkdl.errors import ClusterError, UnreachableError
from sparkdl.launch.wire import Connection, WireError, connect

__all__ = ["MAX_BYTES", "MAX_KEYS", "MAX_VALUE_BYTES", "KeyValueStore", "StoreClient"]

MAX_KEYS = 100_000
MAX_BYTES = 64 << 20
MAX_VALUE_BYTES = 2 << 20
_HOLD_SECONDS = 5.0
_KEY_OVERHEAD_BYTES = 128


class KeyValueStore:
    """The values of one run, held in this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._bytes = 0
        self._closed = False
        self._operations: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "set": lambda request: self._put(request["key"], _bytes(request["value"])),
            "get": self._get,
            "add": self._add,
            "append": self._append,
            "compare_set": self._compare_set,
            "delete": self._delete,
            "wait": self._wait,
            "check": lambda request: all(key in self._values for key in request["keys"]),
            "count": lambda _: len(self._values),
        }

    def serve(self, connection: Connection, first: Mapping[str, Any] | None = None) -> None:
        """Answer what comes over ``connection`` until its other end hangs up; ``first`` has come already."""
        with contextlib.suppress(OSError, WireError):
            while True:
                request = first or connection.receive()[0]
                first = None
                try:
                    with self._changed:
                        answer = {"value": self._operations[request["op"]](request)}
                except (ClusterError, KeyError, TypeError, ValueError) as error:
                    answer = {"error": str(error) if isinstance(error, ClusterError) else repr(error)}
                connection.send(answer)

    def close(self) -> None:
        """Forget everything, and let nobody wait any longer. Idempotent."""
        with self._changed:
            self._closed = True
            self._values.clear()
            self._bytes = 0
            self._changed.notify_all()

    def _put(self, key: str, value: bytes) -> None:
        before = self._values.get(key)
        held = self._bytes + len(value) - (len(before) if before is not None else -_cost(key))
        if len(value) > MAX_VALUE_BYTES or held > MAX_BYTES or (before is None and len(self._values) >= MAX_KEYS):
            raise ClusterError(
                f"the store of this run has {len(self._values):,} keys and {self._bytes:,} bytes and does not take "
                f"{len(value):,} more: it holds {MAX_KEYS:,} keys, {MAX_BYTES:,} bytes, {MAX_VALUE_BYTES:,} a value; "
                f"send data through the collective, and delete keys that are done with"
            )
        if self._closed:
            raise ClusterError("the run is over: its store takes no more keys")
        self._values[key], self._bytes = value, held
        self._changed.notify_all()

    def _get(self, request: Mapping[str, Any]) -> str | None:
        value = self._values.get(request["key"]) if self._wait({**request, "keys": [request["key"]]}) else None
        return None if value is None else _text(value)

    def _wait(self, request: Mapping[str, Any]) -> bool:
        keys = request["keys"]

        def there() -> bool:
            return all(key in self._values for key in keys)

        self._changed.wait_for(lambda: self._closed or there(), min(float(request["seconds"]), _HOLD_SECONDS))
        if self._closed:
            raise ClusterError("the run is over: nothing more comes to its store")
        return there()

    def _add(self, request: Mapping[str, Any]) -> int:
        total = int(self._values.get(request["key"], b"0")) + int(request["number"])
        self._put(request["key"], str(total).encode())
        return total

    def _append(self, request: Mapping[str, Any]) -> None:
        self._put(request["key"], self._values.get(request["key"], b"") + _bytes(request["value"]))

    def _compare_set(self, request: Mapping[str, Any]) -> str:
        """Replace the value if it is ``expected``; a key that is not there counts as empty (as in torch's TCPStore)."""
        key, expected, desired = request["key"], _bytes(request["expected"]), _bytes(request["value"])
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._put(key, desired)
            return _text(desired)
        return _text(expected if current is None else current)

    def _delete(self, request: Mapping[str, Any]) -> bool:
        value = self._values.pop(request["key"], None)
        if value is not None:
            self._bytes -= len(value) + _cost(request["key"])
        return value is not None


class StoreClient:
    """A rank's view of the store of its run; any thread may use it, and none waits for what another one waits for.

    Args:
        address: host and port of whoever holds the store.
        secret: of the run.
    """

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._address, self._secret = address, secret
        self._idle: list[Connection] = []
        self._process = os.getpid()

    def __reduce__(self) -> tuple[type[StoreClient], tuple[tuple[str, int], bytes]]:
        return StoreClient, (self._address, self._secret)

    def derive_key(self, purpose: str) -> bytes:
        """Return a secret that all ranks of this run share, and nobody else, for ``purpose`` alone."""
        return hmac.digest(self._secret, f"derived: {purpose}".encode(), "sha256")

    def set(self, key: str, value: bytes) -> None:
        """Give ``key`` a value of at most 2 MiB.

        Raises:
            ClusterError: the store is full, or the run is over.
        """
        self._ask(op="set", key=key, value=_small(value))

    def get(self, key: str, seconds: float) -> bytes:
        """Return the value of ``key``; wait for it at most ``seconds``.

        Raises:
            TimeoutError: nobody has set it.
        """
        deadline = time.monotonic() + seconds
        while (value := self._ask(op="get", key=key, seconds=deadline - time.monotonic())) is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"nobody has set {key!r} within {seconds:g} s")
        return _bytes(value)

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait at most ``seconds`` until every one of ``keys`` is set; return whether they are."""
        deadline = time.monotonic() + seconds
        while not self._ask(op="wait", keys=list(keys), seconds=deadline - time.monotonic()):
            if time.monotonic() >= deadline:
                return False
        return True

    def check(self, keys: Sequence[str]) -> bool:
        """Whether every one of ``keys`` is set now."""
        return bool(self._ask(op="check", keys=list(keys)))

    def add(self, key: str, number: int) -> int:
        """Add ``number`` to the count under ``key``, which begins at 0; return the sum."""
        return int(self._ask(op="add", key=key, number=number))

    def append(self, key: str, value: bytes) -> None:
        """Put ``value`` behind what ``key`` has."""
        self._ask(op="append", key=key, value=_small(value))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set ``key`` to ``desired`` if it is ``expected``, or not there and ``expected`` empty; return what it is."""
        return _bytes(self._ask(op="compare_set", key=key, expected=_small(expected), value=_small(desired)))

    def delete(self, key: str) -> bool:
        """Remove ``key``; return whether it was there."""
        return bool(self._ask(op="delete", key=key))

    def count(self) -> int:
        """How many keys there are."""
        return int(self._ask(op="count"))

    def close(self) -> None:
        """Hang up; a later request connects again. Idempotent."""
        while self._idle:
            self._idle.pop().close()

    def _ask(self, **request: Any) -> Any:
        try:
            connection = self._connection()
            try:
                connection.send({"kind": "store", **request})
                answer, _ = connection.receive()
            except BaseException:
                connection.close()
                raise
        except (OSError, WireError) as error:
            host, port = self._address
            raise UnreachableError(
                f"the store of this run at {host}:{port} does not answer ({error}): the run is over, or the network "
                f"between this rank and the driver is cut"
            ) from error
        self._idle.append(connection)
        if "error" in answer:
            raise ClusterError(str(answer["error"]))
        return answer["value"]

    def _connection(self) -> Connection:
        """Return a connection that no other thread uses, nor the process that this one was forked from."""
        if self._process != os.getpid():
            self._idle, self._process = [], os.getpid()
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return connect(self._address, self._secret)


def _cost(key: str) -> int:
    return len(key) + _KEY_OVERHEAD_BYTES


def _small(value: bytes) -> str:
    if len(value) > MAX_VALUE_BYTES:
        raise ClusterError(
            f"a value of {len(value):,} bytes exceeds the {MAX_VALUE_BYTES:,} that the store of a run takes: send data "
            f"through the collective"
        )
    return _text(value)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
