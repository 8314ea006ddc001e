"""How full buckets become means: the seam between the reducer and what carries the bytes.

Enters: buckets that hold the gradients of this rank. Leaves: the same buckets with the mean over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from sparkdl.collective.backends.group import GroupCollective, Pending
    from sparkdl.collective.gradients.buckets import Bucket

__all__ = ["Exchange", "WireExchange"]


class Exchange(Protocol):
    """Carries the buckets of one reducer; every rank calls the same methods in the same order.

    Attributes:
        overlaps: whether buckets are to start while the backward pass goes on, each as soon as it is full.
    """

    overlaps: bool

    def place(self, buckets: Sequence[Bucket]) -> None:
        """Give each new bucket the memory that its gradients are collected in, ``bucket.place(wire)``."""
        ...

    def forget(self, buckets: Sequence[Bucket]) -> None:
        """Let go of the memory of ``buckets``, which are used no more."""
        ...

    def begin(self) -> None:
        """Wait until the first bucket of a step may be filled."""
        ...

    def start(self, bucket: Bucket, key: str) -> None:
        """Send ``bucket``, which has been filled; buckets start in the same order on every rank."""
        ...

    def finish(self, buckets: Sequence[Bucket]) -> None:
        """Return once each bucket's ``flat`` and ``flags`` hold the mean over all ranks.

        Raises:
            ClusterError: another rank vanished, or did not take part within the timeout.
        """
        ...

    def close(self) -> None:
        """Let go of what was placed."""
        ...


class WireExchange:
    """All-reduces of the backend, which run while the backward pass goes on.

    Args:
        group: the ranks.
        dtype: what float32 and float64 gradients travel as; None sends them whole.
    """

    overlaps = True

    def __init__(self, group: GroupCollective, dtype: torch.dtype | None) -> None:
        self._group = group
        self._dtype = dtype
        self._pending: list[Pending] = []

    def place(self, buckets: Sequence[Bucket]) -> None:
        """Collect gradients where they stay, or in a narrower copy under compression."""
        for bucket in buckets:
            narrow = self._dtype is not None and bucket.flat.dtype in (torch.float32, torch.float64)
            bucket.place(torch.zeros_like(bucket.flat, dtype=self._dtype) if narrow else bucket.flat)

    def forget(self, buckets: Sequence[Bucket]) -> None:
        """Nothing to let go of."""

    def begin(self) -> None:
        """Nothing to wait for: ``finish`` left nothing under way."""

    def start(self, bucket: Bucket, key: str) -> None:
        """Begin to sum ``bucket`` over the ranks."""
        if bucket.wire is not bucket.flat:
            bucket.wire /= self._group.world.size  # before the sum, lest it overflow 16 bits
        self._pending.append(self._group.start_all_reduce(bucket.wire, "sum", key))

    def finish(self, buckets: Sequence[Bucket]) -> None:
        """Wait for the sums, and make means of them."""
        pending, self._pending = self._pending, []
        for bucket, work in zip(buckets, pending, strict=True):
            work.wait()
            if bucket.wire is bucket.flat:
                bucket.flat /= self._group.world.size
            else:
                bucket.flat.copy_(bucket.wire)

    def close(self) -> None:
        """Forget what is under way: after a failure it may never end."""
        self._pending.clear()
