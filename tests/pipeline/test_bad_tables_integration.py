"""Tables that hold what no table should: a run of what init writes is right, or refuses in one sentence."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.errors import SparkdlError
from sparkdl.pipeline import Pipeline
from sparkdl.tables.table import Table

ROWS = 300
X = np.random.default_rng(0).normal(size=ROWS)
FOLD = np.array(["train", "train", "train", "validate", "score"])[np.arange(ROWS) % 5]
NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
SPLIT = "split={by: column, column: fold, train: [train], validate: [validate], score: [score]}"


ASKED = [SPLIT, "train.verbose=0", "train.baseline=off"]


def missing_in_training(values):
    """The values, but missing in the training rows."""
    return [None if fold == "train" else value for fold, value in zip(FOLD, values, strict=True)]


def pipeline(folder, columns):
    """What init makes of a table with the column ``y``, and no more."""
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    Pipeline.init(folder / "theirs", str(folder / "rows.parquet"), "y")
    return Pipeline.load(folder / "theirs" / "theirs.yaml", ["train.verbose=0"])


@pytest.mark.parametrize(
    ("label", "sentence"),
    [
        (pa.array([1.5] * ROWS), "the label 'y' is 1.5 in every row: name a column with numbers or classes"),
        (pa.array(["yes"] * ROWS), "the label 'y' is 'yes' in every row"),
        (pa.nulls(ROWS, pa.float64()), "the label 'y' is missing in every row: name a column"),
        (pa.nulls(ROWS, pa.string()), "the label 'y' is missing in every row: name a column"),
        (pa.array([f"kind {n}" for n in range(10_000)]), "the label 'y' has 10,000 different texts: name a column"),
    ],
    ids=["one number", "one text", "no number", "no text", "many texts"],
)
def test_a_label_that_cannot_be_learned_is_refused_by_init(tmp_path, label, sentence):
    with pytest.raises(SparkdlError) as refused:
        pipeline(tmp_path, {"x": np.resize(X, len(label)), "y": label})
    assert str(refused.value).startswith(sentence)


def test_three_rows_are_too_few(spark, tmp_path):
    theirs = pipeline(tmp_path, {"x": [1.0, 4.0, 5.0], "y": [1.0, 3.0, 2.0]})
    with pytest.raises(SparkdlError, match=r"split leaves no clean row to (train|validate): give \1 more, or wait"):
        theirs.run(spark)


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    """Numbers beyond float32 and dates of the year 9999 among others, a town that the scored rows alone have."""
    folder = tmp_path_factory.mktemp("strange")
    days = [NEVER if n % 3 == 0 else datetime(2026, 1, 1 + n % 28, n % 24, tzinfo=UTC) for n in range(ROWS)]
    columns = {
        "id": np.arange(ROWS),
        "x": X,
        "amount": np.where(np.arange(ROWS) % 150 == 7, 1e100, np.exp(X * 2)),
        "ends": pa.array(days, pa.timestamp("us", "UTC")),
        "town": np.where(FOLD == "score", "new", np.array(["a", "b"])[np.arange(ROWS) % 2]),
        "fold": FOLD,
        "late number": missing_in_training(X.tolist()),
        "late word": missing_in_training(["a", "b"] * (ROWS // 2)),
        "late day": pa.array(missing_in_training(days), pa.timestamp("us", "UTC")),
        "y": 3 * X + np.random.default_rng(1).normal(size=ROWS) / 10,
    }
    pipeline(folder, columns)
    return folder / "theirs" / "theirs.yaml"


@pytest.mark.slow
def test_numbers_beyond_float32_dates_of_the_year_9999_and_unseen_categories_are_predicted(spark, strange):
    lines = strange.read_text().splitlines()
    assert sum(line.startswith(("  amount", "  ends", "  town", "  late ")) for line in lines) >= 6
    known = strange.with_name("known.yaml")
    known.write_text("\n".join(line for line in lines if not line.startswith("  late ")))
    done = Pipeline.load(known, [*ASKED, "name=known"]).run(spark)
    assert done.outcome == "promoted", done.message
    predictions = Table(done.places["predictions"]).rows().to_pandas()
    assert len(predictions) == np.sum(FOLD == "score")
    assert np.isfinite(predictions.prediction).all()
    assert np.corrcoef(predictions.prediction, X[predictions.id])[0, 1] > 0.9


@pytest.mark.parametrize(
    ("name", "kind", "sentence"),
    [
        ("late number", "number", "has a value in 0 of 180 training rows: leave it out"),
        (
            "late word",
            "category",
            "has no value that occurs 2 times in 180 training rows: lower min_count, or leave it out",
        ),
        ("late day", "date_parts", "has a value in 0 of 180 training rows: leave it out"),
    ],
)
def test_a_column_that_only_training_rows_lack_is_refused_by_name(spark, strange, name, kind, sentence):
    theirs = Pipeline.load(strange, [*ASKED, f"features={{x: number, {name}: {kind}}}"])
    with pytest.raises(SparkdlError, match=f"the feature '{name}'") as refused:
        theirs.run(spark, until="features")
    assert sentence in str(refused.value)
