"""The collective of one rank: nothing travels, everything else behaves as with many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from sparkdl.collective.agree import named_parameters
from sparkdl.collective.backends.group import check_reduction, reduced_dtype, widened
from sparkdl.collective.base import GradientSync, ReduceOp
from sparkdl.collective.gradients.buckets import separate
from sparkdl.collective.signed import SignedObjects
from sparkdl.config import SyncConfig
from sparkdl.errors import ConfigError, WorldSizeError
from sparkdl.world import World


class LocalGradients:
    """Gradients stay what this rank's rows give: the mean over one rank, or over nobody else; see ``GradientSync``.

    Args:
        model: the user's.
        optimizer: of its parameters.
        carried_by: what logs and records say.
    """

    forward_is_collective = False

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, carried_by: str = "solo") -> None:
        self.model, self.carried_by = model, carried_by
        self._params = list(named_parameters(model, optimizer))

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Give each gradient memory of its own behind the block."""
        yield
        separate(self._params)

    def weighted(self, weight: float) -> AbstractContextManager[None]:
        """Nothing is exchanged on the way."""
        return nullcontext()

    def synchronize(self, weight: float = 1.0) -> None:
        """Give each gradient memory of its own."""
        separate(self._params)

    def share_buffers(self) -> None:
        """Nobody else has any."""

    def share_optimizer(self) -> None:
        """Nobody else has one."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: no sum is rounded."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing over."""

    def rank_state(self) -> dict[str, Any]:
        """Return nothing: there is nothing to send."""
        return {}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Take nothing over."""

    def close(self) -> None:
        """There are no hooks."""


class SoloCollective:
    """A world of one."""

    name = "solo"

    def __init__(self, world: World) -> None:
        if world.size != 1:
            raise WorldSizeError(
                f"backend='solo' is for one rank, and this world has {world.size}: choose 'auto', 'horovod' or 'torch'"
            )
        self.world = world

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Leave ``tensors`` as they are."""
        _check_root(root)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return a copy of ``value``, as many ranks would."""
        _check_root(root)
        return self._copied(value)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum", *, weight: float | None = None) -> torch.Tensor:
        """Return a copy of ``tensor``."""
        check_reduction(op, weight)
        value = widened(tensor, op)
        if weight is not None:
            value = value * weight / weight if weight else value * float("nan")
        return value.to(reduced_dtype(tensor.dtype, op))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return ``[value]``, copied."""
        return [self._copied(value)]

    def _copied(self, value: Any) -> Any:
        objects = SignedObjects(self.world)
        return objects.unpack(objects.pack(value), 0)

    def barrier(self) -> None:
        """Return at once."""

    def wrap(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: SyncConfig | None = None
    ) -> GradientSync:
        """Return ``model`` as it is: one rank has nothing to send, so nothing in ``config`` applies."""
        return LocalGradients(model, optimizer)

    def close(self, *, failed: bool = False) -> None:
        """Nothing to leave."""


def _check_root(root: int) -> None:
    if root != 0:
        raise ConfigError(f"root={root} is not a rank of this world of 1: name rank 0")
