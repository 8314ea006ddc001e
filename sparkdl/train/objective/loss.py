"""The loss on one rank, whose mean over the ranks is the loss of the global batch, exactly."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sparkdl.errors import ConfigError
from sparkdl.observe import emit, logger
from sparkdl.train.objective.labels import LikeOutput, fitting_label, label_kind
from sparkdl.train.source import BatchLike
from sparkdl.train.task import Task, takes_no_arguments

Reduce = Callable[[torch.Tensor], torch.Tensor]
Bounds = Callable[[str], tuple[float, float] | None]
"""The least and the greatest value of a tensor, by its name, over the whole data set; None where nobody knows."""


def _unknown(name: str) -> None:
    return None


class Objective:
    """All losses of a task on one rank.

    The loss is weighted such that averaging it (and its gradient) over the ranks gives what one rank with the whole
    batch would compute; for validation there are sums and counts that may be added up over batches and ranks.

    A loss that divides by something other than its rows (sample weights, class weights, labels that are not ignored) is
    computed as a sum, and divided by the sum of the divisors of all ranks. A global batch in which nothing counts has
    the loss 0 and no gradient, where torch's own mean would be 0/0. Where gradients are not joined by their mean, the
    gradient alone is another one: the local mean's, by this rank's own divisor, times the weight of its rows.

    Args:
        task: whose loss, labels and weights are used.
        device: where the losses compute.
        data_size: number of parts of a global batch.
        reduce: sums a tensor over the parts; called once a batch, and only if a loss has divisors of its own.
        averages: whether the mean over the ranks is taken of the gradients, too; Adasum takes another one.
        bounds: of the tensors to train on, equal on all ranks. Where they show that no label is ignored, a loss over
            classes needs no exchange.
    """

    def __init__(
        self,
        task: Task,
        device: torch.device,
        data_size: int,
        reduce: Reduce,
        bounds: Bounds = _unknown,
        *,
        averages: bool = True,
    ) -> None:
        self.labels = tuple(task.labels)
        names = self.labels or ("",)
        losses = _by_label("loss", task.loss, names, spread=True)
        weights = _by_label("loss_weights", task.loss_weights, names, spread=False)
        self.output_losses = [
            _OutputLoss(loss, label, 1.0 if weight is None else float(weight), task.sample_weight is not None)
            for loss, label, weight in zip(map(_made_loss, losses), names, weights, strict=True)
        ]
        for output_loss in self.output_losses:
            output_loss.to(device)
        self._sample_weight = task.sample_weight
        self._data_size = data_size
        self._reduce = reduce
        self._averages = averages
        self._device = device
        self._without_divisor = torch.zeros((), dtype=torch.int64, device=device)
        for output_loss in self.output_losses:
            output_loss.find_divisor(bounds)
        output_loss = self.output_losses[0]
        plain = not (output_loss.has_divisor if data_size > 1 else output_loss.divides_alone) and not output_loss.sums
        self._simple = len(self.output_losses) == 1 and plain and output_loss.weight == 1.0

    @property
    def only_sums(self) -> bool:
        """Whether every loss is a sum over rows, which nothing divides."""
        return all(output_loss.sums for output_loss in self.output_losses)

    def __call__(self, outputs: Any, batch: BatchLike) -> torch.Tensor:
        """Return this rank's contribution: its mean over the ranks is the loss of the global batch.

        Raises:
            ConfigError: outputs and labels do not fit each other.
        """
        if self._simple:
            value = self._mean(outputs, batch)
            return value if batch.weight == 1.0 else value * batch.weight
        return self._total(outputs, batch, batch.weight, 1.0)

    def unweighted(self, outputs: Any, batch: BatchLike, weight: float) -> torch.Tensor:
        """Return this rank's loss such that the mean over the ranks of ``weight`` times it is the global batch's.

        Args:
            outputs: of the model.
            batch: this rank's rows.
            weight: of this rank's part of the global batch.
        """
        if self._simple:
            return self._mean(outputs, batch)
        return self._total(outputs, batch, 1.0, 1.0 / weight)

    def alone(self, outputs: Any, batch: BatchLike) -> torch.Tensor:
        """Return the loss of ``batch`` without asking other ranks."""
        split = split_outputs(outputs, self.labels)
        values = [
            output_loss.weight * output_loss.mean(output, batch)
            for output_loss, output in zip(self.output_losses, split, strict=True)
        ]
        return torch.stack(values).sum()

    def _mean(self, outputs: Any, batch: BatchLike) -> torch.Tensor:
        if type(outputs) is not torch.Tensor:
            outputs = _only(outputs, self.labels)
        return self.output_losses[0].mean(outputs, batch)

    def _total(self, outputs: Any, batch: BatchLike, rows: float, others: float) -> torch.Tensor:
        """All outputs together: means times ``rows``, and what has divisors of its own, or none, times ``others``."""
        terms = self._terms(outputs, batch, whole=self._data_size == 1)
        own = [divisor for _, divisor in terms if divisor is not None]
        loss = self._added_up(terms, self._global_divisors(own), rows, others)
        if self._averages or not own:
            return loss
        local = torch.stack([divisor.detach().double().reshape(()) for divisor in own])
        local = local.masked_fill(local == 0, 1.0) * (self._data_size * others / rows)  # for the local mean times rows
        joined = self._added_up(terms, local, rows, others)
        return loss.detach() + (joined - joined.detach())

    def _added_up(
        self,
        terms: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        divisors: torch.Tensor,
        rows: float,
        others: float,
    ) -> torch.Tensor:
        total: torch.Tensor | None = None
        position = 0
        for output_loss, (value, divisor) in zip(self.output_losses, terms, strict=True):
            if divisor is not None:
                value = value * (output_loss.weight * self._data_size * others) / divisors[position].to(value.dtype)
                position += 1
            else:
                value = value * (output_loss.weight * (self._data_size * others if output_loss.sums else rows))
            total = value if total is None else total + value
        assert total is not None
        return total

    def divisors(self, outputs: Any, batch: BatchLike) -> torch.Tensor:
        """Return what the losses of the global batch are divided by, for ``part``; the other ranks call it or ``skip``.

        Args:
            outputs: of a row or more, of any values: what a loss divides by follows from their shapes alone.
            batch: this rank's rows.
        """
        weights = batch[self._sample_weight] if self._sample_weight else None
        outputs_by_label = zip(self.output_losses, split_outputs(outputs, self.labels), strict=True)
        return self._global_divisors(
            [
                output_loss.divisor(output, batch, weights)
                for output_loss, output in outputs_by_label
                if output_loss.has_divisor
            ]
        )

    def part(self, outputs: Any, batch: BatchLike, divisors: torch.Tensor) -> torch.Tensor:
        """Return the contribution of some of this rank's rows: added up over all, it is what a call of this gives.

        Args:
            outputs: of these rows.
            batch: these rows, with the weight of them alone.
            divisors: what ``divisors`` returned for the batch that they are of.
        """
        return self._added_up(self._terms(outputs, batch), divisors, batch.weight, 1.0)

    def skip(self, batch: BatchLike) -> None:
        """Take part in the reduction of a batch of which this rank has no row."""
        count = sum(output_loss.has_divisor for output_loss in self.output_losses)
        if count and self._data_size > 1:
            self._global_divisors([torch.zeros((), device=self._device)] * count)

    def sums(self, outputs: Any, batch: BatchLike) -> torch.Tensor:
        """Return ``(outputs, 2)`` float64: numerator and divisor of each output's loss, to be added up over batches."""
        rows = []
        for output_loss, (value, divisor) in zip(
            self.output_losses, self._terms(outputs, batch, summed=True), strict=True
        ):
            value = value.detach().double()
            if divisor is not None:
                rows.append(torch.stack((value, divisor.double())))
            elif output_loss.sums:
                rows.append(torch.stack((value, torch.full_like(value, batch.rows / batch.global_rows))))  # 1 a batch
            else:
                rows.append(torch.stack((value * batch.rows, torch.full_like(value, batch.rows))))
        return torch.stack(rows)

    def losses(self, sums: torch.Tensor) -> dict[str, float]:
        """Turn added-up ``sums`` into ``loss`` and, with several labels, ``<label>_loss``."""
        values = [numerator / divisor if divisor else float("nan") for numerator, divisor in sums.tolist()]
        losses = {
            "loss": sum(
                output_loss.weight * value for output_loss, value in zip(self.output_losses, values, strict=True)
            )
        }
        if len(self.output_losses) > 1:
            losses |= {
                f"{output_loss.label}_loss": value
                for output_loss, value in zip(self.output_losses, values, strict=True)
            }
        return losses

    def take_without_divisor(self) -> int:
        """How often since the last call nothing in a global batch counted towards a loss; waits for the device."""
        count = int(self._without_divisor)
        self._without_divisor.zero_()
        return count

    def tell_without_divisor(self, epoch: int, *, tells: bool) -> None:
        """Say, where this rank tells, in how many batches since the last call nothing counted."""
        count = self.take_without_divisor()
        if count and tells:
            message = (
                f"epoch {epoch}: in {count} batches nothing counts towards the loss (every label is ignored, or every "
                "weight is 0); their loss is 0 and their gradient nothing"
            )
            logger.warning(message)
            emit("log", message=message)

    def _terms(
        self, outputs: Any, batch: BatchLike, *, whole: bool = False, summed: bool = False
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Each output's mean or sum and None, or its numerator and divisor.

        Args:
            outputs: of the model.
            batch: this rank's rows.
            whole: this rank holds all rows of the global batch.
            summed: the terms are added up over batches, so every divisor is wanted that there is.
        """
        weights = batch[self._sample_weight] if self._sample_weight else None
        terms: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for output_loss, output in zip(self.output_losses, split_outputs(outputs, self.labels), strict=True):
            divides = (
                output_loss.can_count if summed else output_loss.divides_alone if whole else output_loss.has_divisor
            )
            terms.append(
                output_loss.fraction(output, batch, weights) if divides else (output_loss.mean(output, batch), None)
            )
        return terms

    def _global_divisors(self, divisors: Sequence[torch.Tensor]) -> torch.Tensor:
        if not divisors:
            return torch.empty(0)
        total = torch.stack([divisor.detach().double().reshape(()) for divisor in divisors])
        if self._data_size > 1:
            total = self._reduce(total)
        nothing = total == 0
        self._without_divisor += nothing.any()
        return total.masked_fill(nothing, 1.0)  # nothing counts: the loss is 0, not 0/0


class _OutputLoss:
    """The loss of one label.

    Attributes:
        label: its name; empty for a loss of the output alone.
        weight: factor of this loss in the sum of all.
        sums: the loss is a sum over rows, which nothing divides.
        has_divisor: it divides by something other than the rows, which the ranks have to add up.
        divides_alone: the same on a rank that holds the whole batch, where torch's own mean does unless it were 0/0.
        can_count: what it divides by can be told.
    """

    def __init__(self, loss: Any, label: str, weight: float, sampled: bool) -> None:
        self.label, self.weight = label, weight
        self.loss = loss
        self.kind = label_kind(loss)
        reduction = loss_option(loss, "reduction", "mean")
        self.reduction = reduction if isinstance(reduction, str) else "mean"
        self.sums = self.reduction == "sum" and not sampled
        self._class_weight = loss_option(loss, "weight", None)
        self._ignored = loss_option(loss, "ignore_index", -100)
        counts = self.kind == "classes" and self.reduction == "mean"
        self.can_count = sampled or counts
        self.has_divisor = self.divides_alone = sampled
        self.rowwise = _rowwise(loss) if self.can_count else None

    def find_divisor(self, bounds: Bounds) -> None:
        """Find out whether the loss divides by something other than the rows; equal on all ranks."""
        if self.can_count and not self.divides_alone:
            divisor_bounds = bounds(self.label)
            self.divides_alone = divisor_bounds is None or divisor_bounds[0] <= self._ignored <= divisor_bounds[1]
            self.has_divisor = self.divides_alone or self._class_weight is not None

    def to(self, device: torch.device) -> None:
        for loss in map(_unwrapped, (self.loss, self.rowwise)):
            if isinstance(loss, torch.nn.Module):
                loss.to(device)
        self._class_weight = loss_option(self.loss, "weight", None)

    def mean(self, output: Any, batch: BatchLike) -> torch.Tensor:
        """The local mean over the rows."""
        value: torch.Tensor
        if self.label:
            value = self.loss(output, fitting_label(self.kind, output, batch[self.label]))
        else:
            value = self.loss(output)
        return value if value.ndim == 0 else value.mean()

    def fraction(
        self, output: Any, batch: BatchLike, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the local numerator and divisor."""
        label = fitting_label(self.kind, output, batch[self.label]) if self.label else None
        values = self._values(output, label, batch.rows)
        counts = self._counts(values, output, label)
        if weights is not None:
            weights = weights.to(values.dtype).reshape(-1, *[1] * (values.ndim - 1))
            values, counts = values * weights, counts * weights
        return values.sum(), counts.sum()

    def divisor(self, output: Any, batch: BatchLike, weights: torch.Tensor | None) -> torch.Tensor:
        """Return the local divisor, for the shape of ``output``, which has a row or more."""
        row = _first_row(output)
        everywhere = _first_row(row, rows=batch.rows)
        label = fitting_label(self.kind, everywhere, batch[self.label]) if self.label else None
        values = self._values(row, None if label is None else label[:1], 1).detach()
        values = values.expand(batch.rows, *values.shape[1:])
        counts = self._counts(values, everywhere, label)
        if weights is not None:
            counts = counts * weights.to(values.dtype).reshape(-1, *[1] * (values.ndim - 1))
        return counts.sum()

    def _values(self, output: Any, label: torch.Tensor | None, rows: int) -> torch.Tensor:
        """One loss a row, or several."""
        assert self.rowwise is not None
        values: torch.Tensor = self.rowwise(output, label) if self.label else self.rowwise(output)
        if values.ndim == 0 or values.shape[0] != rows:
            raise ConfigError(
                f"the loss of {self.label!r} returns shape {tuple(values.shape)} for {rows} rows: with sample "
                "weights it must return one value a row; take a torch.nn loss or return them"
            )
        return values

    def _counts(self, values: torch.Tensor, output: Any, label: Any) -> torch.Tensor:
        """What each of ``values`` adds to the divisor: 1, the weight of its class, or 0 if it is ignored."""
        if self.kind == "classes" and not label.is_floating_point():
            ignored = label == self._ignored
            counts: torch.Tensor = ~ignored
            if self._class_weight is not None:
                counts = self._class_weight[label.masked_fill(ignored, 0)].masked_fill(ignored, 0.0)
            return counts.to(values.dtype)
        if self.reduction == "batchmean":
            return torch.ones_like(values) / max(values[0].numel() if len(values) else 1, 1)
        return torch.ones_like(values)


def _first_row(output: Any, rows: int = 1) -> Any:
    """The first row of each tensor in ``output``, ``rows`` times, without memory for more than one."""
    if isinstance(output, torch.Tensor):
        return output[:1].expand(rows, *output.shape[1:])
    if isinstance(output, Mapping):
        return {name: _first_row(value, rows) for name, value in output.items()}
    if isinstance(output, tuple | list):
        return [_first_row(value, rows) for value in output]
    return output


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
    listed = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    if len(listed) != len(labels):
        raise ConfigError(f"the model returns {len(listed)} outputs for {len(labels)} labels: return one a label")
    return listed


def _only(outputs: Any, labels: Sequence[str]) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, Mapping) and labels and labels[0] in outputs:
        return outputs[labels[0]]
    if isinstance(outputs, tuple | list) and len(outputs) == 1:
        return outputs[0]
    return outputs  # a loss of the user's own may take any structure


