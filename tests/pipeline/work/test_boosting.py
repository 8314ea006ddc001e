"""LightGBM gets what the model gets: weights, classes in order, categories as such, missing values as they are."""

from __future__ import annotations

import time

import lightgbm
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from sparkdl.features.fitted import fit
from sparkdl.features.statistics import statistics_of
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.work import boosting
from sparkdl.pipeline.work.evaluate import CHALLENGER, RAW, Judged
from sparkdl.pipeline.work.labels import FittedLabel

LABELS = {
    "regression": FittedLabel(name="y", type="regression"),
    "binary": FittedLabel(name="y", type="binary", classes=("no", "yes")),
    "multiclass": FittedLabel(name="y", type="multiclass", classes=("a", "b", "c")),
}


def spec_of(task="regression", more=""):
    return loads(f"""
    source: {{kind: parquet, path: rows}}
    features: {{x: number, shop: category, day: {{type: date_parts, parts: [year, month]}}, place: vector}}
    label: {{y: {task}}}
    {more}
    """).spec


def rows_of(count, seed=0):
    random = np.random.default_rng(seed)
    frame = pd.DataFrame({"x": random.normal(size=count), "shop": random.choice(["n", "s", "w", "e"], count)})
    frame["day"] = pd.Timestamp("2026-01-01") + pd.to_timedelta(random.integers(0, 700, count), "D")
    frame["place"] = list(random.normal(size=(count, 2)))
    frame["__sparkdl_weight"] = 1.0
    return frame


def arrow(frame):
    return pa.Table.from_pandas(frame, preserve_index=False)


@pytest.fixture(scope="module")
def features():
    spec = spec_of()
    return fit(spec.features, statistics_of(arrow(rows_of(2000)), spec.features))


def test_trees_get_numbers_as_they_came_and_what_is_missing_or_unseen_as_missing(features):
    raw = pa.table({
        "x": pa.array([1e9, None, float("nan")]),
        "shop": ["n", "elsewhere", None],
        "day": pa.array([pd.Timestamp("2026-03-05"), None, pd.Timestamp("1999-01-01")]),
        "place": pa.array([[1.0, 2.0], None, [3.0, None]], pa.list_(pa.float64())),
    })  # fmt: skip
    found = boosting.training_matrix(raw, features)
    nan = np.nan
    shop = found[0, 1]
    assert shop in (1, 2, 3, 4)
    expected = [[1e9, shop, 1, 3, 1, 2], [nan, nan, nan, nan, nan, nan], [nan, nan, nan, 1, 3, nan]]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("weight", [None, "w"])
def test_trees_are_measured_on_the_judging_rows_that_came_with_raw_columns(weight):
    raw = pa.array(
        [{"x": 1.0, "shop": "n"}, None, {"x": None, "shop": None}], pa.struct({"x": pa.float64(), "shop": pa.string()})
    )
    table = pa.table({"__sparkdl_label": [1.0, 2.0, 3.0], "w": [5, 6, 7], RAW: raw, CHALLENGER: [[0.1], [0.2], [0.3]]})
    judging = Judged(table=table, labels={CHALLENGER: LABELS["regression"]})
    measured = boosting._of_judged(judging, spec_of(more=f"weight: {weight}" if weight else ""))
    assert measured.to_pydict() == {
        "x": [1.0, None],
        "shop": ["n", None],
        "__sparkdl_label": [1.0, 3.0],
        "__sparkdl_weight": [5, 7] if weight else [1.0, 1.0],
        "__sparkdl_output": [[0.1], [0.3]],
    }


@pytest.mark.parametrize("task", ["regression", "binary", "multiclass"])
def test_trees_find_what_is_in_categories_and_in_what_is_missing(features, task):
    tables = []
    for seed, count in enumerate((4000, 1000, 1000)):
        frame = rows_of(count, seed)
        hidden = np.random.default_rng(seed).random(count) < 0.3
        odd = frame.shop.isin(["n", "e"]).to_numpy()
        if task == "regression":
            frame["__sparkdl_label"] = 10.0 * odd + 5.0 * hidden + np.random.default_rng(seed + 5).normal(size=count)
        else:
            frame["__sparkdl_label"] = (odd & hidden).astype(float) + (odd if task == "multiclass" else 0.0)
            unlike = np.random.default_rng(seed + 9).random(count) < 0.1  # of which nothing can know
            frame.loc[unlike, "__sparkdl_label"] = 0.0
        frame.loc[hidden, "x"] = np.nan
        wide = np.zeros((count, 3)) if task == "multiclass" else np.zeros((count, 1))
        tables.append(arrow(frame).append_column("__sparkdl_output", pa.array(wide.tolist(), pa.list_(pa.float64()))))
    found = boosting.train_trees(tables, spec_of(task), features, LABELS[task])
    assert found.rows == 4000
    assert found.columns == 6
    assert found.model.rows == found.trees.rows == 1000
    if task == "regression":
        assert found.trees.values["rmse"] < 1.15 < 4 < found.model.values["rmse"]
    else:
        assert found.trees.values["log_loss"] < 0.35
        classes = 3 if task == "multiclass" else 2
        assert found.model.values["log_loss"] == pytest.approx(np.log(classes), rel=1e-6)  # of outputs that are all 0
    assert 0 < found.rounds <= boosting.ROUNDS
    assert not found.out_of_time


