"""Held-out rows with their predictions, checked once, so that nothing after them needs to doubt a number."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from sparkdl.errors import ConfigError, DataError

Task = Literal["regression", "binary", "multiclass"]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_SUM_TOLERANCE = 1e-3
"""How far the probabilities of a row may sum from 1: a softmax in half precision over many classes comes near it."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Held-out rows; made by ``Rows.of``, which checks them.

    Attributes:
        task: what the numbers mean.
        labels: (rows,); class numbers for classes.
        predictions: (rows,) values or probabilities of class 1; (rows, classes) probabilities for ``multiclass``.
        weights: (rows,), none negative.
        groups: (rows,) numbers 0..``group_count`` - 1 of the days or keys that rows belong to.
        group_count: how many of these there are.
        quantile_losses: (rows,) what predicted quantiles lose, NaN where they are of other levels than those that
            judge; None where no quantiles are predicted.
    """

    task: Task
    labels: Floats
    predictions: Floats
    weights: Floats
    groups: Ints
    group_count: int
    quantile_losses: Floats | None = None

    @staticmethod
    def of(
        task: Task,
        labels: npt.ArrayLike,
        predictions: npt.ArrayLike,
        *,
        weights: npt.ArrayLike | None = None,
        groups: npt.ArrayLike | None = None,
        label: str = "label",
        prediction: str = "prediction",
    ) -> Rows:
        """Check arrays of one length.

        Args:
            task: what the numbers mean.
            labels: (rows,) values, or class numbers from 0.
            predictions: (rows,) values or probabilities of class 1; (rows, classes) probabilities for ``multiclass``.
            weights: (rows,); None counts every row once.
            groups: (rows,) of anything that sorts, such as days or keys; None takes each row for a group of its own.
            label: what the column of labels is called, for messages.
            prediction: what the column of predictions is called, for messages.

        Raises:
            ConfigError: there is no such task.
            DataError: lengths differ, or a value is missing or is none of its kind.
        """
        if task not in get_args(Task):
            raise ConfigError(f"task={task!r} is unknown: choose one of {', '.join(get_args(Task))}")
        y, p = _numbers(labels, label, 1), _numbers(predictions, prediction, 2 if task == "multiclass" else 1)
        w = np.ones(len(y)) if weights is None else _numbers(weights, "weight", 1)
        codes, count = (np.arange(len(y)), len(y)) if groups is None else _codes(groups)
        for name, array in ((prediction, p), ("weight", w), ("group", codes)):
            if len(array) != len(y):
                raise DataError(f"{name!r} has {len(array):,} rows, {label!r} {len(y):,}: give both of the same rows")
        _refuse(w < 0, "weight", "is negative", "give weights of 0 and above")
        if task != "regression":
            _check_classes(task, y, p, label, prediction)
        return Rows(task, y, p, w, codes.astype(np.int64, copy=False), count)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: npt.NDArray[Any]) -> Rows:
        """Return the rows that a mask or positions (rows,) choose, with the same numbers of groups."""
        parts = (self.labels[chosen], self.predictions[chosen], self.weights[chosen], self.groups[chosen])
        losses = None if self.quantile_losses is None else self.quantile_losses[chosen]
        return Rows(self.task, *parts, self.group_count, losses)

    def as_one_group(self) -> Rows:
        """Return the rows as those of one group: what is summed by group needs no table of a million of them."""
        return replace(self, groups=np.zeros_like(self.groups), group_count=1)

    def in_blocks(self, most: int, seed: int) -> Rows:
        """Return the rows with their groups joined at random into at most ``most`` blocks of as many groups."""
        if self.group_count <= most:
            return self
        block = np.random.default_rng(seed).permutation(self.group_count) % most
        return replace(self, groups=block[self.groups], group_count=most)

    def check_same(self, other: Rows) -> None:
        """Refuse to compare with predictions of other rows.

        Raises:
            DataError: names what differs, and the first row that does.
        """
        if (self.task, len(self)) != (other.task, len(other)):
            raise DataError(
                f"two models are compared on the same rows alone, and one has {len(self):,} rows of {self.task}, the "
                f"other {len(other):,} of {other.task}: score both on the same rows"
            )
        for name in ("labels", "weights", "groups"):
            differs = getattr(self, name) != getattr(other, name)
            if differs.any():
                raise DataError(
                    f"two models are compared on the same rows alone, and their {name} differ in {differs.sum():,} of "
                    f"{len(self):,} rows (first: row {differs.argmax()}): score both on the same rows in the same order"
                )


def _numbers(values: npt.ArrayLike, name: str, dimensions: int) -> Floats:
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as cause:
        raise DataError(f"{name!r} is missing in some row, or holds what is no number ({cause})") from cause
    if numbers.ndim != dimensions:
        expected = "one probability a class, (rows, classes)" if dimensions == 2 else "one number a row, (rows,)"
        raise DataError(f"{name!r} has the shape {numbers.shape}, and should hold {expected}")
    row = numbers if dimensions == 1 else numbers.sum(axis=1)
    _refuse(np.isnan(row), name, "is missing (null or NaN)", "every row needs one")
    _refuse(np.isinf(row), name, "is infinite", "every row needs a finite one")
    return numbers


def _codes(groups: npt.ArrayLike) -> tuple[Ints, int]:
    keys = np.asarray(groups)
    if keys.ndim != 1:
        raise DataError(f"'group' has the shape {keys.shape}, and should hold one key a row, (rows,)")
    _refuse(missing(keys), "group", "is missing (null or NaN)", "every row needs one")
    try:
        distinct, codes = np.unique(keys, return_inverse=True)
    except TypeError as cause:
        raise DataError(f"'group' holds keys that do not sort together ({cause}): make them strings") from cause
    return codes.astype(np.int64), len(distinct)


def missing(keys: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which of some keys (rows,) are None, NaN, NaT or pandas' NA."""
    import pandas as pd

    return np.asarray(pd.isna(keys), dtype=np.bool_)


def _refuse(wrong: npt.NDArray[np.bool_], name: str, what: str, remedy: str) -> None:
    if wrong.any():
        count, first = int(wrong.sum()), int(wrong.argmax())
        raise DataError(f"{name!r} {what} in {count:,} of {len(wrong):,} rows (first: row {first}): {remedy}")


def _check_classes(task: Task, y: Floats, p: Floats, label: str, prediction: str) -> None:
    classes = p.shape[1] if task == "multiclass" else 2
    if classes < 2:
        raise DataError(f"{prediction!r} holds probabilities of {classes} class: task='binary' takes one number a row")
    none = (y != np.floor(y)) | (y < 0) | (y >= classes)
    _refuse(none, label, f"is none of the classes 0..{classes - 1}", "number the classes from 0")
    lie = (p < 0) | (p > 1)
    outside = np.asarray(lie if p.ndim == 1 else lie.any(axis=1), dtype=np.bool_)
    remedy = "probabilities are asked for, logits need a sigmoid or softmax first"
    _refuse(outside, prediction, "is outside of 0..1", remedy)
    if task == "multiclass":
        _refuse(np.abs(p.sum(axis=1) - 1) > _SUM_TOLERANCE, prediction, "does not sum to 1 over the classes", remedy)
