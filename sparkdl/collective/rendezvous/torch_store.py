"""The store of the run as torch.distributed takes it: no server of torch's own, which would accept anybody.

Enters: the store that the launcher offers. Leaves: a ``torch.distributed.Store`` for process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]

from sparkdl.collective.rendezvous.store import Store, store_of_this_run

__all__ = ["RunStore", "run_store"]


class RunStore(TorchStore):
    """Hands each request of torch on to the store of the run; C++ calls it under torch's own names."""

    timeout: timedelta  # torch keeps it

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: bytes | str) -> None:
        """Give ``key`` a value."""
        self._store.set(key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of ``key``, waiting for it."""
        seconds = self.timeout.total_seconds()
        try:
            return self._store.get(key, seconds)
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
        return self._store.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until every one of ``keys`` is set."""
        seconds = (timeout or self.timeout).total_seconds()
        if not self._store.wait(keys, seconds):
            missing = [key for key in keys if not self._store.check([key])]
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
    store: Any = store_of_this_run()
    if store is None:
        return None
    for known in _kept:
        if known._store is store:
            return known
    _kept.append(RunStore(store))
    return _kept[-1]


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


# C++ holds a store without keeping its Python half alive, and may ask it late: none is ever dropped.
_kept: list[RunStore] = []
