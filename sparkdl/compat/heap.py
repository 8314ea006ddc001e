"""Freed memory that glibc gives back within each step of a training, only to ask for it anew."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_VARIABLES = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}
_MOST_MAPPED = 32 << 20
"""Bytes of a block above which it is mapped by itself: the most that glibc takes, and what it comes to by itself."""
_KEPT, _KEPT_BEHIND = 2**31 - 1, 2 * _MOST_MAPPED
"""Free bytes at the end of the heap that stay, within the block and behind it, as glibc itself would come to."""


@contextmanager
def kept_heap() -> Iterator[None]:
    """Keep freed memory for the next tensor inside the block, and give it back behind it, which takes milliseconds.

    Nothing is done without glibc, nor where the environment sets these bounds.

    Tensors of a step are a few megabytes each, and are freed one after the other. Glibc returns the end of its heap
    beyond some megabytes each time, and the system clears every page of it again: a step of ``jobs/examples/rides``
    took 6.9 ms and takes 5.1, 4,096 rows through the default network 77 and 56, a step of small convolutions 67 and 51
    (``tests/bench/bench_heap.py``). It can go when torch keeps what it frees on a processor, as it does on a GPU.
    """
    libc = ctypes.CDLL(None)
    if _VARIABLES & os.environ.keys() or not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, _MOST_MAPPED)
    libc.mallopt(_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        libc.mallopt(_TRIM_THRESHOLD, _KEPT_BEHIND)
        libc.malloc_trim(0)
