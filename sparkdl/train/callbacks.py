"""A run under way as callbacks see it, and the hooks that they may have into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.train.result import History
from sparkdl.world import World


@dataclass
class Run:
    """The state of the run on this rank.

    Attributes:
        model: the user's own module (not a wrapper), spread as the strategy has it. Every rank may freeze and thaw its
            parameters alike (``requires_grad_``) and, but with ``parameter_server``, write into them
            (``parameter.mul_``). What a strategy cannot follow is refused; what one rank alone does is not noticed.
        optimizer: the optimizer.
        world: which rank this is.
        config: settings of the run.
        steps_per_epoch: batches of an epoch.
        epoch: the current epoch, from 0; after the last one, the number of epochs.
        batch: batches of this epoch that were trained on.
        step: optimizer steps so far.
        rows: rows of all ranks that were trained on so far.
        history: the tables so far; step rows arrive once a window (``TrainConfig.window_steps``).
        local_loss: this rank's share in the loss of the newest batch, on the device.
        stop_reason: why the run will stop, once all ranks know; None otherwise.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    world: World
    config: TrainConfig
    steps_per_epoch: int
    epoch: int = 0
    batch: int = 0
    step: int = 0
    rows: int = 0
    history: History = field(default_factory=History)
    local_loss: torch.Tensor | None = None
    stop_reason: str | None = None
    _stop_request: str | None = None

    @property
    def loss(self) -> float:
        """Loss of the newest batch on this rank (NaN before the first); waits for the device."""
        return float("nan") if self.local_loss is None else float(self.local_loss)

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"epoch": self.epoch, "batch": self.batch, "step": self.step, "rows": self.rows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over a position."""
        self.epoch, self.batch, self.step, self.rows = (state[name] for name in ("epoch", "batch", "step", "rows"))

    def request_stop(self, reason: str = "a callback asked for it") -> None:
        """Ask all ranks to stop; any rank may. They agree at the end of the window, and stop at the same step."""
        self._stop_request = self._stop_request or reason

    @property
    def stop_request(self) -> str | None:
        """Why this rank asked to stop; None if it did not."""
        return self._stop_request

    def agree_to_stop(self, requests: Sequence[str | None]) -> None:
        """Decide by the requests of all ranks: the first rank's reason counts."""
        self.stop_reason = next((request for request in requests if request), None)


class Callback:
    """Override what you need; every hook is called on every rank, unless ``leader_only``.

    A callback travels to the ranks by pickling, so each rank has its own copy, rank 0's of which keeps its
    ``state_dict`` in checkpoints. A hook that talks to other ranks must not be ``leader_only``.

    Attributes:
        leader_only: call the hooks on rank 0 alone.
    """

    leader_only: bool = False

    def on_fit_start(self, run: Run) -> None:
        """Act before the first step; a resumed run has its state already."""

    def on_epoch_start(self, run: Run) -> None:
        """Act before the first batch of an epoch."""

    def on_step_end(self, run: Run) -> None:
        """Act after each optimizer step. ``run.loss`` costs a wait for the device: ask for it rarely."""

    def on_validation_start(self, run: Run) -> None:
        """Act before each validation."""

    def on_validation_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Act after each validation, with its columns (``val_loss``, ...), equal on all ranks."""

    def on_epoch_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Act after each epoch, with its row of the history, equal on all ranks."""

    def on_checkpoint(self, run: Run) -> None:
        """Act after a checkpoint's content was taken; it becomes durable a little later."""

    def on_fit_end(self, run: Run) -> None:
        """Act after the last epoch, with the final weights in the model."""

    def on_error(self, run: Run, error: BaseException) -> None:
        """When the run ends by an error; other ranks may be gone already."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: numbers, strings, tensors, lists and dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""


class Hooks:
    """The callbacks of one rank, ready to be called: only hooks that somebody overrides cost anything.

    Raises:
        ConfigError: one of them is no ``Callback``.
    """

    def __init__(self, callbacks: Sequence[Callback], is_leader: bool) -> None:
        unknown = [type(c).__name__ for c in callbacks if not isinstance(c, Callback)]
        if unknown:
            raise ConfigError(
                f"callbacks holds {unknown}, which are none: derive them from sparkdl.train.callbacks.Callback"
            )
        self.callbacks = list(callbacks)
        self._active = [callback for callback in callbacks if is_leader or not callback.leader_only]
        self.step_end = self._overridden("on_step_end")

    def call(self, hook: str, *arguments: Any) -> None:
        """Call ``hook`` of every callback that overrides it, in order."""
        for function in self._overridden(hook):
            function(*arguments)

    def _overridden(self, hook: str) -> list[Callable[..., None]]:
        plain = getattr(Callback, hook)
        return [getattr(c, hook) for c in self._active if getattr(type(c), hook, plain) is not plain]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of each callback, in order."""
        return [callback.state_dict() for callback in self.callbacks]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Take over the states, as far as the callbacks are the same ones in the same order."""
        for callback, state in zip(self.callbacks, states, strict=False):
            callback.load_state_dict(state)
