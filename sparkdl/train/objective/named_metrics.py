"""Metrics by name: ``"rmse"``, ``"auc"`` and the like, as ``sparkdl.metrics`` computes them for the gate."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from sparkdl.errors import ConfigError, DataError
from sparkdl.metrics.names import (
    HIGHER_IS_BETTER,
    METRIC_NAMES,
    OF_RANKS,
    OF_VALUES,
    check_metric_name,
)
from sparkdl.metrics.ranking import auc, average_precision
from sparkdl.metrics.rows import Floats, Rows, Task
from sparkdl.metrics.sums import Answers, Sums, sums_of, sums_of_answers, values_of
from sparkdl.nn.poisson_loss import PoissonLoss, amounts_of
from sparkdl.train.objective.labels import Meaning, label_kind, meaning_of
from sparkdl.train.objective.loss import loss_option

_NUMBERS_AT_ONCE = 1 << 16
"""The numbers of rows that are summed up together: what batches say is fetched from a GPU, and waited for, once for all
of them."""

Activation = Literal["none", "exp", "sigmoid", "softmax"]


@dataclass(frozen=True, slots=True)
class NamedMetric:
    """One metric by name, as it travels to the ranks; see ``named_metric``.

    Attributes:
        name: one of ``METRIC_NAMES``.
        meaning: of the output.
        activation: what makes values or probabilities of the output.
        ignored: label of rows that do not count, as the loss ignores them; None counts every row.
        mean: that exponentials are multiplied by.
        ceiling: that no value exceeds then; None sets none.
    """

    name: str
    meaning: Meaning
    activation: Activation
    ignored: int | None = None
    mean: float = 1.0
    ceiling: float | None = None

    @property
    def higher_is_better(self) -> bool:
        """Whether more of it is better."""
        return HIGHER_IS_BETTER[self.name]


def named_metric(name: str, label: str, loss: Any) -> NamedMetric:
    """Return the metric ``name`` for outputs that ``loss`` compares with ``label``.

    Raises:
        ConfigError: there is no such metric, or it does not fit what the loss says of the output.
    """
    check_metric_name(name)
    meaning = meaning_of(loss)
    called = _name_of(loss)
    if meaning == "value" and _is_torchs(loss) and label_kind(loss) == "own":
        raise ConfigError(
            f"metric {name!r} of {label!r}: {called} does not say what its outputs are: give a function of (output, "
            "label), or a torchmetrics object"
        )
    if (name in OF_VALUES) != (meaning == "value"):
        fits = [candidate for candidate in METRIC_NAMES if (candidate in OF_VALUES) == (meaning == "value")]
        output_kind = "values" if meaning == "value" else "classes"
        raise ConfigError(
            f"metric {name!r} of {label!r} does not fit outputs of {called}, which are {output_kind}: choose one of "
            f"{', '.join(fits)}, or give a torchmetrics object"
        )
    activation: Activation = "none"
    if isinstance(loss, PoissonLoss):
        return NamedMetric(name, meaning, "exp", mean=loss.mean, ceiling=loss.ceiling)
    if meaning in ("logit", "classes"):
        activation = "sigmoid" if meaning == "logit" else "softmax"
    elif called in ("PoissonNLLLoss", "poisson_nll_loss") and loss_option(loss, "log_input", True):
        activation = "exp"
    return NamedMetric(
        name, meaning, activation, loss_option(loss, "ignore_index", -100) if meaning == "classes" else None
    )


def _name_of(loss: Any) -> str:
    while isinstance(loss, functools.partial):
        loss = loss.func
    return str(getattr(loss, "__name__", type(loss).__name__))


def _is_torchs(loss: Any) -> bool:
    while isinstance(loss, functools.partial):
        loss = loss.func
    owner = loss if hasattr(loss, "__qualname__") else type(loss)
    return str(owner.__module__).startswith("torch.")


class MetricRule:
    """One metric over outputs of one width.

    What the loss says of the output (values, logits, probabilities, one number a class) becomes numbers a row where the
    output lies, in double precision; many rows are summed up together. ``auc`` and ``average_precision`` keep the
    probability and label of each row.

    Args:
        named: the metric.
        width: numbers in a row of the output: classes, or elements of a value.

    Attributes:
        keeps_rows: whether its state grows with the rows.
    """

    def __init__(self, named: NamedMetric, width: int) -> None:
        self.named, self.width = named, width
        self.keeps_rows = named.name in OF_RANKS
        self._classes = max(width, 2)
        self._rows: list[torch.Tensor] = []  # where the outputs lie
        self._waiting = 0  # numbers in them
        self._sums: list[Sums] = []
        if named.meaning in ("logit", "probability") and width != 1:
            raise ConfigError(
                f"metric {named.name!r} is of one answer a row, and the output has {width} of their own: give "
                "torchmetrics' Multilabel metrics"
            )
        if named.meaning == "classes" and width < 2:
            raise ConfigError(
                f"metric {named.name!r} is of classes, and the output has {width}: give one number a class"
            )

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        """Take in outputs and labels of one batch.

        Raises:
            ConfigError: their shapes do not fit each other.
            DataError: a label of this batch or of one before it is no class.
        """
        output, label = output.detach().double(), label.detach().double()
        rows = self._values(output, label) if self.named.meaning == "value" else self._answers(output, label)
        self._rows.append(rows)
        self._waiting += rows.numel()
        if not self.keeps_rows and self._waiting >= _NUMBERS_AT_ONCE:
            self._sum_up()

    def _values(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Labels, then predictions, (rows, 2 * width)."""
        if output.numel() != label.numel():
            raise ConfigError(
                f"metric {self.named.name!r} compares as many numbers, and the output has {tuple(output.shape)}, "
                f"the label {tuple(label.shape)}: make their shapes fit"
            )
        if self.named.activation == "exp":
            output = amounts_of(output, self.named.mean, self.named.ceiling)
        return torch.cat([label.reshape(-1, self.width), output.reshape(-1, self.width)], dim=1)

    def _answers(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Labels, then the columns of ``Answers``, or the probabilities that rank rows; positions of an image are rows.

        A label that is no class is found once the rows are summed up: to ask here would wait for the device.
        """
        if self.named.meaning == "classes":
            output = output.movedim(1, -1).reshape(-1, self.width) if output.ndim > 1 else output.reshape(1, -1)
            chances = torch.softmax(output, dim=1)  # of log-probabilities, which NLLLoss takes: the probabilities
        else:
            output = output.reshape(-1)
            # 1 - p would lose what is far from 0.
            class_chances = (
                (torch.sigmoid(-output), torch.sigmoid(output))
                if self.named.activation == "sigmoid"
                else (1 - output, output)
            )
            chances = torch.stack(class_chances, dim=1)
        label = label.reshape(-1)
        if len(label) != len(chances):
            raise ConfigError(
                f"metric {self.named.name!r} is of class numbers, and there are {len(label)} labels for {len(chances)} "
                "rows: give one class a row, or a metric of your own"
            )
        if self.keeps_rows:
            return torch.cat([label[:, None], chances if self._classes > 2 else chances[:, 1:]], dim=1)
        label_chances = chances.gather(1, label.long().clamp(0, self._classes - 1)[:, None])[:, 0]
        chosen = chances.argmax(dim=1) if self._classes > 2 else chances[:, 1] > 0.5
        brier = chances.square().sum(dim=1) - 2 * label_chances + 1
        return torch.stack([label, chosen.double(), label_chances, brier if self._classes > 2 else brier / 2], dim=1)

    def _sum_up(self) -> None:
        """Add the rows that were taken in to the sums."""
        rows, self._rows, self._waiting = self._numbers(), [], 0
        if len(rows):
            self._add(self._sums_of(rows))

    def _add(self, sums: list[Sums]) -> None:
        self._sums = (
            [total + batch_sum for total, batch_sum in zip(self._sums, sums, strict=True)] if self._sums else sums
        )

    def _sums_of(self, rows: Floats) -> list[Sums]:
        """The sums of each number of a value, or of the answers."""
        ones, groups = np.ones(len(rows)), np.zeros(len(rows), np.int64)
        if self.named.meaning == "value":
            pairs = zip(rows.T[: self.width], rows.T[self.width :], strict=True)
            return [sums_of(Rows("regression", labels, values, ones, groups, 1)) for labels, values in pairs]
        labels, chosen, chances, brier = rows.T
        answers = Answers(labels.astype(np.int64), chosen.astype(np.int64), chances, brier)
        task: Task = "binary" if self._classes == 2 else "multiclass"
        return [sums_of_answers(task, answers, self._classes, ones, groups, 1)]

    def _numbers(self) -> Floats:
        """The rows that were taken in and count, as numpy has them; labels that are no classes are refused."""
        rows: Floats = torch.cat(self._rows).cpu().numpy() if self._rows else np.zeros((0, 1))
        if self.named.meaning == "value":
            return rows
        rows = rows[rows[:, 0] != self.named.ignored]
        labels = rows[:, 0]
        if (labels != np.floor(labels)).any():
            raise DataError(
                f"metric {self.named.name!r} takes classes, and a label is not a whole number: give 0, 1, 2, ..., or "
                "another metric"
            )
        wrong = labels[(labels < 0) | (labels >= self._classes)]
        if len(wrong):
            raise DataError(
                f"metric {self.named.name!r} takes classes 0..{self._classes - 1}, and a label is {int(wrong[0])}: "
                "renumber the classes"
            )
        return rows

    def state(self) -> list[Any]:
        """What was taken in: the rows, or the origin and table of each sum; tensors on the CPU.

        Raises:
            DataError: a label is no class.
        """
        if self.keeps_rows:
            return [torch.from_numpy(self._numbers())]
        self._sum_up()
        return [(sums.origin, torch.from_numpy(sums.table)) for sums in self._sums]

    def load(self, states: Sequence[list[Any]]) -> None:
        """Take over what one or several ranks had taken in."""
        self.reset()
        if self.keeps_rows:
            self._rows = [rows for (rows,) in states if len(rows)]
            return
        task: Task = "regression" if self.named.meaning == "value" else "binary" if self._classes == 2 else "multiclass"
        for state in filter(None, states):
            self._add([Sums(task, table.numpy(), origin) for origin, table in state])

    def reset(self) -> None:
        """Start over."""
        self._rows, self._waiting, self._sums = [], 0, []

    def result(self) -> float:
        """Return the number over everything taken in; NaN where nothing defines it.

        Raises:
            DataError: a label is no class.
        """
        name = self.named.name
        if self.keeps_rows:
            return self._ranked(self._numbers())
        self._sum_up()
        if not self._sums:
            return float("nan")
        columns = [values_of(sums) for sums in self._sums]
        if name == "rmse":
            return float(np.sqrt(np.mean([values["mse"] for values in columns])))
        value = float(np.mean([values[name] for values in columns]))
        # An epoch in which no row is of class 1, or is taken for it, has the worst value, as sklearn's zero_division=0.
        return 0.0 if np.isnan(value) and name in ("precision", "recall", "f1") else value

    def _ranked(self, rows: Floats) -> float:
        """The metric of class 1 of two, or its mean over the classes that define it."""
        metric = auc if self.named.name == "auc" else average_precision
        ones, groups = np.ones(len(rows)), np.zeros(len(rows), np.int64)
        labels, chances = rows[:, 0], rows.T[1:]
        classes = range(self._classes) if self._classes > 2 else [1]
        values = [
            float(metric(Rows("binary", (labels == number).astype(np.float64), chance, ones, groups, 1))[0])
            for number, chance in zip(classes, chances, strict=False)
        ]
        defined = [value for value in values if not np.isnan(value)]
        return float(np.mean(defined)) if defined else float("nan")
