"""Which epoch is best, keeping its weights, and ending with them.

Enters: each epoch's row of the history. Leaves: the judgement, and at the end the right weights in the model of every
rank.
"""

from __future__ import annotations

from typing import Any

import torch

from sparkdl.collective.base import Collective
from sparkdl.config import TrainConfig
from sparkdl.errors import CheckpointError, ConfigError, SparkdlError
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.checkpoint.resume import check_state
from sparkdl.train.objective.metrics import MetricSet
from sparkdl.train.result import History
from sparkdl.train.schedule import LearningRate
from sparkdl.train.stopping import Stopping
from sparkdl.train.task import Task

__all__ = ["Judge", "settled_monitor"]


def settled_monitor(config: TrainConfig, metrics: MetricSet, task: Task, *, validates: bool) -> str:
    """The column by which epochs are judged.

    Raises:
        ConfigError: no epoch will have such a column.
    """
    monitor = config.monitor or ("val_loss" if validates else "loss")
    name = monitor.removeprefix("val_")
    if name != monitor and not validates:
        raise ConfigError(f"monitor={monitor!r} needs validation data, and there is none: give some")
    known = [*metrics.names, "loss"]
    known += [f"{label}_loss" for label in task.labels] if len(task.labels) > 1 and validates else []
    if not config.train_metrics and name == monitor:
        known = ["loss"]
    if not any(name == column or name.startswith(f"{column}_") for column in known):
        raise ConfigError(f"monitor={monitor!r} is no column of an epoch: choose one of {sorted(known)}")
    return monitor


class Judge:
    """Judges epochs by one column of their rows.

    Args:
        config: monitor, patience, whether the best weights are restored.
        metrics: the task's metrics, which may say whether higher is better.
        collective: the ranks.
        model: whose weights are kept and restored.
        checkpoints: where a resumed run finds the best weights of its earlier part.
    """

    def __init__(
        self,
        config: TrainConfig,
        metrics: MetricSet,
        collective: Collective,
        model: torch.nn.Module,
        checkpoints: Checkpointer | None,
    ) -> None:
        self._config, self._metrics, self._collective = config, metrics, collective
        self._model, self._checkpoints = model, checkpoints
        self._best: dict[str, torch.Tensor] | None = None
        self._row: dict[str, float] = {}
        self.monitor = config.monitor or "loss"
        self.stopping = Stopping("min", config.early_stopping_patience, config.min_delta)

    def check_monitor(self, task: Task, *, validates: bool, rate: LearningRate) -> None:
        """Settle what is monitored, before the first step.

        Raises:
            ConfigError: no epoch will have such a column.
        """
        config = self._config
        self.monitor = settled_monitor(config, self._metrics, task, validates=validates)
        name = self.monitor.removeprefix("val_")
        higher = self._metrics.higher_is_better(name)
        mode = config.monitor_mode
        self.stopping.mode = mode if mode != "auto" else "max" if higher else "min"

    def judge(self, epoch: int, row: dict[str, float]) -> bool:
        """Take in the row of ``epoch``; return whether it is the best so far, and keep its weights if they are wanted.

        Raises:
            ConfigError: the row has no such column.
        """
        if self.monitor not in row:
            raise ConfigError(f"monitor={self.monitor!r} is no column of an epoch: choose one of {sorted(row)}")
        best = self.stopping.judge(epoch, row[self.monitor])
        if best and self._config.restores_best:
            self._row = dict(row)
            if self._collective.world.is_leader:
                self._keep()
        return best

    def finish(self, history: History) -> dict[str, float]:
        """Put the best weights into every rank's model if that was asked for; return the row they belong to."""
        last = history.epochs[-1] if history.epochs else {}
        best = self.stopping.best_epoch
        if not self._config.restores_best or best is None or last.get("epoch") == best:
            return dict(last)
        outcome: SparkdlError | None = None
        if self._collective.world.is_leader:
            try:
                self._model.load_state_dict(self._best if self._best is not None else self._from_checkpoint())
            except SparkdlError as error:
                outcome = error
        if self._collective.world.size > 1:
            outcome = self._collective.broadcast_object(outcome)
            if outcome is None:
                with torch.no_grad():
                    self._collective.broadcast([*self._model.parameters(), *self._model.buffers()])
        if outcome is not None:
            raise outcome
        return dict(self._row)

    def _keep(self) -> None:
        """Copy the weights, into the memory of the copy before."""
        state = self._model.state_dict()
        if self._best is None:
            self._best = {name: torch.empty_like(tensor, device="cpu") for name, tensor in state.items()}
        for name, tensor in state.items():
            self._best[name].copy_(tensor)

    def _from_checkpoint(self) -> dict[str, torch.Tensor]:
        """The best weights of a run that was resumed after its best epoch."""
        found = self._checkpoints.best(check_state) if self._checkpoints is not None else None
        if found is None:
            raise CheckpointError(
                f"the weights of the best epoch {self.stopping.best_epoch} are not kept: set keep_best=True"
            )
        model: dict[str, torch.Tensor] = found.state["model"]
        return model

    def state_dict(self) -> dict[str, Any]:
        """Return the judgement so far; the best weights stand in the best checkpoint."""
        return {"stopping": self.stopping.state_dict(), "row": self._row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the judgement."""
        self.stopping.load_state_dict(state["stopping"])
        self._row = dict(state["row"])
