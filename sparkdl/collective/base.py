"""The Protocols of this room: what the training loop asks of the ranks, and gradients of a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeVar

import torch

from sparkdl.config import SyncConfig
from sparkdl.errors import SparkdlError
from sparkdl.world import World

ReduceOp = Literal["sum", "mean", "min", "max"]
Value = TypeVar("Value")


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
    def carried_by(self) -> str:
        """What carries the gradients, as logs and records say it.

        The backend's name where its all-reduce does, or ``"torch, gradients in shared memory"``.
        """
        ...

    @property
    def forward_is_collective(self) -> bool:
        """Whether a forward or backward pass itself waits for the other ranks, as synchronised batch norm does.

        Where it is true, a rank with an empty local batch must run both passes all the same, over rows that stand in
        for none (``weighted(0.0)``); where it is false, it may go straight to ``synchronize()``.
        """
        ...

    def accumulate(self) -> AbstractContextManager[None]:
        """Backward passes inside only add to the local gradients; nothing travels.

        Behind it every ``param.grad`` has memory of its own, so that the next pass adds to each of them once.
        """
        ...

    def weighted(self, weight: float) -> AbstractContextManager[None]:
        """Forward passes inside are of rows whose gradients the caller multiplies by ``weight`` afterwards.

        What ranks exchange on the way must know it. At 0 the rows stand in for none, and count for nothing there; what
        their backward pass does to ``param.grad`` is the caller's affair.
        """
        ...

    def share_buffers(self) -> None:
        """Give all ranks rank 0's buffers, so that all validate and save the same model; every rank calls it.

        Warns once where floating-point buffers had drifted apart.
        """
        ...

    def share_optimizer(self) -> None:
        """Give all ranks the state and the hyperparameters of rank 0's optimizer; every rank calls it."""
        ...

    def synchronize(self, weight: float = 1.0) -> None:
        """Wait until every ``param.grad`` holds the mean over all ranks of the local sums.

        A parameter without a gradient on some ranks counts as zero there; without one on every rank it stays None.
        Every ``param.grad`` then has memory of its own: what changes gradients in place changes each of them once.

        Args:
            weight: what the gradients of this rank's own rows have been multiplied by, for the mean to be that of the
                global batch: its share of the rows times the ranks, 0 without any. The mean needs no more; Adasum,
                which is none, joins the gradients divided by it.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return, in strings, numbers and lists, what decides how sums are rounded."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as ``state_dict`` says, before the first step; every rank calls it with the same ``state``.

        What does not fit any more (other parameters, another world size, settings given since) is left out, and found
        anew.
        """
        ...

    def rank_state(self) -> dict[str, Any]:
        """Return what this rank alone has to go on exactly: what compression has left to send."""
        ...

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Take over what ``rank_state`` gave on the rank of this number, behind ``load_state_dict``."""
        ...

    def close(self) -> None:
        """Remove every hook; ``model`` of the user is as it was before ``wrap``."""
        ...


class Collective(Protocol):
    """The ranks of one run, as one of them sees them.

    ``backends/`` holds three implementations, and one contract test runs over all of them.
    """

    @property
    def name(self) -> str:
        """``"solo"``, ``"torch"`` or ``"horovod"``."""
        ...

    @property
    def world(self) -> World:
        """This rank's place among the ranks."""
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
            ConfigError: ``op`` is unknown, the dtype has no such reduction or does not hold the sum, or ``weight``
                comes without ``"mean"``.
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


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return once its result is in place.

        Raises:
            UnreachableError: another rank vanished or did not take part within the timeout.
        """
        ...


class Ranks(Protocol):
    """The operations of a backend that gradients travel by: they start, and complete in the background.

    The two real backends have them in common, and ``gradients/`` knows nothing else of a backend.
    """

    @property
    def name(self) -> str:
        """The backend's name."""
        ...

    @property
    def world(self) -> World:
        """This rank's place among the ranks."""
        ...

    @property
    def timeout_seconds(self) -> float:
        """How long an operation waits for the other ranks, seconds."""
        ...

    @property
    def may_share_memory(self) -> bool:
        """Whether gradients may go round the backend, through memory of the host, where nobody said otherwise."""
        ...

    def start_all_reduce(self, flat: torch.Tensor, op: str, key: str, *, channel: str = "") -> Pending:
        """Begin to reduce ``flat``, contiguous and 1-d, in place over all ranks; ``op`` is sum, min or max.

        Operations of one channel begin in the same order on every rank; ``key`` is equal on all ranks, and free again
        once the operation is done. Channels are independent of each other.
        """
        ...

    def open_channel(self, channel: str) -> None:
        """Make ``channel`` usable, by every rank in the same order; the channel ``""`` always is."""
        ...

    def gather_rows(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's ``rows``, which may differ in their first dimension alone."""
        ...

    def broadcast_unchecked(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Overwrite ``tensors``, whose shapes are known to agree, with those of ``root``."""
        ...

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return ``root``'s value on every rank."""
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called it."""
        ...

    def at_close(self, closer: Callable[[], None]) -> None:
        """Call ``closer``, which is idempotent, when this rank leaves."""
        ...


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as a flat one, without a copy where it lies whole.

    A dimension of one element may have any stride in a contiguous tensor, and torch views none but 1 as bytes.
    """
    contiguous = tensor.detach().contiguous()
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def on_leader(collective: Collective, act: Callable[[], Value]) -> Value:
    """Return on every rank what ``act`` gives on rank 0, picklable; what it refuses there, every rank raises.

    Raises:
        SparkdlError: that of ``act``.
    """
    outcome: Any = None
    if collective.world.is_leader:
        try:
            outcome = act()
        except SparkdlError as error:
            outcome = error
    outcome = collective.broadcast_object(outcome)
    if isinstance(outcome, SparkdlError):
        raise outcome
    return outcome  # type: ignore[no-any-return]
