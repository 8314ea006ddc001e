"""The carriers of full buckets between ranks: the backend's all-reduce, shared memory, or compression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from sparkdl import observe
from sparkdl.collective.base import Pending, Ranks
from sparkdl.collective.gradients.buckets import Bucket
from sparkdl.collective.gradients.compressed import COMPRESSIONS
from sparkdl.collective.gradients.shared_memory import SharedMemoryCarrier, open_shared_memory
from sparkdl.config import Compression, SyncConfig
from sparkdl.errors import ConfigError

WIRE_DTYPES = {None: None, "fp16": torch.float16, "bf16": torch.bfloat16}


class Carrier(Protocol):
    """Carries the buckets of one reducer; every rank calls the same methods in the same order.

    Attributes:
        name: what logs and records say.
        overlaps: whether buckets are to leave while the backward pass goes on, each as soon as it is full.
    """

    name: str
    overlaps: bool

    def place(self, buckets: Sequence[Bucket]) -> None:
        """Give each new bucket the memory that its gradients are collected in, ``bucket.place(wire)``."""
        ...

    def send(self, bucket: Bucket, key: str) -> None:
        """Fill ``bucket`` and send it; buckets leave in the same order on every rank."""
        ...

    def receive(self, buckets: Sequence[Bucket], weight: float = 1.0) -> None:
        """Return once each bucket's ``flat`` holds the mean over all ranks.

        Args:
            buckets: all that were sent.
            weight: of this rank in that mean, which its gradients have been multiplied by; see ``GradientSync``.

        Raises:
            UnreachableError: another rank vanished, or did not take part within the timeout.
        """
        ...

    def rank_state(self, params: Sequence[torch.nn.Parameter]) -> dict[str, Any]:
        """What this rank alone has to go on exactly, by the position of a parameter; nothing in most."""
        ...

    def load_rank_state(self, state: Mapping[str, Any], params: Sequence[torch.nn.Parameter]) -> None:
        """Take over what ``rank_state`` gave, as far as it is of the same kind."""
        ...

    def close(self) -> None:
        """Let go of the memory and the connections."""
        ...


class AllReduceCarrier:
    """All-reduces of the backend, which run while the backward pass goes on.

    Args:
        ranks: the backend.
        dtype: what float32 and float64 gradients travel as; None sends them whole.
    """

    overlaps = True

    def __init__(self, ranks: Ranks, dtype: torch.dtype | None) -> None:
        self.name = ranks.name
        self._ranks = ranks
        self._dtype = dtype
        self._pending: list[Pending] = []

    def place(self, buckets: Sequence[Bucket]) -> None:
        """Collect gradients where they stay, or in a narrower copy under compression."""
        for bucket in buckets:
            if self._dtype is not None and bucket.flat.dtype in (torch.float32, torch.float64):
                bucket.place(torch.zeros_like(bucket.flat, dtype=self._dtype))

    def send(self, bucket: Bucket, key: str) -> None:
        """Fill ``bucket`` and begin to sum it over the ranks."""
        bucket.fill()
        if bucket.wire is not bucket.flat:
            bucket.wire /= self._ranks.world.size  # before the sum, lest it overflow 16 bits
        self._pending.append(self._ranks.start_all_reduce(bucket.wire, "sum", key))

    def receive(self, buckets: Sequence[Bucket], weight: float = 1.0) -> None:
        """Wait for the sums, and make means of them."""
        pending, self._pending = self._pending, []
        for bucket, work in zip(buckets, pending, strict=True):
            work.wait()
            if bucket.wire is bucket.flat:
                bucket.flat /= self._ranks.world.size
            else:
                bucket.flat.copy_(bucket.wire)

    def rank_state(self, params: Sequence[torch.nn.Parameter]) -> dict[str, Any]:
        """Return nothing: all is sent."""
        return {}

    def load_rank_state(self, state: Mapping[str, Any], params: Sequence[torch.nn.Parameter]) -> None:
        """Take nothing over."""

    def close(self) -> None:
        """Forget what is under way: after a failure it may never end."""
        self._pending.clear()


def open_carrier(ranks: Ranks, params: Sequence[torch.nn.Parameter], config: SyncConfig) -> Carrier:
    """The backend's all-reduce, or memory of the host where that is asked for, or left to us and possible.

    Raises:
        ConfigError: ``config.shared_memory`` is True and memory cannot be shared; every rank raises it.
    """
    shares_memory = ranks.may_share_memory if config.shared_memory is None else config.shared_memory
    if shares_memory and ranks.world.size > 1:
        on_cpu = all(param.device.type == "cpu" for param in params)
        carrier_or_reason: SharedMemoryCarrier | str = "gradients are not on the CPU, or compressed"
        if config.compression is None and on_cpu:
            carrier_or_reason = open_shared_memory(ranks)
        if isinstance(carrier_or_reason, SharedMemoryCarrier):
            ranks.at_close(carrier_or_reason.close)
            if ranks.world.is_leader:
                observe.logger.info("gradients travel in shared memory, not through %s", ranks.name)
            return carrier_or_reason
        if config.shared_memory:
            raise ConfigError(
                f"shared_memory=True, but {carrier_or_reason}: leave it out to send gradients through {ranks.name}"
            )
        if ranks.world.is_leader:
            observe.logger.info("gradients travel through %s: %s", ranks.name, carrier_or_reason)
    if config.compression is None or config.compression in WIRE_DTYPES:
        return AllReduceCarrier(ranks, WIRE_DTYPES[config.compression])
    compression = Compression.of_text(config.compression)
    return COMPRESSIONS[compression.kind](ranks, compression)
