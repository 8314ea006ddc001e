"""Memory that batches are gathered into, used again as soon as nobody looks at it."""

from __future__ import annotations

import sys
import threading

import numpy as np
import numpy.typing as npt
import torch

_LEAST = 4096


class BufferRing:
    """Reusable buffers, by size in powers of two.

    Whoever asks for so many bytes gets a byte tensor. Fresh memory costs a page fault every 4 KiB, several times the
    copy itself, so buffers go round; but a buffer never goes round while any tensor, view or array of it is alive: each
    hand-out wraps the same numpy array in a storage of its own, and the array's reference count tells when all are
    gone.

    Args:
        keep_bytes: buffers beyond this many bytes are not kept for reuse.
        pin_memory: take page-locked memory from torch, whose own allocator then does the reuse, since it alone knows
            when copies to a GPU have ended.

    Attributes:
        keep_bytes: as given; may be raised.
    """

    def __init__(self, keep_bytes: int, pin_memory: bool = False) -> None:
        self.keep_bytes = keep_bytes
        self._pin_memory = pin_memory
        self._kept_bytes = 0
        self._buffers: dict[int, list[npt.NDArray[np.uint8]]] = {}
        self._lock = threading.Lock()
        self._idle_count = self._count([np.empty(1, np.uint8)], 0)

    @staticmethod
    def _count(buffers: list[npt.NDArray[np.uint8]], position: int) -> int:
        """References to a buffer, as many as a buffer in a list has that nobody else looks at."""
        return sys.getrefcount(buffers[position])

    def take(self, size: int) -> torch.Tensor:
        """A uint8 tensor of ``size`` bytes of any content, aligned to 64 bytes where that is more than a page."""
        if self._pin_memory:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.from_numpy(self._buffer(size))[:size]

    def numbers(self, count: int) -> npt.NDArray[np.int64]:
        """An array of ``count`` numbers of any content; never page-locked."""
        return self._buffer(8 * count)[: 8 * count].view(np.int64)

    def _buffer(self, size: int) -> npt.NDArray[np.uint8]:
        slot = max(_LEAST, 1 << max(0, size - 1).bit_length())
        with self._lock:
            buffers = self._buffers.setdefault(slot, [])
            for position in range(len(buffers)):  # always the same few, as long as they are idle: they are in a cache
                if self._count(buffers, position) == self._idle_count:
                    return buffers[position]
            buffer = np.empty(slot, np.uint8)
            if self._kept_bytes + slot <= self.keep_bytes:
                buffers.append(buffer)
                self._kept_bytes += slot
        return buffer
