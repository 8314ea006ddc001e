"""What looks wrong with the losses of a fit: no better than guessing, or far lower on the rows that trained.

Nothing is read again: the statistics of the shards know what the mean of the training labels would cost. Where they do
not (losses of the user's own, sample weights, a part of the rows), or rows are few, nothing is said.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sparkdl.columns.statistics import ColumnStats
from sparkdl.shards.manifest import Manifest
from sparkdl.train.objective.labels import label_kind
from sparkdl.train.objective.loss import loss_option

__all__ = ["guess_loss", "loss_warnings"]

_LEAST_ROWS = 500
"""Of fewer rows chance alone tells losses apart."""
_LEAST_STEPS = 50
"""In an epoch; after fewer, batch normalization has seen too little to validate with, and the gap is its."""
_FAR, _OF_GUESS = 1.5, 0.1
"""A validation loss so many times the training loss, and so much of a guess's loss above it, is far above it."""


def guess_loss(loss: Any, train: ColumnStats, rows: ColumnStats) -> tuple[str, float] | None:
    """A guess without a model, in words, and what it costs; None where statistics do not tell.

    Args:
        loss: of torch, or the user's own.
        train: of the labels to train on.
        rows: of the labels to predict.

    Returns:
        for a squared error or two classes exactly what the mean of the training labels costs, for an absolute error at
        most that; for more classes what it costs to call all alike.
    """
    while isinstance(loss, functools.partial):
        if loss.args or loss.keywords:
            return None
        loss = loss.func
    changed = [loss_option(loss, name, None) is not None for name in ("weight", "pos_weight")]
    smoothed = loss_option(loss, "label_smoothing", 0.0) != 0.0
    if label_kind(loss) == "own" or loss_option(loss, "reduction", "mean") != "mean" or smoothed or any(changed):
        return None
    if train.mean is None or train.min is None or train.max is None or train.null_count:
        return None
    if rows.mean is None or rows.variance is None or rows.min is None or rows.max is None or rows.null_count:
        return None
    words = f"always the mean of the training labels, {train.mean:.4g},"
    low, high = min(train.min, rows.min), max(train.max, rows.max)
    spread = rows.variance + (rows.mean - train.mean) ** 2
    match getattr(loss, "__name__", type(loss).__name__):
        case "MSELoss" | "mse_loss":
            return words, spread
        case "L1Loss" | "l1_loss":
            return words, math.sqrt(spread)
        case "BCEWithLogitsLoss" | "binary_cross_entropy_with_logits" | "BCELoss" | "binary_cross_entropy":
            return (words, _entropy(train.mean, rows.mean)) if low >= 0 and high <= 1 else None
        case "CrossEntropyLoss" | "cross_entropy" | "NLLLoss" | "nll_loss":
            if low < 0 or high < 1 or low <= loss_option(loss, "ignore_index", -100) <= high:
                return None
            if high == 1:
                return words, _entropy(train.mean, rows.mean)
            return f"all {high + 1:g} classes alike", math.log(high + 1)
    return None


def _entropy(share: float, rows: float) -> float:
    """Log loss of predicting ``share`` where ``rows`` is the share of ones."""
    terms = [(rows, share), (1 - rows, 1 - share)]
    return -sum(weight * math.log(chance) if chance > 0 else math.inf for weight, chance in terms if weight > 0)


def loss_warnings(
    epochs: Sequence[Mapping[str, float]],
    kept: Mapping[str, float],
    losses: Mapping[str, Any],
    train: Manifest,
    validation: Manifest | None,
    *,
    weighted: bool = False,
) -> list[str]:
    """Say what looks wrong, one sentence each.

    Args:
        epochs: the history's rows; all rows of a set count in each.
        kept: that of the epoch whose weights are kept.
        losses: by label.
        train: the set to train on.
        validation: the set to validate on.
        weighted: whether rows have weights, of which the statistics know nothing.
    """
    rows = train if validation is None else validation
    if rows.rows < _LEAST_ROWS or train.rows < _LEAST_ROWS or not epochs:
        return []
    guesses = {}
    for label, loss in losses.items():
        stats = [one.statistics.get(label, ColumnStats()) for one in (train, rows)]
        classes = label_kind(loss) == "classes"
        if not (classes and stats[1].count != rows.rows):  # one row's labels are chances, or a sequence
            guesses[label] = guess_loss(loss, *stats)
    said = []
    prefix = "" if validation is None else "val_"
    if not weighted and (validation is not None or len(epochs) > 1):  # the first epoch's mean begins at random weights
        for label, guess in guesses.items():
            name = f"{prefix}{label}_loss" if len(losses) > 1 else f"{prefix}loss"
            value = kept.get(name)
            if guess is not None and value is not None and value >= guess[1] * (1 - 1e-6) > 0:
                said.append(
                    f"beats the baseline: no. {name} is {value:.4g} over {rows.rows:,} rows, and {guess[0]} costs "
                    f"{guess[1]:.4g}: the model has learned nothing that helps, or its training went wrong"
                )
    known = [guess[1] for guess in guesses.values() if guess is not None]
    if validation is not None and len(known) == len(losses) == 1 and epochs[0].get("step", 0) >= _LEAST_STEPS:
        first, last = ((row.get("loss", math.nan), row.get("val_loss", math.nan)) for row in (epochs[0], kept))
        if all(held > _FAR * seen > 0 and held - seen > _OF_GUESS * known[0] for seen, held in (first, last)):
            said.append(
                f"the training loss lies far below the validation loss from the first epoch on ({first[0]:.4g} against "
                f"{first[1]:.4g}): rows may train in an order that the optimizer follows (shuffle them), a feature may "
                "know the label of training rows alone (a leak), validation rows may be of another kind (a later time, "
                "other keys), or the network learns rows by heart (a smaller one, weight_decay, fewer epochs)"
            )
    return said
