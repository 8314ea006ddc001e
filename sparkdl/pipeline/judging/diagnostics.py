"""Where predictions go wrong, in a few hundred numbers: calibration and ROC, confusion, residuals.

All models of the same rows have the same bins, as few for millions of rows as for a hundred.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.metrics.measure import CalibrationBin, calibration, confusion
from sparkdl.metrics.rows import Floats, Rows
from sparkdl.pipeline.judging.slices import OTHERS

_BINS, _CELLS, _POINTS, _CLASSES = 40, 24, 100, 20
_LARGEST = 1e150
"""The largest value that is drawn: the span of two of them is finite."""
_TAIL = 0.005
"""Share of the values at either end that the first and the last bin take together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """Weight by value.

    Attributes:
        edges: of the bins, ascending; the first and the last bin hold what lies beyond, too.
        weights: one a bin.
    """

    edges: tuple[float, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plane:
    """Weight by label and prediction.

    Attributes:
        edges: of both, ascending; the first and the last hold what lies beyond, too.
        weights: row by row, a row a bin of labels, a column a bin of predictions.
    """

    edges: tuple[float, ...]
    weights: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Confusion:
    """Weight by label and predicted class.

    Attributes:
        classes: in order; of many the most frequent, with ``OTHERS`` for the rest.
        weights: a row a label, a column a prediction.
        others: how many classes stand together as ``OTHERS``.
    """

    classes: tuple[str, ...]
    weights: tuple[tuple[float, ...], ...]
    others: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnostics:
    """What there is to see of one model's predictions; a document as it is (``documents.typed``).

    Attributes:
        calibration: bins of predicted probability, of a binary label.
        roc: (share of negatives, share of positives) above falling thresholds, of a binary label.
        confusion: of classes.
        residuals: predicted minus true, of a regression.
        plane: true against predicted, of a regression.
        quantiles: of the residuals: 5, 25, 50, 75 and 95 %.
    """

    calibration: tuple[CalibrationBin, ...] = ()
    roc: tuple[tuple[float, float], ...] = ()
    confusion: Confusion | None = None
    residuals: Histogram | None = None
    plane: Plane | None = None
    quantiles: tuple[float, ...] = ()


def diagnose(models: Sequence[Rows], classes: Sequence[str]) -> list[Diagnostics]:
    """Look at the predictions of some models of the same rows.

    Args:
        models: the rows with the predictions of each; rows without weight do not count.
        classes: names of the classes in the order of the labels; none of a regression.

    Returns:
        one a model; without any figures where no row has weight.
    """
    weighty = [rows.take(rows.weights > 0) for rows in models]
    if not all(len(rows) for rows in weighty):
        return [Diagnostics() for _ in models]
    if weighty[0].task == "regression":
        return _regression(weighty)
    confusions = _confusions(weighty, classes)
    if weighty[0].task == "multiclass":
        return [Diagnostics(confusion=confusion) for confusion in confusions]
    return [
        Diagnostics(confusion=confusion, calibration=calibration(rows), roc=_roc(rows))
        for confusion, rows in zip(confusions, weighty, strict=True)
    ]


def _regression(models: Sequence[Rows]) -> list[Diagnostics]:
    with np.errstate(over="ignore"):
        errors = [np.clip(rows.predictions - rows.labels, -_LARGEST, _LARGEST) for rows in models]
    bins = _edges(np.concatenate(errors), _BINS)
    cells = _edges(np.concatenate([models[0].labels, *[rows.predictions for rows in models]]), _CELLS)
    diagnostics = []
    for rows, error in zip(models, errors, strict=True):
        residuals, _ = np.histogram(error.clip(bins[0], bins[-1]), bins, weights=rows.weights)
        true, predicted = rows.labels.clip(cells[0], cells[-1]), rows.predictions.clip(cells[0], cells[-1])
        plane, _, _ = np.histogram2d(true, predicted, [cells, cells], weights=rows.weights)
        diagnostics.append(
            Diagnostics(
                residuals=Histogram(edges=_plain(bins), weights=_plain(residuals)),
                plane=Plane(edges=_plain(cells), weights=tuple(map(_plain, plane))),
                quantiles=_plain(np.quantile(error, [0.05, 0.25, 0.5, 0.75, 0.95])),
            )
        )
    return diagnostics


def _edges(values: Floats, bins: int) -> Floats:
    """Edges of equal bins over all but the outermost values."""
    low, high = np.quantile(np.clip(values, -_LARGEST, _LARGEST), [_TAIL, 1 - _TAIL])
    if not low < high:
        room = max(abs(float(low)), 1.0) * 0.5
        low, high = low - room, high + room
    return np.linspace(low, high, bins + 1)


def _plain(values: npt.NDArray[Any]) -> tuple[float, ...]:
    """The values as JSON holds them, with nine digits: more than a figure shows."""
    return tuple(float(f"{value:.9g}") for value in values)


def _confusions(models: Sequence[Rows], classes: Sequence[str]) -> list[Confusion]:
    """Confusion over the same classes for all models: all of a few, of many those with the most weight."""
    count = len(classes)
    weight = np.bincount(models[0].labels.astype(np.int64), models[0].weights, count)
    shown = np.sort(np.argsort(-weight, kind="stable")[:_CLASSES])
    places = np.full(count, len(shown))
    places[shown] = np.arange(len(shown))
    names = [classes[number] for number in shown]
    if count > len(shown):
        names.append(OTHERS)
    return [
        Confusion(classes=tuple(names), weights=tuple(map(_plain, confusion(rows, places))), others=count - len(shown))
        for rows in models
    ]


def _roc(rows: Rows) -> tuple[tuple[float, float], ...]:
    """The curve at as many thresholds as a figure shows, ties as one step; none where a class is missing."""
    order = np.argsort(-rows.predictions, kind="stable")
    scores, labels, weights = rows.predictions[order], rows.labels[order], rows.weights[order]
    last = np.flatnonzero(np.append(np.diff(scores) != 0, True))
    true, false = np.cumsum(weights * labels)[last], np.cumsum(weights * (1 - labels))[last]
    if not (true[-1] > 0 and false[-1] > 0):
        return ()
    x, y = np.append(0.0, false / false[-1]), np.append(0.0, true / true[-1])
    at = np.unique(np.searchsorted(x + y, np.linspace(0, 2, _POINTS + 1)).clip(0, len(x) - 1))
    return tuple(zip(_plain(x[at]), _plain(y[at]), strict=True))
