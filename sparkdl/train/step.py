"""One optimizer step: the strategy goes forward and backward and exchanges gradients; here they are clipped and used.

Enters: one rank's batches. Leaves: weights that are equal on all ranks again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sparkdl.batches.reading.batch import Batch
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.strategies.base import Strategy
from sparkdl.train.objective.loss import Objective
from sparkdl.train.source import BatchLike
from sparkdl.train.task import Task

__all__ = ["BatchLoss", "Placement", "Stepper", "autocast_of", "caller_of", "clip_gradients"]

Caller = Callable[[torch.nn.Module, Any], Any]


class Placement:
    """Brings batches to where the model computes; a batch that is there already passes untouched."""

    def __init__(self, device: torch.device, channels_last: bool) -> None:
        self._device, self._channels_last = device, channels_last
        self._idle = device.type == "cpu" and not channels_last

    def __call__(self, batch: BatchLike) -> BatchLike:
        """Return ``batch`` on the device, images in channels-last order if that was asked for; dtypes stay."""
        if self._idle:
            return batch
        tensors = {name: self._place(tensor) for name, tensor in batch.items()}
        return Batch(
            tensors,
            epoch=batch.epoch,
            step=batch.step,
            rows=batch.rows,
            global_rows=batch.global_rows,
            weight=batch.weight,
        )

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._channels_last and tensor.ndim == 4:
            return tensor.to(self._device, non_blocking=True, memory_format=torch.channels_last)
        return tensor.to(self._device, non_blocking=True)


def caller_of(task: Task) -> Caller:
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


def autocast_of(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """A context, to be entered many times, in which ``precision`` holds."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16 if precision == "bf16" else torch.float16)


class BatchLoss:
    """The loss of one batch, as a strategy asks for it: see ``StepObjective``.

    Attributes:
        share: the batch's share in the optimizer step; 1 unless gradients are accumulated.
        scaler: the fp16 loss scaler; None without fp16.
    """

    def __init__(self, task: Task, objective: Objective | None, precision: str, device: torch.device) -> None:
        self._call, self._train_step, self._objective = caller_of(task), task.train_step, objective
        self._precision, self._device = precision, device
        self.share = 1.0
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        self._row: dict[str, torch.Tensor] | None = None

    def __call__(self, model: torch.nn.Module, batch: BatchLike) -> tuple[torch.Tensor, Any]:
        """Return the loss, weighted by this rank's rows, and the outputs."""
        if self._row is None:
            self._row = {name: tensor[:1].clone() for name, tensor in batch.items()}
        if self._precision == "fp32":
            return self._of(model, batch)
        with autocast_of(self._precision, self._device):
            return self._of(model, batch)

    def _of(self, model: torch.nn.Module, batch: BatchLike) -> tuple[torch.Tensor, Any]:
        if self._train_step is None:
            outputs = self._call(model, batch)
            assert self._objective is not None
            return self._objective(outputs, batch), outputs
        returned = self._train_step(model, batch)
        loss, outputs = returned if isinstance(returned, tuple) else (returned, None)
        if not isinstance(loss, torch.Tensor) or loss.ndim != 0:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(f"train_step returned a loss of {what}: return the scalar mean loss of the batch")
        return (loss if batch.weight == 1.0 else loss * batch.weight), outputs

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
        rows = self._row or {name: tensor.new_zeros((1, *tensor.shape[1:])) for name, tensor in batch.items()}
        stand_in = Batch(rows, step=batch.step, epoch=batch.epoch, rows=1)
        with autocast_of(self._precision, self._device):
            if self._objective is None:
                return self._of(model, stand_in)[0]
            outputs = self._call(model, stand_in)
            self._objective.skip(batch)
            return self._objective.alone(outputs, stand_in)


class Stepper:
    """Trains on batches; all state beyond the strategy's is the scaler's.

    Args:
        task: how the model is called.
        strategy: the model on all ranks.
        objective: the losses.
        config: precision, clipping.
        device: where the model computes.

    Attributes:
        scaler: the fp16 loss scaler; None without fp16.
        norm: gradient norm of the newest step before clipping; None without clipping.
        divides: whether the loss is a mean, so that accumulated batches share one step.
    """

    def __init__(
        self, task: Task, strategy: Strategy, objective: Objective | None, config: TrainConfig, device: torch.device
    ) -> None:
        self._strategy, self._optimizer = strategy, strategy.optimizer
        self._loss = BatchLoss(task, objective, config.precision, device)
        self.scaler = self._loss.scaler
        self._max_norm = config.max_grad_norm
        self._parameters = [p for group in strategy.optimizer.param_groups for p in group["params"]]
        self.norm: torch.Tensor | None = None
        self.divides = objective is None or not objective.only_sums

    def add(self, batch: BatchLike, share: float, *, last: bool) -> tuple[torch.Tensor, Any]:
        """Add the gradient of ``batch`` to the step's.

        Args:
            batch: this rank's part of a global batch, on the device.
            share: the batch's share in the step; 1 unless gradients are accumulated.
            last: whether the step's gradients are complete with it, and travel.

        Returns:
            The batch's loss and the model's outputs, as ``Strategy.step`` gives them.
        """
        self._loss.share = share
        return self._strategy.step(batch, self._loss, last=last)

    def update(self, correction: float) -> None:
        """Clip and step.

        Args:
            correction: multiplies the gradients; not 1 where the shares of the step's batches do not add up to 1.
        """
        optimizer, scaler = self._optimizer, self.scaler
        if scaler is not None and any(p.grad is not None for p in self._parameters):
            scaler.unscale_(optimizer)
        if correction != 1.0:
            _multiply_gradients(self._parameters, correction)
        if self._max_norm is not None:
            self.norm = clip_gradients(self._parameters, self._max_norm)
        if scaler is None:
            optimizer.step()
        elif any(p.grad is not None for p in self._parameters):
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)

    def exchange(self) -> None:
        """Exchange the gradients of batches of which none was the last."""
        self._strategy.exchange()


@torch.no_grad()
def _multiply_gradients(parameters: Sequence[torch.nn.Parameter], factor: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


@torch.no_grad()
def clip_gradients(parameters: Sequence[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their common 2-norm is at most ``max_norm``; return the norm before.

    Unlike torch's own function this one takes sparse gradients, too (Pascanu et al., ICML 2013, section 3.2).
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not any(gradient.is_sparse for gradient in gradients):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # entries of one row must be added before they are squared
    values = [p.grad._values() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(values)
    torch._foreach_mul_(values, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
