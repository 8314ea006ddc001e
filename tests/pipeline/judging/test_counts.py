"""What a model carries of its features, and the same of a window, become cells that drift compares."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from sparkdl.features.spec import Category, Ids, Number, Vector
from sparkdl.features.statistics import Running, statistics_of
from sparkdl.pipeline.judging.counts import Categories, Histogram, counts_of
from sparkdl.pipeline.judging.drift import compare
from sparkdl.pipeline.spec import Drift as Section
from tests.pipeline.judging.conftest import counted_between

OPTIONS = {
    "age": Number(),
    "city": Category(),
    "top": Category(column="city", max_size=1),
    "hashed": Category(column="city", buckets=100),
    "tags": Ids(min_count=1),
    "spot": Vector(size=2),
}


def window(random, rows, tags=1):
    """Rows of five columns; the elements of a row's list are all the same."""
    city = random.choice(["Bonn", "Köln", "Trier"], rows).tolist()
    return pa.table(
        {
            "age": pa.array(random.normal(40, 10, rows)),
            "city": pa.array([None, *city[1:]]),
            "tags": pa.array([[f"t{one}"] * tags for one in random.integers(0, 5, rows)]),
            "spot": pa.array(random.normal(size=(rows, 2)).tolist(), pa.list_(pa.float64(), 2)),
        }
    )


def test_each_type_of_feature_has_its_cells():
    rows = window(np.random.default_rng(0), 1000, tags=3)
    found = counts_of(OPTIONS, statistics_of(rows, OPTIONS))
    assert list(found) == ["age", "city", "top", "hashed", "tags", "tags (length)", "spot"]
    assert isinstance(found["age"], Histogram)
    assert len(found["age"].counts) == 12
    city = rows.column("city").to_pylist()
    assert found["city"].counts == {name: city.count(name) for name in ("Bonn", "Köln", "Trier")}
    assert (found["city"].missing, found["city"].other, found["city"].minimum) == (1, 0, 2)
    assert (found["top"].other, found["top"].minimum) == (999 - max(found["city"].counts.values()), 0)
    assert (found["hashed"].present, found["hashed"].missing) == (999, 1)
    assert (found["tags"].total, found["tags"].present, found["tags"].minimum) == (3000, 1000, 1)
    assert (found["tags (length)"].present, max(found["tags (length)"].counts)) == (1000, 1000)
    assert found["spot"] == Histogram(counts=(1000,))
    assert all(one.present + one.missing == 1000 for one in found.values())


def test_a_window_of_the_same_rows_does_not_drift_and_other_rows_do():
    random = np.random.default_rng(1)
    rows = window(random, 2000)
    reference = statistics_of(rows, OPTIONS)
    same = counts_of(OPTIONS, counted_between(reference, OPTIONS, rows))
    assert same == counts_of(OPTIONS, reference)
    later = window(random, 500, tags=4)
    later = later.set_column(0, "age", pa.array([55.0] * 500)).set_column(1, "city", pa.array(["Ulm"] * 500))
    found = compare(
        counts_of(OPTIONS, reference), counts_of(OPTIONS, counted_between(reference, OPTIONS, later)), Section()
    )
    assert [name for name, one in found.features.items() if one.alarm] == [
        "age",
        "city",
        "top",
        "hashed",
        "tags (length)",
    ]


@pytest.mark.parametrize(("before", "now"), [(5.0, 3.0), (5.0, 7.0)])
def test_a_constant_that_becomes_another_drifts(before, now):
    options = {"age": Number()}
    reference = statistics_of(pa.table({"age": [before] * 500}), options)
    same, other = (pa.table({"age": [one] * 300}) for one in (before, now))
    alarms = [
        compare(
            counts_of(options, reference), counts_of(options, counted_between(reference, options, rows)), Section()
        ).alarm
        for rows in (same, other)
    ]
    assert alarms == [False, True]


def test_zeros_that_become_a_mark_below_all_values_drift():
    options, values = {"age": Number()}, np.random.default_rng(4).exponential(1, 1000)
    reference = statistics_of(pa.table({"age": np.where(np.arange(1000) < 300, 0.0, values)}), options)
    later = pa.table({"age": np.where(np.arange(1000) < 300, -1.0, values)})
    found = compare(
        counts_of(options, reference), counts_of(options, counted_between(reference, options, later)), Section()
    )
    assert found.features["age"].reason.startswith("psi of ")


def test_a_window_without_batches_has_empty_cells():
    reference = statistics_of(window(np.random.default_rng(2), 100), OPTIONS)
    nothing = {name: Running().result(one.quantiles, ()) for name, one in reference.items()}
    assert not compare(counts_of(OPTIONS, reference), counts_of(OPTIONS, nothing), Section()).judged


def test_values_that_come_together_are_no_more_evidence_than_their_rows():
    """Ten equal ids a row: taken one by one, chance alone would look like drift."""
    random = np.random.default_rng(3)
    section = Section(psi=1e-12, js=1e-12, missing=0.0, unseen=0.0)
    alarms = 0
    for _ in range(300):
        counts = [
            Categories(counts={str(n): 10 * int(c) for n, c in enumerate(drawn)}, rows=int(drawn.sum()))
            for drawn in (random.multinomial(size, [0.4, 0.3, 0.2, 0.1]) for size in (2000, 300))
        ]
        alarms += compare(*({"tags": one} for one in counts), section, 0.05).alarm
    assert stats.binomtest(alarms, 300, 0.05, alternative="greater").pvalue > 0.01
