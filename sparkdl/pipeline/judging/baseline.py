"""What predicting without a model comes to: a constant of the training labels, or the last value of the same key.

Each metric has the guess that is best for it (the mean for squared errors, the median for absolute ones, the training
rows' quantiles for quantiles, their shares for probabilities, the commonest class for classes), measured on the
held-out rows as a model is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sparkdl.documents.typed import Count
from sparkdl.metrics.measure import measure
from sparkdl.metrics.names import HIGHER_IS_BETTER
from sparkdl.metrics.rows import Floats, Rows, Task
from sparkdl.metrics.sums import quantile_losses

_SQUARED, _ABSOLUTE, _QUANTILES = ("mse", "rmse", "r2"), ("mae", "mape"), ("pinball",)
_PROBABILITIES, _RANKS = ("log_loss", "brier"), ("auc", "average_precision")
_CLASSES = ("accuracy", "precision", "recall", "f1")
_LAST_VALUE = "the last value"
_SAME = 1e-6
"""Metrics nearer to each other than this, relatively, are the same: a model that learned the mean does not beat it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelSummary:
    """The labels of the training rows, weighted as they train; a document as it is (``documents.typed``).

    Attributes:
        rows: how many.
        mean: of a regression's.
        median: of a regression's.
        shares: of each class, by its name; a binary label's negative class first.
        levels: of the quantiles that are predicted.
        quantiles: of a regression's labels, one a level.
    """

    rows: Count
    mean: float = 0.0
    median: float = 0.0
    shares: Mapping[str, float] = field(default_factory=dict)
    levels: tuple[float, ...] = ()
    quantiles: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """The best guesses without a model, on held-out rows; a document as it is (``documents.typed``).

    Attributes:
        values: of each metric that a guess has a finite value of.
        guesses: by metric, what is predicted for that value, such as ``always the mean 12.3``.
        constants: of each metric, the value of the guess that is the same for all rows.
    """

    values: Mapping[str, float]
    guesses: Mapping[str, str]
    constants: Mapping[str, float] = field(default_factory=dict)

    def beaten_by(self, metric: str, value: float | None) -> bool | None:
        """Whether a model's metric is better; None where no guess has one, or recall, which needs no model to be 1."""
        if value is None or metric not in self.values or metric == "recall":
            return None
        return is_better(metric, value, self.values[metric])

    def constant_beaten_by(self, metric: str, value: float) -> bool:
        """Whether a model's metric is better than that of one guess for all rows; True where none has one."""
        return metric not in self.constants or is_better(metric, value, self.constants[metric])

    def said(self, metric: str) -> str:
        """The guess and its value: ``always the mean 12.3 has rmse 4.1``."""
        return f"{self.guesses[metric]} has {metric} {self.values[metric]:.4g}"


def is_better(metric: str, value: float, other: float) -> bool:
    """Whether a value of a metric is better than another, by more than rounding."""
    if math.isclose(value, other, rel_tol=_SAME, abs_tol=1e-12):
        return False
    return (value > other) == HIGHER_IS_BETTER[metric]


def summary_of(
    task: Task, labels: Floats, weights: Floats, classes: Sequence[str] = (), levels: Sequence[float] = ()
) -> LabelSummary:
    """Sum up training labels.

    Args:
        task: what they are.
        labels: (rows,) values, or numbers of ``classes``.
        weights: (rows,), none negative, not all 0.
        classes: their names.
        levels: of the quantiles that are predicted, if any.
    """
    if task != "regression":
        shares = np.bincount(labels.astype(np.int64), weights, len(classes)) / weights.sum()
        return LabelSummary(rows=len(labels), shares=dict(zip(classes, shares.tolist(), strict=True)))
    order = np.argsort(labels, kind="stable")
    below = np.cumsum(weights[order])
    middle = [np.searchsorted(below, below[-1] / 2, side=side) for side in ("left", "right")]  # two where halves part
    median = labels[order][np.minimum(middle, len(labels) - 1)].mean()
    reached = np.searchsorted(below, below[-1] * np.asarray(levels, dtype=np.float64))
    return LabelSummary(
        rows=len(labels),
        mean=float(np.average(labels, weights=weights)),
        median=float(median),
        levels=tuple(levels),
        quantiles=tuple(labels[order][np.minimum(reached, len(labels) - 1)].tolist()),
    )


