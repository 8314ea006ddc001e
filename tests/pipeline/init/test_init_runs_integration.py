"""What init writes is run as it is, for every kind of label and of column, in every kind of file."""

from __future__ import annotations

import datetime as dt
import itertools
import json
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from sparkdl.pipeline import Pipeline
from sparkdl.tables.table import Table

ROWS = 240
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=ROWS)
CLASS = (X + RANDOM.normal(size=ROWS) / 2 > 0).astype(int)
THREE = np.digitize(X, [-0.5, 0.5])


def some(values, every=7):
    """The values with a gap in every so many rows."""
    return [None if n % every == 3 else value for n, value in enumerate(values)]


LABELS = {
    "whole 0 and 1": pa.array(CLASS),
    "whole 0 and 1 with gaps": pa.array(some(CLASS.tolist()), pa.int32()),
    "fractions 0 and 1 with gaps": pa.array(some(map(float, CLASS))),
    "fractions 0 and 1 with NaN": pa.array([np.nan if n % 7 == 3 else float(value) for n, value in enumerate(CLASS)]),
    "fractions of one place": pa.array(CLASS.astype(np.float32)),
    "decimals 0 and 1": pa.array([Decimal(int(value)) for value in CLASS], pa.decimal128(3, 0)),
    "truth": pa.array(CLASS.astype(bool)),
    "truth with gaps": pa.array(some(CLASS.astype(bool).tolist())),
    "text of two": pa.array(np.where(CLASS, "left", "stayed")),
    "text of three with gaps": pa.array(some(np.array(["a", "b: c", "it's"])[THREE].tolist())),
    "whole 0 to 2": pa.array(THREE),
    "fractions 0 to 2 with gaps": pa.array(some(map(float, THREE))),
    "decimals 1 to 3": pa.array([Decimal(int(value + 1)) for value in THREE], pa.decimal128(5, 2)),
    "fractions": pa.array(X * 3 + 1),
    "fractions with gaps and NaN": pa.array(
        [np.nan if n % 9 == 2 else value for n, value in enumerate(some(X.tolist()))], from_pandas=False
    ),
    "decimals": pa.array([Decimal(round(value * 100)) / 100 for value in X], pa.decimal128(9, 2)),
    "whole": pa.array((X * 1000).astype(np.int64)),
}
KINDS = ("parquet", "csv", "json", "delta")


