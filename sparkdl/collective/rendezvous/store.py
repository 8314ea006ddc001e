"""The store of the run that this process is a rank of, as a collective sees it.

Enters: a store, from the launcher, for the length of a block. Leaves: the same to whoever joins ranks inside the block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

__all__ = ["RollCall", "Store", "TorchRendezvous", "call_roll", "offered", "store_of_this_run"]


class Store(Protocol):
    """Keys and values that the ranks of one run share, and nobody else."""

    def set(self, key: str, value: bytes) -> None:
        """Give ``key`` a value."""
        ...

    def get(self, key: str, seconds: float) -> bytes:
        """Return the value of ``key``; wait for it at most ``seconds``, then raise TimeoutError."""
        ...

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait at most ``seconds`` until every one of ``keys`` is set; return whether they are."""
        ...

    def check(self, keys: Sequence[str]) -> bool:
        """Whether every one of ``keys`` is set now."""
        ...

    def add(self, key: str, number: int) -> int:
        """Add ``number`` to the count under ``key``; return the sum."""
        ...

    def append(self, key: str, value: bytes) -> None:
        """Put ``value`` behind what ``key`` has."""
        ...

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set ``key`` to ``desired`` if it is ``expected``, or not there and ``expected`` empty; return what it is."""
        ...

    def delete(self, key: str) -> bool:
        """Remove ``key``; return whether it was there."""
        ...

    def count(self) -> int:
        """How many keys there are."""
        ...

    def derive_key(self, purpose: str) -> bytes:
        """Return a secret that all ranks of the run share, and nobody else, for ``purpose`` alone."""
        ...


_offered: list[Store] = []


@contextmanager
def offered(store: Store) -> Iterator[None]:
    """Make ``store`` the one that ranks meet at inside the block."""
    _offered.append(store)
    try:
        yield
    finally:
        _offered.remove(store)


def store_of_this_run() -> Store | None:
    """The store that the launcher offers; None in a process that it did not start."""
    return _offered[-1] if _offered else None


class TorchRendezvous:
    """Offers torch.distributed the store of the run."""

    @contextmanager
    def join(self, store: Store) -> Iterator[dict[str, str]]:
        """Offer ``store`` for the block; torch finds it without any variable."""
        with offered(store):
            yield {}


class RollCall(NamedTuple):
    """Who came to a store.

    Attributes:
        missing: ranks that did not come in time.
        refusals: why ranks that came cannot go on, by rank.
    """

    missing: list[int]
    refusals: dict[int, str]


def call_roll(store: Store, scope: str, rank: int, size: int, seconds: float, refusal: str = "") -> RollCall:
    """Announce ``rank`` at ``store``, for the first time or once more, and wait for the others, at most ``seconds``.

    All ranks that are not told of missing ones are told the same.
    """
    times = store.add(f"{scope}/times/{rank}", 1)
    names = [f"{scope}/{times}/{other}" for other in range(size)]
    store.set(names[rank], refusal.encode())
    if not store.wait(names, seconds):
        return RollCall([other for other, name in enumerate(names) if not store.check([name])], {})
    texts = {other: store.get(name, seconds).decode() for other, name in enumerate(names)}
    return RollCall([], {other: text for other, text in texts.items() if text})