def baseline_of(
    summary: LabelSummary, rows: Rows, classes: Sequence[str] = (), last: Floats | None = None, key: str = ""
) -> Baseline:
    """Measure the guesses on held-out rows.

    Args:
        summary: of the training labels.
        rows: with labels, weights and any predictions.
        classes: in the order of the labels' numbers; one that training never saw has the share 0.
        last: (rows,), the newest training label of the same key; NaN where there is none, which the constant fills.
        key: what the key is called.
    """
    values: dict[str, float] = {}
    constants: dict[str, float] = {}
    guesses: dict[str, str] = {}
    for guess, metrics, guessed in _guesses(summary, rows, classes, last, key):
        measured = measure(guessed).values
        for name in (name for name in metrics if name in measured):
            if not guess.startswith(_LAST_VALUE):  # each metric has one of these
                constants[name] = measured[name]
            if name not in values or is_better(name, measured[name], values[name]):
                values[name], guesses[name] = measured[name], guess
    return Baseline(values=values, guesses=guesses, constants=constants)


def best_guess(
    guess: str,
    summary: LabelSummary,
    rows: Rows,
    classes: Sequence[str] = (),
    last: Floats | None = None,
    key: str = "",
) -> Rows:
    """The rows with one of the guesses of ``baseline_of`` in place of predictions, as ``Baseline.guesses`` names it."""
    return next(guessed for text, _, guessed in _guesses(summary, rows, classes, last, key) if text == guess)


def _guesses(
    summary: LabelSummary, rows: Rows, classes: Sequence[str], last: Floats | None, key: str
) -> Iterator[tuple[str, tuple[str, ...], Rows]]:
    """Each guess: in words, the metrics that it stands for, and the rows with it in place of predictions."""
    count, last_value_text = len(rows), f"{_LAST_VALUE} of the same {key}"

    def guessed(predictions: Floats, quantiles: Floats | None = None) -> Rows:
        losses = None if quantiles is None else quantile_losses(rows.labels, quantiles, summary.levels)
        return dataclasses.replace(rows, predictions=predictions, quantile_losses=losses)

    if rows.task == "regression":
        medians = np.full(count, summary.median)
        yield f"always the mean {summary.mean:.4g}", _SQUARED, guessed(np.full(count, summary.mean))
        yield f"always the median {summary.median:.4g}", _ABSOLUTE, guessed(medians)
        if summary.levels:
            numbers = ", ".join(f"{value:.4g}" for value in summary.quantiles)
            yield f"always the quantiles {numbers}", _QUANTILES, guessed(medians, np.array(summary.quantiles))
        if last is not None:
            values = np.where(np.isnan(last), summary.mean, last)
            of_quantiles = values[:, None] if summary.levels else None
            yield last_value_text, (*_SQUARED, *_ABSOLUTE, *_QUANTILES), guessed(values, of_quantiles)
        return
    shares = np.array([summary.shares.get(name, 0.0) for name in classes])
    commonest = int(shares.argmax())
    newest = None if last is None else np.where(np.isnan(last), commonest, last)
    if rows.task == "multiclass":
        yield "always the shares of training", _PROBABILITIES, guessed(np.tile(shares / shares.sum(), (count, 1)))
        of_class = np.eye(len(shares))
        constant_text = f"always {classes[commonest]!r}, the commonest class"
        yield constant_text, _CLASSES, guessed(np.tile(of_class[commonest], (count, 1)))
        if newest is not None:
            yield last_value_text, _CLASSES, guessed(of_class[newest.astype(np.int64)])
        return
    share = float(shares[1])
    yield f"always the share of training {share:.4g}", (*_PROBABILITIES, *_RANKS), guessed(np.full(count, share))
    constant_text = f"always {classes[commonest]!r}, the commonest class"
    yield constant_text, ("accuracy",), guessed(np.full(count, float(commonest)))
    yield f"always {classes[1]!r}", ("precision", "recall", "f1"), guessed(np.ones(count))
    if newest is not None:
        yield last_value_text, (*_CLASSES, *_RANKS), guessed(newest)