def columns():
    """A column of every type that a table may have."""
    days = [dt.date(2026, 1, 1) + dt.timedelta(days=n // 8) for n in range(ROWS)]
    times = [dt.datetime(2026, 1, 1, n % 24, n % 60) + dt.timedelta(days=n // 8) for n in range(ROWS)]
    return {
        "id": pa.array(range(ROWS)),
        "x": pa.array([np.nan if n % 11 == 5 else value for n, value in enumerate(X)]),
        "x float": pa.array(X.astype(np.float32)),
        "price": pa.array(some([Decimal(n * 7 % 900) / 100 for n in range(ROWS)]), pa.decimal128(12, 2)),
        "small": pa.array(some([n % 100 - 50 for n in range(ROWS)]), pa.int8()),
        "large": pa.array([int(n) for n in RANDOM.integers(0, 2**50, ROWS)]),
        "flag": pa.array(some([n % 3 == 0 for n in range(ROWS)])),
        "town": pa.array(some([["Köln", "a, b", 'the "c"'][n % 3] for n in range(ROWS)])),
        "day": pa.array(days, pa.date32()),
        "born": pa.array(some(days), pa.date32()),
        "local": pa.array(times, pa.timestamp("us")),
        "utc": pa.array(times, pa.timestamp("us", "UTC")),
        "zoned": pa.array(some(times), pa.timestamp("us", "Europe/Berlin")),
        "numbers": pa.array([[float(n), 1.5] for n in range(ROWS)]),
        "tags": pa.array([[n % 5, n % 3][: n % 3] for n in range(ROWS)], pa.list_(pa.int64())),
        "words": pa.array([["a", "b"][: n % 3] for n in range(ROWS)]),
        "nested": pa.array([{"a": n, "b": {"c": "d"}} for n in range(ROWS)]),
        "several": pa.array([[{"a": n}] for n in range(ROWS)]),
        "pairs": pa.array([[("k", n)] for n in range(ROWS)], pa.map_(pa.string(), pa.int64())),
        "bytes": pa.array([b"\x00\xff"] * ROWS),
        "nothing": pa.nulls(ROWS, pa.string()),
    }


def written(folder, kind, label):
    """The table with a label, as a file of a kind: text files hold what such files hold of it."""
    table, place = pa.table({**columns(), "y": LABELS[label]}), folder / f"rows.{kind}"
    if kind == "delta":
        table = table.rename_columns([name.replace(" ", "_") for name in table.column_names])
        Table(str(place)).append(table)
    elif kind == "parquet":
        pq.write_table(table, place)
    elif kind == "csv":
        flat = table.select([one.name for one in table.schema if not pa.types.is_nested(one.type)]).drop(["bytes"])
        pacsv.write_csv(flat, place)
    else:
        rows = table.drop(["bytes", "pairs"]).to_pylist()
        place.write_text("\n".join(json.dumps(as_json(row)) for row in rows))
    return str(place)


def as_json(value):
    """A value as JSON has it: no NaN, dates as texts, decimals as numbers."""
    if isinstance(value, dict):
        return {name: as_json(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [as_json(inner) for inner in value]
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, dt.date):
        return value.isoformat()
    return None if isinstance(value, float) and np.isnan(value) else value


def made(folder, kind, label):
    """The pipeline that init writes, which check calls sound."""
    pipeline = Pipeline.init(folder / "theirs", written(folder, kind, label), "y")
    assert pipeline.check() == ""
    return Pipeline.load(folder / "theirs" / "theirs.yaml", ["train.verbose=0"])


def rows_of(spark, folder, kind, label, **asked):
    """A run of what init writes, which loses no row but those whose number to learn is NaN; a missing label is fine."""
    pipeline = made(folder, kind, label)
    done = pipeline.run(spark, **asked)
    task, values = pipeline.spec.label["y"].type, LABELS[label]
    nan = pc.sum(pc.is_nan(values.cast(pa.float64()))).as_py() if pa.types.is_floating(values.type) else 0
    aside = nan if task == "regression" and kind in ("parquet", "delta") else 0  # text files have no NaN of their own
    assert (done.rows["read"], done.rows["kept"]) == (ROWS, ROWS - aside), done.rows
    return done


FEW = [
    ("parquet", "fractions 0 and 1 with gaps"),
    ("csv", "fractions 0 to 2 with gaps"),
    ("json", "text of three with gaps"),
    ("delta", "decimals 0 and 1"),
]
ALL = list(itertools.product(KINDS, LABELS))


@pytest.mark.parametrize("kind", KINDS)
def test_what_init_writes_is_analysed_by_spark_and_found_sound(spark, tmp_path, kind):
    """Every label in some kind of file, and every kind with labels of all tasks."""
    check_labels(tmp_path, kind, list(LABELS)[KINDS.index(kind) :: len(KINDS)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_init_writes_for_every_label_in_every_kind_of_file_is_found_sound(spark, tmp_path, kind):
    check_labels(tmp_path, kind, LABELS)


def check_labels(folder, kind, labels):
    for number, label in enumerate(labels):
        (folder / str(number)).mkdir()
        made(folder / str(number), kind, label)


@pytest.mark.parametrize(
    ("kind", "label"), [FEW[0], *(pytest.param(*pair, marks=pytest.mark.slow) for pair in FEW[1:])]
)
def test_what_init_writes_becomes_shards_as_it_is(spark, tmp_path, kind, label):
    rows_of(spark, tmp_path, kind, label, until="shards")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "label"), [pair for pair in ALL if pair not in FEW])
def test_what_init_writes_for_every_label_in_every_kind_of_file_becomes_shards(spark, tmp_path, kind, label):
    rows_of(spark, tmp_path, kind, label, until="shards")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "label"), [("parquet", "fractions 0 and 1 with NaN"), ("csv", "decimals"), *FEW[2:]])
def test_what_init_writes_predicts_as_it_is(spark, tmp_path, kind, label):
    done = rows_of(spark, tmp_path, kind, label)
    assert done.outcome in ("promoted", "not promoted")
    assert sum(done.predictions.values()) > 0 or done.outcome == "not promoted"


def test_decimal_commas_are_read_as_the_numbers_that_they_are(spark, tmp_path):
    def german(value, places):
        return f"{value:,.{places}f}".translate(str.maketrans(",.", ".,"))

    amounts, shares = X * 3000, [None if n % 9 == 3 else round(n % 100 / 100, 2) for n in range(ROWS)]
    lines = ["id;betrag;stück;anteil;y"]
    for n in range(ROWS):
        share = "" if shares[n] is None else german(shares[n], 2)
        lines.append(f"{n};{german(amounts[n], 2)};{german(n * 17 + 1, 0)};{share};{german(X[n], 3)}")
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    pipeline = Pipeline.init(tmp_path / "theirs", str(tmp_path / "rows.csv"), "y")
    assert {name: type(one).__name__ for name, one in pipeline.spec.features.items()} == dict.fromkeys(
        ("betrag", "stück", "anteil"), "Number"
    )
    assert pipeline.check() == ""
    done = pipeline.run(spark, until="ingest")
    assert (done.rows["read"], done.rows["kept"]) == (ROWS, ROWS)
    rows = sorted(Table(done.places["clean"]).rows().to_pylist(), key=lambda row: row["id"])
    assert [round(float(row["betrag"]), 2) for row in rows] == [round(value, 2) for value in amounts.tolist()]
    assert [float(row["stück"]) for row in rows] == [n * 17 + 1 for n in range(ROWS)]
    assert [None if row["anteil"] is None else float(row["anteil"]) for row in rows] == shares
