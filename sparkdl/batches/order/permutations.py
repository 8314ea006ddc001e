"""Permutations that a key decides, the same on every machine, made anew for every row of every epoch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Empty = Callable[[int], Ints]
"""A function that returns an array of so many numbers of any content: fresh memory is slow, so some is used again."""

_NARROW_BITS = 16


def fresh(count: int) -> Ints:
    """An array of ``count`` numbers of any content, in memory of its own."""
    return np.empty(count, np.int64)


def permutations(
    count: int, size: int, *key: int, skip: int = 0, empty: Empty = fresh
) -> npt.NDArray[np.unsignedinteger]:
    """Permute ``0..size-1`` ``count`` times by ``key``, the same on every machine and with every NumPy.

    Only raw PCG64 output is used, whose stream NumPy guarantees (``Generator.permutation`` carries no such promise).
    Each index rides in the low bits of a random number, and the numbers are sorted: numbers of 32 bits as long as half
    of them are left to chance, which sort twice as fast as those of 64.

    Args:
        count: permutations, taken one after the other from the stream of ``key``.
        size: numbers in each.
        key: of the stream.
        skip: permutations of this size to leave out first, at no cost.
        empty: where the result's memory comes from.

    Returns:
        ``(count, size)``, of an unsigned dtype.
    """
    bits = max(1, int(size - 1).bit_length())
    word = np.dtype("<u4" if bits <= _NARROW_BITS else "<u8")
    draws = -(-size * word.itemsize // 8)
    stream = np.random.PCG64(np.random.SeedSequence(key)).advance(skip * draws)
    random = np.asarray(stream.random_raw(count * draws), "<u8").reshape(count, draws).view(word)[:, :size]
    mixed: npt.NDArray[np.unsignedinteger] = empty(count * draws).view(word)[: count * size].reshape(count, size)
    np.left_shift(random, word.type(bits), out=mixed)
    mixed |= np.arange(size, dtype=word)
    mixed.sort(axis=1)
    mixed &= word.type((1 << bits) - 1)
    return mixed


def permutation(size: int, *key: int) -> Ints:
    """Permute ``0..size-1`` by ``key``, ``(size,)``; see ``permutations``."""
    mixed: Ints = permutations(1, size, *key)[0].astype(np.int64)
    return mixed
