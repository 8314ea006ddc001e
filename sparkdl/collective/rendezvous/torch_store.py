"""The store of the run as torch.distributed takes it: no server of torch's own, which would accept anybody."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]

from sparkdl.launch.store import StoreClient, store_of_this_run


class RunStore(TorchStore):
    """Hands each request of torch on to the store of the run; C++ calls it under torch's own names."""

    timeout: timedelta  # torch keeps it

    def __init__(self, store: StoreClient) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: bytes | str) -> None:
        """Give ``key`` a value."""
        self._store.set(key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of ``key``, waiting for it."""
        try:
            return self._store.get(key, self.timeout.total_seconds())
        except TimeoutError as error:
            raise dist.DistStoreError(str(error)) from error

    def add(self, key: str, number: int) -> int:
        """Add to the count under ``key``."""
        return self._store.add(key, number)

    def append(self, key: str, value: bytes | str) -> None:
        """Put ``value`` behind what ``key`` has."""
        self._store.append(key, _bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether every one of ``keys`` is set."""
        return self._store.wait(keys, 0)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until every one of ``keys`` is set."""
        seconds = (timeout or self.timeout).total_seconds()
        if not self._store.wait(keys, seconds):
            missing = [key for key in keys if not self.check([key])]
            raise dist.DistStoreError(f"nobody has set {', '.join(missing[:5])} within {seconds:g} s")

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set ``key`` if it is as expected."""
        return self._store.compare_set(key, _bytes(expected), _bytes(desired))

    def delete_key(self, key: str) -> bool:
        """Remove ``key``."""
        return self._store.delete(key)

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._store.count()

    def has_extended_api(self) -> bool:
        """Whether ``append``, ``multi_get`` and ``multi_set`` exist."""
        return True

    def clone(self) -> RunStore:
        """Return a store for another thread: this one, where no request waits for another."""
        return self

    # What C++ calls them.
    deleteKey = delete_key
    getNumKeys = num_keys


def run_store() -> RunStore | None:
    """The store of this run for torch, the same object each time; None in a process that was not launched."""
    store = store_of_this_run()
    return None if store is None else _for_torch(store)


@functools.cache
def _for_torch(store: StoreClient) -> RunStore:
    # C++ holds a store without keeping its Python half alive, and may ask it late: none is ever dropped.
    return RunStore(store)


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
