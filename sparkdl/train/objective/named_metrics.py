"""Metrics by name: ``"rmse"``, ``"auc"`` and the like, each the exact torchmetrics object that fits loss and output.

Enters: a name, and what the loss says of the output: values, logits, probabilities, one number a class. Leaves: one
number over all rows. Sums are kept alone, in double precision; ``auc`` and ``average_precision`` keep the probability
and label of each row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sparkdl.errors import ConfigError, DataError
from sparkdl.metrics.names import (
    HIGHER_IS_BETTER,
    METRIC_NAMES,
    OF_RANKS,
    OF_VALUES,
    check_metric_name,
)
from sparkdl.train.objective.labels import Meaning, label_kind, meaning_of
from sparkdl.train.objective.loss import loss_option

__all__ = ["MetricRule", "NamedMetric", "named_metric"]

_LEAST_PROBABILITY = torch.finfo(torch.float64).eps  # as sklearn's log_loss clips double precision

Activation = Literal["none", "exp", "sigmoid", "softmax"]


@dataclass(frozen=True, slots=True)
class NamedMetric:
    """One metric by name, as it travels to the ranks; see ``named_metric``.

    Attributes:
        name: one of ``METRIC_NAMES``.
        meaning: of the output.
        activation: what makes values or probabilities of the output.
        ignored: label of rows that do not count, as the loss ignores them; None counts every row.
    """

    name: str
    meaning: Meaning
    activation: Activation
    ignored: int | None = None

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
        fits = [one for one in METRIC_NAMES if (one in OF_VALUES) == (meaning == "value")]
        said = "values" if meaning == "value" else "classes"
        raise ConfigError(
            f"metric {name!r} of {label!r} does not fit outputs of {called}, which are {said}: choose one of "
            f"{', '.join(fits)}, or give a torchmetrics object"
        )
    activation: Activation = "none"
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
    """How outputs and labels of one width become numbers that a torchmetrics object takes, and back.

    Args:
        named: the metric.
        width: numbers in a row of the output: classes, or elements of a value.

    Attributes:
        metric: the torchmetrics object.
        keeps_rows: whether its state grows with the rows.
    """

    def __init__(self, named: NamedMetric, width: int) -> None:
        self.named, self.width = named, width
        self.keeps_rows = named.name in OF_RANKS
        if named.meaning in ("logit", "probability") and width != 1:
            raise ConfigError(
                f"metric {named.name!r} is of one answer a row, and the output has {width} of their own: give "
                "torchmetrics' Multilabel metrics"
            )
        if named.meaning == "classes" and width < 2:
            raise ConfigError(
                f"metric {named.name!r} is of classes, and the output has {width}: give one number a class"
            )
        self.metric = self._made()

    def _made(self) -> Any:
        import torchmetrics
        from torchmetrics import classification

        name = self.named.name
        values: dict[str, Callable[[], Any]] = {
            "mse": torchmetrics.MeanSquaredError,
            "rmse": functools.partial(torchmetrics.MeanSquaredError, squared=False),
            "mae": torchmetrics.MeanAbsoluteError,
            "mape": torchmetrics.MeanAbsolutePercentageError,
            "r2": torchmetrics.R2Score,
            "log_loss": torchmetrics.MeanMetric,
        }
        if name in values:
            made = values[name]()
        else:
            title = {"f1": "F1Score", "auc": "AUROC"}.get(name, name.title().replace("_", ""))
            if self.width <= 2:
                made = getattr(classification, f"Binary{title}")(validate_args=False)
            else:
                # Ranks over classes without a row, or with every row, say nothing: left out in ``result``.
                average = {"accuracy": "micro"}.get(name, "none" if self.keeps_rows else "macro")
                made = getattr(classification, f"Multiclass{title}")(self.width, average=average, validate_args=False)
        return made.set_dtype(torch.float64)

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        """Take in outputs and labels of one batch.

        Raises:
            ConfigError: their shapes do not fit each other.
            DataError: a label is no class.
        """
        if self.named.meaning == "value":
            output = output.detach().double()
            output = output.exp() if self.named.activation == "exp" else output
            if output.numel() != label.numel():
                raise ConfigError(
                    f"metric {self.named.name!r} compares as many numbers, and the output has {tuple(output.shape)}, "
                    f"the label {tuple(label.shape)}: make their shapes fit"
                )
            shape = (-1, self.width) if self.width > 1 and output.ndim > 1 else (-1,)
            self.metric.update(output.reshape(shape), label.detach().double().reshape(shape))
            return
        chances, classes = self._rows(output.detach().double(), label)
        counts = classes != self.named.ignored if self.named.ignored is not None else torch.ones_like(classes).bool()
        chances, classes = chances[counts], classes[counts]
        if not len(classes):
            return
        most = max(self.width, 2)
        if int(classes.min()) < 0 or int(classes.max()) >= most:
            raise DataError(
                f"metric {self.named.name!r} takes classes 0..{most - 1}, and a label is "
                f"{int(classes.min() if classes.min() < 0 else classes.max())}: renumber the classes"
            )
        if self.named.name == "log_loss":
            chosen = chances.gather(1, classes[:, None]).clamp(_LEAST_PROBABILITY, 1.0)
            self.metric.update(-chosen.log())
        else:
            self.metric.update(chances[:, 1] if self.width <= 2 else chances, classes)

    def _rows(self, output: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities ``(rows, classes)`` and class numbers ``(rows,)``; positions of an image are rows."""
        if self.named.meaning == "classes":
            output = output.movedim(1, -1).reshape(-1, self.width) if output.ndim > 1 else output.reshape(1, -1)
            chances = torch.softmax(output, dim=1)  # of log-probabilities, which NLLLoss takes: the probabilities
        else:
            output = output.reshape(-1)
            # 1 - p would lose what is far from 0.
            both = (
                (torch.sigmoid(-output), torch.sigmoid(output))
                if self.named.activation == "sigmoid"
                else (1 - output, output)
            )
            chances = torch.stack(both, dim=1)
        label = label.detach().reshape(-1)
        if len(label) != len(chances):
            raise ConfigError(
                f"metric {self.named.name!r} is of class numbers, and there are {len(label)} labels for {len(chances)} "
                "rows: give one class a row, or a metric of your own"
            )
        classes = label.to(torch.int64)
        if label.is_floating_point() and not torch.equal(classes.to(label.dtype), label):
            raise DataError(
                f"metric {self.named.name!r} takes classes, and a label is not a whole number: give 0, 1, 2, ..., or "
                "another metric"
            )
        return chances, classes

    def result(self) -> float:
        """Return the number over everything taken in; NaN where nothing defines it."""
        if self.metric.update_count == 0:
            return float("nan")
        if not self.keeps_rows:
            return float(self.metric.compute())
        target = self.metric.target
        target = torch.cat(target) if isinstance(target, list) else target
        rows = torch.bincount(target, minlength=max(self.width, 2))
        told = rows > 0 if self.named.name == "average_precision" else (rows > 0) & (rows < len(target))
        if not (told[1] if self.width <= 2 else told.any()):
            return float("nan")
        values = self.metric.compute()
        return float(values if self.width <= 2 else values[told].mean())
