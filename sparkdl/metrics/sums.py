"""Metrics that are functions of sums: one small row of sums a group stands for all its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sparkdl.metrics.rows import Floats, Ints, Rows, Task

_LEAST_PROBABILITY = np.finfo(np.float64).eps  # as sklearn's log_loss clips double precision


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Weighted sums by group.

    Sums add up: those of batches and ranks to those of an epoch, and a bootstrap draw over groups is one matrix
    product. Labels are summed about their mean: in ``r2`` nothing cancels, however large the labels are.

    Attributes:
        task: what the columns are: see ``_value_columns`` and ``sums_of_answers``.
        table: (groups, columns).
        origin: what labels are summed about; 0 for classes.
    """

    task: Task
    table: Floats
    origin: float = 0.0

    def total(self) -> Sums:
        """Return the sums over all groups, as one group."""
        return replace(self, table=self.table.sum(axis=0, keepdims=True))

    def __add__(self, other: Sums) -> Sums:
        """The sums over the rows of both, of as many groups and classes, about this one's origin."""
        shifted, shift = other.table.copy(), other.origin - self.origin
        if self.task == "regression":
            weight, label, label_squared = other.table.T[:3]
            shifted[:, 1] = label + shift * weight
            shifted[:, 2] = label_squared + shift * (2 * label + shift * weight)
        return replace(self, table=self.table + shifted)


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """What a model answers for rows of classes.

    Attributes:
        labels: (rows,) class numbers.
        chosen: (rows,) class numbers: of many the likeliest, the first of equal ones; of two class 1 above 0.5.
        chances: (rows,), the probability that the row's own class was given.
        brier: (rows,), squared errors of the probabilities.
    """

    labels: Ints
    chosen: Ints
    chances: Floats
    brier: Floats


def answers_of(rows: Rows) -> Answers:
    """What the probabilities of rows of classes answer."""
    labels, p = rows.labels.astype(np.int64), rows.predictions
    if rows.task == "binary":
        chances = np.where(labels == 1, p, 1 - p)
        return Answers(labels, (p > 0.5).astype(np.int64), chances, (p - labels) ** 2)
    chances = np.take_along_axis(p, labels[:, None], axis=1)[:, 0]
    # sum over classes of (p - [class is label])^2
    return Answers(labels, p.argmax(axis=1), chances, np.einsum("rc,rc->r", p, p) - 2 * chances + 1)


def sums_of(rows: Rows) -> Sums:
    """Sum up rows by group."""
    if rows.task != "regression":
        classes = 2 if rows.task == "binary" else rows.predictions.shape[1]
        return sums_of_answers(rows.task, answers_of(rows), classes, rows.weights, rows.groups, rows.group_count)
    weight = rows.weights.sum()
    origin = float(rows.weights @ rows.labels / weight) if weight else 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        columns = [  # one at a time: together they would take more than the rows
            np.bincount(rows.groups, rows.weights * column, rows.group_count).astype(np.float64, copy=False)
            for column in _value_columns(rows, origin)
        ]
    return Sums(rows.task, np.stack(columns, axis=1), origin)


def _value_columns(rows: Rows, origin: float) -> Iterator[Floats]:
    """Ones, label and its square about the origin, error squared, absolute, relative, label is 0, error, pinball."""
    labels = rows.labels
    error, zero = rows.predictions - labels, labels == 0
    yield np.ones(len(labels))
    yield labels - origin
    yield (labels - origin) ** 2
    yield error**2
    yield np.abs(error)
    yield np.abs(error) / np.where(zero, 1.0, np.abs(labels))
    yield zero.astype(np.float64)
    yield error
    yield np.zeros(len(labels)) if rows.quantile_losses is None else rows.quantile_losses


