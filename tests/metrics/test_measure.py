"""Metrics equal scikit-learn's, weighted and with ties; by slice and over draws they are the same numbers."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn

from sparkdl.documents.typed import Source, decode, encode
from sparkdl.errors import ConfigError
from sparkdl.metrics.measure import (
    METRICS,
    Measured,
    calibration,
    check_metric,
    confusion,
    measure,
    metric_over,
)
from sparkdl.metrics.names import METRIC_NAMES
from sparkdl.metrics.ranking import wins_by_group
from sparkdl.metrics.rows import Rows
from sparkdl.metrics.sums import quantile_losses
from sparkdl.train.objective.named_metrics import MetricRule, named_metric


def regression_rows(count=500, seed=0, shift=0.0, groups=7):
    random = np.random.default_rng(seed)
    labels = random.normal(shift, 2, count)
    arrays = (labels, labels + random.normal(0.1, 1, count))
    return Rows.of("regression", *arrays, weights=random.uniform(0, 3, count), groups=random.integers(0, groups, count))


def binary_rows(count=500, seed=0, weighted=True, groups=7):
    """Scores of one decimal: many ties."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, count)
    scores = np.round(np.clip(0.25 * labels + random.uniform(0, 0.75, count), 0, 1), 1)
    weights = random.integers(0, 4, count) if weighted else None
    return Rows.of("binary", labels, scores, weights=weights, groups=random.integers(0, groups, count))


