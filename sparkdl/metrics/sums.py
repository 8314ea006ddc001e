"""Metrics that are functions of sums: one small row of sums a group stands for all its rows.

Enters: checked rows. Leaves: the metrics by name; NaN where nothing defines one.

Sums add up, so a bootstrap draw over groups is one matrix product. Labels are
summed about their mean: in ``r2`` nothing cancels, however large the labels are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sparkdl.metrics.rows import Floats, Rows, Task

__all__ = ["Sums", "losses_of", "sums_of", "values_of"]

_LEAST_PROBABILITY = np.finfo(np.float64).eps  # as sklearn's log_loss clips double precision


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Weighted sums by group.

    Attributes:
        task: what the columns are: see ``_regression``, ``_binary``, ``_multiclass``.
        table: (groups, columns).
        origin: what labels are summed about; 0 for classes.
    """

    task: Task
    table: Floats
    origin: float = 0.0

    def total(self) -> Sums:
        """Return the sums over all groups, as one group."""
        return replace(self, table=self.table.sum(axis=0, keepdims=True))


def sums_of(rows: Rows) -> Sums:
    """Sum up rows by group."""
    weight = rows.weights.sum()
    origin = float(rows.weights @ rows.labels / weight) if rows.task == "regression" and weight else 0.0
    kinds = {"regression": _regression, "binary": _binary, "multiclass": _multiclass}
    with np.errstate(over="ignore", invalid="ignore"):
        columns = [  # one at a time: together they would take more than the rows
            np.bincount(rows.groups, rows.weights * each, rows.group_count).astype(np.float64, copy=False)
            for each in kinds[rows.task](rows, origin)
        ]
        if rows.task == "multiclass":
            columns += _by_class(rows)
    return Sums(rows.task, np.stack(columns, axis=1), origin)


def _regression(rows: Rows, origin: float) -> Iterator[Floats]:
    """Ones, label and its square about the origin, error squared, error absolute, error relative, label is 0, error."""
    y, error = rows.labels, rows.predictions - rows.labels
    zero = y == 0
    yield np.ones(len(y))
    yield y - origin
    yield (y - origin) ** 2
    yield error**2
    yield np.abs(error)
    yield np.abs(error) / np.where(zero, 1.0, np.abs(y))
    yield zero.astype(np.float64)
    yield error


def _binary(rows: Rows, _: float) -> Iterator[Floats]:
    """Ones, log loss, Brier, true positives, predicted positives, positives, right ones; 0.5 and above is positive."""
    y, p = rows.labels, rows.predictions
    positive = (p >= 0.5).astype(np.float64)
    yield np.ones(len(y))
    yield _log_losses(rows)
    yield (p - y) ** 2
    yield positive * y
    yield positive
    yield y
    yield (positive == y).astype(np.float64)


def _multiclass(rows: Rows, _: float) -> Iterator[Floats]:
    """Ones, log loss, Brier, right ones."""
    p = rows.predictions
    yield np.ones(len(p))
    yield _log_losses(rows)
    yield np.einsum("rc,rc->r", p, p) - 2 * _chances(rows) + 1  # sum over classes of (p - [class is label])^2
    yield (p.argmax(axis=1) == rows.labels).astype(np.float64)


def _by_class(rows: Rows) -> list[Floats]:
    """By group: true positives of each class, predictions of each, labels of each."""
    chosen, label, count = rows.predictions.argmax(axis=1), rows.labels.astype(np.int64), rows.predictions.shape[1]

    def summed(of: npt.NDArray[np.int64], weights: Floats) -> Floats:
        cells = np.bincount(rows.groups * count + of, weights, rows.group_count * count)
        return cells.reshape(rows.group_count, count).T.astype(np.float64, copy=False)

    columns = (summed(label, rows.weights * (chosen == label)), summed(chosen, rows.weights))
    return [*columns[0], *columns[1], *summed(label, rows.weights)]


def losses_of(rows: Rows) -> Floats:
    """Return what each row costs (rows,): its squared error, or its log loss."""
    with np.errstate(over="ignore", invalid="ignore"):
        if rows.task == "regression":
            return np.asarray((rows.predictions - rows.labels) ** 2, dtype=np.float64)
        return _log_losses(rows)


def _chances(rows: Rows) -> Floats:
    """The probability that each row's class was given, (rows,)."""
    if rows.task == "binary":
        return np.where(rows.labels == 1, rows.predictions, 1 - rows.predictions)
    return np.take_along_axis(rows.predictions, rows.labels.astype(np.int64)[:, None], axis=1)[:, 0]


def _log_losses(rows: Rows) -> Floats:
    return np.asarray(-np.log(np.maximum(_chances(rows), _LEAST_PROBABILITY)), dtype=np.float64)


def values_of(sums: Sums, draws: npt.NDArray[np.float64] | None = None) -> dict[str, Floats]:
    """Return every metric of the sums, by name.

    Args:
        sums: by group.
        draws: (draws, groups), how often each draw takes each group; None takes each once.

    Returns:
        (draws,) a metric, (1,) without draws; NaN where a metric is undefined.
    """
    table = sums.total().table if draws is None else draws @ sums.table
    table = np.where(table[:, :1] > 0, table, np.nan)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if sums.task == "regression":
            return _regression_values(table, sums.origin)
        return _binary_values(table) if sums.task == "binary" else _multiclass_values(table)


def _regression_values(table: Floats, origin: float) -> dict[str, Floats]:
    weight, label, label_squared, squared, absolute, relative, zero, error = table.T
    spread = label_squared - label * label / weight
    rounding = weight * (8 * np.finfo(np.float64).eps * abs(origin)) ** 2
    return {
        "mse": squared / weight,
        "rmse": np.sqrt(squared / weight),
        "mae": absolute / weight,
        "mape": np.where(zero > 0, np.nan, relative / weight),
        "r2": np.where(spread > rounding, 1 - squared / spread, np.nan),
        "bias": error / weight,  # predicted minus true
    }


def _binary_values(table: Floats) -> dict[str, Floats]:
    weight, log_loss, brier, true, predicted, positive, right = table.T
    return {
        "log_loss": log_loss / weight,
        "brier": brier / weight,
        "accuracy": right / weight,
        "precision": _share(true, predicted),
        "recall": _share(true, positive),
        "f1": _share(2 * true, predicted + positive),
    }


def _multiclass_values(table: Floats) -> dict[str, Floats]:
    weight = table[:, 0]
    true, predicted, positive = np.split(table[:, 4:], 3, axis=1)
    named = zip(("log_loss", "brier", "accuracy"), table.T[1:4], strict=True)
    return {name: column / weight for name, column in named} | {
        # as sklearn's macro average: over the classes that stand in labels or predictions
        "precision": _mean_share(true, predicted, predicted + positive),
        "recall": _mean_share(true, positive, predicted + positive),
        "f1": _mean_share(2 * true, predicted + positive, predicted + positive),
    }


def _share(part: Floats, whole: Floats) -> Floats:
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1), np.nan)


def _mean_share(part: Floats, whole: Floats, present: Floats) -> Floats:
    """The mean over the classes that are present, one without a whole counting 0; NaN where weight is none."""
    shares = np.where(whole > 0, part / np.where(whole > 0, whole, 1), 0.0)
    return np.where(np.isnan(part[:, 0]), np.nan, (shares * (present > 0)).sum(axis=1) / (present > 0).sum(axis=1))
