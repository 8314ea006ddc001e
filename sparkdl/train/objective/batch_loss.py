"""The loss of one batch: how the model is called with it, in which precision, and what a strategy asks of that."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sparkdl.batches.reading.batch import Batch
from sparkdl.errors import ConfigError
from sparkdl.train.objective.loss import Objective
from sparkdl.train.source import BatchLike
from sparkdl.train.task import Task


def autocast_of(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """A context, to be entered many times, in which ``precision`` holds."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16 if precision == "bf16" else torch.float16)


class AuxiliaryLoss:
    """What the modules of a model add to the task's loss, such as the balance loss of a mixture of experts.

    A module has it as its attribute ``auxiliary_loss``, a scalar tensor that is a mean over this rank's rows, or None;
    see ``Task.model``.
    """

    def __init__(self) -> None:
        self._modules: list[tuple[str, Any]] | None = None

    def take(self, model: torch.nn.Module) -> torch.Tensor | None:
        """Return the sum of what the newest forward pass of ``model`` left, and leave None behind.

        Raises:
            ConfigError: a module has another thing there.
        """
        if self._modules is None:  # behind a forward pass, which may have been the first to set the attribute
            # Of a wrapper, getattr would be that of the wrapped; a method or a module of that name is something else.
            attributes = [
                (name, module, inspect.getattr_static(module, "auxiliary_loss", len))
                for name, module in model.named_modules()
            ]
            self._modules = [(name, module) for name, module, value in attributes if not callable(value)]
        total: torch.Tensor | None = None
        for name, module in self._modules:
            loss = module.auxiliary_loss
            if loss is None:
                continue
            if not isinstance(loss, torch.Tensor) or loss.ndim:
                description = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
                raise ConfigError(
                    f"auxiliary_loss of module {name!r} is {description}, and is added to the loss: make it a scalar "
                    "tensor, the mean over the rows of the batch, or None, or name it otherwise"
                )
            total = loss if total is None else total + loss
            if "auxiliary_loss" in vars(module):
                module.auxiliary_loss = None  # a forward pass that leaves this module out adds nothing
        return total