def _by_label(what: str, values: Any, labels: Sequence[str], *, spread: bool) -> list[Any]:
    if isinstance(values, Mapping):
        unknown, missing = sorted(set(values) - set(labels)), [label for label in labels if label not in values]
        if unknown or missing:
            raise ConfigError(f"{what} names {sorted(values)}, the labels are {list(labels)}: name each label once")
        return [values[label] for label in labels]
    if isinstance(values, Sequence) and not isinstance(values, str):
        if len(values) != len(labels):
            raise ConfigError(f"{what} has {len(values)} entries for {len(labels)} labels: give one a label")
        return list(values)
    if values is None or spread:
        return [values] * len(labels)
    raise ConfigError(f"{what}={values!r} is neither a sequence nor a mapping: give one value a label")


def _made_loss(loss: Any) -> Any:
    loss = loss() if takes_no_arguments(loss) else loss
    if not callable(loss):
        raise ConfigError(f"the loss is a {type(loss).__name__}: give a callable of (output, label)")
    users_loss = _unwrapped(loss)
    _check_arguments(users_loss)
    if isinstance(users_loss, torch.nn.Module) and any(p.requires_grad for p in users_loss.parameters()):
        raise ConfigError(
            f"the loss {type(users_loss).__name__} has parameters of its own, which would not be synchronised: freeze "
            "them by requires_grad_(False), or make it a part of the model and return the loss from a train_step"
        )
    return loss


