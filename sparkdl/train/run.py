"""A run under way, as callbacks see it.

Enters: the loop's progress. Leaves: one object to read from, and the one request that can be put to it: to stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sparkdl.config import TrainConfig
from sparkdl.train.result import History
from sparkdl.world import World

__all__ = ["Run"]


@dataclass
class Run:
    """Where the run stands on this rank.

    Attributes:
        model: the user's own module (not a wrapper); look, and change at your own risk.
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
