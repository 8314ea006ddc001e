"""A window drifts where it differs by more than chance gives, and by more than anybody cares about."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from scipy.spatial.distance import jensenshannon

from sparkdl.documents.typed import Source, decode, encode
from sparkdl.errors import DataError
from sparkdl.pipeline.judging.counts import Categories, Histogram
from sparkdl.pipeline.judging.drift import Drift, compare, count_range, decide
from sparkdl.pipeline.spec import Drift as Section

EVEN = Histogram(counts=(2500, 2500, 2500, 2500), missing=100)
CITIES = Categories(counts={"Bonn": 5100, "Köln": 3000, "Trier": 1000}, other=900, missing=100, minimum=15)
USUAL = Section(psi=0.2)
NO_THRESHOLD = Section(missing=0.0, unseen=0.0, psi=1e-12, js=1e-12, ks=1e-12)


def histogram(*counts, missing=0):
    return Histogram(counts=counts, missing=missing)


def judged(reference, current, **limits):
    return compare({"x": reference}, {"x": current}, Section(**{"psi": 0.2, **limits})).features["x"]


def test_a_window_like_the_reference_does_not_drift():
    found = compare({"x": EVEN, "city": CITIES}, {"x": EVEN, "city": CITIES}, USUAL)
    assert (found.alarm, found.judged, found.rows) == (False, True, 10_100)
    assert found.reason == "none of 2 features drifts"
    assert found.features["x"].reason == "no drift: missing 0, psi 0, jensen_shannon 0, ks 0"
    assert list(found.features["city"].measures) == ["missing", "new_categories", "psi", "jensen_shannon"]


def test_measures_are_what_their_definitions_say():
    old, new = np.array([4000, 3000, 2000, 1000]), np.array([100, 200, 300, 400])
    measures = judged(histogram(*old), histogram(*new)).measures
    p, q = old / old.sum(), new / new.sum()
    assert measures["psi"].value == pytest.approx(((q - p) * np.log(q / p)).sum(), rel=1e-2)
    assert measures["jensen_shannon"].value == pytest.approx(jensenshannon(p, q, base=2), rel=1e-2)
    assert measures["ks"].value == pytest.approx(np.abs(np.cumsum(p) - np.cumsum(q)).max())
    # six measures may be asked for; by default the missing rate and the PSI of one number are
    assert measures["psi"].chance == pytest.approx((1 / 10_000 + 1 / 1000) * stats.chi2.isf(0.01 / 2, 3))


def test_another_shape_is_an_alarm_with_both_limits():
    found = judged(EVEN, histogram(100, 200, 300, 400, missing=10))
    assert found.alarm
    assert found.reason.startswith("psi of 0.2")
    assert "is above 0.2 (chance alone: 0.0" in found.reason


def test_a_trifle_in_millions_of_rows_is_no_alarm():
    found = judged(histogram(*[10**6] * 4), histogram(1_010_000, 990_000, 10**6, 10**6))
    assert found.measures["psi"].value > found.measures["psi"].chance
    assert not found.alarm


def test_a_fluke_in_few_rows_is_no_alarm_and_says_so():
    found = judged(EVEN, histogram(10, 3, 4, 3))
    assert found.measures["psi"].value > 0.2
    assert not found.alarm
    assert found.reason == "no drift in 20 values: psi of 0.275 is above 0.2 (chance alone: 0.395)"


@pytest.mark.parametrize(("before", "now"), [(100, 2000), (9000, 500)])
def test_the_missing_rate_alarms_up_and_down(before, now):
    old = histogram(*[(10_000 - before) // 4] * 4, missing=before)
    new = histogram(*[(10_000 - now) // 4] * 4, missing=now)
    found = judged(old, new)
    assert found.alarm
    assert found.reason.startswith(f"missing went from {before / 1e4:.2%} to {now / 1e4:.2%}, by more than 5.00%")
    assert not judged(old, histogram(*old.counts, missing=old.missing + 20)).alarm


def test_new_categories_alarm_where_the_reference_did_not_expect_them():
    found = judged(CITIES, Categories(counts={"Bonn": 400, "Köln": 300, "Trier": 100}, other=200))
    assert found.alarm
    assert "new_categories went from 9.00% to 20.00%" in found.reason
    named = Categories(counts={"Bonn": 400, "Köln": 300, "Trier": 100, "Ulm": 150}, other=50)
    assert judged(CITIES, named).measures["new_categories"] == found.measures["new_categories"]


def test_a_long_tail_makes_new_categories_without_drift():
    """Every second value of the reference stood there once, so every second value of fresh rows is new."""
    tail = Categories(counts={"a": 500} | {f"id {number}": 1 for number in range(500)})
    assert not judged(tail, Categories(counts={"a": 500}, other=500)).alarm
    assert judged(Categories(counts={"a": 500, "b": 500}), Categories(counts={"a": 500}, other=500)).alarm


def test_an_empty_window_is_not_judged_and_says_so():
    empty = {"x": histogram(0, 0, 0, 0), "city": Categories(counts={})}
    found = compare({"x": EVEN, "city": CITIES}, empty, USUAL)
    assert (found.alarm, found.judged, found.features) == (False, False, {})
    assert found.reason == "the window has no rows, so its drift cannot be judged"
    assert decide(Section(action="fail"), {"a": found}) == ("none", "no window with rows was compared")


def test_one_row_is_no_evidence():
    for one in (histogram(0, 0, 0, 1), histogram(0, 0, 0, 0, missing=1)):
        assert not compare({"x": EVEN}, {"x": one}, NO_THRESHOLD, 0.05).alarm
    assert not compare({"city": CITIES}, {"city": Categories(counts={}, other=1)}, NO_THRESHOLD, 0.05).alarm


def test_a_constant_feature_stays_so_or_drifts():
    constant = Histogram(counts=(0, 1000, 0))
    same = judged(constant, Histogram(counts=(0, 300, 0)))
    assert not same.alarm
    assert same.measures["psi"].value < 0.01
    assert judged(constant, Histogram(counts=(0, 0, 300))).alarm
    one_bin = Histogram(counts=(1000,))
    assert judged(one_bin, one_bin).measures["psi"].value == 0
    alone = Categories(counts={"a": 1000})
    assert not judged(alone, Categories(counts={"a": 10})).alarm


def test_a_feature_without_any_value():
    nothing = histogram(0, 0, 0, 0, missing=1000)
    assert judged(nothing, nothing).reason == "every value is missing, as in the reference"
    for old, new in ((EVEN, nothing), (nothing, EVEN)):
        found = judged(old, new)
        assert found.alarm
        assert list(found.measures) == ["missing"]
    assert judged(Categories(counts={}, missing=50), Categories(counts={}, other=50)).alarm


def test_a_reference_without_rows_is_refused():
    with pytest.raises(DataError, match="the reference of the feature 'x' counts no rows"):
        compare({"x": histogram(0, 0, 0, 0)}, {"x": EVEN}, USUAL)


DRIFTED = histogram(0, 0, 0, 1000)


QUIET, ALARM = (compare({"x": EVEN}, {"x": one}, USUAL) for one in (EVEN, DRIFTED))
NO_ROWS = compare({"x": EVEN}, {"x": histogram(0, 0, 0, 0)}, USUAL)


@pytest.mark.parametrize("action", ["warn", "retrain", "fail"])
def test_an_action_waits_for_k_of_the_last_n_windows(action):
    section = Section(action=action, after=2, of=3)

    def taken(*windows):
        return decide(section, dict(zip("abcdef", windows, strict=False)))[0]

    assert taken() == taken(ALARM) == taken(ALARM, QUIET, QUIET, ALARM) == "none"
    assert taken(ALARM, ALARM) == taken(ALARM, QUIET, ALARM) == taken(QUIET, ALARM, ALARM, QUIET) == action
    assert taken(ALARM, QUIET, NO_ROWS, NO_ROWS, ALARM) == action


def test_the_reason_of_an_action_names_window_feature_measure_value_and_threshold():
    psi = "x: psi of 5.69 is above 0.2 (chance alone: 0.0"
    action, reason = decide(Section(action="fail"), {"a": QUIET, "b": ALARM})
    assert action == "fail"
    assert reason.startswith(f"window b: {psi}")
    _, reason = decide(Section(action="retrain", after=2, of=3), {"a": ALARM, "b": QUIET, "c": QUIET})
    assert reason.startswith(f"1 of the last 3 windows drift, lately a: {psi}")
    assert reason.endswith("; retrain waits for 2 of 3 windows")
    assert decide(USUAL, {"a": ALARM, "b": QUIET}) == ("none", "none of 1 features drifts, in window b")


def test_thresholds_that_are_none_alarm_nobody():
    found = judged(EVEN, DRIFTED, psi=None, missing=None)
    assert not found.alarm
    assert found.measures["psi"].value > 1
    assert judged(EVEN, DRIFTED, psi=None, missing=None, ks=0.3).reason.startswith("ks of 0.75 is above 0.3")


def test_verdicts_travel_as_documents():
    city = Categories(counts=CITIES.counts | {"Bonn": 1}, other=0, missing=0)
    found = compare({"x": EVEN, "city": CITIES}, {"x": histogram(0, 0, 0, city.present), "city": city}, USUAL)
    assert decode(encode(found), Drift, Source("x")) == found


def one_window(random, rows, reference_rows, shift=0.0):
    """A reference and a window: a number in quantile bins, a small category, ids with a long tail; some missing."""
    old, new = ({}, {})
    values, later = random.normal(size=reference_rows), random.normal(shift, 1, rows)
    edges = np.quantile(values, np.arange(1, 10) / 10)
    for place, found in ((old, values), (new, later)):
        found = found[random.random(len(found)) > 0.02]
        counts = np.bincount(np.searchsorted(edges, found, side="left"), minlength=10)
        missing = len(later if place is new else values) - len(found)
        place["number"] = Histogram(counts=tuple(counts.tolist()), missing=missing)
    colors = random.multinomial(reference_rows, [0.5, 0.3, 0.2]), random.multinomial(rows, [0.5, 0.3, 0.2])
    tail = 1 / np.arange(1, 1001)
    ids = [random.multinomial(size, tail / tail.sum()) for size in (reference_rows, rows)]
    named = np.flatnonzero(ids[0] >= 2)
    for place, color, of_ids in zip((old, new), colors, ids, strict=True):
        place["color"] = Categories(counts=dict(zip("rgb", color.tolist(), strict=True)))
        counts = dict(zip(map(str, named), of_ids[named].tolist(), strict=True))
        place["id"] = Categories(counts=counts, other=int(of_ids.sum()) - sum(counts.values()), minimum=2)
    return old, new


@pytest.mark.slow
@pytest.mark.parametrize(("reference_rows", "rows"), [(5000, 300), (1000, 1000)])
def test_windows_without_drift_alarm_no_more_often_than_agreed(reference_rows, rows):
    """With thresholds of 0 chance alone is left; 2,000 windows in all, each of 12 measures of three features."""
    random, windows = np.random.default_rng(0), 1000
    alarms = sum(compare(*one_window(random, rows, reference_rows), NO_THRESHOLD, 0.05).alarm for _ in range(windows))
    assert stats.binomtest(alarms, windows, 0.05, alternative="greater").pvalue > 0.01


def test_a_real_shift_is_detected():
    random = np.random.default_rng(1)
    found = [compare(*one_window(random, 1000, 5000, shift=0.7), USUAL) for _ in range(50)]
    assert all(one.features["number"].alarm for one in found)
    assert not any(one.features["color"].alarm or one.features["id"].alarm for one in found)


@pytest.mark.parametrize(
    ("marked", "rows", "drawn"),
    [
        (0, 10, 5),
        (10, 10, 5),
        (3, 100, 1),
        (3, 100, 99),
        (50, 100, 50),
        (1, 1_000_001, 1),
        (7, 2_000_000, 1_000_000),
        (400_000, 1_100_000, 100_000),
    ],
)
@pytest.mark.parametrize("tail", [0.05, 1e-4])
def test_counts_within_the_range_are_what_the_hypergeometric_distribution_gives(marked, rows, drawn, tail):
    low, high = count_range(marked, rows, drawn, tail)
    exact = stats.hypergeom(rows, marked, drawn)
    assert exact.cdf(low - 1) <= tail < exact.cdf(low)
    assert exact.sf(high) <= tail < exact.sf(high - 1)
    assert np.isin([low, high], np.arange(max(0, marked + drawn - rows), min(marked, drawn) + 1)).all()
