"""Losses, metrics and training steps written for Horovod's estimator, as a ``train.Task`` takes them; no Spark."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.errors import ConfigError
from sparkdl.estimator.model_call import ModelCall
from sparkdl.models.calling import parameters_of
from sparkdl.models.signature import COMPANIONS
from sparkdl.train.objective.labels import LikeOutput, label_kind
from sparkdl.train.objective.named_metrics import named_metric
from sparkdl.train.task import takes_no_arguments


def adapted_loss(loss: Any) -> Any:
    """Return torch's own losses as they are; others so that a label meets them in the shape of the output.

    A label of shape (rows,) against an output of shape (rows, 1) would otherwise be broadcast to (rows, rows). What
    makes a loss is called here, for it is the loss that meets the label; classes of torch's own are left as they are.
    """
    if inspect.isclass(loss) and label_kind(loss) != "own":
        return loss
    made = loss() if takes_no_arguments(loss) else loss
    return made if label_kind(made) != "own" else LikeOutput(made)


def adapted_metrics(metrics: Any, labels: Sequence[str], losses: Sequence[Any]) -> dict[str, Any]:
    """Return metrics by name, or by label and name.

    Args:
        metrics: a mapping by name, a list, or Horovod's list of groups, each with one entry for all outputs or one an
            output. An entry is a function, a torchmetrics object, or a name as ``"rmse"``.
        labels: the label columns.
        losses: one a label, made.

    Raises:
        ConfigError: a group has neither one entry nor one a label, an entry is nothing that computes, or a name does
            not fit the loss.
    """
    if not metrics:
        return {}
    loss_of = dict(zip(labels, losses, strict=True))
    if isinstance(metrics, Mapping):
        return _with_names(metrics, loss_of)
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        metrics = [metrics]
    by_label: dict[str, dict[str, Any]] = {label: {} for label in labels}
    for group in metrics:
        entries = list(group) if isinstance(group, list | tuple) else [group]
        if len(entries) not in (1, len(labels)):
            raise ConfigError(
                f"a group of metrics has {len(entries)} entries for {len(labels)} labels: give one, or one a label"
            )
        for label, entry in zip(labels, entries * len(labels), strict=False):
            if isinstance(entry, str):
                by_label[label][_fresh(entry, by_label[label])] = named_metric(entry, label, loss_of[label])
                continue
            if not (callable(entry) or _is_metric(entry)):
                raise ConfigError(
                    f"metrics holds {entry!r}, a {type(entry).__name__}: give names, torchmetrics "
                    "objects, or functions of (output, label)"
                )
            by_label[label][_fresh(_name_of(entry), by_label[label])] = _adapted(entry)
    return by_label[labels[0]] if len(labels) == 1 else by_label


def _with_names(metrics: Mapping[str, Any], loss_of: Mapping[str, Any]) -> dict[str, Any]:
    """The same mapping, by name or by label and name, with the metrics that its strings mean."""

    def resolved(entries: Mapping[str, Any], label: str) -> dict[str, Any]:
        return {
            name: named_metric(entry, label, loss_of[label]) if isinstance(entry, str) else _adapted(entry)
            for name, entry in entries.items()
        }

    if all(isinstance(entry, Mapping) for entry in metrics.values()):
        return {label: resolved(part, label) if label in loss_of else part for label, part in metrics.items()}
    if any(isinstance(entry, str) for entry in metrics.values()):
        by_label = {label: resolved(metrics, label) for label in loss_of}
        return by_label if len(by_label) > 1 else next(iter(by_label.values()))
    return {name: _adapted(entry) for name, entry in metrics.items()}


def _adapted(entry: Any) -> Any:
    """A metric as it is, a function so that a label meets it in the output's shape; what makes one of them, made."""
    if not _is_metric(entry) and takes_no_arguments(entry):
        entry = entry()
    return LikeOutput(entry) if callable(entry) and not _is_metric(entry) else entry


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


