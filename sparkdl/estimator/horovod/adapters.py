"""Losses, metrics and training steps written for Horovod's estimator, as the training loop takes them.

Enters: functions of (output, label), Horovod's lists of them, its ``train_minibatch_fn``. Leaves: the entries of a
``train.Task``. It imports torch alone, since the ranks load it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.errors import ConfigError
from sparkdl.estimator.fit.views import Views
from sparkdl.train.objective.labels import label_kind
from sparkdl.train.objective.loss import split_outputs

__all__ = ["LikeOutput", "MinibatchStep", "adapted_loss", "adapted_metrics"]


def adapted_loss(loss: Any) -> Any:
    """Return torch's own losses as they are; others so that a label meets them in the shape of the output.

    A label of shape (rows,) against an output of shape (rows, 1) would otherwise be broadcast to (rows, rows).
    """
    return loss if inspect.isclass(loss) or label_kind(loss) != "own" else LikeOutput(loss)


class LikeOutput:
    """A function of (output, label, ...) that sees the label in the output's shape when both hold as many numbers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)

    @property
    def __name__(self) -> str:
        return _name_of(self.function)

    def __call__(self, output: Any, label: Any, *more: Any, **named: Any) -> Any:
        """Call the function."""
        if isinstance(output, torch.Tensor) and isinstance(label, torch.Tensor) and output.numel() == label.numel():
            label = label.reshape(output.shape)
        return self.function(output, label, *more, **named)


def adapted_metrics(given: Any, labels: Sequence[str]) -> dict[str, Any]:
    """Return metrics by name, or by label and name.

    Args:
        given: a mapping by name, a list, or Horovod's list of groups, each with one function for all outputs or one an
            output.
        labels: the label columns.

    Raises:
        ConfigError: a group has neither one entry nor one a label, or an entry is nothing that computes.
    """
    if not given:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, Sequence):
        given = [given]
    by_label: dict[str, dict[str, Any]] = {label: {} for label in labels}
    for group in given:
        entries = list(group) if isinstance(group, list | tuple) else [group]
        if len(entries) not in (1, len(labels)):
            raise ConfigError(
                f"a group of metrics has {len(entries)} entries for {len(labels)} labels: give one, or one a label"
            )
        for label, entry in zip(labels, entries * len(labels), strict=False):
            if not (callable(entry) or _is_metric(entry)):
                raise ConfigError(
                    f"metrics holds {entry!r}, a {type(entry).__name__}: give torchmetrics objects, or functions of "
                    "(output, label)"
                )
            name = _fresh(_name_of(entry), by_label[label])
            by_label[label][name] = entry if _is_metric(entry) else LikeOutput(entry)
    return by_label[labels[0]] if len(labels) == 1 else by_label


def _is_metric(entry: Any) -> bool:
    return hasattr(entry, "update") and hasattr(entry, "compute")


def _name_of(entry: Any) -> str:
    while isinstance(entry, functools.partial):
        entry = entry.func
    name = getattr(entry, "__name__", type(entry).__name__)
    return "metric" if name == "<lambda>" else str(name)


def _fresh(name: str, taken: Mapping[str, Any]) -> str:
    if name not in taken:
        return name
    return next(f"{name}_{n}" for n in range(2, len(taken) + 3) if f"{name}_{n}" not in taken)


class _Deferred(torch.Tensor):
    """A loss whose backward pass is left to the training loop, whatever the user's function calls."""

    def backward(self, *_: Any, **__: Any) -> None:
        """Leave it to the loop, which runs it once, synchronises, clips and steps."""
        self.sparkdl_asked = True


class _Idle:
    """Stands in for the optimizer in a user's step: the loop owns the real one."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []

    def zero_grad(self, *_: Any, **__: Any) -> None:
        """Leave it to the loop."""

    def step(self, *_: Any, **__: Any) -> None:
        """Leave it to the loop."""


@dataclass
class MinibatchStep:
    """Runs Horovod's ``train_minibatch_fn`` inside the loop's step.

    The function gets the model, a stand-in for the optimizer, ``transform_outputs``, ``loss_fn``, inputs, labels,
    sample weights, and (if it takes them) ``backward_passes_per_step`` and ``batch_idx``. What it asks of optimizer and
    ``loss.backward()`` is done by the loop, once, with gradients synchronised.

    Attributes:
        function: the user's.
        views: from a batch to the model's inputs.
        labels: names of the label tensors.
        losses: one a label.
        loss_weights: one a label.
        sample_weight: name of the weights' tensor.
        passes: backward_passes_per_step.
    """

    function: Callable[..., Any]
    views: Views
    labels: tuple[str, ...]
    losses: tuple[Any, ...]
    loss_weights: tuple[float, ...]
    sample_weight: str | None
    passes: int = 1

    def __call__(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        """Return the loss of one batch and the outputs.

        Raises:
            ConfigError: the function does not return (outputs, loss).
        """
        positional, named = self.views.arguments(batch)
        inputs = list(positional) or [named]
        weights = batch[self.sample_weight].float() if self.sample_weight else None
        labels = [batch[name] for name in self.labels]
        given = (model, _Idle(), _transform_outputs, self._loss, inputs, labels, weights, self.passes, batch.step)
        returned = self.function(*given[: _positional_count(self.function, len(given))])
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], torch.Tensor):
            raise ConfigError("train_minibatch_fn must return (outputs, loss), as Horovod's does: return both")
        outputs, loss = returned
        found = tuple(outputs) if isinstance(outputs, list | tuple) else outputs
        return loss.as_subclass(torch.Tensor), found[0] if isinstance(found, tuple) and len(found) == 1 else found

    def _loss(self, outputs: Any, labels: Sequence[torch.Tensor], weights: torch.Tensor | None = None) -> torch.Tensor:
        total: torch.Tensor | None = None
        split = split_outputs(outputs, self.labels)
        for output, label, loss, factor in zip(split, labels, self.losses, self.loss_weights, strict=True):
            value = (
                loss(output, label) if weights is None else loss(output, label, reduction="none").flatten() * weights
            )
            value = value.mean() * factor
            total = value if total is None else total + value
        assert total is not None
        return total.as_subclass(_Deferred)


def _transform_outputs(outputs: Any, labels: Sequence[torch.Tensor]) -> tuple[list[Any], list[torch.Tensor]]:
    found = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    shaped = [
        label.reshape(output.shape) if isinstance(output, torch.Tensor) and output.numel() == label.numel() else label
        for output, label in zip(found, labels, strict=True)
    ]
    return found, shaped


def _positional_count(function: Callable[..., Any], most: int) -> int:
    """How many of Horovod's nine arguments a function takes: older ones take seven."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return most
    return min(most, sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters))
