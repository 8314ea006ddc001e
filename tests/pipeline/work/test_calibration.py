"""The temperature is the likeliest one, and what it is fitted to is what the model says of the validation rows."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import softmax

from sparkdl.metrics.measure import calibration_error
from sparkdl.metrics.rows import Rows
from sparkdl.pipeline.work.calibration import temperature_of


def drawn(temperature, classes=3, rows=20_000, seed=0):
    """Logits that are too large by a factor, and labels of their true probabilities."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(rows, classes)) * 2
    shares = softmax(logits, axis=1)
    labels = (random.random((rows, 1)) > shares.cumsum(axis=1)).sum(axis=1).clip(max=classes - 1)
    return temperature * logits, labels.astype(float)


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("classes", [2, 5])
def test_logits_that_are_too_large_by_a_factor_have_it_as_their_temperature(temperature, classes):
    logits, labels = drawn(temperature, classes)
    found = temperature_of(logits, labels, np.ones(len(labels)))
    assert found == pytest.approx(temperature, rel=0.05)
    before, after = (
        calibration_error(Rows.of("multiclass", labels, softmax(logits / scale, axis=1))) for scale in (1.0, found)
    )
    assert after < 0.015
    assert before > 0.05 or temperature == 1.0


def test_rows_without_weight_have_no_say():
    logits, labels = drawn(2.0)
    other, wrong = drawn(0.1, seed=1)
    weights = np.repeat([3.0, 0.0], len(labels))
    found = temperature_of(np.concatenate([logits, other]), np.concatenate([labels, wrong]), weights)
    assert found == pytest.approx(temperature_of(logits, labels, np.ones(len(labels))), rel=1e-4)


def test_labels_that_are_always_right_or_never_leave_it_within_bounds():
    logits = np.array([[0.0, 9.0]] * 50)
    assert 0.05 <= temperature_of(logits, np.ones(50), np.ones(50)) < 1
    assert temperature_of(logits, np.zeros(50), np.ones(50)) == pytest.approx(50, rel=0.01)


@pytest.mark.parametrize(("rows", "logit"), [(250, 2.0), (5_000, 2.0), (250, 4.0)])
def test_labels_that_are_always_right_are_no_surer_than_their_number_shows(rows, logit):
    labels = np.arange(rows) % 10.0
    logits = logit * np.eye(10)[labels.astype(int)]
    weights, wrong = np.ones(rows + 1), np.zeros((1, 10))
    weights[-1], wrong[0, 3] = 0.0, 9.0  # one that has no say
    temperature = temperature_of(np.concatenate([logits, wrong]), np.append(labels, 5.0), weights)
    sure = softmax(logits / temperature, axis=1).max(axis=1)
    assert sure == pytest.approx(1 - 0.9 / (rows + 2), rel=1e-6)


def test_the_calibration_error_is_the_gap_of_confidence_and_accuracy():
    always = Rows.of("binary", np.array([1.0, 0, 1, 0]), np.full(4, 0.9))
    assert calibration_error(always) == pytest.approx(0.4)
    weighted = Rows.of("binary", np.array([1.0, 0, 1, 0]), np.full(4, 0.9), weights=[9, 1, 9, 1])
    assert calibration_error(weighted) == pytest.approx(0.0)
