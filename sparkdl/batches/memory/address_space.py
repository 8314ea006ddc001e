"""One range of addresses in which every block of a shard set has a place: any row is one number."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.errors import IntegrityError, StorageError

PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000 if sys.platform.startswith("linux") else 0x40
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14; not among Python's names
_FAILED = ctypes.c_void_p(-1).value


def _libc() -> Any:
    """The C library: Python's ``mmap`` cannot choose an address."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def pages(size: int) -> int:
    """``size`` bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


class _Range:
    """The reserved addresses; given back when the last array that looks at them is gone."""

    def __init__(self, size: int) -> None:
        self._libc = _libc()
        self.size = size
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        address = self._libc.mmap(None, size, mmap.PROT_READ, flags, -1, 0)
        if address in (None, _FAILED):
            raise StorageError(
                f"cannot reserve {size} bytes of address space ({os.strerror(ctypes.get_errno())}): raise `ulimit -v`"
            )
        self.address = int(address)
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (self.address, True)}

    def _within(self, offset: int, size: int) -> None:
        """Memory outside of the range belongs to somebody else."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise IntegrityError(
                f"{size} bytes at {offset} lie outside of the {self.size} reserved: write the set again"
            )

    def place(self, offset: int, size: int, descriptor: int) -> None:
        """Map the first ``size`` bytes of a file at ``offset``, or with -1 take the file there away."""
        self._within(offset, pages(size))
        if descriptor < 0:
            flags, size = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED, pages(size)
        else:
            flags = mmap.MAP_SHARED | _MAP_FIXED
        address = self._libc.mmap(self.address + offset, size, mmap.PROT_READ, flags, descriptor, 0)
        if address in (None, _FAILED):
            reason = os.strerror(ctypes.get_errno())
            raise StorageError(
                f"cannot map {size} bytes into memory ({reason}): raise vm.max_map_count, or lower cache_bytes"
            )

    def advise(self, offset: int, size: int, advice: int) -> None:
        self._within(offset, size)
        first = offset // PAGE * PAGE
        self._libc.madvise(self.address + first, offset + size - first, advice)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, TypeError):
            self._libc.munmap(self.address, self.size)


class AddressSpace:
    """A flat, read-only array of ``size`` bytes over which files are mapped.

    Files are mapped, not read: pages are loaded on first touch, belong to the page cache, and are shared by all ranks
    of the host. Gathering rows of many files then is a single indexed copy, with no copy into a buffer of blocks before
    it. The range is reserved first (``mmap`` without access costs neither memory nor swap), then files are mapped over
    parts of it.

    Args:
        size: bytes to reserve; a little more is reserved behind them, so that a gather of a few rows more than there
            are (padding of ragged rows) reads zeros instead of failing.
    """

    GUARD = 1 << 24

    def __init__(self, size: int) -> None:
        self.size = pages(size)
        self._range = _Range(self.size + self.GUARD)
        self.bytes: npt.NDArray[np.uint8] = np.asarray(self._range)
        self._next = 0
        self._free: dict[int, list[int]] = {}

    @property
    def address(self) -> int:
        """The place in memory where the address space starts."""
        return self._range.address

    def allot(self, size: int) -> int:
        """Set a part of ``size`` bytes aside; returns its offset. Parts are sized in powers of two, for reuse."""
        slot = max(PAGE, 1 << max(0, size - 1).bit_length())
        if self._free.get(slot):
            return self._free[slot].pop()
        if self._next + slot > self.size:
            raise StorageError(
                f"the {self.size} bytes reserved for mapped blocks are used up by {self._next}: lower cache_bytes"
            )
        self._next += slot
        return self._next - slot

    def map(self, descriptor: int, size: int, offset: int) -> None:
        """Map the first ``size`` bytes of an open file at ``offset``, a multiple of the page size."""
        self._range.place(offset, size, descriptor)

    def unmap(self, offset: int, size: int) -> None:
        """Take away what ``map`` placed in an allotted part, and free the part."""
        self._range.place(offset, size, -1)
        self._free.setdefault(max(PAGE, 1 << max(0, size - 1).bit_length()), []).append(offset)

    def populate(self, offset: int, size: int) -> None:
        """Map the pages of a part in one call instead of a fault for every few; where that is unknown, do nothing."""
        self._range.advise(offset, size, _POPULATE_READ)

    def forget(self, offset: int, size: int) -> None:
        """Drop the pages of a part from this process; the next touch takes them from the page cache again."""
        self._range.advise(offset, size, mmap.MADV_DONTNEED)
