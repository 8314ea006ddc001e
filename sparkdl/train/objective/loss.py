"""From outputs and labels to one number whose mean over the ranks is the loss of the global batch, exactly.

Enters: the model's outputs and one rank's batch. Leaves: a differentiable scalar, weighted such that averaging it (and
its gradient) over the ranks gives what one rank with the whole batch would compute; and, for validation, sums and
counts that may be added up over batches and ranks.

A loss that divides by something other than its rows (sample weights, class weights, ignored labels) is computed as a
sum, and divided by the sum of the divisors of all ranks.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sparkdl.errors import ConfigError
from sparkdl.train.objective.labels import fitting_label, label_kind
from sparkdl.train.source import BatchLike
from sparkdl.train.task import Task, takes_no_arguments

__all__ = ["Objective", "split_outputs"]

Reduce = Callable[[torch.Tensor], torch.Tensor]


class Objective:
    """All losses of a task on one rank.

    Args:
        task: whose loss, labels and weights are used.
        device: where the losses compute.
        world_size: number of ranks that share a global batch.
        reduce: sums a tensor over the ranks; called once a batch, and only if a loss has divisors of its own.
    """

    def __init__(self, task: Task, device: torch.device, world_size: int, reduce: Reduce) -> None:
        self.labels = tuple(task.labels)
        names = self.labels or ("",)
        losses = _by_label("loss", task.loss, names, spread=True)
        weights = _by_label("loss_weights", task.loss_weights, names, spread=False)
        self.heads = [
            _Head(made, label, 1.0 if weight is None else float(weight), task.sample_weight is not None)
            for made, label, weight in zip(map(_made_loss, losses), names, weights, strict=True)
        ]
        for head in self.heads:
            head.to(device)
        self._sample_weight = task.sample_weight
        self._world_size = world_size
        self._reduce = reduce
        self._device = device
        self._settled = False
        self._simple = False

    @property
    def only_sums(self) -> bool:
        """Whether every loss is a sum over rows, which nothing divides."""
        return all(head.sums for head in self.heads)

    def __call__(self, outputs: Any, batch: BatchLike) -> torch.Tensor:
        """Return this rank's contribution: its mean over the ranks is the loss of the global batch.

        Raises:
            ConfigError: outputs and labels do not fit each other.
        """
        if not self._settled:
            self._settle(batch)
        if self._simple:
            if type(outputs) is not torch.Tensor:
                outputs = _only(outputs, self.labels)
            value = self.heads[0].mean(outputs, batch)
            return value if batch.weight == 1.0 else value * batch.weight
        terms = self._terms(outputs, batch, whole=self._world_size == 1)
        divisors = self._global_divisors([divisor for _, divisor in terms if divisor is not None])
        total: torch.Tensor | None = None
        position = 0
        for head, (value, divisor) in zip(self.heads, terms, strict=True):
            if divisor is not None:
                value = value * (head.weight * self._world_size) / divisors[position].to(value.dtype)
                position += 1
            else:
                value = value * (head.weight * (self._world_size if head.sums else batch.weight))
            total = value if total is None else total + value
        assert total is not None
        return total

    def skip(self, batch: BatchLike) -> None:
        """Take part in the reduction of a batch of which this rank has no row."""
        if not self._settled:
            self._settle(batch)
        count = sum(head.has_divisor for head in self.heads)
        if count and self._world_size > 1:
            self._global_divisors([torch.zeros((), device=self._device)] * count)

    def sums(self, outputs: Any, batch: BatchLike) -> torch.Tensor:
        """Return ``(heads, 2)`` float64: numerator and divisor of each head's loss, to be added up over batches."""
        if not self._settled:
            self._settle(batch)
        rows = []
        for head, (value, divisor) in zip(self.heads, self._terms(outputs, batch, whole=False), strict=True):
            value = value.detach().double()
            if divisor is not None:
                rows.append(torch.stack((value, divisor.double())))
            elif head.sums:
                rows.append(torch.stack((value, torch.full_like(value, 1 / self._world_size))))
            else:
                rows.append(torch.stack((value * batch.rows, torch.full_like(value, batch.rows))))
        return torch.stack(rows)

    def losses(self, sums: torch.Tensor) -> dict[str, float]:
        """Turn added-up ``sums`` into ``loss`` and, with several labels, ``<label>_loss``."""
        values = [numerator / divisor if divisor else float("nan") for numerator, divisor in sums.tolist()]
        found = {"loss": sum(head.weight * value for head, value in zip(self.heads, values, strict=True))}
        if len(self.heads) > 1:
            found |= {f"{head.label}_loss": value for head, value in zip(self.heads, values, strict=True)}
        return found

    def _settle(self, batch: BatchLike) -> None:
        """Decide, by what every rank sees in the first batch, which losses have divisors of their own."""
        for head in self.heads:
            head.settle(batch)
        head = self.heads[0]
        plain = not (head.has_divisor if self._world_size > 1 else head.sampled) and not head.sums
        self._simple = len(self.heads) == 1 and plain and head.weight == 1.0
        self._settled = True

    def _terms(self, outputs: Any, batch: BatchLike, *, whole: bool) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Each head's mean or sum and None, or its numerator and divisor; ``whole``: this rank holds all rows."""
        weights = batch[self._sample_weight] if self._sample_weight else None
        split = split_outputs(outputs, self.labels)
        return [head(output, batch, weights, whole) for head, output in zip(self.heads, split, strict=True)]

    def _global_divisors(self, divisors: Sequence[torch.Tensor]) -> torch.Tensor:
        if not divisors:
            return torch.empty(0)
        total = torch.stack([divisor.detach().double().reshape(()) for divisor in divisors])
        if self._world_size > 1:
            total = self._reduce(total)
        return total.masked_fill(total == 0, 1.0)  # nothing counts: the loss is 0, not 0/0