def sums_of_answers(
    task: Task, answers: Answers, classes: int, weights: Floats, groups: Ints, group_count: int
) -> Sums:
    """Sum up answers by group: ones, log loss, Brier, right ones; then true positives, predictions, labels by class.

    Args:
        task: ``binary`` for the precision, recall and F1 of class 1, ``multiclass`` for their means over classes.
        answers: of the rows.
        classes: how many there are.
        weights: (rows,), none negative.
        groups: (rows,) numbers 0..``group_count`` - 1.
        group_count: how many there are.
    """
    right = weights * (answers.chosen == answers.labels)
    by_row = (weights, weights * _log_losses(answers), weights * answers.brier, right)

    def by_class(numbers: Ints, weights: Floats) -> Floats:
        cells = np.bincount(groups * classes + numbers, weights, group_count * classes)
        return cells.reshape(group_count, classes).astype(np.float64, copy=False)

    table = [
        np.stack([np.bincount(groups, column, group_count) for column in by_row], axis=1),
        by_class(answers.labels, right),
        by_class(answers.chosen, weights),
        by_class(answers.labels, weights),
    ]
    return Sums(task, np.concatenate(table, axis=1))


def losses_of(rows: Rows) -> Floats:
    """Return what each row costs (rows,): its squared error, or its log loss."""
    if rows.task != "regression":
        return _log_losses(answers_of(rows))
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray((rows.predictions - rows.labels) ** 2, dtype=np.float64)


def quantile_losses(labels: Floats, quantiles: Floats, levels: Sequence[float]) -> Floats:
    """Return what each row's quantiles lose (rows,): the mean pinball loss over ``levels`` (Koenker and Bassett 1978).

    Args:
        labels: (rows,).
        quantiles: (rows, levels), or (levels,) that are the same for all rows.
        levels: probabilities.
    """
    error, probabilities = labels[:, None] - quantiles, np.asarray(levels)
    return np.asarray(np.maximum(probabilities * error, (probabilities - 1) * error).mean(axis=1), dtype=np.float64)


def _log_losses(answers: Answers) -> Floats:
    return np.asarray(-np.log(np.clip(answers.chances, _LEAST_PROBABILITY, 1.0)), dtype=np.float64)


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
        return _value_metrics(table, sums.origin) if sums.task == "regression" else _class_metrics(table, sums.task)


def _value_metrics(table: Floats, origin: float) -> dict[str, Floats]:
    weight, label, label_squared, squared, absolute, relative, zero, error, pinball = table.T
    spread = label_squared - label * label / weight
    epsilon = np.finfo(np.float64).eps
    # Of equal labels the spread is what rounding leaves: of each label, and of the sum of many squares.
    rounding = weight * (8 * epsilon * abs(origin)) ** 2 + 64 * epsilon * label_squared
    return {
        "mse": squared / weight,
        "rmse": np.sqrt(squared / weight),
        "mae": absolute / weight,
        "mape": np.where(zero > 0, np.nan, relative / weight),
        "r2": np.where(spread > rounding, 1 - squared / spread, np.nan),
        "bias": error / weight,  # predicted minus true
        "pinball": pinball / weight,
    }


def _class_metrics(table: Floats, task: Task) -> dict[str, Floats]:
    weight = table[:, 0]
    true, predicted, positive = np.split(table[:, 4:], 3, axis=1)
    shares = {"precision": (true, predicted), "recall": (true, positive), "f1": (2 * true, predicted + positive)}
    if task == "binary":
        of_classes = {name: _share(part[:, 1], total[:, 1]) for name, (part, total) in shares.items()}
    else:  # as sklearn's macro average: over the classes that stand in labels or predictions
        present = predicted + positive
        of_classes = {name: _mean_share(part, total, present) for name, (part, total) in shares.items()}
    named = zip(("log_loss", "brier", "accuracy"), table.T[1:4], strict=True)
    return {name: column / weight for name, column in named} | of_classes


def _share(part: Floats, whole: Floats) -> Floats:
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1), np.nan)


def _mean_share(part: Floats, whole: Floats, present: Floats) -> Floats:
    """The mean over the classes that are present, one without a whole counting 0; NaN where weight is none."""
    shares = np.where(whole > 0, part / np.where(whole > 0, whole, 1), 0.0)
    return np.where(np.isnan(part[:, 0]), np.nan, (shares * (present > 0)).sum(axis=1) / (present > 0).sum(axis=1))
