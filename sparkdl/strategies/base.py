"""What the trainer asks of a strategy, and the strategies there are.

The trainer owns the order of batches, objective, metrics, schedule, checkpoints, selection and callbacks; a strategy
owns where parameters, gradients and optimizer state live, and what travels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import torch

from sparkdl.collective.base import Collective, GradientSync
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError

__all__ = ["STRATEGIES", "StepObjective", "Strategy", "open_strategy"]

STRATEGIES = {
    "all_reduce": "sparkdl.strategies.all_reduce:AllReduce",
    "zero1": "sparkdl.strategies.zero1:Zero1",
}
"""By name, where the class is; it is loaded when it is asked for."""


class StepObjective(Protocol):
    """What one batch shall reach, as the trainer hands it to a strategy's ``step``."""

    def __call__(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        """Return the loss of this rank's rows, whose mean over ranks is that of the global batch, and the outputs."""
        ...

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what to call ``backward`` on: the loss by its share in the step and the scale of fp16."""
        ...

    def skip(self, batch: Any) -> None:
        """Take part in what ranks exchange for the loss, on a rank that has no row of ``batch``."""
        ...

    def without_rows(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Do as ``skip``, with a forward pass of a row that stands in for none; return its loss."""
        ...


class Strategy(Protocol):
    """Trains one model on all ranks. Made from (collective, config); every rank calls every method, in the same order.

    Attributes:
        data_rank: which part of each global batch this rank reads; ranks of one pipeline read the same rows.
        data_size: of how many parts.
        model: the user's own module, once it is built.
        net: the module that a step calls: ``model``, or what wraps or compiles it.
        optimizer: the one to step, with every parameter group: the user's own, or what wraps it.
    """

    data_rank: int
    data_size: int
    model: torch.nn.Module
    net: torch.nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def sync(self) -> GradientSync | None:
        """By which a step of the user's own exchanges gradients; None where the strategy allows none."""
        ...

    @property
    def carried_by(self) -> str:
        """What carries the gradients, as logs and records say it."""
        ...

    def build(
        self,
        make_model: Callable[[], torch.nn.Module],
        make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
    ) -> None:
        """Make the model and spread it, then make the optimizer of what this rank holds.

        Raises:
            CheckpointError: the ranks made different models.
            ConfigError: what they made does not go with this strategy.
        """
        ...

    def step(self, batch: Any, objective: StepObjective, *, last: bool = True) -> tuple[torch.Tensor, Any]:
        """Forward, backward and, behind the last batch of an optimizer step, the exchange.

        The trainer clips and calls ``optimizer.step()`` then.

        Returns:
            The batch's loss on this rank, detached, such that its mean over ranks is the loss of the global batch; and
            the model's outputs, None where there is no row.
        """
        ...

    def exchange(self) -> None:
        """Exchange what steps with ``last=False`` left, where no last one follows."""
        ...

    def share_buffers(self) -> None:
        """Give all ranks rank 0's buffers, so that all validate and save the same model."""
        ...

    def state_dict(self) -> dict[str, Any] | None:
        """Gather ``model``, ``optimizer`` and ``sync``, in whole tensors under the user's own names, on the leader.

        The form is that of one plain module and one plain optimizer, so that any strategy loads what any other saved.
        Other ranks get None.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take over what ``state_dict`` gave; of a state without ``optimizer`` the weights alone.

        Args:
            state: on the leader; the other ranks give None.

        Raises:
            CheckpointError: it does not fit the model or the optimizer; on every rank.
        """
        ...

    def gather_model(self) -> torch.nn.Module:
        """Return one plain module with the current weights: on the leader at least."""
        ...

    def close(self) -> None:
        """Take every hook off model and optimizer; idempotent. ``state_dict`` still works."""
        ...


def open_strategy(name: str, collective: Collective, config: TrainConfig) -> Strategy:
    """Make the strategy ``name`` for the ranks of ``collective``.

    Raises:
        ConfigError: there is none of that name, or it does not go with this collective.
    """
    if name not in STRATEGIES:
        raise ConfigError(f"strategy={name!r} is unknown: choose one of {sorted(STRATEGIES)}")
    module, _, kind = STRATEGIES[name].partition(":")
    return cast(Strategy, getattr(importlib.import_module(module), kind)(collective, config))
