"""The key-value store that the ranks of a run meet at, over authenticated connections."""

from __future__ import annotations

import contextlib
import hmac
import os
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sparkdl.errors import ClusterError, UnreachableError
from sparkdl.launch.wire import Connection, WireError, connect

MAX_KEYS = 100_000
MAX_BYTES = 64 << 20
MAX_VALUE_BYTES = 2 << 20
_HOLD_SECONDS = 5.0
_KEY_OVERHEAD_BYTES = 128


class KeyValueStore:
    """The values of one run, held in this process.

    One process has it (the driver, or the task of slot 0 where executors do not reach it), every rank a
    ``StoreClient``; both sides speak through ``wire.Connection``, so nobody without the secret of the run reads or
    writes a key. It is bounded in keys and bytes, and gone with the run.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._bytes = 0
        self._closed = False

    def serve(self, connection: Connection, first: Mapping[str, Any] | None = None) -> None:
        """Answer what comes over ``connection`` until its other end hangs up; ``first`` has come already."""
        with contextlib.suppress(OSError, WireError):
            while True:
                request = first or connection.receive()[0]
                first = None
                try:
                    with self._changed:
                        answer = {"value": self._perform(**request)}
                except (ClusterError, TypeError, ValueError) as error:
                    answer = {"error": str(error) if isinstance(error, ClusterError) else repr(error)}
                connection.send(answer)

    def close(self) -> None:
        """Forget everything, and let nobody wait any longer. Idempotent."""
        with self._changed:
            self._closed = True
            self._values.clear()
            self._bytes = 0
            self._changed.notify_all()

    def _perform(
        self,
        op: str,
        key: str = "",
        keys: Sequence[str] = (),
        value: str = "",
        expected: str = "",
        number: int = 0,
        seconds: float = 0.0,
        kind: str = "store",
    ) -> Any:
        """Do what a client asks for; values travel as base64."""
        current, desired = self._values.get(key), b64decode(value)
        if op in ("get", "wait"):
            if not self._wait(keys, seconds):
                return None
            return True if op == "wait" else _encoded(self._values[keys[0]])
        if op == "set":
            return self._put(key, desired)
        if op == "append":
            return self._put(key, (current or b"") + desired)
        if op == "add":
            total = int(current or 0) + number
            self._put(key, str(total).encode())
            return total
        if op == "compare_set":  # a key that is not there counts as empty, as in torch's TCPStore
            if (current or b"") != b64decode(expected):
                return expected if current is None else _encoded(current)
            self._put(key, desired)
            return value
        if op == "delete":
            if current is not None:
                del self._values[key]
                self._bytes -= len(current) + len(key) + _KEY_OVERHEAD_BYTES
            return current is not None
        if op == "count":
            return len(self._values)
        raise ClusterError(f"the store of a run has no operation {op!r}: every rank needs the driver's version of it")

    def _put(self, key: str, value: bytes) -> None:
        current = self._values.get(key)
        freed = len(current) if current is not None else -len(key) - _KEY_OVERHEAD_BYTES
        total = self._bytes + len(value) - freed
        if len(value) > MAX_VALUE_BYTES or total > MAX_BYTES or (current is None and len(self._values) >= MAX_KEYS):
            raise ClusterError(
                f"the store of this run has {len(self._values):,} keys and {self._bytes:,} bytes and does not take "
                f"{len(value):,} more: it holds {MAX_KEYS:,} keys, {MAX_BYTES:,} bytes, {MAX_VALUE_BYTES:,} a value; "
                f"send data through the collective, and delete keys that are done with"
            )
        if self._closed:
            raise ClusterError("the run is over: its store takes no more keys")
        self._values[key], self._bytes = value, total
        self._changed.notify_all()

    def _wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Whether every one of ``keys`` is set before long; a client that wants to wait longer asks again."""
        self._changed.wait_for(
            lambda: self._closed or all(key in self._values for key in keys), min(seconds, _HOLD_SECONDS)
        )
        if self._closed:
            raise ClusterError("the run is over: nothing more comes to its store")
        return all(key in self._values for key in keys)


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

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of whoever holds the store."""
        return self._address

    def derive_key(self, purpose: str) -> bytes:
        """Return a secret that all ranks of this run share, and nobody else, for ``purpose`` alone."""
        return hmac.digest(self._secret, f"derived: {purpose}".encode(), "sha256")

    def set(self, key: str, value: bytes) -> None:
        """Give ``key`` a value of at most 2 MiB.

        Raises:
            ClusterError: the store is full, or the run is over.
        """
        self._ask(op="set", key=key, value=_encoded(value))

    def append(self, key: str, value: bytes) -> None:
        """Put ``value`` behind what ``key`` has."""
        self._ask(op="append", key=key, value=_encoded(value))

    def add(self, key: str, number: int) -> int:
        """Add ``number`` to the count under ``key``, which begins at 0; return the sum."""
        return int(self._ask(op="add", key=key, number=number))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set ``key`` to ``desired`` if it is ``expected``, or not there and ``expected`` empty; return what it is."""
        return b64decode(self._ask(op="compare_set", key=key, expected=_encoded(expected), value=_encoded(desired)))

    def get(self, key: str, seconds: float) -> bytes:
        """Return the value of ``key``; wait for it at most ``seconds``.

        Raises:
            TimeoutError: nobody has set it.
        """
        value = self._await("get", [key], seconds)
        if value is None:
            raise TimeoutError(f"nobody has set {key!r} within {seconds:g} s")
        return b64decode(value)

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait at most ``seconds`` until every one of ``keys`` is set; return whether they are."""
        return self._await("wait", list(keys), seconds) is not None

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

    def _await(self, op: str, keys: list[str], seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while (answer := self._ask(op=op, keys=keys, seconds=deadline - time.monotonic())) is None:
            if time.monotonic() >= deadline:
                break
        return answer

    def _ask(self, **request: Any) -> Any:
        """Send a request over a connection that no other thread uses, nor the process that this one was forked from."""
        if self._process != os.getpid():
            self._idle, self._process = [], os.getpid()
        try:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = connect(self._address, self._secret)
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


def _encoded(value: bytes) -> str:
    if len(value) > MAX_VALUE_BYTES:
        raise ClusterError(
            f"a value of {len(value):,} bytes exceeds the {MAX_VALUE_BYTES:,} that the store of a run takes: send data "
            f"through the collective"
        )
    return b64encode(value).decode()


Service = Callable[[StoreClient], AbstractContextManager[Mapping[str, str]]]
"""What each rank enters while its function runs, such as Horovod's way to the store of the run; its value are the
variables that the function finds it by.
"""

_offered: list[StoreClient] = []


@contextmanager
def offered(store: StoreClient) -> Iterator[None]:
    """Make ``store`` the one that ranks meet at inside the block."""
    _offered.append(store)
    try:
        yield
    finally:
        _offered.remove(store)


def store_of_this_run() -> StoreClient | None:
    """The store that the launcher offers; None in a process that it did not start."""
    return _offered[-1] if _offered else None
