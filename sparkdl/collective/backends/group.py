"""The part that both real backends share: the Protocol of ``base.py``, built out of four primitive operations."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch

from sparkdl.collective.agree import (
    agree_on_tensors,
    named_parameters,
    pack,
    share_optimizer,
    unpack,
)
from sparkdl.collective.base import GradientSync, Pending, ReduceOp
from sparkdl.collective.signed import SignedObjects
from sparkdl.config import SyncConfig
from sparkdl.errors import ConfigError
from sparkdl.world import World

REDUCE_OPS = ("sum", "mean", "min", "max")
BROADCAST_BYTES = 64 * 2**20  # tensors are fused up to this: it bounds the staging copy
FEW_ELEMENTS = 4096
"""The number of elements up to which a message costs what its rounds take, whatever it holds."""
MESSAGE_BYTES = 2**30  # backends count the elements of a message in 31 bits


def widened(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """Return ``tensor`` as a dtype in which every backend reduces exactly; a copy in any case.

    Raises:
        ConfigError: the dtype has no such reduction.
    """
    dtype = tensor.dtype
    if dtype.is_complex or tensor.layout != torch.strided:
        raise ConfigError(f"all_reduce of a {tensor.layout} tensor of {dtype} is not supported: reduce its parts")
    if dtype == torch.uint64 and op in ("min", "max"):
        raise ConfigError(f"op={op!r} of {dtype} is not supported, half of which no backend orders: reduce torch.int64")
    if not dtype.is_floating_point:
        target = torch.float64 if op == "mean" else torch.int64
    elif dtype in (torch.float32, torch.float64):
        target = dtype
    else:
        target = torch.float32
    return tensor.detach().to(target, copy=True).contiguous()


class GroupCollective(ABC):
    """A ``Collective`` over several processes; subclasses add the primitives.

    A backend adds only how a flat tensor is reduced, broadcast and gathered, how it waits, and what its errors look
    like.

    Args:
        world: where this rank stands.
        timeout: how long to wait for the other ranks, in every operation.
        may_share_memory: whether gradients may go round the backend where ``SyncConfig`` does not say.
    """

    def __init__(self, world: World, timeout: timedelta, *, may_share_memory: bool = False) -> None:
        self._world = world
        self._timeout = timeout
        self._may_share_memory = may_share_memory
        self._closed = False
        self._closers: list[Callable[[], None]] = []

    @property
    def world(self) -> World:
        """This rank's place among the ranks."""
        return self._world

    @property
    def timeout_seconds(self) -> float:
        """How long an operation waits for the other ranks, seconds."""
        return self._timeout.total_seconds()

    @property
    def may_share_memory(self) -> bool:
        """Whether gradients may go round the backend, through memory of the host, where nobody said otherwise."""
        return self._may_share_memory

    @functools.cached_property
    def _objects(self) -> SignedObjects:
        return SignedObjects(self._world)

    @property
    @abstractmethod
    def name(self) -> str:
        """The backend's name."""

    @abstractmethod
    def start_all_reduce(self, flat: torch.Tensor, op: str, key: str, *, channel: str = "") -> Pending:
        """Begin to reduce ``flat``, contiguous and 1-d, in place over all ranks; ``op`` is sum, min or max.

        Operations of one channel begin in the same order on every rank; ``key`` is equal on all ranks, and free again
        once the operation is done. Channels are independent of each other.
        """

    @abstractmethod
    def open_channel(self, channel: str) -> None:
        """Make ``channel`` usable, by every rank in the same order; the channel ``""`` always is."""

    @abstractmethod
    def broadcast_flat(self, flat: torch.Tensor, root: int) -> None:
        """Overwrite ``flat``, contiguous bytes, with that of ``root``."""

    @abstractmethod
    def gather_rows(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's ``rows``, which may differ in their first dimension alone."""

    @abstractmethod
    def gather_equal(self, flat: torch.Tensor) -> torch.Tensor:
        """Return ``(size, elements)``: every rank's ``flat``, 1-d, contiguous and of one length on all ranks."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    @abstractmethod
    def guard(self, doing: str) -> AbstractContextManager[None]:
        """Turn the backend's errors inside the block into ``UnreachableError``."""

    @abstractmethod
    def leave(self, *, failed: bool) -> None:
        """Leave the group, unless user code made it; after a failure without waiting for the other ranks."""

    def close(self, *, failed: bool = False) -> None:
        """Leave the group. Idempotent."""
        if self._closed:
            return
        self._closed = True
        # Hanging up is how the other ranks learn at once that this one failed.
        for closer in self._closers:
            closer()
        self._closers.clear()
        self.leave(failed=failed)

    def at_close(self, closer: Callable[[], None]) -> None:
        """Call ``closer``, which is idempotent, when this rank leaves."""
        self._closers.append(closer)

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Overwrite ``tensors`` in place with those of ``root``."""
        self._check_root(root)
        agree_on_tensors(self, [(f"tensor {index}", tensor) for index, tensor in enumerate(tensors)])
        self.broadcast_unchecked(tensors, root)

    def broadcast_unchecked(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Broadcast tensors whose shapes are known to agree, fused into few messages."""
        for batch in batches_of(tensors, BROADCAST_BYTES):
            flat = pack(batch)
            self._broadcast_long(flat, root)
            if self._world.rank != root:
                unpack(flat, batch)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return ``root``'s value on every rank."""
        self._check_root(root)
        flat = self._objects.pack(value) if self._world.rank == root else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([flat.numel()], dtype=torch.int64)
        self.broadcast_flat(size.view(torch.uint8), root)
        if self._world.rank != root:
            flat = torch.empty(int(size.item()), dtype=torch.uint8)
        self._broadcast_long(flat, root)
        value = self._objects.unpack(flat, root)
        self._objects.next_operation()
        return value

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum", *, weight: float | None = None) -> torch.Tensor:
        """Return ``op`` over all ranks, elementwise, as a new tensor."""
        check_reduction(op, weight)
        flat = widened(tensor, op).reshape(-1)
        if weight is not None:
            flat = torch.cat([flat * weight, flat.new_tensor([weight])])
        if op in ("sum", "mean") and flat.is_floating_point() and 0 < flat.numel() <= FEW_ELEMENTS:
            flat = self.sum_of_few(flat)
        else:
            self.start_all_reduce(flat, "sum" if op == "mean" else op, "all_reduce").wait()
        if weight is not None:
            flat = flat[:-1] / flat[-1]
        elif op == "mean":
            flat /= self._world.size
        return narrowed(flat.reshape(tensor.shape), tensor.dtype, op)

    def sum_of_few(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's ``flat``, floats, added up in an order that its length does not change.

        A ring begins each part of a message at another rank, and three numbers have several sums: what a number comes
        to would depend on what travels beside it. Two have one.
        """
        if self._world.size == 2:
            self.start_all_reduce(flat, "sum", "few").wait()
            return flat
        total: torch.Tensor = functools.reduce(torch.add, self.gather_equal(flat))
        return total

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return all ranks' values in rank order."""
        parts = self.gather_rows(self._objects.pack(value))
        values = [self._objects.unpack(part, rank) for rank, part in enumerate(parts)]
        self._objects.next_operation()
        return values

    def wrap(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: SyncConfig | None = None
    ) -> GradientSync:
        """Broadcast ``model`` and ``optimizer`` from rank 0, then hook the gradients."""
        from sparkdl.collective.gradients.reducer import Reducer

        parameters = [(name, param) for param, name in named_parameters(model, optimizer).items()]
        named: list[tuple[str, torch.Tensor]] = [*parameters, *model.named_buffers()]
        agree_on_tensors(self, named)
        with torch.no_grad():
            self.broadcast_unchecked([tensor for _, tensor in named])
            share_optimizer(self, optimizer)
        return Reducer(self, model, optimizer, config or SyncConfig())

    def _broadcast_long(self, flat: torch.Tensor, root: int) -> None:
        for part in torch.split(flat, MESSAGE_BYTES):
            self.broadcast_flat(part, root)

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self._world.size:
            raise ConfigError(f"root={root} is not a rank of this world of {self._world.size}: name one of its ranks")


def never_came(world: World, missing: Sequence[int], seconds: float) -> str:
    """Say which ranks did not join."""
    names = ", ".join(str(rank) for rank in missing[:20]) + (", ..." if len(missing) > 20 else "")
    which = f"rank {names} of {world.size}" if len(missing) == 1 else f"ranks {names} of {world.size}"
    return f"{which} did not join rank {world.rank} within {seconds:g} s: see why they did not start, or raise timeout"


def check_reduction(op: str, weight: float | None) -> None:
    """Raise ``ConfigError`` unless ``op`` exists and fits ``weight``."""
    if op not in REDUCE_OPS:
        raise ConfigError(f"op={op!r} is not one of {', '.join(REDUCE_OPS)}: choose one of these")
    if weight is not None and op != "mean":
        raise ConfigError(f"weight={weight} with op={op!r} has no meaning: weights go with op='mean'")


def reduced_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    """The dtype of a reduction's result: that of its input, but for means of integers and sums of booleans."""
    if not dtype.is_floating_point and op == "mean":
        return torch.float64
    return torch.int64 if dtype == torch.bool and op == "sum" else dtype


def narrowed(reduced: torch.Tensor, dtype: torch.dtype, op: str) -> torch.Tensor:
    """Return what became of a ``widened`` tensor of ``dtype``, as the dtype of the result.

    Raises:
        ConfigError: it is a sum of integers that the dtype does not hold; every rank raises it.
    """
    target = reduced_dtype(dtype, op)
    if op == "sum" and not target.is_floating_point and target.itemsize < 8 and reduced.numel():
        least, most = (int(end) for end in reduced.aminmax())
        bounds = torch.iinfo(target)
        if least < bounds.min or most > bounds.max:
            raise ConfigError(
                f"a sum over the ranks lies in {least}..{most}, and {target} holds {bounds.min}..{bounds.max}: reduce "
                "a tensor of torch.int64"
            )
    return reduced.to(target)


def batches_of(tensors: Sequence[torch.Tensor], limit: int) -> list[list[torch.Tensor]]:
    """Cut ``tensors`` into runs on one device of at most ``limit`` bytes each, one tensor at least."""
    batches: list[list[torch.Tensor]] = []
    batch_bytes, device = 0, None
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if not batches or batch_bytes + size > limit or tensor.device != device:
            batches.append([])
            batch_bytes, device = 0, tensor.device
        batches[-1].append(tensor)
        batch_bytes += size
    return batches