def multiclass_rows(count=400, seed=0, classes=4):
    """The last class stands neither in labels nor in predictions."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes - 1, count)
    logits = random.normal(0, 1, (count, classes)) + 1.5 * np.eye(classes)[labels]
    logits[:, -1] = -20
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    weights = random.uniform(0, 3, count)
    return Rows.of("multiclass", labels, chances, weights=weights, groups=random.integers(0, 5, count))


def names_of(rows):
    """The metrics of rows without quantiles."""
    return {*METRICS[rows.task]} - {"pinball"}


def test_metrics_of_values_are_sklearns():
    rows = regression_rows()
    arrays, weight = (rows.labels, rows.predictions), {"sample_weight": rows.weights}
    assert measure(rows).values == pytest.approx(
        {
            "mse": sklearn.mean_squared_error(*arrays, **weight),
            "rmse": sklearn.root_mean_squared_error(*arrays, **weight),
            "mae": sklearn.mean_absolute_error(*arrays, **weight),
            "mape": sklearn.mean_absolute_percentage_error(*arrays, **weight),
            "r2": sklearn.r2_score(*arrays, **weight),
            "bias": np.average(rows.predictions - rows.labels, weights=rows.weights),
        },
        rel=1e-12,
    )


def test_what_quantiles_lose_is_sklearns_pinball_loss():
    rows, levels = regression_rows(), (0.1, 0.5, 0.9)
    quantiles = rows.labels[:, None] + np.random.default_rng(1).normal(0, 1, (len(rows), 3))
    with_quantiles = replace(rows, quantile_losses=quantile_losses(rows.labels, quantiles, levels))
    by_level = [
        sklearn.mean_pinball_loss(rows.labels, predicted, alpha=level, sample_weight=rows.weights)
        for predicted, level in zip(quantiles.T, levels, strict=True)
    ]
    assert measure(with_quantiles).values["pinball"] == pytest.approx(np.mean(by_level), rel=1e-12)
    draws = np.array([[2.0, 0, 1, 0, 0, 3, 1]])
    weighted = replace(with_quantiles, weights=rows.weights * draws[0][rows.groups])
    assert metric_over(with_quantiles, "pinball", draws)[0] == pytest.approx(measure(weighted).values["pinball"])
    assert "pinball" not in measure(rows).values
    with pytest.raises(ConfigError, match="pinball is a metric of quantiles, and one number is predicted a row"):
        metric_over(rows, "pinball")


def test_r2_of_a_draw_of_equal_labels_is_undefined_wherever_they_lie():
    labels = np.zeros(300)
    labels[:5] = [3.1, 40.7, 2.3, 9.9, 17.2]
    rows = Rows.of("regression", labels, labels + 0.1, groups=np.arange(300))
    draws = np.zeros((2, 300))
    draws[0, 5:], draws[1, 0] = 1.0, 300.0
    assert np.isnan(metric_over(rows, "r2", draws)).all()


def test_r2_is_exact_far_from_zero():
    rows = regression_rows(shift=1e9)
    exact = sklearn.r2_score(rows.labels - 1e9, rows.predictions - 1e9, sample_weight=rows.weights)
    assert measure(rows).values["r2"] == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_of_two_classes_are_sklearns(weighted):
    rows = binary_rows(weighted=weighted)
    arrays, weight = (rows.labels, rows.predictions), {"sample_weight": rows.weights}
    chosen = (rows.labels, rows.predictions > 0.5)
    assert measure(rows).values == pytest.approx(
        {
            "log_loss": sklearn.log_loss(*arrays, **weight),
            "brier": sklearn.brier_score_loss(*arrays, **weight),
            "accuracy": sklearn.accuracy_score(*chosen, **weight),
            "precision": sklearn.precision_score(*chosen, **weight),
            "recall": sklearn.recall_score(*chosen, **weight),
            "f1": sklearn.f1_score(*chosen, **weight),
            "auc": sklearn.roc_auc_score(*arrays, **weight),
            "average_precision": sklearn.average_precision_score(*arrays, **weight),
        },
        rel=1e-12,
    )
    assert confusion(rows) == pytest.approx(sklearn.confusion_matrix(*chosen, **weight))


def test_metrics_of_many_classes_are_sklearns():
    rows = multiclass_rows()
    weight = {"sample_weight": rows.weights}
    chosen = (rows.labels, rows.predictions.argmax(axis=1))
    one_hot = np.eye(4)[rows.labels.astype(int)]
    macro = weight | {"average": "macro", "zero_division": 0.0}
    assert measure(rows).values == pytest.approx(
        {
            "log_loss": sklearn.log_loss(rows.labels, rows.predictions, labels=range(4), **weight),
            "brier": np.average(((rows.predictions - one_hot) ** 2).sum(axis=1), weights=rows.weights),
            "accuracy": sklearn.accuracy_score(*chosen, **weight),
            "precision": sklearn.precision_score(*chosen, **macro),
            "recall": sklearn.recall_score(*chosen, **macro),
            "f1": sklearn.f1_score(*chosen, **macro),
        },
        rel=1e-12,
    )
    assert confusion(rows) == pytest.approx(sklearn.confusion_matrix(*chosen, labels=range(4), **weight))


@pytest.mark.parametrize(
    "rows", [multiclass_rows(count=2_000, classes=500), regression_rows(count=200_000, groups=200_000)]
)
def test_measuring_takes_less_memory_than_three_copies_of_the_rows(rows):
    """A group a row, and many classes: neither makes a table of all of them."""
    tracemalloc.start()
    try:
        measure(rows)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * sum(each.nbytes for each in (rows.labels, rows.predictions, rows.weights, rows.groups))


def test_a_probability_of_nothing_costs_what_sklearn_says():
    labels, scores = np.array([1, 0, 1]), np.array([0.0, 1.0, 0.7])
    assert measure(Rows.of("binary", labels, scores)).values["log_loss"] == pytest.approx(
        sklearn.log_loss(labels, scores)
    )


@pytest.mark.parametrize("made", [binary_rows, multiclass_rows])
def test_confusions_of_parts_add_up_to_that_of_the_whole(made):
    rows = made()
    cut = np.arange(len(rows)) < 100
    assert confusion(rows.take(cut)) + confusion(rows.take(~cut)) == pytest.approx(confusion(rows))


@pytest.mark.parametrize(
    ("made", "loss"),
    [(regression_rows, torch.nn.MSELoss()), (binary_rows, torch.nn.BCELoss()), (multiclass_rows, torch.nn.NLLLoss())],
)
def test_the_gate_measures_what_training_does(made, loss):
    """One number by either, with ties and probabilities of exactly 0.5 among the rows."""
    rows = made()
    rows = Rows.of(rows.task, rows.labels, rows.predictions)
    output = torch.from_numpy(np.log(rows.predictions) if rows.task == "multiclass" else rows.predictions)
    metrics = measure(rows).values
    for name in METRIC_NAMES:
        if name in METRICS[rows.task]:
            rule = MetricRule(named_metric(name, "y", loss), output.shape[1] if output.ndim > 1 else 1)
            for part in np.array_split(np.arange(len(rows)), 3):
                rule.update(output[part], torch.from_numpy(rows.labels[part]))
            assert rule.result() == pytest.approx(metrics[name], rel=1e-12), name


@pytest.mark.parametrize("made", [regression_rows, binary_rows, multiclass_rows])
def test_a_draw_is_the_metric_of_the_rows_that_it_takes(made):
    rows = made()
    draws = np.random.default_rng(3).multinomial(rows.group_count, np.full(rows.group_count, 1 / rows.group_count), 5)
    for name in names_of(rows):
        over = metric_over(rows, name, draws.astype(float))
        for draw, value in zip(draws, over, strict=True):
            taken = rows.take(np.repeat(np.arange(len(rows)), draw[rows.groups]))
            assert value == pytest.approx(measure(taken).values[name], rel=1e-10)


def test_wins_by_group_count_every_pair_once():
    rows = binary_rows(60, groups=3)
    wins = np.zeros((3, 3))
    for i in np.flatnonzero(rows.labels == 1):
        for j in np.flatnonzero(rows.labels == 0):
            order = np.sign(rows.predictions[i] - rows.predictions[j])
            wins[rows.groups[i], rows.groups[j]] += rows.weights[i] * rows.weights[j] * (order + 1) / 2
    assert wins_by_group(rows) == pytest.approx(wins)


@pytest.mark.parametrize(
    ("rows", "name", "why"),
    [
        (Rows.of("binary", [1, 1, 1], [0.2, 0.6, 0.9]), "auc", "auc is undefined: every label of 3 rows is 1"),
        (Rows.of("binary", [1, 0], [0.2, 0.6], weights=[1, 0]), "auc", "auc is undefined: every label of 1 rows is 1"),
        (Rows.of("binary", [0, 0], [0.2, 0.6]), "average_precision", "no label of 2 rows is 1"),
        (Rows.of("binary", [0, 0], [0.2, 0.1]), "f1", "no label of 2 rows is 1"),
        (Rows.of("binary", [0, 1], [0.2, 0.1]), "precision", "no prediction of 2 rows is above 0.5"),
        (Rows.of("regression", [0.1] * 3, [0.1, 0.2, 0.3]), "r2", "every label of 3 rows is 0.1"),
        (Rows.of("regression", [0, 1, 2], [0.1, 0.2, 0.3]), "mape", "1 of 3 labels are 0"),
        (Rows.of("regression", [0, 1], [1e200, 0.2]), "rmse", "rmse is inf: predictions reach 1e.200, labels 1"),
        (Rows.of("regression", [], []), "rmse", "there are no rows"),
        (Rows.of("binary", [], []), "auc", "there are no rows"),
        (Rows.of("multiclass", [], np.zeros((0, 3))), "f1", "there are no rows"),
        (Rows.of("regression", [1], [1], weights=[0]), "mae", "all weights are 0"),
    ],
)
def test_an_undefined_metric_has_no_value_but_a_reason(rows, name, why):
    found = measure(rows)
    assert name not in found.values
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(found.undefined[name])
    assert (found.values.keys() | found.undefined.keys()) - {"bias"} == names_of(rows)


def test_measures_are_documents():
    found = measure(Rows.of("binary", [1, 1], [0.5, 0.6]))
    assert decode(encode(found), Measured, Source("x")) == found


def test_calibration_bins_hold_every_row_once():
    rows = Rows.of("binary", [0, 1, 1, 0, 1], [0.0, 0.05, 0.95, 1.0, 0.5], weights=[1, 3, 1, 1, 0])
    bins = calibration(rows, 2)
    assert [(one.low, one.high, one.rows, one.weight) for one in bins] == [(0.0, 0.5, 2, 4.0), (0.5, 1.0, 3, 2.0)]
    assert [(one.predicted, one.observed) for one in bins] == [
        (pytest.approx(0.0375), 0.75),
        (pytest.approx(0.975), 0.5),
    ]
    with pytest.raises(ConfigError, match="task='binary'"):
        calibration(regression_rows())


def test_calibration_bins_are_sklearns():
    from sklearn.calibration import calibration_curve

    rows = binary_rows(weighted=False)
    shifted = Rows.of("binary", rows.labels, np.clip(rows.predictions + 0.01, 0, 1))  # away from the edges
    observed, predicted = calibration_curve(shifted.labels, shifted.predictions, n_bins=10)
    found = calibration(shifted, 10)
    assert [one.observed for one in found] == pytest.approx(observed)
    assert [one.predicted for one in found] == pytest.approx(predicted)


def test_metrics_are_found_by_name_or_the_nearest_is_named():
    with pytest.raises(ConfigError, match="there is no metric 'rsme': did you mean 'rmse'"):
        check_metric("rsme")
    with pytest.raises(ConfigError, match="regression has no metric 'auc': choose one of mse, rmse"):
        metric_over(regression_rows(), "auc")
    with pytest.raises(ConfigError, match="confusion matrix takes rows of classes"):
        confusion(regression_rows())
