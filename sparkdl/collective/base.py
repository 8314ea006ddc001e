"""What the training loop asks of the ranks around it: one small Protocol, three implementations.

Enters: tensors, objects, gradients of one rank. Leaves: the same, agreed on by all ranks.

Stage 3 of 5. ``solo.py``, ``ddp.py`` and ``horovod.py`` implement it, and one contract test holds all three to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch

from sparkdl.config import SyncConfig
from sparkdl.world import World

__all__ = ["Collective", "GradientSync", "ReduceOp"]

ReduceOp = Literal["sum", "mean", "min", "max"]


class GradientSync(Protocol):
    """Keeps the gradients of one model equal on all ranks.

    The loop calls ``model`` forward, runs ``backward`` (inside ``accumulate()`` for all but the last pass of a
    step), then ``synchronize()``, and only then clips and steps the optimizer, which stays the user's own object.
    """

    @property
    def model(self) -> torch.nn.Module:
        """The module to call: the user's own, or a wrapper around it that hooks its backward pass."""
        ...

    @property
    def forward_is_collective(self) -> bool:
        """Whether a forward or backward pass itself waits for the other ranks, as synchronised batch norm does.

        Where it is true, a rank with an empty local batch must run both passes all the same; where it is false, it
        may go straight to ``synchronize()``.
        """
        ...

    def accumulate(self) -> AbstractContextManager[None]:
        """Backward passes inside only add to the local gradients; nothing travels.

        Behind it every ``param.grad`` has memory of its own, so that the next pass adds to each of them once.
        """
        ...

    def synchronize(self) -> None:
        """Wait until every ``param.grad`` holds the mean over all ranks of the local sums.

        A parameter without a gradient on some ranks counts as zero there; without one on every rank it stays None.
        Every ``param.grad`` then has memory of its own: what changes gradients in place changes each of them once.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return, in strings, numbers and lists, what decides how sums are rounded and what was found by measuring."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as ``state_dict`` says, before the first step; every rank calls it with the same ``state``.

        What does not fit any more (other parameters, another world size, settings given since) is left out, and found
        anew.
        """
        ...

    def close(self) -> None:
        """Remove every hook; ``model`` of the user is as it was before ``wrap``."""
        ...


class Collective(Protocol):
    """The ranks of one run, as one of them sees them."""

    @property
    def name(self) -> str:
        """``"solo"``, ``"torch"`` or ``"horovod"``."""
        ...

    @property
    def world(self) -> World:
        """Where this rank stands."""
        ...

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Overwrite ``tensors`` on every rank, in place, with those of ``root``.

        Raises:
            CheckpointError: shapes or dtypes differ between ranks; the message names the first tensor that does.
        """
        ...

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return ``root``'s picklable value on every rank."""
        ...

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum", *, weight: float | None = None) -> torch.Tensor:
        """Return a new tensor: ``op`` over all ranks, elementwise.

        Integers stay exact under sum, min and max; their mean is a float64 tensor. ``weight`` makes ``"mean"`` the
        weighted mean, ``sum(weight * tensor) / sum(weight)``; it is NaN where all weights are zero.

        Raises:
            ConfigError: ``op`` is unknown, the dtype has no such reduction, or ``weight`` comes without ``"mean"``.
        """
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the picklable values of all ranks, in rank order, on every rank."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called it."""
        ...

    def wrap(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: SyncConfig | None = None
    ) -> GradientSync:
        """Broadcast ``model``'s parameters and buffers and ``optimizer``'s state from rank 0, then hook gradients."""
        ...

    def close(self, *, failed: bool = False) -> None:
        """Leave the group; after a failure (``failed=True``) without waiting for the other ranks. Idempotent."""
        ...
