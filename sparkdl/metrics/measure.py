"""All metrics of a task over held-out rows: as numbers, as calibration, as confusion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sparkdl.errors import ConfigError
from sparkdl.metrics.names import HIGHER_IS_BETTER, check_metric_name
from sparkdl.metrics.ranking import auc, average_precision
from sparkdl.metrics.rows import Floats, Ints, Rows, Task
from sparkdl.metrics.sums import answers_of, sums_of, values_of

_CONFIDENCE_BINS = 15
_OF_CLASSES = ("log_loss", "brier", "accuracy", "precision", "recall", "f1")
METRICS: Mapping[Task, tuple[str, ...]] = {
    "regression": ("mse", "rmse", "mae", "mape", "r2", "pinball"),
    "binary": (*_OF_CLASSES, "auc", "average_precision"),
    "multiclass": _OF_CLASSES,
}
_DESCRIBED: Mapping[Task, tuple[str, ...]] = {"regression": ("bias",), "binary": (), "multiclass": ()}
"""What is told of predictions, and judges none: it has no better or worse."""
_OF_RANKS = {"auc": auc, "average_precision": average_precision}


def check_metric(name: str, task: Task | None = None) -> None:
    """Refuse a name that no metric has, or none of the task.

    Raises:
        ConfigError: names the nearest, and all.
    """
    check_metric_name(name, HIGHER_IS_BETTER)
    if task is not None and name not in METRICS[task]:
        raise ConfigError(f"{task} has no metric {name!r}: choose one of {', '.join(METRICS[task])}")


def check_metric_of(rows: Rows, name: str) -> None:
    """Refuse a name that no metric has, or none of these rows.

    Raises:
        ConfigError: names the nearest, and all.
    """
    check_metric(name, rows.task)
    if name == "pinball" and rows.quantile_losses is None:
        raise ConfigError("pinball is a metric of quantiles, and one number is predicted a row: choose mae")


def metric_over(rows: Rows, name: str, draws: Floats | None = None) -> Floats:
    """Return one metric, over all rows or over each of (draws, groups) bootstrap draws; NaN where it is undefined.

    Raises:
        ConfigError: the task has no such metric, or the rows have no quantiles.
    """
    check_metric_of(rows, name)
    return _OF_RANKS[name](rows, draws) if name in _OF_RANKS else values_of(sums_of(rows), draws)[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Metrics over some rows.

    Attributes:
        rows: how many there are.
        weight: the sum of their weights.
        values: finite numbers by metric.
        undefined: why the other metrics of the task have none, one sentence each.
    """

    rows: int
    weight: float
    values: Mapping[str, float]
    undefined: Mapping[str, str]


def measure(rows: Rows) -> Measured:
    """Return all metrics of the rows' task; ``pinball`` of those with predicted quantiles alone."""
    rows = rows.as_one_group()
    values = values_of(sums_of(rows))
    if rows.task == "binary":
        values = values | {name: over(rows) for name, over in _OF_RANKS.items()}
    names = [*METRICS[rows.task], *_DESCRIBED[rows.task]]
    if rows.quantile_losses is None:
        names = [name for name in names if name != "pinball"]
    numbers = {name: float(values[name][0]) for name in names}
    return Measured(
        rows=len(rows),
        weight=float(rows.weights.sum()),
        values={name: value for name, value in numbers.items() if np.isfinite(value)},
        undefined={name: _why(name, value, rows) for name, value in numbers.items() if not np.isfinite(value)},
    )


def _why(name: str, value: float, rows: Rows) -> str:
    labels = rows.labels[rows.weights > 0]
    if not len(labels):
        return f"{name} is undefined: there are no rows" if not len(rows) else f"{name} is undefined: all weights are 0"
    if name in ("auc", "r2") and labels.min() == labels.max():
        return f"{name} is undefined: every label of {len(labels):,} rows is {labels[0]:g}"
    if name == "mape" and (labels == 0).any():
        return f"{name} is undefined: {int((labels == 0).sum()):,} of {len(labels):,} labels are 0"
    if name in ("average_precision", "recall", "f1") and rows.task == "binary" and not labels.any():
        return f"{name} is undefined: no label of {len(labels):,} rows is 1"
    if name == "pinball" and rows.quantile_losses is not None and np.isnan(rows.quantile_losses).any():
        return "pinball is undefined: it predicts quantiles of other levels"
    if name == "precision":
        return f"{name} is undefined: no prediction of {len(labels):,} rows is above 0.5"
    return f"{name} is {value}: predictions reach {np.abs(rows.predictions).max():g}, labels {np.abs(labels).max():g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationBin:
    """Rows whose predicted probability lies in ``[low, high)``, the last bin with its upper end.

    Attributes:
        low: where the bin begins.
        high: where it ends.
        rows: how many rows lie in it.
        weight: the sum of their weights.
        predicted: their mean probability.
        observed: the share of label 1 among them.
    """

    low: float
    high: float
    rows: int
    weight: float
    predicted: float
    observed: float


def calibration(rows: Rows, bins: int = 10) -> tuple[CalibrationBin, ...]:
    """Return the bins of equal width that hold weight.

    Raises:
        ConfigError: the rows are not of two classes, or there is no bin.
    """
    if rows.task != "binary" or bins < 1:
        raise ConfigError(f"calibration takes rows of task='binary' and 1 bin or more, not {rows.task!r} and {bins}")
    at = np.minimum((rows.predictions * bins).astype(np.int64), bins - 1)
    count = np.bincount(at, minlength=bins)
    parts = (rows.weights, rows.weights * rows.predictions, rows.weights * rows.labels)
    weight, predicted, observed = (np.bincount(at, part, bins) for part in parts)
    return tuple(
        CalibrationBin(
            low=float(bin_index) / bins,
            high=float(bin_index + 1) / bins,
            rows=int(count[bin_index]),
            weight=float(weight[bin_index]),
            predicted=float(predicted[bin_index] / weight[bin_index]),
            observed=float(observed[bin_index] / weight[bin_index]),
        )
        for bin_index in np.flatnonzero(weight > 0)
    )


def calibration_error(rows: Rows) -> float:
    """Return the expected calibration error of the likeliest class, over 15 bins of equal width (Guo et al. 2017)."""
    shares = rows.predictions
    if shares.ndim == 1:
        shares = np.stack([1 - shares, shares], axis=1)
    confidence, right = shares.max(axis=1), shares.argmax(axis=1) == rows.labels
    bins = np.minimum((confidence * _CONFIDENCE_BINS).astype(np.int64), _CONFIDENCE_BINS - 1)
    gaps = np.bincount(bins, rows.weights * (confidence - right), _CONFIDENCE_BINS)
    return float(np.abs(gaps).sum() / rows.weights.sum())


def confusion(rows: Rows, places: Ints | None = None) -> Floats:
    """Return the weight of rows by (label, predicted class), (classes, classes); matrices of parts add up.

    Args:
        rows: of classes.
        places: (classes,) row and column of each class, of which several may share one; None gives each its own.

    Raises:
        ConfigError: the rows have no classes.
    """
    if rows.task == "regression":
        raise ConfigError("a confusion matrix takes rows of classes: their task is 'regression'")
    if places is None:
        places = np.arange(2 if rows.task == "binary" else rows.predictions.shape[1])
    answers, size = answers_of(rows), int(places.max()) + 1
    cells = places[answers.labels] * size + places[answers.chosen]
    return np.bincount(cells, rows.weights, size * size).reshape(size, size).astype(np.float64)