class _Head:
    """The loss of one label."""

    def __init__(self, loss: Any, label: str, weight: float, sampled: bool) -> None:
        self.label, self.weight = label, weight
        self.loss = loss
        self.kind = label_kind(loss)
        self.reduction = _reduction(loss)
        self.sums = self.reduction == "sum" and not sampled
        self.has_divisor = sampled
        self.sampled = sampled
        # Class weights and ignored labels are divisors too; a rank with the whole batch lets the loss divide by them.
        self._may_count = self.kind == "classes" and self.reduction == "mean"
        self.rowwise = _rowwise(loss) if sampled or self._may_count else None

    def settle(self, batch: BatchLike) -> None:
        """Find out whether the loss divides by something other than the rows; equal on all ranks."""
        if self._may_count:
            weight, ignored = getattr(self.loss, "weight", None), getattr(self.loss, "ignore_index", -100)
            # A label for each token of a row: paddings are marked by the ignored number, be it the default one.
            tokens = batch[self.label].ndim > 1 and batch[self.label].shape[1] > 1
            self.has_divisor = self.has_divisor or weight is not None or ignored != -100 or tokens

    def to(self, device: torch.device) -> None:
        for loss in (self.loss, self.rowwise):
            if isinstance(loss, torch.nn.Module):
                loss.to(device)

    def mean(self, output: Any, batch: BatchLike) -> torch.Tensor:
        """The local mean over the rows."""
        value: torch.Tensor
        if self.label:
            value = self.loss(output, fitting_label(self.kind, output, batch[self.label]))
        else:
            value = self.loss(output)
        return value if value.ndim == 0 else value.mean()

    def __call__(
        self, output: Any, batch: BatchLike, weights: torch.Tensor | None, whole: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a mean or sum and None, or a numerator and its divisor."""
        if not self.has_divisor or (whole and not self.sampled):
            return self.mean(output, batch), None
        assert self.rowwise is not None
        label = fitting_label(self.kind, output, batch[self.label]) if self.label else None
        values = self.rowwise(output, label) if self.label else self.rowwise(output)
        if values.ndim == 0 or values.shape[0] != batch.rows:
            raise ConfigError(
                f"the loss of {self.label!r} returns shape {tuple(values.shape)} for {batch.rows} rows: with sample "
                "weights it must return one value a row; take a torch.nn loss or return them"
            )
        counts = self._counts(values, output, label)
        if weights is not None:
            weights = weights.to(values.dtype).reshape(-1, *[1] * (values.ndim - 1))
            values, counts = values * weights, counts * weights
        return values.sum(), counts.sum()

    def _counts(self, values: torch.Tensor, output: Any, label: Any) -> torch.Tensor:
        """What each of ``values`` adds to the divisor: 1, the weight of its class, or 0 if it is ignored."""
        if self.kind == "classes" and not label.is_floating_point():
            ignored = label == getattr(self.loss, "ignore_index", -100)
            class_weight = getattr(self.loss, "weight", None)
            counts: torch.Tensor = ~ignored
            if class_weight is not None:
                counts = class_weight[label.masked_fill(ignored, 0)].masked_fill(ignored, 0.0)
            return counts.to(values.dtype)
        if self.reduction == "batchmean":
            return torch.ones_like(values) / max(values[0].numel() if len(values) else 1, 1)
        return torch.ones_like(values)


def split_outputs(outputs: Any, labels: Sequence[str]) -> list[Any]:
    """Pair the model's outputs with ``labels``, by name where the model returns a dict, else by position.

    Raises:
        ConfigError: there are more or fewer outputs than labels, or a name is missing.
    """
    if len(labels) <= 1:
        return [_only(outputs, labels)]
    if isinstance(outputs, Mapping):
        missing = [label for label in labels if label not in outputs]
        if missing:
            raise ConfigError(f"the model returns {sorted(outputs)}, without {missing}: return one output a label")
        return [outputs[label] for label in labels]
    found = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    if len(found) != len(labels):
        raise ConfigError(f"the model returns {len(found)} outputs for {len(labels)} labels: return one a label")
    return found


def _only(outputs: Any, labels: Sequence[str]) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, Mapping) and labels and labels[0] in outputs:
        return outputs[labels[0]]
    if isinstance(outputs, tuple | list) and len(outputs) == 1:
        return outputs[0]
    return outputs  # a loss of the user's own may take any structure


def _by_label(what: str, given: Any, labels: Sequence[str], *, spread: bool) -> list[Any]:
    if isinstance(given, Mapping):
        unknown, missing = sorted(set(given) - set(labels)), [label for label in labels if label not in given]
        if unknown or missing:
            raise ConfigError(f"{what} names {sorted(given)}, the labels are {list(labels)}: name each label once")
        return [given[label] for label in labels]
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != len(labels):
            raise ConfigError(f"{what} has {len(given)} entries for {len(labels)} labels: give one a label")
        return list(given)
    if given is None or spread:
        return [given] * len(labels)
    raise ConfigError(f"{what}={given!r} is neither a sequence nor a mapping: give one value a label")


def _made_loss(given: Any) -> Any:
    loss = given() if takes_no_arguments(given) else given
    if not callable(loss):
        raise ConfigError(f"the loss is a {type(loss).__name__}: give a callable of (output, label)")
    if isinstance(loss, torch.nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise ConfigError(
            f"the loss {type(loss).__name__} has parameters of its own, which would not be synchronised: make it a "
            "part of the model and return the loss from a train_step"
        )
    return loss


def _reduction(loss: Any) -> str:
    found = getattr(loss, "reduction", None)
    if found is None and isinstance(loss, functools.partial):
        found = loss.keywords.get("reduction")
    return found if isinstance(found, str) else "mean"


def _rowwise(loss: Any) -> Any:
    """The same loss before its reduction, if it has one that can be switched off."""
    if isinstance(loss, torch.nn.Module) and isinstance(getattr(loss, "reduction", None), str):
        unreduced = copy.copy(loss)
        unreduced.reduction = "none"  # type: ignore[assignment]
        return unreduced
    try:
        named = "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        named = False
    return functools.partial(loss, reduction="none") if named else loss
