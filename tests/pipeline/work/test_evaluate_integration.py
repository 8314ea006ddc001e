"""The guesses without a model come from the training rows, weighted as they train, and for keys that come again."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import functions as F

from sparkdl.pipeline.file import loads
from sparkdl.pipeline.work import evaluate
from sparkdl.pipeline.work.labels import FittedLabel, Labels

LABELS = Labels(
    labels=(
        FittedLabel(name="sales", type="regression"),
        FittedLabel(name="open", type="binary", classes=("no", "yes")),
        FittedLabel(name="kind", type="multiclass", classes=("a", "b", "c")),
    )
)


def spec_of(source="key: [store, day], time: day", split="{by: time}", more=""):
    return loads(f"""
    source: {{kind: parquet, path: rows, {source}}}
    features: {{x: number}}
    label: {{sales: regression, open: binary, kind: multiclass}}
    split: {split}
    {more}
    """).spec


@pytest.fixture(scope="module")
def rows(spark):
    random = np.random.default_rng(0)
    table = pd.DataFrame(
        {"store": np.repeat([1, 2, None], 10), "day": pd.date_range("2026-03-01", periods=10).tolist() * 3}
    )
    table["day"] = table["day"].dt.date
    table["sales"] = random.gamma(2, 5, 30)
    table["open"], table["kind"] = random.choice(["no", "yes"], 30), random.choice(["a", "b", "c"], 30)
    table["w"] = random.integers(0, 4, 30).astype(float)
    return spark.createDataFrame(table), table


@pytest.mark.parametrize("weighted", [False, True])
def test_labels_of_the_training_rows_are_summed_up_with_their_weights(rows, weighted):
    frame, table = rows
    found = evaluate.label_summaries(frame, spec_of(more="weight: w" if weighted else ""), LABELS, 30)
    weights = table.w if weighted else np.ones(30)
    assert found["sales"].mean == pytest.approx(np.average(table.sales, weights=weights), rel=1e-6)
    assert found["open"].shares["yes"] == pytest.approx(np.average(table.open == "yes", weights=weights))
    assert found["kind"].shares == pytest.approx(
        {name: np.average(table.kind == name, weights=weights) for name in "abc"}
    )
    if not weighted:
        assert found["sales"].median == pytest.approx(np.median(table.sales), rel=1e-6)


@pytest.mark.parametrize("name", ["_label", "_group", "_slice_0", "_last"])
def test_a_column_of_the_user_is_judged_with_its_own_values(rows, name):
    """The model and the trees read it; once it was the label that they were given."""
    frame = rows[0].withColumn(name, F.lit(-1.0))
    judged, kept = evaluate.held_out(frame, spec_of(more="report: {slices: [store]}"), LABELS.labels[0], 30)
    assert judged.where(F.col(name) != -1.0).count() == 0
    assert name not in kept


@pytest.mark.parametrize("most", [30, 12])
def test_raw_columns_of_as_many_rows_as_trees_take_lie_beside_what_judges(rows, most):
    """With names that are no names of SQL, and values that are missing."""
    frame, table = rows
    named = frame.withColumn("a.`b", F.col("sales"))
    judging, kept = evaluate.held_out(named, spec_of(source="time: day"), LABELS.labels[0], 30, ["store", "a.`b"], most)
    assert evaluate.RAW in kept
    judged = judging.select(evaluate.RAW, evaluate.LABEL).toArrow()
    drawn = judged.filter(judged[evaluate.RAW].is_valid())
    assert drawn.num_rows == 30 if most == 30 else 4 < drawn.num_rows < 20
    raw = [row[evaluate.RAW] for row in drawn.to_pylist()]
    assert {name for row in raw for name in row} == {"store", "a.`b"}
    np.testing.assert_allclose([row["a.`b"] for row in raw], drawn[evaluate.LABEL].to_numpy(), rtol=1e-6)
    if most == 30:
        assert sum(row["store"] is None or np.isnan(row["store"]) for row in raw) == table.store.isna().sum()


def test_the_newest_training_label_of_the_same_key_is_beside_each_row(spark, rows):
    frame, table = rows
    held_out = spark.createDataFrame(pd.DataFrame({"store": [1.0, 2.0, None, 9.0], "x": [1, 2, 3, 4]}))
    found = evaluate.with_last_values(held_out, frame, spec_of(), LABELS).toPandas().set_index("x")
    newest = table[table.day == table.day.max()].sales.to_list()
    assert found["__sparkdl_last"].to_list()[:3] == pytest.approx(newest, rel=1e-6)  # a missing store is one, too
    assert np.isnan(found.loc[4, "__sparkdl_last"])
    assert len(found) == 4


@pytest.mark.parametrize(
    ("source", "split"),
    [
        ("key: trip, time: day", "{by: time}"),  # no key comes again
        ("key: day, time: day", "{by: time}"),  # nor does anything beside the time
        ("key: [store, day], time: day", "{by: hash}"),  # what was later may have trained
    ],
)
def test_rows_without_a_key_that_comes_again_have_no_last_value(rows, source, split):
    frame, _ = rows
    assert evaluate.with_last_values(frame, frame, spec_of(source, split), LABELS) is frame
