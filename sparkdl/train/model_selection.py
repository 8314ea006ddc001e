"""Model selection: the best epoch, its weights, and the end of the wait for a better one."""

from __future__ import annotations

import math
from typing import Any

import torch

from sparkdl.collective.base import Collective, on_leader
from sparkdl.config import TrainConfig
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.strategies.base import Strategy
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.checkpoint.resume import check_state
from sparkdl.train.objective.metrics import MetricSet
from sparkdl.train.result import History
from sparkdl.train.task import Task


def monitor_of(config: TrainConfig, metrics: MetricSet, task: Task, *, validates: bool) -> str:
    """The column by which epochs are compared.

    Raises:
        ConfigError: no epoch will have such a column, or nobody knows whether less or more of it is better.
    """
    monitor = config.monitor or ("val_loss" if validates else "loss")
    name = monitor.removeprefix("val_")
    if name != monitor and not validates:
        raise ConfigError(f"monitor={monitor!r} needs validation data, and there is none: give some")
    losses = ["loss"]
    if name != monitor and len(task.labels) > 1:  # those of training are one sum
        losses += [f"{label}_loss" for label in task.labels]
    columns = [*metrics.names, *losses]
    if not config.train_metrics and name == monitor:
        columns = ["loss"]
    if not any(name == column or name.startswith(f"{column}_") for column in columns):
        raise ConfigError(f"monitor={monitor!r} is no column of an epoch: choose one of {sorted(columns)}")
    if config.monitor_mode == "auto" and name not in losses and metrics.higher_is_better(name) is None:
        raise ConfigError(
            f"monitor={monitor!r} and monitor_mode='auto', and the metric does not say whether less or more of it is "
            "better: set monitor_mode='min' or monitor_mode='max'"
        )
    return monitor


class ModelSelection:
    """Compares epochs by one column of their rows, equal ones by their loss: few rows have few accuracies.

    Rows of the history are equal on all ranks, and so is the selection; at the end every rank's model has the best
    weights.

    Args:
        task: whose outputs the rows tell of.
        config: monitor, patience, whether the best weights are restored.
        metrics: the task's metrics, which may say whether higher is better.
        collective: the ranks.
        strategy: whose model's weights are kept and restored.
        checkpoints: where a resumed run finds the best weights of its earlier part.
        validates: whether there is validation data.

    Attributes:
        monitor: the column.
        best_value: its best value; None before the first.
        best_epoch: the epoch of that value, and of the least loss with it.
        waited: epochs since it was first reached.

    Raises:
        ConfigError: no epoch will have such a column, or nobody knows whether less or more of it is better.
    """

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        metrics: MetricSet,
        collective: Collective,
        strategy: Strategy,
        checkpoints: Checkpointer | None,
        *,
        validates: bool,
    ) -> None:
        self._config, self._collective = config, collective
        self._strategy, self._checkpoints = strategy, checkpoints
        self.monitor = monitor_of(config, metrics, task, validates=validates)
        higher = metrics.higher_is_better(self.monitor.removeprefix("val_"))
        self._maximize = higher if config.monitor_mode == "auto" else config.monitor_mode == "max"
        self.best_value: float | None = None
        self.best_epoch: int | None = None
        self.waited = 0
        self._loss = "val_loss" if self.monitor.startswith("val_") else "loss"
        self._best_loss: float | None = None
        self._best_weights: dict[str, torch.Tensor] | None = None
        self._best_row: dict[str, float] = {}

    def update(self, epoch: int, row: dict[str, float]) -> bool:
        """Take in the row of ``epoch``; return whether it is the best so far, and keep its weights if they are wanted.

        Raises:
            ConfigError: the row has no such column.
        """
        if self.monitor not in row:
            raise ConfigError(f"monitor={self.monitor!r} is no column of an epoch: choose one of {sorted(row)}")
        value, loss = row[self.monitor], row.get(self._loss)
        is_better = self._is_better(value)
        self.waited = 0 if is_better else self.waited + 1
        if not is_better and not (value == self.best_value and self._loses_less(loss)):
            return False
        self.best_value, self.best_epoch = value, epoch
        self._best_loss = loss if loss is not None and math.isfinite(loss) else None
        self._best_row = dict(row)  # a run that goes on may want it, though this one does not
        if self._config.restores_best:
            model = self._strategy.gather_model()
            if self._collective.world.is_leader:
                self._keep_weights(model.state_dict())
        return True

    def _is_better(self, value: float) -> bool:
        """Whether ``value`` improves by more than ``min_delta``; NaN never does."""
        if math.isnan(value) or self.best_value is None:
            return not math.isnan(value)
        return (value - self.best_value if self._maximize else self.best_value - value) > self._config.min_delta

    def _loses_less(self, loss: float | None) -> bool:
        """Whether ``loss`` is below that of the best epoch."""
        return loss is not None and self._best_loss is not None and loss < self._best_loss

    @property
    def out_of_patience(self) -> bool:
        """Whether ``early_stopping_patience`` epochs have passed without a better one."""
        patience = self._config.early_stopping_patience
        return patience is not None and self.waited >= patience

    def restore_best(self, history: History) -> dict[str, float]:
        """Put the best weights into every rank's model if that was asked for; return the row they belong to."""
        last = history.epochs[-1] if history.epochs else {}
        best = self.best_epoch
        if not self._config.restores_best or best is None or last.get("epoch") == best:
            return dict(last)
        on_leader(self._collective, self._find_weights)
        leads = self._collective.world.is_leader
        self._strategy.load_state_dict({"model": self._best_weights} if leads else None)
        return dict(self._best_row)

    def _keep_weights(self, state: dict[str, torch.Tensor]) -> None:
        """Copy the weights, into the memory of the copy before."""
        if self._best_weights is None:
            self._best_weights = {name: torch.empty_like(tensor, device="cpu") for name, tensor in state.items()}
        for name, tensor in state.items():
            self._best_weights[name].copy_(tensor)

    def _find_weights(self) -> None:
        """Take the best weights of a run that was resumed after its best epoch from the checkpoint that holds them."""
        if self._best_weights is not None:
            return
        best = self._checkpoints.best(check_state) if self._checkpoints is not None else None
        if best is None:
            raise CheckpointError(f"the weights of the best epoch {self.best_epoch} are not kept: set keep_best=True")
        self._best_weights = best.state["model"]

    def state_dict(self) -> dict[str, Any]:
        """Return what was selected so far; the best weights stand in the best checkpoint."""
        stopping = {"best_value": self.best_value, "best_epoch": self.best_epoch, "waited": self.waited}
        return {"stopping": stopping, "best_loss": self._best_loss, "row": self._best_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was selected."""
        stopping = state["stopping"]
        self.best_value, self.best_epoch, self.waited = (
            stopping[name] for name in ("best_value", "best_epoch", "waited")
        )
        self._best_loss = state.get("best_loss")  # an earlier version kept none
        self._best_row = dict(state["row"])
