"""Held-out rows are checked once: what is missing or no number of its kind is refused by name."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from sparkdl.errors import ConfigError, DataError
from sparkdl.metrics.rows import Rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("binary", [0, None, 1], [0.1, 0.2, 0.3]), r"'clicked' is missing .* in 1 of 3 rows \(first: row 1\)"),
        (("binary", [0, 1], [0.1, np.nan]), r"'p' is missing .* in 1 of 2 rows \(first: row 1\)"),
        (("binary", [0, 1], pd.array([0.1, None], dtype="Float64")), "'p' is missing"),
        (("binary", [0, 1], ["a", "b"]), "'p' is missing in some row, or holds what is no number"),
        (("regression", [0, 1], [np.inf, 1]), r"'p' is infinite in 1 of 2 rows \(first: row 0\)"),
        (("regression", [0, 1], [1.0]), "'p' has 1 rows, 'clicked' 2"),
        (("regression", [0, 1], [[1.0], [2.0]]), r"'p' has the shape \(2, 1\), and should hold one number a row"),
        (("binary", [0, 2], [0.1, 0.2]), "'clicked' is none of the classes 0..1 in 1 of 2 rows"),
        (("binary", [0, 0.5], [0.1, 0.2]), "'clicked' is none of the classes 0..1 in 1 of 2 rows"),
        (("binary", [0, 1], [-3.1, 0.2]), "'p' is outside of 0..1 in 1 of 2 rows .* logits need a sigmoid"),
        (("multiclass", [0, 3], [[0.5, 0.3, 0.2]] * 2), "'clicked' is none of the classes 0..2 in 1 of 2"),
        (("multiclass", [0, 1], [[0.5, 0.3, 0.1]] * 2), "'p' does not sum to 1 over the classes in 2 of 2"),
        (("multiclass", [0, 1], [[1.5, -0.5], [0, 1]]), "'p' is outside of 0..1 in 1 of 2"),
        (("multiclass", [0, 0], [[1.0], [1.0]]), "'p' holds probabilities of 1 class"),
        (("multiclass", [0, 1], [0.1, 0.9]), r"'p' has the shape \(2,\), and should hold one probability a class"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(arguments, message):
    with pytest.raises(DataError, match=message):
        Rows.of(*arguments, label="clicked", prediction="p")


@pytest.mark.parametrize(
    ("weights", "groups", "message"),
    [
        ([1, -1], None, "'weight' is negative in 1 of 2 rows"),
        ([1, np.nan], None, "'weight' is missing"),
        (None, ["a", None], r"'group' is missing .* in 1 of 2 rows \(first: row 1\)"),
        (None, np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"), "'group' is missing"),
        (None, np.array(["a", 1], dtype=object), "'group' holds keys that do not sort together"),
        (None, ["a"], "'group' has 1 rows, 'label' 2"),
        (None, [["a"], ["b"]], r"'group' has the shape \(2, 1\)"),
    ],
)
def test_weights_and_groups_are_checked_as_well(weights, groups, message):
    with pytest.raises(DataError, match=message):
        Rows.of("regression", [1, 2], [1, 2], weights=weights, groups=groups)


def test_an_unknown_task_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="task='ranking' is unknown: choose one of regression, binary, multiclass"):
        Rows.of("ranking", [1], [1])


def test_rows_without_groups_are_groups_of_their_own():
    rows = Rows.of("regression", [1, 2, 3], [1, 2, 3])
    assert rows.groups.tolist() == [0, 1, 2]
    assert rows.group_count == 3


def test_blocks_hold_whole_groups_and_nearly_as_many_each():
    rows = Rows.of("regression", np.arange(300), np.arange(300), groups=np.arange(300) // 3)
    blocks = rows.in_blocks(7, seed=1)
    assert blocks.group_count == 7
    for group in range(100):
        assert len(set(blocks.groups[rows.groups == group])) == 1
    sizes = np.bincount(blocks.groups) // 3
    assert sizes.max() - sizes.min() <= 1
    assert rows.in_blocks(100, seed=1) is rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [0, 1, 0]}, r"their labels differ in 1 of 3 rows \(first: row 2\)"),
        ({"weights": [1, 2, 1]}, r"their weights differ in 1 of 3 rows \(first: row 1\)"),
        ({"groups": ["a", "b", "b"]}, r"their groups differ in 1 of 3 rows \(first: row 1\)"),
        ({"task": "regression"}, "one has 3 rows of binary, the other 3 of regression"),
        ({"labels": [0], "predictions": [0.5], "groups": ["a"]}, "one has 3 rows of binary, the other 1 of binary"),
    ],
)
def test_predictions_of_other_rows_are_not_compared(change, message):
    same = {"task": "binary", "labels": [0, 1, 1], "predictions": [0.5] * 3, "groups": ["a", "a", "b"]}
    Rows.of(**same).check_same(Rows.of(**same | {"predictions": [0.1, 0.2, 0.3]}))
    with pytest.raises(DataError, match=message):
        Rows.of(**same).check_same(Rows.of(**same | change))