class BatchLoss:
    """The loss of one batch, as a strategy asks for it: see ``StepObjective``.

    Args:
        task: how the model is called; or its ``train_step``, which does that and computes the loss.
        objective: the losses; None with a ``train_step``.
        precision: of the forward pass and the loss.
        device: where the model computes.

    Attributes:
        share: the batch's share in the optimizer step; 1 unless gradients are accumulated.
        scaler: the fp16 loss scaler; None without fp16.
        divides: whether the loss is a mean, so that accumulated batches share one step.
        outputs: how many outputs have a loss.
    """

    def __init__(self, task: Task, objective: Objective | None, precision: str, device: torch.device) -> None:
        self._call, self._train_step, self._objective = _caller_of(task), task.train_step, objective
        self._precision, self._device = precision, device
        self.share = 1.0
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        self.divides = objective is None or not objective.only_sums
        self.outputs = 1 if objective is None else len(objective.output_losses)
        self._auxiliary = AuxiliaryLoss()
        self._row: dict[str, torch.Tensor] | None = None

    def __call__(self, model: torch.nn.Module, batch: BatchLike) -> tuple[torch.Tensor, Any]:
        """Return the loss, weighted by this rank's rows, and the outputs."""
        if self._row is None:
            self._row = {name: tensor[:1].clone() for name, tensor in batch.items()}
        if self._precision == "fp32":
            return self._weighted(model, batch)
        with autocast_of(self._precision, self._device):
            return self._weighted(model, batch)

    def autocast(self) -> AbstractContextManager[Any]:
        """A context in which the forward pass has this loss's precision."""
        return autocast_of(self._precision, self._device)

    def divisors(self, outputs: Any, batch: BatchLike) -> torch.Tensor:
        """Return what the losses of the global batch are divided by; the other ranks call it or ``skip``."""
        assert self._objective is not None, "a pipeline takes no train_step"
        with self.autocast():
            return self._objective.divisors(outputs, batch)

    def part(self, outputs: Any, batch: BatchLike, rows: slice, divisors: torch.Tensor) -> torch.Tensor:
        """Return the loss of some of the batch's rows, such that all of them add up to the loss of the batch."""
        assert self._objective is not None, "a pipeline takes no train_step"
        count = rows.stop - rows.start
        part = Batch(
            {name: tensor[rows] for name, tensor in batch.items()},
            step=batch.step,
            epoch=batch.epoch,
            rows=count,
            global_rows=batch.global_rows,
            weight=batch.weight * count / batch.rows,
        )
        with self.autocast():
            return self._objective.part(outputs, part, divisors)

    def sums(self, outputs: Any, batch: BatchLike) -> torch.Tensor:
        """Return the second of what ``evaluate`` does, of outputs that are there already."""
        assert self._objective is not None, "a pipeline takes no train_step"
        return self._objective.sums(outputs, batch)

    def _weighted(self, model: torch.nn.Module, batch: BatchLike) -> tuple[torch.Tensor, Any]:
        if self._objective is not None:
            outputs = self._call(model, batch)
            loss = self._objective(outputs, batch)
            auxiliary = self._auxiliary.take(model)
            return (loss if auxiliary is None else loss + auxiliary * batch.weight), outputs
        loss, outputs = self._own_step(model, batch)
        return (loss if batch.weight == 1.0 else loss * batch.weight), outputs

    def _own_step(self, model: torch.nn.Module, batch: BatchLike) -> tuple[torch.Tensor, Any]:
        assert self._train_step is not None
        returned = self._train_step(model, batch)
        loss, outputs = returned if isinstance(returned, tuple) else (returned, None)
        if not isinstance(loss, torch.Tensor) or loss.ndim != 0:
            description = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(f"train_step returned a loss of {description}: return the scalar mean loss of the batch")
        return loss, outputs

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what to call ``backward`` on."""
        if self.share != 1.0:
            loss = loss * self.share
        return loss if self.scaler is None else self.scaler.scale(loss)

    def skip(self, batch: BatchLike) -> None:
        """Take part in what ranks exchange for the loss, without a row."""
        if self._objective is not None:
            self._objective.skip(batch)

    def without_rows(self, model: torch.nn.Module, batch: BatchLike) -> torch.Tensor:
        """Return the loss of the first row that this rank had, or of zeros: few models take a batch of no rows."""
        stand_in = self._stand_in(batch)
        with autocast_of(self._precision, self._device):
            if self._objective is None:
                return self._weighted(model, stand_in)[0]
            outputs = self._call(model, stand_in)
            self._objective.skip(batch)
            return self._objective.alone(outputs, stand_in)

    def forward_without_rows(self, model: torch.nn.Module, batch: BatchLike) -> None:
        """Call the model, or the task's ``train_step``, with the row that ``without_rows`` takes."""
        stand_in = self._stand_in(batch)
        if self._objective is None:
            self._own_step(model, stand_in)
        else:
            self._call(model, stand_in)

    def _stand_in(self, batch: BatchLike) -> Batch:
        rows = self._row or {name: tensor.new_zeros((1, *tensor.shape[1:])) for name, tensor in batch.items()}
        return Batch(rows, step=batch.step, epoch=batch.epoch, rows=1)

    def evaluate(self, model: torch.nn.Module, batch: BatchLike) -> tuple[Any, torch.Tensor]:
        """Return the outputs and, as ``(outputs, 2)`` float64, numerator and divisor of each output's loss."""
        if self._objective is not None:
            outputs = self._call(model, batch)
            return outputs, self._objective.sums(outputs, batch)
        loss, outputs = self._own_step(model, batch)
        rows = torch.as_tensor(float(batch.rows), dtype=torch.float64, device=self._device)
        return outputs, torch.stack((loss.detach().double() * rows, rows)).reshape(1, 2)

    def losses(self, sums: torch.Tensor) -> dict[str, float]:
        """Turn what ``evaluate`` gave, added up over batches and ranks, into ``loss`` and the losses of the labels."""
        if self._objective is not None:
            return self._objective.losses(sums)
        numerator, divisor = sums[0].tolist()
        return {"loss": numerator / divisor if divisor else float("nan")}


def _caller_of(task: Task) -> Callable[[torch.nn.Module, Any], Any]:
    """How the task's model is called with a batch."""
    if task.forward is not None:
        return task.forward
    names = tuple(task.inputs)
    if task.input_style == "dict":
        return lambda model, batch: model({name: batch[name] for name in names})
    if task.input_style == "keyword":
        return lambda model, batch: model(**{name: batch[name] for name in names})
    if len(names) == 1:
        only = names[0]
        return lambda model, batch: model(batch[only])
    return lambda model, batch: model(*[batch[name] for name in names])
