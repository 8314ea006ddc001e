"""The loss and the metrics of a model on held-out batches, exact over all ranks.

Enters: a model and a source of batches. Leaves: columns such as ``val_loss``; the model is in the mode it was in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sparkdl.collective.base import Collective
from sparkdl.errors import ConfigError
from sparkdl.train.objective.loss import Objective
from sparkdl.train.objective.metrics import MetricSet
from sparkdl.train.source import BatchSource
from sparkdl.train.step import Placement, autocast_of, caller_of
from sparkdl.train.task import Task

__all__ = ["Evaluator"]


class Evaluator:
    """Validates a model; nothing of it changes, no gradient is recorded.

    Args:
        task: how the model is called, its losses and metrics.
        model: the user's own module.
        objective: the losses; None with a custom train step, which then computes the loss here, too.
        place: brings a batch to the device.
        collective: the ranks.
        precision: as in training.
    """

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        objective: Objective | None,
        place: Placement,
        collective: Collective,
        precision: str,
    ) -> None:
        self._task, self._model, self._objective = task, model, objective
        self._place, self._collective, self._precision = place, collective, precision
        self._device = torch.device(collective.world.device)
        self.metrics = MetricSet(task.metrics, task.labels, self._device)
        self._call = caller_of(task)

    def __call__(
        self, source: BatchSource, steps: int | None = None, on_batch: Callable[[int], None] | None = None
    ) -> dict[str, float]:
        """Return ``val_loss`` and the metrics over ``source``, or its first ``steps`` batches.

        Args:
            source: held-out batches.
            steps: batches to take; None takes all.
            on_batch: called after each batch with the number of batches done.
        """
        outputs = len(self._objective.output_losses) if self._objective is not None else 1
        sums = torch.zeros(outputs, 2, dtype=torch.float64, device=self._device)
        with evaluating(self._model), torch.inference_mode(), autocast_of(self._precision, self._device):
            for done, batch in enumerate(source, start=1):
                if batch.rows:
                    batch = self._place(batch)
                    outputs, batch_sums = self._batch(batch)
                    sums += batch_sums
                    if self.metrics:
                        self.metrics.update(outputs, batch)
                if on_batch is not None:
                    on_batch(done)
                if done == steps:
                    break
        world = self._collective.world
        if world.size > 1:
            sums = self._collective.all_reduce(sums, "sum")
        found = self._losses(sums) | self.metrics.compute(self._collective, world.size)
        return {f"val_{name}": value for name, value in found.items()}

    def _batch(self, batch: Any) -> tuple[Any, torch.Tensor]:
        if self._objective is not None:
            outputs = self._call(self._model, batch)
            return outputs, self._objective.sums(outputs, batch)
        assert self._task.train_step is not None
        found = self._task.train_step(self._model, batch)
        loss, outputs = found if isinstance(found, tuple) else (found, None)
        if self.metrics and outputs is None:
            raise ConfigError("train_step returns no outputs for the metrics: return (loss, outputs), or no metrics")
        rows = torch.as_tensor(float(batch.rows), dtype=torch.float64, device=self._device)
        return outputs, torch.stack((loss.detach().double() * rows, rows)).reshape(1, 2)

    def _losses(self, sums: torch.Tensor) -> dict[str, float]:
        if self._objective is not None:
            return self._objective.losses(sums)
        numerator, divisor = sums[0].tolist()
        return {"loss": numerator / divisor if divisor else float("nan")}


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode for the block, and each of its modules back into its own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
