"""The gate promotes what is better on the same rows, beyond what chance gives, and says why in each case."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from sparkdl.documents.typed import Source, decode, encode
from sparkdl.errors import ConfigError, DataError
from sparkdl.metrics.rows import Rows
from sparkdl.pipeline.judging.gate import Decision, Gate, decide, gains
from sparkdl.pipeline.spec import Gate as Section
from sparkdl.pipeline.spec.operation import Floor

RMSE = Gate(metric="rmse")
AUC = Gate(metric="auc")


def values(noise, seed=0, days=30, rows=20, day_effect=0.0):
    """Predictions whose error is ``noise``; days are alike for all seeds."""
    labels = np.random.default_rng(99).normal(0, 3, days * rows)
    random = np.random.default_rng(seed)
    error = random.normal(0, noise, len(labels)) + np.repeat(random.normal(0, day_effect, days), rows)
    return Rows.of("regression", labels, labels + error, groups=np.repeat(np.arange(days), rows))


def clicks(signal, seed=0, days=30, rows=40):
    labels = np.random.default_rng(98).integers(0, 2, days * rows)
    scores = 1 / (1 + np.exp(-(signal * labels + np.random.default_rng(seed).normal(0, 1, len(labels)))))
    return Rows.of("binary", labels, scores, groups=np.repeat(np.arange(days), rows))


def test_the_first_champion_needs_no_comparison():
    found = decide(RMSE, values(1.0))
    assert (found.promote, found.outcome, found.champion, found.gain, found.lower) == (True, "first", None, None, None)
    assert found.reason == f"there is no earlier champion; the challenger has rmse {_rmse(found):.4g} over 600 rows"
    assert decide(RMSE, values(1.0, days=2)).outcome == "first"


def _rmse(found):
    return found.challenger.values["rmse"]


def test_a_better_challenger_is_promoted_with_the_figures():
    found = decide(RMSE, values(1.0), values(1.5, seed=1))
    assert (found.promote, found.outcome) == (True, "better")
    assert 0 < found.lower < found.gain == pytest.approx(found.champion.values["rmse"] - _rmse(found))
    assert found.reason == (
        f"rmse {_rmse(found):.4g} against the champion's {found.champion.values['rmse']:.4g} on the same 600 rows; "
        f"with 95 % confidence over 30 groups the gain is above {found.lower:.4g}, and the gate asks for more than 0"
    )
    assert (found.rows, found.groups, found.positives) == (600, 30, None)


def test_quantiles_are_judged_by_what_they_lose_and_those_of_other_levels_cannot_be_compared():
    gate, middle = Gate(metric="pinball"), values(1.0)
    with pytest.raises(ConfigError, match="pinball is a metric of quantiles"):
        decide(gate, middle)
    ours, theirs = (
        replace(middle, quantile_losses=np.random.default_rng(0).gamma(2, scale, len(middle))) for scale in (1, 2)
    )
    found = decide(gate, ours, theirs)
    assert (found.outcome, found.gain) == ("better", pytest.approx(2, abs=0.3))
    other = replace(middle, quantile_losses=np.full(len(middle), np.nan))
    assert decide(gate, ours, other).reason.startswith(
        "the champion's pinball is undefined: it predicts quantiles of other levels; pinball "
    )


def test_a_worse_challenger_is_refused():
    found = decide(RMSE, values(1.5), values(1.0, seed=1))
    assert (found.promote, found.outcome) == (False, "worse")
    assert found.lower < found.gain < 0
    assert "it is worse" in found.reason


def test_an_equal_challenger_is_refused_where_better_and_promoted_where_not_worse_is_asked_for():
    for rows in (values(1.0), clicks(1.0)):
        metric = "rmse" if rows.task == "regression" else "auc"
        found = decide(Gate(metric=metric), rows, rows)
        assert (found.promote, found.outcome, found.gain, found.lower) == (False, "equal", 0, 0)
        assert decide(Gate(metric=metric, mode="not_worse", margin=0.01), rows, rows).outcome == "not_worse"


def test_a_gain_within_chance_is_not_proven():
    found = decide(RMSE, values(0.97), values(1.0, seed=2))
    assert (found.promote, found.outcome) == (False, "not_proven")
    assert found.lower < 0 < found.gain
    assert "that is not enough" in found.reason


def test_a_real_gain_below_the_effect_is_not_enough():
    new, old = values(1.0), values(1.5, seed=1)
    assert decide(Gate(metric="rmse", effect=0.3), new, old).promote
    found = decide(Gate(metric="rmse", effect=1.0), new, old)
    assert (found.promote, found.outcome) == (False, "not_proven")
    assert found.reason.endswith("the gate asks for more than 1")


def test_not_worse_passes_within_its_margin_and_no_further():
    new, old = values(1.02), values(1.0, seed=1)
    found = decide(Gate(metric="rmse", mode="not_worse", margin=0.2), new, old)
    assert (found.promote, found.outcome) == (True, "not_worse")
    assert -0.2 < found.lower < 0
    assert found.reason.endswith("the gate asks for no less than -0.2")
    assert not decide(Gate(metric="rmse", mode="not_worse", margin=0.001), new, old).promote
    assert decide(Gate(metric="rmse", mode="not_worse", margin=0.2), values(2.0), old).outcome == "worse"


def test_a_champion_that_cannot_predict_is_replaced_by_whoever_reaches_the_floors():
    why = "the champion takes the column 'city', and the table has none"
    found = decide(Gate(metric="auc", floors=("auc >= 0.7",)), clicks(1.5), champion_error=why)
    assert (found.promote, found.outcome) == (True, "champion_unusable")
    assert found.reason.startswith(f"the champion cannot predict these rows ({why}); auc 0.8")
    assert found.reason.endswith("and reaches auc >= 0.7")
    assert decide(Gate(metric="auc", floors=("auc >= 0.99",)), clicks(1.5), champion_error=why).outcome == "below_floor"


def test_a_champion_that_no_row_can_judge_stays():
    found = decide(Gate(metric="auc"), clicks(1.5), seen="version 3 was trained on all of them")
    assert (found.promote, found.outcome, found.reason) == (False, "too_little", "version 3 was trained on all of them")
    assert found.champion is None
    floor = Gate(metric="auc", floors=("auc >= 0.99",))
    assert decide(floor, clicks(1.5), seen="version 3 was trained on all of them").outcome == "below_floor"


def test_a_challenger_below_a_floor_is_refused_however_bad_the_champion_is():
    found = decide(
        Gate(
            metric="auc",
            floors=(
                "log_loss <= 9",
                "auc >= 0.9",
            ),
        ),
        clicks(1.0),
        clicks(0.0, seed=1),
    )
    assert (found.promote, found.outcome) == (False, "below_floor")
    assert found.reason == f"the challenger's auc of {found.challenger.values['auc']:.4g} misses the floor auc >= 0.9"


def test_too_few_rows_groups_or_positives_promote_nobody():
    few, floored = values(1.0, days=5, rows=4), replace(RMSE, floors=("rmse <= 100",))
    for found in (decide(RMSE, few, values(2.0, days=5, rows=4, seed=1)), decide(floored, few)):
        assert (found.promote, found.outcome) == (False, "too_little")
        assert found.reason == "there are 20 held-out rows, and the gate asks for 30"
    few = values(1.0, days=4), values(2.0, seed=1, days=4)
    assert (
        decide(RMSE, *few).reason == "held-out rows are of 4 groups, and the gate asks for 5 to tell a gain from chance"
    )
    rare = Rows.of("binary", np.arange(100) < 3, np.full(100, 0.5))
    assert decide(AUC, rare, rare).reason == "3 of 100 held-out rows have label 1, and the gate asks for 10"
    common = Rows.of("binary", np.arange(100) >= 3, np.full(100, 0.5))
    assert decide(AUC, common, common).reason == "3 of 100 held-out rows have label 0, and the gate asks for 10"


def test_the_first_model_of_a_small_table_serves_if_there_is_no_floor_to_reach():
    found = decide(RMSE, values(1.0, days=5, rows=4))
    assert (found.promote, found.outcome) == (True, "first")
    assert decide(RMSE, Rows.of("regression", [], [])).outcome == "undefined"


def test_one_group_alone_compares_nobody():
    found = decide(RMSE, values(1.0, days=1, rows=100), values(3.0, seed=1, days=1, rows=100))
    assert (found.promote, found.outcome) == (False, "too_little")
    assert found.reason.startswith("all held-out rows belong to 1 group, and the gate asks for 5")


def test_groups_without_weight_do_not_count():
    new, old = values(1.0, days=6), values(3.0, seed=1, days=6)
    weights = (new.groups < 3).astype(float)
    found = decide(RMSE, *(dataclasses.replace(one, weights=weights) for one in (new, old)))
    assert (found.outcome, found.groups) == ("too_little", 3)


def test_a_challenger_without_a_finite_metric_is_refused_and_such_a_champion_replaced():
    good, bad = values(1.0), values(1.0)
    bad.predictions[3] = 1e200
    found = decide(RMSE, bad, good)
    assert (found.promote, found.outcome) == (False, "undefined")
    assert found.reason == f"the challenger's rmse is inf: predictions reach 1e+200, labels {abs(good.labels).max():g}"
    found = decide(RMSE, good, bad)
    assert (found.promote, found.outcome) == (True, "champion_unusable")
    assert found.reason.startswith("the champion's rmse is inf: predictions reach 1e+200")
    constant = Rows.of("regression", np.full(600, 2.5), good.predictions, groups=good.groups)
    assert decide(Gate(metric="r2"), constant, constant).reason == (
        "the challenger's r2 is undefined: every label of 600 rows is 2.5"
    )


def test_draws_that_leave_the_metric_undefined_prove_nothing():
    labels = np.repeat([1, 0, 0, 0, 0, 0], 20)
    new, old = np.where(labels == 1, 0.9, 0.1), np.full(120, 0.5)
    groups = np.repeat(np.arange(6), 20)
    found = decide(AUC, *(Rows.of("binary", labels, scores, groups=groups) for scores in (new, old)))
    assert (found.promote, found.outcome, found.lower) == (False, "not_proven", None)
    assert found.gain == 0.5
    assert "the gain has no lower bound, since 3" in found.reason
    assert found.reason.endswith("% of draws leave auc undefined")


def test_models_scored_on_other_rows_are_not_compared():
    with pytest.raises(DataError, match="one has 600 rows of regression, the other 580"):
        decide(RMSE, values(1.0), values(1.0, days=29))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("auc", "floors='auc' is not of the form that is wanted: write it like 'auc >= 0.7'"),
        ("auc >= 70%", "is not of the form"),
        ("auc >= 0.7 and f1 >= 0.5", "is not of the form"),
        ("auc > 0.7", "is not of the form"),
        ("auk >= 0.7", "there is no metric 'auk': did you mean 'auc'"),
        ("rmse >= 3", "the floor 'rmse >= 3' refuses good models: rmse is better when lower, write <="),
        ("auc <= 0.7", "the floor 'auc <= 0.7' refuses good models: auc is better when higher, write >="),
    ],
)
def test_a_floor_that_is_none_is_refused_with_help(text, message):
    with pytest.raises(ConfigError, match=message):
        Section(floors=(text,))


def test_floors_hold_at_their_bound():
    assert Floor.parse("auc >= .7") == Floor(metric="auc", relation=">=", bound=0.7)
    assert [Floor.parse("auc >= 0.7").holds(value) for value in (0.69, 0.7)] == [False, True]
    assert [Floor.parse("mse <= 1e-2").holds(value) for value in (0.01, 0.02)] == [True, False]


def test_a_floor_of_another_task_is_refused():
    with pytest.raises(ConfigError, match="regression has no metric 'auc'"):
        decide(Gate(metric="rmse", floors=("auc >= 0.7",)), values(1.0))


def test_decisions_repeat_with_the_seed_and_travel_as_documents():
    new, old = clicks(1.0), clicks(0.8, seed=1)
    first, again, other = (decide(Gate(metric="auc", seed=seed), new, old) for seed in (0, 0, 1))
    assert first == again
    assert first.lower != other.lower
    assert decode(encode(first), Decision, Source("x")) == first


def test_one_day_that_gains_much_does_not_carry_the_bound():
    """Four days of five say nothing and one says much: draws without that day are not far below the others."""
    labels, groups = np.zeros(100), np.repeat(np.arange(5), 20)
    old = np.where(groups == 0, 3.0, 1.0) * np.tile([1, -1], 50)
    new = np.where(groups == 0, 1.0, 0.999) * np.tile([1, -1], 50)
    pair = [Rows.of("regression", labels, one, groups=groups) for one in (new, old)]
    assert gains(Gate(metric="mse"), *pair)[0] > 0  # no draw loses
    found = decide(Gate(metric="mse"), *pair)
    assert (found.promote, found.outcome) == (False, "not_proven")


def test_blocks_of_many_keys_give_the_bounds_of_the_keys():
    """2,000 keys are drawn in 400 blocks; the spread of the gain is that of the rows, which are independent here."""
    new, old = (values(noise, seed, days=2000, rows=2) for noise, seed in ((1.0, 0), (1.02, 1)))
    drawn = gains(Gate(metric="mse"), new, old)
    squares = [(one.predictions - one.labels) ** 2 for one in (new, old)]
    assert drawn.std() == pytest.approx(np.std(squares[1] - squares[0]) / np.sqrt(4000), rel=0.12)


def delong(labels, first, second):
    """AUC difference and its variance (Sun and Xu 2014, "Fast implementation of DeLong's algorithm", algorithm 2)."""
    parts = []
    for scores in (first, second):
        positive, negative = scores[labels == 1], scores[labels == 0]
        m, n = len(positive), len(negative)
        ranks = stats.rankdata(np.concatenate([positive, negative]))
        of_positives = (ranks[:m] - stats.rankdata(positive)) / n
        of_negatives = 1 - (ranks[m:] - stats.rankdata(negative)) / m
        parts.append((of_positives, of_negatives))
    (a, b), (c, d) = parts
    return (a - c).mean(), np.var(a - c, ddof=1) / len(a) + np.var(b - d, ddof=1) / len(b)


@pytest.mark.parametrize("ties", [False, True])
def test_the_bound_of_auc_is_delongs_where_rows_are_independent(ties):
    labels = np.random.default_rng(5).random(1500) < 0.3
    signal = labels + np.random.default_rng(6).normal(0, 1, 1500)  # both models share it: paired
    new, old = (
        1 / (1 + np.exp(-signal - np.random.default_rng(seed).normal(0, noise, 1500)))
        for seed, noise in ((7, 0.5), (8, 0.8))
    )
    new, old = (np.round(one, 1) for one in (new, old)) if ties else (new, old)
    found = decide(AUC, *(Rows.of("binary", labels, scores) for scores in (new, old)))
    gain, variance = delong(labels, new, old)
    assert found.gain == pytest.approx(gain, abs=1e-12)
    assert gain - found.lower == pytest.approx(stats.norm.ppf(0.95) * np.sqrt(variance), rel=0.15)


def promotions(trials, gate, pair):
    return sum(decide(gate, *pair(np.random.default_rng(trial))).promote for trial in range(trials))


def days_with_effects(random, days, gain=0.0, skew=False):
    """Two models whose errors on a day go together; a day of rows, days that differ in size."""
    sizes = random.integers(5, 20, days)
    groups = np.repeat(np.arange(days), sizes)
    labels = random.normal(0, 3, len(groups))
    shared = random.exponential(1, days) if skew else 1 + 0.3 * random.random(days)
    new, old = (
        labels + random.normal(0, 1, len(groups)) * shared[groups] * (1 + more) + random.normal(0, 0.3, days)[groups]
        for more in (0.0, gain)
    )
    return tuple(Rows.of("regression", labels, one, groups=groups) for one in (new, old))


@pytest.mark.slow
@pytest.mark.parametrize("days", [5, 8, 40])
def test_models_that_are_no_better_are_promoted_no_more_often_than_stated(days):
    trials, gate = 400, Gate(metric="rmse", resamples=400)
    count = promotions(trials, gate, lambda random: days_with_effects(random, days))
    assert stats.binomtest(count, trials, 0.05, alternative="greater").pvalue > 0.01


def test_a_model_just_as_worse_as_the_margin_passes_no_more_often_than_stated():
    """The challenger's squared error is exactly 0.21 above the champion's in expectation."""

    def pair(random):
        labels = random.normal(0, 3, 600)
        groups = np.repeat(np.arange(30), 20)
        errors = (random.normal(0, 1.1, 600), random.normal(0, 1, 600))
        return tuple(Rows.of("regression", labels, labels + error, groups=groups) for error in errors)

    trials = 400
    gate = Gate(metric="mse", mode="not_worse", margin=1.1**2 - 1, resamples=400)
    count = promotions(trials, gate, pair)
    assert stats.binomtest(count, trials, 0.05, alternative="greater").pvalue > 0.01


def ranked(random, gain):
    labels = random.random(800) < 0.2
    signal = labels + random.normal(0, 1, 800)
    scores = (signal + random.normal(0, noise, 800) for noise in (0.5, 0.5 + gain))
    groups = np.repeat(np.arange(20), 40)
    return tuple(Rows.of("binary", labels, 1 / (1 + np.exp(-one)), groups=groups) for one in scores)


def test_the_gate_of_auc_keeps_its_level_too():
    trials = 200
    count = promotions(trials, Gate(metric="auc", resamples=400), lambda random: ranked(random, 0.0))
    assert stats.binomtest(count, trials, 0.05, alternative="greater").pvalue > 0.01


def test_a_real_gain_is_found():
    assert promotions(50, Gate(metric="rmse"), lambda random: days_with_effects(random, 40, gain=0.3)) >= 48
    assert promotions(50, AUC, lambda random: ranked(random, 1.0)) >= 45
