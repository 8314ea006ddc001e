"""The best guess without a model is scikit-learn's dummy, measured as a model is, and the gate asks for more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.metrics import (
    accuracy_score,
    log_loss,
    mean_absolute_error,
    mean_pinball_loss,
    r2_score,
    root_mean_squared_error,
)

from sparkdl.documents.typed import Source, decode, encode
from sparkdl.metrics.measure import metric_over
from sparkdl.metrics.rows import Rows
from sparkdl.pipeline.judging.baseline import baseline_of, best_guess, summary_of
from sparkdl.pipeline.judging.gate import Decision, Gate, decide

CLASSES = ["no", "yes", "maybe"]


def table(task, seed, rows=500):
    random = np.random.default_rng(seed)
    labels = random.gamma(2, 5, rows) if task == "regression" else random.choice(3, rows, p=[0.2, 0.3, 0.5])
    labels = np.minimum(labels, 1) if task == "binary" else labels
    return labels.astype(float), random.integers(0, 4, rows).astype(float)


def held_out(task, seed=1):
    labels, weights = table(task, seed)
    shape = (len(labels), 3) if task == "multiclass" else len(labels)
    return Rows.of(task, labels, np.full(shape, 1 / 3), weights=weights)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_regression_is_guessed_by_the_mean_of_training_for_squares_and_its_median_for_absolutes(weighted):
    labels, weights = table("regression", 0)
    weights = weights if weighted else np.ones(len(labels))
    rows = held_out("regression")
    found = baseline_of(summary_of("regression", labels, weights), rows).values

    def dummy(strategy):
        fitted = DummyRegressor(strategy=strategy).fit(np.zeros((len(labels), 1)), labels, weights)
        return fitted.predict(np.zeros((len(rows), 1)))

    told = {"sample_weight": rows.weights}
    assert found["rmse"] == pytest.approx(root_mean_squared_error(rows.labels, dummy("mean"), **told))
    assert found["r2"] == pytest.approx(r2_score(rows.labels, dummy("mean"), **told))
    assert found["mae"] == pytest.approx(mean_absolute_error(rows.labels, dummy("median"), **told), rel=1e-3)
    assert found["mae"] < mean_absolute_error(rows.labels, dummy("mean"), **told)
    assert summary_of("regression", np.array([1.0, 2.0, 10.0, 20.0]), np.ones(4)).median == 6.0


def test_quantiles_are_guessed_by_those_of_training():
    labels, weights = table("regression", 0)
    levels = (0.1, 0.5, 0.9)
    summary = summary_of("regression", labels, weights, levels=levels)
    rows = replace(held_out("regression"), quantile_losses=np.zeros(500))
    found = baseline_of(summary, rows)
    by_level = []
    for level in levels:
        fitted = DummyRegressor(strategy="quantile", quantile=level).fit(np.zeros((500, 1)), labels, weights)
        guess = fitted.predict(np.zeros((500, 1)))
        by_level.append(mean_pinball_loss(rows.labels, guess, alpha=level, sample_weight=rows.weights))
    assert found.values["pinball"] == pytest.approx(np.mean(by_level), rel=1e-3)
    assert found.guesses["pinball"].startswith("always the quantiles ")
    guess = best_guess(found.guesses["pinball"], summary, rows)
    assert float(metric_over(guess.as_one_group(), "pinball")[0]) == found.values["pinball"]
    last = rows.labels + 0.01
    assert baseline_of(summary, rows, last=last, key="store").guesses["pinball"] == "the last value of the same store"
    assert "pinball" not in baseline_of(summary_of("regression", labels, weights), held_out("regression")).values


@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_classes_are_guessed_by_their_shares_in_training_and_by_the_commonest(task):
    labels, weights = table(task, 0)
    classes, rows = CLASSES[: 2 if task == "binary" else 3], held_out(task)
    found = baseline_of(summary_of(task, labels, weights, classes), rows, classes)
    nothing = np.zeros((len(labels), 1))
    prior = DummyClassifier(strategy="prior").fit(nothing, labels, weights)
    told = {"sample_weight": rows.weights}
    assert found.values["log_loss"] == pytest.approx(log_loss(rows.labels, prior.predict_proba(nothing), **told))
    assert found.values["accuracy"] == pytest.approx(accuracy_score(rows.labels, prior.predict(nothing), **told))
    commonest = classes[int(prior.predict(nothing)[0])]
    assert found.guesses["accuracy"] == f"always {commonest!r}, the commonest class"
    if task == "binary":
        assert found.values["auc"] == 0.5
        assert found.values["f1"] > 0  # always the positive class; the commonest one could leave it undefined
        assert found.beaten_by("recall", 0.9) is None  # whoever always says yes has 1


def test_the_last_value_of_a_key_is_the_guess_where_it_is_better_and_a_constant_fills_its_gaps():
    random = np.random.default_rng(0)
    level = random.normal(100, 20, 200)
    rows = Rows.of("regression", level + random.normal(0, 1, 200), np.zeros(200))
    last = np.where(np.arange(200) < 20, np.nan, level)
    summary = summary_of("regression", level, np.ones(200))
    found = baseline_of(summary, rows, last=last, key="store")
    assert found.guesses["rmse"] == "the last value of the same store"
    guessed = np.where(np.isnan(last), summary.mean, last)
    assert found.values["rmse"] == pytest.approx(root_mean_squared_error(rows.labels, guessed))
    useless = baseline_of(summary, rows, last=random.permutation(level) * 3, key="store")
    assert useless.guesses["rmse"].startswith("always the mean")
    of_class = baseline_of(
        summary_of("multiclass", np.array([0.0, 1.0, 2.0, 2.0]), np.ones(4), CLASSES),
        Rows.of("multiclass", [0, 1, 2], np.full((3, 3), 1 / 3)),
        CLASSES,
        np.array([0.0, 1.0, np.nan]),
        "store",
    )
    assert (of_class.values["accuracy"], of_class.guesses["log_loss"]) == (1.0, "always the shares of training")


def judged(gate, noise, champion=None, rows=300, **given):
    """A regression whose model has errors of ``noise``, and the mean of training rmse 1."""
    random = np.random.default_rng(5)
    labels = random.normal(10, 1, rows)
    groups = np.arange(rows) % 20
    models = [Rows.of("regression", labels, labels + random.normal(0, each, rows), groups=groups)
              for each in (noise, champion) if each is not None]  # fmt: skip
    baseline = baseline_of(summary_of("regression", labels, np.ones(rows)), models[0])
    return decide(gate, *models, baseline=baseline, **given)


RMSE = Gate(metric="rmse")


def test_a_first_champion_that_does_not_beat_the_mean_is_refused_unless_the_file_says_so():
    found = judged(RMSE, 2.0)
    assert (found.promote, found.outcome, found.beats_baseline) == (False, "below_baseline", False)
    assert "; beats the baseline: no, always the mean 9.96 has rmse 0.9592" in found.reason
    assert found.reason.endswith(", which publish.gate.baseline=first refuses (never lets it pass)")
    asked_not = judged(replace(RMSE, baseline="never"), 2.0)
    assert (asked_not.promote, asked_not.outcome) == (True, "first")
    assert "beats the baseline: no" in asked_not.reason  # and it is said all the same
    better = judged(RMSE, 0.5)
    assert (better.promote, better.outcome, better.beats_baseline) == (True, "first", True)
    assert "baseline" not in better.reason
    assert decode(encode(found), Decision, Source("x")) == found


def test_a_first_champion_between_the_mean_and_the_last_value_is_told_of_and_promoted():
    random = np.random.default_rng(0)
    level = random.normal(100, 20, 300)
    labels = level + random.normal(0, 1, 300)
    rows = Rows.of("regression", labels, labels + random.normal(0, 5, 300), groups=np.arange(300) % 20)
    baseline = baseline_of(summary_of("regression", level, np.ones(300)), rows, last=level, key="store")
    found = decide(RMSE, rows, baseline=baseline)
    assert (found.promote, found.outcome, found.beats_baseline) == (True, "first", False)
    assert "beats the baseline: no, the last value of the same store has rmse" in found.reason
    assert "refuses" not in found.reason


def test_a_model_that_learned_the_mean_does_not_beat_it():
    labels = np.random.default_rng(0).normal(3, 1, 200)
    rows = Rows.of("regression", labels, np.full(200, labels.mean() * (1 + 1e-9)))
    baseline = baseline_of(summary_of("regression", labels, np.ones(200)), rows)
    assert decide(RMSE, rows, baseline=baseline).outcome == "below_baseline"


def test_a_model_that_beats_the_baseline_by_chance_alone_is_said_to():
    labels = np.random.default_rng(0).normal(10, 1, 600)
    summary = summary_of("regression", labels, np.ones(600))

    def of(predictions):
        rows = Rows.of("regression", labels, predictions, groups=np.arange(600) % 40)
        baseline = baseline_of(summary, rows)
        guess = best_guess(baseline.guesses["rmse"], summary, rows)
        np.testing.assert_array_equal(guess.predictions, summary.mean)
        return decide(RMSE, rows, baseline=baseline, guess=guess)

    noise = np.random.default_rng(1).normal(0, 0.002, 600)
    noise *= np.sign(noise @ (labels - summary.mean))  # so that it helps on these very rows
    by_chance = of(summary.mean + noise)
    assert (by_chance.promote, by_chance.beats_baseline, by_chance.baseline_by_chance) == (True, True, True)
    assert by_chance.baseline_text().startswith("beats the baseline: no more than by chance, always the mean")
    real = of(0.5 * summary.mean + 0.5 * labels)
    assert (real.beats_baseline, real.baseline_by_chance) == (True, False)
    assert 0 < real.baseline_lower < 0.5
    assert real.baseline_text().startswith("beats the baseline: yes")


def test_later_champions_are_told_and_refused_only_where_the_file_says_always():
    found = judged(RMSE, 1.5, champion=3.0)
    assert (found.promote, found.outcome, found.beats_baseline) == (True, "better", False)
    assert "beats the baseline: no" in found.reason
    always = judged(replace(RMSE, baseline="always"), 1.5, champion=3.0)
    assert (always.promote, always.outcome) == (False, "below_baseline")
    assert judged(replace(RMSE, baseline="always"), 0.5, champion=3.0).promote
    worse = judged(replace(RMSE, baseline="always"), 3.0, champion=1.5)
    assert worse.outcome == "worse"  # the champion's figures say more


def test_who_follows_a_champion_that_cannot_predict_is_asked_like_the_first():
    assert judged(RMSE, 2.0, champion_error="it lacks a column").outcome == "below_baseline"
    assert judged(RMSE, 0.5, champion_error="it lacks a column").outcome == "champion_unusable"


def test_few_rows_refuse_nobody_by_the_baseline_and_without_training_labels_nothing_is_said():
    few = judged(RMSE, 2.0, rows=20)
    assert (few.outcome, few.beats_baseline) == ("first", False)
    rows = Rows.of("regression", np.arange(100.0), np.zeros(100))
    unknown = decide(RMSE, rows)
    assert (unknown.outcome, unknown.beats_baseline, unknown.baseline_text()) == ("first", None, "")
