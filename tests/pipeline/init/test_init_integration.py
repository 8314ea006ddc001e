"""What init writes for tables that are not ours trains, publishes and scores as it is, and predicts as it should."""

from __future__ import annotations

import json
import math
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.pipeline import Pipeline
from sparkdl.tables.table import Table

HELD = ["train.verbose=0"]


def run_of(spark, folder, name, *overrides):
    """Check, plan and run the file that init wrote."""
    pipeline = Pipeline.load(folder / name / f"{name}.yaml", [*HELD, *overrides])
    assert pipeline.check() == ""
    assert not pipeline.plan().nothing_new
    return pipeline.run(spark)


@pytest.mark.slow
def test_a_strangers_csv_file_is_predicted_without_a_change(spark, tmp_path):
    """Names with everything in them, numbers that are missing, classes that are words, a key that counts."""
    random = np.random.default_rng(0)
    rows = 240
    frame = pd.DataFrame({"Nr. id": np.arange(rows), "größe, in `mm`": random.normal(size=rows).round(3)})
    frame["${HOME} a.b"] = random.choice(["x", "y: z", "#w"], rows)
    frame['it\'s: "ok"?'] = np.where(frame.iloc[:, 1] + (frame.iloc[:, 2] == "x") > 0.3, "good one", "not: good")
    frame.iloc[::20, 1] = np.nan
    frame.to_csv(tmp_path / "t.csv", index=False)
    Pipeline.init(tmp_path / "strange", str(tmp_path / "t.csv"))
    done = run_of(spark, tmp_path, "strange", "train.epochs=6", "train.learning_rate=0.01")
    assert done.outcome == "promoted", done.message
    assert (done.rows["read"], done.rows["kept"]) == (rows, rows)
    assert done.evaluated.decision.challenger.values["auc"] > 0.9
    predictions = Table(done.places["predictions"]).rows().to_pandas().set_index("Nr. id")
    actual = frame.set_index("Nr. id").iloc[:, -1][predictions.index]
    assert set(predictions.prediction) == {"good one", "not: good"}
    assert (predictions.prediction == actual).mean() > 0.7


def held_out(name, label):
    """What a plain linear model of scikit-learn reaches on rows that it was not shown, averaged over ten splits."""
    from sklearn import datasets
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    table = getattr(datasets, f"load_{name}")(as_frame=True)
    model = Ridge() if label == "r2" else LogisticRegression(max_iter=1000)
    return cross_val_score(
        make_pipeline(StandardScaler(), model), table.data, table.target, scoring=label, cv=10
    ).mean()


def written_as(kind, name, folder):
    """One of scikit-learn's tables as a user would have it: as it is, with all its names."""
    from sklearn import datasets

    frame = getattr(datasets, f"load_{name}")(as_frame=True).frame
    place = folder / (f"{name}.csv" if kind == "csv" else name)
    if kind == "csv":
        frame.to_csv(place, index=False)
    elif kind == "delta":
        frame.columns = [column.replace(" ", "_") for column in frame.columns]  # Delta allows no blanks
        Table(str(place)).append(pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None))
    else:
        place.mkdir()
        frame.to_parquet(place / "rows.parquet")
    return str(place)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "csv", "delta"])
@pytest.mark.parametrize(
    ("name", "metric", "margin"),
    [("breast_cancer", "accuracy", 0.05), ("diabetes", "r2", 0.1), ("wine", "accuracy", 0.08)],
)
def test_tables_of_scikit_learn_are_predicted_about_as_well_as_by_its_own_models(
    spark, tmp_path, name, metric, margin, kind
):
    table = written_as(kind, name, tmp_path)
    Pipeline.init(tmp_path / "theirs", table, "target")
    done = run_of(spark, tmp_path, "theirs")
    assert done.outcome == "promoted", done.message
    reached, known = done.evaluated.decision.challenger.values[metric], held_out(name, metric)
    assert reached > known - margin, (reached, known)
    predictions = Table(done.places["predictions"]).rows().to_pandas()
    assert len(predictions) == done.predictions["all"] > 20
    if metric == "accuracy":  # rows that neither training nor the choice of the epoch has seen
        assert (predictions.prediction == predictions.target.astype(str)).mean() > known - margin
    else:
        rest = ((predictions.prediction - predictions.target) ** 2).mean() / predictions.target.var(ddof=0)
        assert 1 - rest > known - margin - 0.1
    again = Pipeline.load(tmp_path / "theirs" / "theirs.yaml", HELD).run()
    assert again.outcome == "nothing new"


