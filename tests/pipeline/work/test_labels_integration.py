"""What labels may be: missing ones are left out and counted, impossible ones are refused."""

from __future__ import annotations

import msgspec
import pytest
from pyspark.sql import functions as F

from sparkdl.errors import DataError
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.rows.parts import PART
from sparkdl.pipeline.spec.data import prediction_columns
from sparkdl.pipeline.steps import score
from sparkdl.pipeline.work.labels import (
    FittedLabel,
    LabelCounts,
    NoLabelsError,
    check_labels,
    fit_labels,
    labelled,
)
from sparkdl.pipeline.work.shard_rows import _LabelledRows, _only_read


def labels_of(**types):
    named = ", ".join(f"{name}: {kind}" for name, kind in types.items())
    text = f"name: a\nroot: b\nsource: {{kind: csv, path: c}}\nfeatures: {{x: number}}\nlabel: {{{named}}}\n"
    return loads(text, ["publish.label=y"] if len(types) > 1 else []).spec.label


def checked(rows, labels, part, weight=None):
    return checked_parts(rows.withColumn(PART, F.lit(part)), labels, weight, [part])[part]


def checked_parts(rows, labels, weight, parts):
    """By part of the rows how many have labels and how many have none, checked as those of shards are."""
    columns = tuple(dict.fromkeys([*labels.names, *filter(None, [weight])]))
    task = _LabelledRows(_only_read, columns, labels, weight, {part: [part] for part in parts}, PART)
    [report] = task(rows.toArrow().to_batches())
    counts = msgspec.json.decode(report.column(1)[0].as_py(), type=dict[str, LabelCounts])
    for part, of_part in counts.items():
        check_labels(of_part, part, labels, weight)
    return {part: (of_part.labelled, of_part.unlabelled) for part, of_part in counts.items()}


def test_rows_without_a_label_do_not_count_in_any_label(spark):
    rows = spark.createDataFrame([(1.0, "a"), (3.0, "b"), (None, "c"), (5.0, None)], "y double, z string")
    fitted = fit_labels(rows, labels_of(y="regression", z="binary") | {"z": labels_of(z="multiclass")["z"]})
    number, classes = fitted
    assert (number.mean, number.deviation, classes.classes) == (2.0, 1.0, ("a", "b"))
    assert checked(rows, fitted, "train") == (2, 2)
    assert labelled(rows, fitted.names).count() == 2
    with pytest.raises(NoLabelsError, match="none of the 1 rows to validate has a label yet: wait for labels"):
        checked(rows.where("y IS NULL"), fitted, "validate")
    with pytest.raises(NoLabelsError, match="none of the 1 rows to train has a label yet"):
        fit_labels(rows.where("y IS NULL"), labels_of(y="regression"))
    with pytest.raises(DataError, match="split leaves no clean row to validate") as refused:
        checked(rows.where("y < 0"), fitted, "validate")
    assert not isinstance(refused.value, NoLabelsError)


def test_labels_that_a_loss_cannot_take_are_refused_by_name_and_value(spark):
    rows = spark.createDataFrame([(1.0, "a"), (3.0, "b"), (None, "c")], "y double, z string")
    fitted = fit_labels(rows, {"y": labels_of(y="regression")["y"], "z": labels_of(z="multiclass")["z"]})
    later = spark.createDataFrame([(1.0, "x"), (float("nan"), "a"), (None, "y")], "y double, z string")
    with pytest.raises(DataError, match="label 'y': 1 of the rows to validate have one that is no finite float32"):
        checked(later, fitted, "validate")
    with pytest.raises(
        DataError, match="label 'z': 1 of the rows to validate have one that training never saw, such as 'x'"
    ):
        checked(later.where("y = 1"), fitted, "validate")


def test_each_part_of_one_reading_is_checked_and_rows_of_none_are_not(spark):
    columns = f"{PART} string, y double, w double"
    good = [("train", 1.0, 1.0), ("train", 2.0, 0.0), ("train", None, -1.0), ("validate", 3.0, 2.0)]
    fitted = fit_labels(spark.createDataFrame(good, columns), labels_of(y="regression"))

    checks = (fitted, "w", ["train", "validate"])

    def check(*more, without=()):
        rows = spark.createDataFrame([*(row for row in good if row[0] not in without), *more], columns)
        return checked_parts(rows, *checks)

    counts = {"train": (2, 1), "validate": (1, 0)}
    assert check((None, float("nan"), -1.0), (None, None, None)) == counts
    with pytest.raises(DataError, match="label 'y': 1 of the rows to validate have one that is no finite float32"):
        check(("validate", float("inf"), 1.0))
    with pytest.raises(DataError, match="weight 'w' is missing, negative or not finite in 2 of the rows to train"):
        check(("train", 4.0, None), ("train", 4.0, -2.0), ("validate", 4.0, -2.0))
    with pytest.raises(DataError, match="weight 'w' is 0 in all rows to validate: there is nothing to validate"):
        check(("validate", 4.0, 0.0), ("validate", None, 5.0), without=["validate"])
    with pytest.raises(NoLabelsError, match="none of the 1 rows to validate has a label yet"):
        check(("validate", None, 1.0), without=["validate"])
    with pytest.raises(DataError, match="split leaves no clean row to train"):
        check(without=["train"])


@pytest.mark.parametrize(
    ("kind", "values", "sentence"),
    [
        ("regression", [1.5] * 4, "label 'y' is 1.5 in all 4 training rows: there is nothing to learn"),
        ("regression", [1e39, -1e308, 1e308], "label 'y' is NaN, infinite or too large in some of 3 training rows"),
        ("binary", ["yes"] * 4, "label 'y' is 'yes' in all 4 training rows: there is nothing to learn"),
        ("multiclass", ["a"] * 4, "label 'y' is 'a' in all 4 training rows: there is nothing to learn"),
        (
            "multiclass",
            [f"kind {n}" for n in range(10_001)],
            "label 'y' has more than 10,000 classes in the training",
        ),
    ],
    ids=["one number", "beyond float32", "one of two", "one class", "many classes"],
)
def test_labels_that_cannot_be_learned_are_refused(spark, kind, values, sentence):
    rows = spark.createDataFrame([(value,) for value in values], f"y {'double' if kind == 'regression' else 'string'}")
    with pytest.raises(DataError) as refused:
        fit_labels(rows, labels_of(y=kind))
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("kind", ["regression", "binary", "multiclass"])
def test_predictions_have_the_columns_that_a_file_must_leave_to_them(spark, kind):
    frame = spark.sql(f"SELECT {'array(0.0D, 1.0D)' if kind == 'multiclass' else '0.0D'} AS o")
    names = frame.select(*score._columns(FittedLabel(name="y", type=kind, classes=("a", "b")), frame.o, "y_")).columns
    own = prediction_columns({"y": kind, "z": "regression"})
    assert {*names, *score._OWN} - {score.WINDOW} == {*own} - {"z_prediction"}