def inputs_by_position(model: torch.nn.Module, call: ModelCall) -> tuple[str, ...]:
    """The order in which ``model(*inputs)`` takes inputs that go by keyword; empty where they go by position.

    A ``train_minibatch_fn`` of Horovod's calls ``model(*inputs)``, whatever the names of the model's parameters. A
    model that takes one dict gets it as its only input.

    Raises:
        ConfigError: it takes some of them by keyword alone.
    """
    beside = any(argument.form in COMPANIONS for argument in call.inputs)
    if call.style == "dict" or (call.style == "positional" and not beside):
        return ()
    names = {argument.name for argument in call.inputs}
    places = [p.name for p in parameters_of(model) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    first = tuple(places[: len(names)])
    if set(first) != names:
        raise ConfigError(
            f"train_minibatch_fn calls model(*inputs), and forward of {type(model).__name__} takes "
            f"{sorted(names - set(first))} by keyword, not among its first {len(names)} parameters {list(first)}: let "
            "forward take them there"
        )
    return first


@dataclass
class MinibatchStep:
    """Runs Horovod's ``train_minibatch_fn``, as a ``Task.manual_step``.

    The function gets the model, the optimizer, ``transform_outputs``, ``loss_fn``, inputs, labels, sample weights, and
    (if it takes them) ``backward_passes_per_step`` and ``batch_idx``. It owns ``zero_grad``, ``backward`` and ``step``:
    ``train.own_step`` sees to it that N ranks do what one process would. ``loss_fn`` is the estimator's own loss; with
    sample weights it is the weighted mean of the global batch, as without a function.

    Attributes:
        function: the user's.
        call: from a batch to the model's inputs.
        labels: names of the label tensors.
        sample_weight: name of the weights' tensor.
        passes: backward_passes_per_step.
        order: of inputs that ``forward`` takes by name, see ``inputs_by_position``.
    """

    function: Callable[..., Any]
    call: ModelCall
    labels: tuple[str, ...]
    sample_weight: str | None = None
    passes: int = 1
    order: tuple[str, ...] = ()

    __name__ = "train_minibatch_fn"

    def forward(self, model: torch.nn.Module, batch: Any) -> Any:
        """Call the model as the function is meant to."""
        return model(*self._inputs(batch))

    def _inputs(self, batch: Any) -> list[Any]:
        positional, named = self.call.arguments(batch)
        return [named[name] for name in self.order] if self.order else list(positional)

    def __call__(self, model: torch.nn.Module, optimizer: Any, batch: Any, loss: Callable[..., torch.Tensor]) -> Any:
        """Return what the function returns for one batch: outputs and loss."""
        if optimizer.backward_passes_per_step != self.passes:
            optimizer.set_backward_passes_per_step(self.passes)
        weights = batch[self.sample_weight].float() if self.sample_weight else None
        labels = [batch[name] for name in self.labels]
        loss_fn = functools.partial(self._loss, loss)
        inputs = self._inputs(batch)
        arguments = (model, optimizer, _transform_outputs, loss_fn, inputs, labels, weights, self.passes, batch.step)
        returned = self.function(*arguments[: _positional_count(self.function, len(arguments))])
        if not isinstance(returned, tuple) or len(returned) != 2:
            return returned
        outputs = tuple(returned[0]) if isinstance(returned[0], list) else returned[0]
        return outputs[0] if isinstance(outputs, tuple) and len(outputs) == 1 else outputs, returned[1]

    def _loss(
        self,
        loss: Callable[..., torch.Tensor],
        outputs: Any,
        labels: Sequence[torch.Tensor],
        sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = len(labels[0])
        tensors = dict(zip(self.labels, labels, strict=True))
        if self.sample_weight is not None:
            ones = torch.ones(rows, device=labels[0].device)
            tensors[self.sample_weight] = ones if sample_weights is None else sample_weights
        elif sample_weights is not None:
            raise ConfigError("loss_fn is given sample weights, and sample_weight_col is not set: set it")
        return loss(tuple(outputs) if isinstance(outputs, list) else outputs, _Rows(tensors, rows))


class _Rows(dict[str, torch.Tensor]):
    """Labels and weights as the function hands them to ``loss_fn``: all that a loss asks of a batch."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], rows: int) -> None:
        super().__init__(tensors)
        self.rows = rows


def _transform_outputs(outputs: Any, labels: Sequence[torch.Tensor]) -> tuple[list[Any], list[torch.Tensor]]:
    listed = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    shaped = [
        label.reshape(output.shape) if isinstance(output, torch.Tensor) and output.numel() == label.numel() else label
        for output, label in zip(listed, labels, strict=True)
    ]
    return listed, shaped


def _positional_count(function: Callable[..., Any], most: int) -> int:
    """How many of Horovod's nine arguments a function takes: older ones take seven."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return most
    return min(most, sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters))
