"""Quantiles by closed forms, against scipy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from sparkdl.pipeline.judging.chance import chi_squared_quantile, count_range, student_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 10, 49, 300, 5000])
@pytest.mark.parametrize("tail", [0.5, 0.05, 1e-3, 1e-7])
def test_chi_squared_quantiles_are_scipys(tail, freedom):
    assert chi_squared_quantile(tail, freedom) == pytest.approx(stats.chi2.isf(tail, freedom), rel=1e-8)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 30, 399])
@pytest.mark.parametrize("tail", [0.2, 0.05, 1e-3])
def test_student_quantiles_are_scipys(tail, freedom):
    assert student_quantile(tail, freedom) == pytest.approx(stats.t.isf(tail, freedom), rel=1e-8)


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
