"""What a report draws of predictions: every row once, as scikit-learn counts it, however wild the values."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as sklearn

from sparkdl.documents.typed import Source, decode, encode
from sparkdl.metrics.measure import measure
from sparkdl.metrics.rows import Rows
from sparkdl.pipeline.judging.diagnostics import OTHERS, Diagnostics, diagnose

RANDOM = np.random.default_rng(0)


def regression(errors, labels=None, weights=None):
    labels = RANDOM.gamma(2, 5, len(errors)) if labels is None else np.asarray(labels, dtype=float)
    return Rows.of("regression", labels, labels + np.asarray(errors, dtype=float), weights=weights)


def binary(count=3000):
    labels = RANDOM.integers(0, 2, count)
    scores = np.round(np.clip(0.3 * labels + RANDOM.uniform(0, 0.7, count), 0, 1), 2)
    return Rows.of("binary", labels, scores, weights=RANDOM.uniform(0, 2, count))


def multiclass(classes, count=2000):
    labels = (RANDOM.zipf(1.6, count) - 1) % classes
    chances = RANDOM.dirichlet(np.ones(classes), count) + np.eye(classes)[labels]
    return Rows.of("multiclass", labels, chances / chances.sum(axis=1, keepdims=True))


def test_residuals_hold_the_weight_of_every_row_on_the_same_bins_for_both_models():
    weights = RANDOM.uniform(0, 2, 500)
    errors = RANDOM.normal(1, 2, 500)
    mine = regression(errors, np.arange(500.0), weights)
    theirs = regression(3 * errors, np.arange(500.0), weights)
    one, two = diagnose([mine, theirs], [])
    for seen in (one, two):
        assert sum(seen.residuals.weights) == pytest.approx(weights.sum())
        assert np.sum(seen.plane.weights) == pytest.approx(weights.sum())
    assert one.residuals.edges == two.residuals.edges
    assert one.plane.edges == two.plane.edges
    assert one.quantiles[2] == pytest.approx(np.median(errors), abs=1e-6)


def test_the_plane_has_true_values_in_rows_and_predictions_in_columns():
    labels = np.repeat([0.0, 10.0], 50)
    plane = diagnose([Rows.of("regression", labels, np.zeros(100))], [])[0].plane
    table = np.array(plane.weights)
    assert table[0, 0] == 50
    assert table[-1, 0] == 50


@pytest.mark.parametrize(
    "rows",
    [
        regression([0.0] * 20, [1.0] * 20),
        regression([1e200, 0.0]),
        Rows.of("regression", [1e308, -1e308], [-1e308, 1e308]),
        regression([]),
        regression([1.0], weights=[0.0]),
        Rows.of("binary", [1, 1], [0.2, 0.3]),
        Rows.of("binary", [], []),
        Rows.of("multiclass", [], np.zeros((0, 3))),
        multiclass(300, 400),
    ],
)
def test_diagnostics_are_documents_whatever_the_values(rows):
    classes = {"regression": 0, "binary": 2, "multiclass": rows.predictions.shape[-1]}[rows.task]
    found = diagnose([rows], [f"c{n}" for n in range(classes)])[0]
    assert decode(encode(found), Diagnostics, Source("x")) == found


def test_the_roc_curve_has_the_area_that_is_measured():
    rows = binary()
    roc = diagnose([rows], ["no", "yes"])[0].roc
    assert roc[0] == (0, 0)
    assert roc[-1] == (1, 1)
    assert len(roc) <= 101
    x, y = np.array(roc).T
    assert np.trapezoid(y, x) == pytest.approx(measure(rows).values["auc"], abs=1e-3)


def test_confusion_of_a_few_classes_is_sklearns():
    rows = multiclass(4)
    found = diagnose([rows], ["a", "b", "c", "d"])[0].confusion
    assert found.classes == ("a", "b", "c", "d")
    expected = sklearn.confusion_matrix(rows.labels, rows.predictions.argmax(axis=1), labels=range(4))
    assert np.array(found.weights) == pytest.approx(expected)


def test_of_many_classes_the_most_frequent_are_shown_and_no_row_is_lost():
    rows = multiclass(300)
    found = diagnose([rows], [f"c{n}" for n in range(300)])[0].confusion
    table = np.array(found.weights)
    assert table.shape == (21, 21)
    assert table.sum() == len(rows)
    assert found.others == 280
    assert found.classes[-1] == OTHERS
    assert table[0].sum() == (rows.labels == 0).sum()
    assert found.classes[0] == "c0"
