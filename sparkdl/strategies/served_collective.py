"""The ranks of a run as a parameter server sees them: those that are gone are left out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sparkdl.collective.backends.group import check_reduction, narrowed, widened
from sparkdl.collective.base import Collective, GradientSync, ReduceOp
from sparkdl.compat.pickles import dumps
from sparkdl.config import SyncConfig
from sparkdl.errors import CheckpointError, UnreachableError
from sparkdl.launch.wire import load_value
from sparkdl.world import World

Gather = Callable[[torch.Tensor], dict[int, torch.Tensor]]


class ServedCollective:
    """A collective whose ranks exchange through a server, once there is one, so that a dead one keeps nobody waiting.

    It counts as the mean of those that live: a sum of numbers with fractions is multiplied by the number of all ranks
    over that of those which took part. Objects and whole numbers are those of the ranks that live.

    Args:
        ranks: what they exchange by until then.
    """

    def __init__(self, ranks: Collective) -> None:
        self._ranks = ranks
        self._gather: Gather | None = None

    def serve(self, gather: Gather) -> None:
        """Exchange by ``gather`` from now on: every rank gives its bytes, and gets those of all that live, by rank."""
        self._gather = gather

    @property
    def name(self) -> str:
        """The backend's name."""
        return self._ranks.name

    @property
    def world(self) -> World:
        """This rank's place among the ranks."""
        return self._ranks.world

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of the ranks that live, in rank order."""
        return self._ranks.all_gather_object(value) if self._gather is None else list(self._values(value).values())

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return ``root``'s value.

        Raises:
            UnreachableError: it is gone.
        """
        if self._gather is None:
            return self._ranks.broadcast_object(value, root)
        values = self._values(value if self.world.rank == root else None)
        if root not in values:
            raise UnreachableError(f"rank {root} is gone, and had something for the others: see why it ended")
        return values[root]

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Overwrite ``tensors`` with those of ``root``."""
        if self._gather is None:
            self._ranks.broadcast(tensors, root)
            return
        sent = [tensor.detach().cpu() for tensor in tensors] if self.world.rank == root else None
        for number, (tensor, value) in enumerate(zip(tensors, self.broadcast_object(sent, root), strict=True)):
            if tensor.shape != value.shape or tensor.dtype != value.dtype:
                raise CheckpointError(
                    f"tensor {number} is {tuple(tensor.shape)} of {tensor.dtype} here and {tuple(value.shape)} of "
                    f"{value.dtype} on rank {root}: build the same model on every rank"
                )
            tensor.detach().copy_(value)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum", *, weight: float | None = None) -> torch.Tensor:
        """Return ``op`` over the ranks, added up in their order."""
        if self._gather is None:
            return self._ranks.all_reduce(tensor, op, weight=weight)
        check_reduction(op, weight)
        contribution = widened(tensor, op).cpu()
        values = list(self._values((contribution if weight is None else contribution * weight, weight)).values())
        tensors = [value for value, _ in values]
        result: torch.Tensor
        if op in ("min", "max"):
            result = functools.reduce(torch.minimum if op == "min" else torch.maximum, tensors)
        else:
            result = functools.reduce(torch.add, tensors)
            if op == "mean":
                result = result / (len(values) if weight is None else sum(share for _, share in values))
            elif len(values) < self.world.size and tensor.is_floating_point():
                result = result * (self.world.size / len(values))
        return narrowed(result.to(tensor.device), tensor.dtype, op)

    def barrier(self) -> None:
        """Return once every rank that lives has called it."""
        if self._gather is None:
            self._ranks.barrier()
        else:
            self._values(None)

    def wrap(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: SyncConfig | None = None
    ) -> GradientSync:
        """Hook gradients to what the ranks exchange by without a server."""
        return self._ranks.wrap(model, optimizer, config)

    def close(self, *, failed: bool = False) -> None:
        """Leave the group."""
        self._ranks.close(failed=failed)

    def _values(self, value: Any) -> dict[int, Any]:
        assert self._gather is not None
        payload = torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8)
        return {rank: load_value([bytearray(blob.numpy())]) for rank, blob in self._gather(payload).items()}
