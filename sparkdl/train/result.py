"""What a training run leaves behind.

Enters: nothing. Leaves: ``TrainResult``, which the loop fills and the caller reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sparkdl.train.telemetry.history import History

__all__ = ["TrainResult"]


@dataclass(kw_only=True)
class TrainResult:
    """The end of a run, equal on all ranks.

    Attributes:
        model: the trained module of this rank; its weights are those of the best epoch where that was asked for.
        optimizer: with its state after the last step; None once it has left this rank.
        history: one row a step and one row an epoch, earlier parts of a resumed run included.
        backend: what carried the gradients: ``"torch"``, ``"horovod"``, or ``"horovod, gradients in shared memory"``.
        metrics: the row of the epoch the weights belong to: losses and metrics by column name.
        monitor: the column that judged the epochs.
        best_epoch: the epoch with the best ``monitor``, from 0; None if no epoch was judged.
        best_value: ``monitor`` of that epoch.
        epochs: epochs that were finished, earlier parts of a resumed run included.
        steps: optimizer steps, likewise.
        rows: rows of all ranks that were trained on, likewise.
        seconds: wall-clock seconds of this call.
        stopped_early: whether the run ended before its last epoch.
        stop_reason: why, if it did.
        resumed_step: the step of the checkpoint this call continued from; None for a fresh or a warm start.
    """

    model: torch.nn.Module
    history: History
    optimizer: torch.optim.Optimizer | None = None
    backend: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    monitor: str = "loss"
    best_epoch: int | None = None
    best_value: float | None = None
    epochs: int = 0
    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    stopped_early: bool = False
    stop_reason: str | None = None
    resumed_step: int | None = None