def _check_arguments(loss: Any) -> None:
    """Refuse losses of torch that take more than an output and a label."""
    owner = loss if hasattr(loss, "__qualname__") else type(loss)
    if not str(getattr(owner, "__module__", "")).startswith("torch."):
        return
    try:
        parameters = inspect.signature(loss.forward if isinstance(loss, torch.nn.Module) else loss).parameters.values()
    except (TypeError, ValueError):
        return
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(needed) > 2:
        raise ConfigError(
            f"the loss {owner.__name__} takes ({', '.join(needed)}), and losses are called with (output, label): call "
            "it in a function of your own that makes these of output and label"
        )


def loss_option(loss: Any, name: str, default: Any) -> Any:
    """A setting of a loss: an attribute of a module, or what a ``functools.partial`` of a function binds."""
    loss = _unwrapped(loss)
    while isinstance(loss, functools.partial):
        if name in loss.keywords:
            return loss.keywords[name]
        loss = loss.func
    return getattr(loss, name, default) if isinstance(loss, torch.nn.Module) else default


def _unwrapped(loss: Any) -> Any:
    return loss.function if isinstance(loss, LikeOutput) else loss


def _rowwise(loss: Any) -> Any:
    """The same loss before its reduction, if it has one that can be switched off."""
    if isinstance(loss, LikeOutput):
        return LikeOutput(_rowwise(loss.function))
    if isinstance(loss, torch.nn.Module) and isinstance(getattr(loss, "reduction", None), str):
        unreduced = copy.copy(loss)
        unreduced.reduction = "none"  # type: ignore[assignment]
        return unreduced
    try:
        named = "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        named = False
    return functools.partial(loss, reduction="none") if named else loss
