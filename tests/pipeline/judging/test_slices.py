"""The largest slices and the worst are shown, and no row is lost between them."""

from __future__ import annotations

import numpy as np
import pytest

from sparkdl.metrics.measure import measure
from sparkdl.metrics.rows import Rows
from sparkdl.pipeline.judging.slices import LEAST_ROWS, MISSING, OTHERS, Slices


def rows_of(errors):
    labels = np.arange(len(errors), dtype=float)
    return Rows.of("regression", labels, labels + np.asarray(errors, dtype=float))


def test_slices_come_by_size_and_the_small_ones_together():
    rows = rows_of(np.random.default_rng(0).normal(size=100))
    keys = np.array(["big"] * 50 + ["small"] * 30 + [None] * 15 + ["x"] * 3 + ["y"] * 2, dtype=object)
    slices = Slices.of(rows, keys, largest=3)
    found = slices.measure(rows)
    assert [(name, one.rows) for name, one in found.items()] == [("big", 50), ("small", 30), (MISSING, 15), (OTHERS, 5)]
    assert slices.values == 5
    assert found["big"] == measure(rows.take(keys == "big"))


def test_a_text_that_is_called_as_the_missing_ones_are_is_a_slice_of_its_own():
    rows = Rows.of("regression", np.zeros(60), np.ones(60))
    found = Slices.of(rows, [None] * 10 + ["(missing)"] * 20 + ["(others)"] * 30, largest=2).measure(rows)
    assert {name: one.rows for name, one in found.items()} == {"'(others)'": 30, "'(missing)'": 20, OTHERS: 10}


def test_the_worst_slice_is_shown_however_many_are_larger():
    sizes = [LEAST_ROWS + 100 - n for n in range(100)]
    keys = np.repeat([f"k{n}" for n in range(100)], sizes)
    errors = np.where(keys == "k97", 9.0, 1.0)
    slices = Slices.of(rows_of(errors), keys, largest=5, worst=1)
    assert slices.names == ("k0", "k1", "k2", "k3", "k4", "k97", OTHERS)
    found = slices.measure(rows_of(errors))
    assert found["k97"].values["rmse"] == 9
    assert sum(one.rows for one in found.values()) == len(keys)


def test_a_slice_of_a_few_rows_is_not_the_worst():
    keys = np.array(["a"] * 100 + ["b"] * LEAST_ROWS + ["c"] * (LEAST_ROWS - 1))
    errors = np.where(keys == "c", 1e6, 1.0)
    assert Slices.of(rows_of(errors), keys, largest=1, worst=1).names == ("a", "b", OTHERS)


@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_the_worst_classes_are_worst_by_log_loss(task):
    keys = np.repeat(["a", "b", "c"], [50, 40, 40])
    sure = np.where(keys == "c", 0.1, 0.9)
    labels = np.ones(len(keys)) if task == "binary" else np.zeros(len(keys))
    chances = sure if task == "binary" else np.stack([sure, 1 - sure], axis=1)
    rows = Rows.of(task, labels, chances)
    assert Slices.of(rows, keys, largest=1, worst=1).names == ("a", "c", OTHERS)


def test_another_model_is_measured_on_the_same_slices():
    keys = np.array(["a", "b"] * 50)
    mine, theirs = rows_of(np.ones(100)), rows_of(np.full(100, 2.0))
    slices = Slices.of(mine, keys)
    assert {name: one.values["rmse"] for name, one in slices.measure(theirs).items()} == {"a": 2, "b": 2}


def test_slices_of_no_rows_are_none():
    rows = Rows.of("regression", [], [])
    assert Slices.of(rows, []).measure(rows) == {}