@pytest.mark.slow
def test_a_table_of_the_catalog_and_the_stub_in_its_place(spark, tmp_path):
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"id": range(600), "x": random.normal(size=600)})
    frame["tags"] = [["a", "b"][: n % 3] for n in range(600)]
    frame["y"] = 3 * frame.x + 1 + random.normal(size=600) / 2
    spark.createDataFrame(frame).write.saveAsTable("spark_catalog.default.theirs_of_init")
    try:
        Pipeline.init(tmp_path / "named", "spark_catalog.default.theirs_of_init", spark=spark)
        file = tmp_path / "named" / "named.yaml"
        pipeline = Pipeline.load(file)
        assert pipeline.spec.source.key == ("id",)
        assert "Spark alone knows" in pipeline.check()
        text = Path(file).read_text()
        assert "all 600 rows" in text
        file.write_text(text.replace("# model: named_model", "model: named_model"))
        done = Pipeline.load(file, [*HELD, "train.learning_rate=0.01"]).run(spark)
        assert done.outcome == "promoted"
        assert done.evaluated.decision.challenger.values["r2"] > 0.8
        assert json.loads(json.dumps(done.settings))["model"]["factory"] == "named_model:network"
    finally:
        spark.sql("DROP TABLE spark_catalog.default.theirs_of_init")


def test_classes_that_are_fractions_are_whole_numbers_and_none_where_there_is_none(spark, tmp_path):
    values = [0.0, 1.0, math.nan] * 100
    columns = {"x": np.random.default_rng(0).normal(size=300), "y": values}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    pipeline = Pipeline.init(tmp_path / "p", str(tmp_path / "t.parquet"), "y")
    assert pipeline.spec.label["y"].type == "binary"
    done = pipeline.run(spark, until="ingest")
    found = Counter(row["y"] for row in Table(done.places["clean"]).rows().to_pylist())
    assert found == {0: 100, 1: 100, None: 100}


def written_oddly(way, folder):
    """A table of 300 rows, as tools and people write it; the third row's age is a text where one says its unit."""
    random = np.random.default_rng(0)
    rows = [[n, ["Ulm", "K\xf6ln"][n % 2], n % 60, round(float(random.random()), 3)] for n in range(300)]
    lines = [["id", "town", "age", "y"], *rows]
    if way == "json":
        text = "\n".join(
            json.dumps({"id": row[0], "town": row[1], "age": str(row[2]), "y": str(row[3])}) for row in rows
        )
    else:
        if way == "units":
            lines.insert(1, ["", "", "years", "EUR"])
        text = "\n".join({"padded": ", ", "blanks": " "}.get(way, ",").join(map(str, line)) for line in lines)
    file = folder / ("t.jsonl" if way == "json" else "t.csv")
    file.write_bytes(text.encode("latin-1" if way == "latin" else "utf-8"))
    return str(file), pa.table({name: [row[place] for row in rows] for place, name in enumerate(lines[0])})


@pytest.mark.parametrize("way", ["json", "units", "padded", "blanks", "latin"])
def test_a_file_is_ingested_as_it_is_meant_however_it_is_written(spark, tmp_path, way):
    file, expected = written_oddly(way, tmp_path)
    done = Pipeline.init(tmp_path / "p", file, "y").run(spark, until="ingest")
    clean = Table(done.places["clean"]).rows().to_pylist()
    read = [{name: row[name] for name in expected.column_names} for row in sorted(clean, key=lambda row: row["id"])]
    assert read == expected.to_pylist()
    assert done.rows["quarantined"] == (way == "units")


@pytest.mark.parametrize(("strftime", "read"), [("%m/%d/%Y", "date"), ("%-d.%-m.%Y %-H:%M", "time")])
def test_dates_and_amounts_are_ingested_as_what_they_are(spark, tmp_path, strftime, read):
    times = [datetime(2026, 1, 1, 9, 5, tzinfo=UTC) + timedelta(days=n % 60, hours=n % 7) for n in range(300)]
    amounts = [1234.5 + n for n in range(300)]
    lines = [f'{n},{times[n].strftime(strftime)},"${amounts[n]:,.2f}",{n % 9},{n % 2}' for n in range(300)]
    (tmp_path / "t.csv").write_text("\n".join(["id,sold,price,x,y", *lines]))
    done = Pipeline.init(tmp_path / "p", str(tmp_path / "t.csv"), "y").run(spark, until="ingest")
    rows = sorted(Table(done.places["clean"]).rows().to_pylist(), key=lambda row: row["id"])
    assert [row["price"] for row in rows] == amounts
    assert [row["sold"] for row in rows] == [time.date() if read == "date" else time for time in times]
    assert {row["_window"] for row in rows} == {time.date().isoformat() for time in times}
