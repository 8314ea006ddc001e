"""The order of a pipeline's messages over gloo: a rank says what it is to receive before it sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def receives_first(device: torch.device) -> Iterator[None]:
    """Inside, schedules of ``torch.distributed.pipelining`` begin to receive first; NCCL needs no order.

    A rank of gloo says that it can receive on the connection that it sends on, behind what it sends. torch's 1F1B
    begins to send before it begins to receive, so that of two ranks which send each other something one follows the
    other: at 0.2 Gbit/s a step of two stages took 347 ms in this order and takes 286 (torch 2.13,
    ``bench_pipeline_messages.py``). It can go once torch begins to receive first.
    """
    schedules: Any = import_module("torch.distributed.pipelining.schedules")
    torchs = schedules._batch_p2p

    def ordered(operations: Sequence[Any], desc: str | None = None) -> Any:
        return torchs(sorted(operations, key=lambda operation: operation.op is not dist.irecv), desc)

    if device.type == "cpu":
        schedules._batch_p2p = ordered
    try:
        yield
    finally:
        schedules._batch_p2p = torchs