def _with_labels(count, seed, weights):
    """Rows of which each weight has a label of its own."""
    frame = rows_of(count, seed)
    frame["__sparkdl_weight"] = np.random.default_rng(seed).choice(weights, count)
    frame["__sparkdl_label"] = np.where(frame["__sparkdl_weight"] > 0, 1.0, 100.0) + frame.x
    return arrow(frame).append_column("__sparkdl_output", pa.array(np.zeros(count)))


def test_rows_without_weight_neither_train_nor_stop_nor_judge(features):
    tables = [_with_labels(1500, seed, [0.0, 2.0]) for seed in range(3)]
    found = boosting.train_trees(tables, spec_of(), features, LABELS["regression"])
    assert found.trees.values["rmse"] < 0.3
    assert found.model.values["mae"] < 3


@pytest.mark.parametrize(("loss", "objective"), [("mse", "regression"), ("mae", "regression_l1"), ("huber", "huber")])
def test_trees_are_trained_for_the_loss_of_the_label(features, loss, objective, monkeypatch):
    asked = []
    train = lightgbm.train
    monkeypatch.setattr(lightgbm, "train", lambda parameters, *more, **named: (
        asked.append(parameters["objective"]) or train(parameters, *more, **named)
    ))  # fmt: skip
    spec = spec_of(f"{{type: regression, loss: {loss}}}")
    tables = [_with_labels(200, seed, [1.0]) for seed in range(3)]
    boosting.train_trees(tables, spec, features, LABELS["regression"])
    assert asked == [objective]


@pytest.mark.parametrize(("many", "rate"), [(200 * 6, 0.05), (200 * 6 - 1, 0.1)])
def test_many_values_are_learned_at_lightgbms_own_rate(features, many, rate, monkeypatch):
    rates = []
    train = lightgbm.train
    monkeypatch.setattr(lightgbm, "train", lambda parameters, *more, **named: (
        rates.append(parameters["learning_rate"]) or train(parameters, *more, **named)
    ))  # fmt: skip
    monkeypatch.setattr(boosting, "MANY_VALUES", many)
    tables = [_with_labels(200, seed, [1.0]) for seed in range(3)]
    boosting.train_trees(tables, spec_of(), features, LABELS["regression"])
    assert rates == [rate]


def test_the_clock_ends_a_training_with_the_trees_that_there_are(features):
    tables = [_with_labels(500, seed, [1.0]) for seed in range(3)]
    found = boosting.train_trees(tables, spec_of(), features, LABELS["regression"], seconds=0.0)
    assert (found.rounds, found.out_of_time) == (1, True)
    assert "stopped by the clock" in found.conditions()


def test_threads_that_hinder_each_other_are_not_used():
    assert boosting.faster_threads(4, lambda threads: time.sleep(0.05 * (threads - 1))) == 1
    assert boosting.faster_threads(4, lambda threads: time.sleep(0.2 / threads)) == 4
    assert boosting.faster_threads(0, lambda threads: pytest.fail("nothing is to be chosen")) == 1


def test_trees_are_the_same_with_one_thread_and_with_several(features, monkeypatch):
    """Rounds with other threads come before, on the same rows."""
    tables = [_with_labels(3000, seed, [1.0, 3.0]) for seed in range(3)]
    monkeypatch.setattr(boosting, "VALUES_OF_A_THREAD", 1)
    monkeypatch.setattr(boosting.os, "sched_getaffinity", lambda process: {0, 1, 2})
    found = []
    for chosen in (1, 3):

        def train_both(most, train, chosen=chosen):
            train(most)
            train(1)
            return chosen

        monkeypatch.setattr(boosting, "faster_threads", train_both)
        found.append(boosting.train_trees(tables, spec_of(), features, LABELS["regression"]))
    assert found[0].rounds > boosting.ROUNDS_TO_COMPARE
    assert (found[0].rounds, found[0].trees) == (found[1].rounds, found[1].trees)
