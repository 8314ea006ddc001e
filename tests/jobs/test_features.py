from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.features import LABEL, NUMERIC, Moments, Statistics, check_vocabulary, split_days
from jobs.settings import EtlSettings
from sparkdl.errors import DataError

DAYS = [f"2026-03-{day:02d}" for day in range(1, 20)]


def moments(values):
    array = np.asarray(values, dtype=np.float64)
    return Moments(rows=len(array), mean=float(array.mean()), variance=float(array.var()))


@given(st.lists(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=20), min_size=1, max_size=6))
def test_merged_moments_are_those_of_all_rows(parts):
    merged = moments(parts[0])
    for part in parts[1:]:
        merged = merged.merged(moments(part))
    whole = moments([value for part in parts for value in part])
    assert merged.rows == whole.rows
    assert merged.mean == pytest.approx(whole.mean, abs=1e-7)
    assert merged.variance == pytest.approx(whole.variance, rel=1e-9, abs=1e-5)


def test_no_rows_merge_into_nothing_new():
    empty, some = Moments(rows=0, mean=0.0, variance=0.0), moments([1.0, 5.0])
    assert empty.merged(some) == some == some.merged(empty)


def days_of_moments(values):
    return {day: {name: moments(row) for name in (*NUMERIC, LABEL)} for day, row in zip(DAYS, values, strict=False)}


def test_statistics_run_over_all_given_days_and_survive_json():
    statistics = Statistics.of(days_of_moments([[1.0, 2.0], [3.0]]))
    assert statistics.mean(LABEL) == pytest.approx(2.0)
    assert statistics.scale(LABEL) == pytest.approx(np.std([1.0, 2.0, 3.0]))
    assert Statistics.from_dict(statistics.to_dict()) == statistics


def test_a_constant_is_not_divided_by_zero():
    assert Statistics.of(days_of_moments([[4.0, 4.0]])).scale("rain_mm") == 1.0


def test_the_id_of_statistics_follows_from_days_and_values():
    first = Statistics.of(days_of_moments([[1.0, 2.0], [3.0]]))
    assert first.statistics_id == Statistics.of(days_of_moments([[1.0, 2.0], [3.0]])).statistics_id
    assert first.statistics_id != Statistics.of(days_of_moments([[1.0, 2.0], [4.0]])).statistics_id
    assert first.statistics_id != Statistics.of(days_of_moments([[1.0, 2.0]])).statistics_id


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_statistics_that_are_not_finite_are_refused(value):
    days = days_of_moments([[1.0, 2.0]])
    days[DAYS[0]]["rain_mm"] = Moments(rows=2, mean=value, variance=1.0)
    with pytest.raises(DataError, match=rf"rain_mm.*{value}"):
        Statistics.of(days)


def test_no_training_rows_are_refused():
    with pytest.raises(DataError, match="0 rows"):
        Statistics.of({})


def test_the_split_goes_by_time():
    split = split_days(reversed(DAYS), EtlSettings(training_days=14, validation_days=2, scoring_days=1))
    assert split.scoring == ("2026-03-19",)
    assert split.validation == ("2026-03-17", "2026-03-18")
    assert split.training == tuple(DAYS[2:16])


def test_too_few_days_are_refused():
    with pytest.raises(DataError, match=r"3 days.*2 for validation and 1"):
        split_days(DAYS[:3], EtlSettings())
    assert split_days(DAYS[:4], EtlSettings()).training == ("2026-03-01",)


def test_more_ids_than_embedding_rows_are_refused_with_a_size_that_fits():
    check_vocabulary({"vehicle": 16}, {"vehicle": 16})
    with pytest.raises(DataError, match=r"vehicle has 17 ids.*16 rows.*embedding_rows\.vehicle=32"):
        check_vocabulary({"vehicle": 17}, {"vehicle": 16})
