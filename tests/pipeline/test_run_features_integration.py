"""Every type of feature, label and split goes through a run, and what is predicted is what the published model says."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd
import pytest

from sparkdl.models.registry import ModelRegistry
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.scoring.score import score
from sparkdl.shards.manifest import Manifest
from sparkdl.tables.table import Table

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)
OWN = '''
"""Functions of a user's own."""
from torch import nn, optim
from pyspark.sql import functions as F


def halves(text: str) -> list[str]:
    return [text[:2], text[2:]]


def double(rows, by):
    return rows.withColumn("size", F.col("size") * by)


class Net(nn.Module):
    def __init__(self, features, width):
        super().__init__()
        self.names = [one["name"] for one in features["inputs"]]
        size = features["inputs"][0]["shape"][0]
        outputs = features["labels"][0]["outputs"]
        self.layers = nn.Sequential(nn.Linear(size, width), nn.Tanh(), nn.Linear(width, outputs))

    def forward(self, row):
        return self.layers(row["numbers"])


def build(features, width=8) -> nn.Module:
    return Net(features, width)


def steepest(model):
    return optim.SGD(model.parameters(), lr=0.1)


def source(spark, window, path):
    return spark.read.parquet(path)
'''


@pytest.fixture(scope="module")
def own(spark, tmp_path_factory):
    """A module of the user's own that driver and workers can import; its name."""
    name = "own_features_of_a_run"
    file = tmp_path_factory.mktemp("own") / f"{name}.py"
    file.write_text(OWN)
    spark.sparkContext.addPyFile(str(file))
    return name


def png(pixels):
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(stream, format="PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """360 rows with a column of every type, a column that splits them, and two labels that follow from them."""
    random = np.random.default_rng(0)
    rows, start = 360, datetime(2026, 1, 1)
    size, colour = random.normal(size=rows), random.choice(["red", "green", "blue"], rows)
    bought = [[f"i{n}" for n in random.integers(0, 9, random.integers(0, 5))] for _ in range(rows)]
    frame = pd.DataFrame(
        {
            "id": np.arange(rows),
            "size": size,
            "colour": colour,
            "bought": bought,
            "said": random.choice(["good deal", "bad deal", "so so"], rows),
            "place": list(random.normal(size=(rows, 3)).astype(np.float32)),
            "picture": [png(np.full((8, 8), 250 if value > 0 else 5)) for value in size],
            "day": [start + timedelta(days=int(n)) for n in random.integers(0, 60, rows)],
            "fold": random.choice(["a", "b", "c"], rows, p=[0.5, 0.3, 0.2]),
            "trust": random.uniform(0.5, 1.5, rows),
        }
    )
    frame["price"] = 3 * size + (colour == "red") + np.array([len(each) for each in bought])
    frame["kept"] = np.where(size > 0, "yes", "no")
    folder = tmp_path_factory.mktemp("everything")
    frame.to_parquet(folder / "rows.parquet", coerce_timestamps="us")
    return folder


def test_every_type_of_feature_and_two_labels_are_predicted_as_the_published_model_says(
    spark, everything, own, tmp_path
):
    file = loads(f"""
    name: everything
    root: {tmp_path}
    source: {{kind: parquet, path: {everything}, key: id}}
    transform: {{function: "{own}:double", arguments: {{by: 2.0}}}}
    features:
      size: {{type: number, missing_indicator: true}}
      colour: category
      bought: ids
      said: {{type: text, tokens: "{own}:halves"}}
      place: vector
      picture: {{type: image, height: 8, width: 8, channels: 1}}
      day: date_parts
    label: {{kept: {{type: binary, positive: "yes"}}, price: {{type: regression, loss: "torch.nn:HuberLoss"}}}}
    weight: trust
    split: {{by: column, column: fold, train: [a], validate: [b], score: [c]}}
    train: {{epochs: 2, batch_size: 32, num_proc: 1, verbose: 0, optimizer: adamw, decay: cosine, warmup_steps: 3,
      partitions_per_process: 3, spread_rows: false, transform_batch_size: 50}}
    publish: {{metric: auc, gate: {{min_rows: 50}}}}
    report: {{slices: [colour]}}
    score: {{keep: [colour]}}
    """)
    done = execute(Run(Project(file), RunRequest(now=NOW)), spark)
    assert (done.outcome, done.evaluated.label) == ("promoted", "kept")
    assert set(done.evaluated.slices["colour"]) == {"red", "green", "blue"}
    [cut] = (tmp_path / "everything" / "shards").glob("train-*")
    assert len(Manifest.load(cut).shards) == 3
    predictions = Table(done.places["predictions"]).rows().to_pandas().set_index("id").sort_index()
    rows = pd.read_parquet(everything / "rows.parquet").set_index("id")
    assert list(predictions.index) == list(rows.index[rows.fold == "c"])
    assert (predictions.colour == rows.colour[predictions.index]).all()

    clean = Table(done.places["clean"]).read(spark).where("fold = 'c'")
    version = ModelRegistry(f"{tmp_path}/everything/registry").get("everything", "champion")
    scored = score(clean, version.uri, output_columns=["kept_", "price_"], keep=["id"], trusted=[own])
    again = scored.toPandas().set_index("id").sort_index()
    np.testing.assert_allclose(predictions.price_prediction, np.array(again.price_.to_list()).ravel(), rtol=1e-5)
    chance = 1 / (1 + np.exp(-np.array(again.kept_.to_list(), dtype=np.float64).ravel()))
    np.testing.assert_allclose(predictions.kept_probability, chance, rtol=1e-5)
    assert (predictions.kept_prediction == np.where(chance >= 0.5, "yes", "no")).all()


def table_of(name, folder):
    """One of scikit-learn's tables as rows of Parquet; returns the columns of its features."""
    from sklearn import datasets

    table = getattr(datasets, f"load_{name}")(as_frame=True).frame
    columns = [column for column in table.columns if column != "target"]
    table.columns = [column.replace("/", "_") for column in table.columns]
    table.insert(0, "id", range(len(table)))
    table.to_parquet(folder / "rows.parquet")
    return [column.replace("/", "_") for column in columns]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "label", "floor"),
    [
        ("diabetes", "regression", "r2 >= 0.2"),
        ("wine", "multiclass", "accuracy >= 0.8"),
    ],
)
def test_a_table_of_numbers_becomes_a_model_better_than_guessing(spark, tmp_path, name, label, floor):
    (tmp_path / "rows").mkdir()
    columns = table_of(name, tmp_path / "rows")
    file = loads(f"""
    name: {name}
    root: {tmp_path}/root
    source: {{kind: parquet, path: {tmp_path}/rows, key: id}}
    features: {{"{", ".join(columns)}": number}}
    label: {{target: {label}}}
    split: {{by: hash, train: 0.6, validate: 0.3, score: 0.1}}
    train: {{epochs: 30, batch_size: 16, learning_rate: 0.003, num_proc: 1, verbose: 0}}
    publish: {{gate: {{floors: ["{floor}"], min_rows: 30}}}}
    """)
    done = execute(Run(Project(file), RunRequest(now=NOW)), spark)
    assert done.outcome == "promoted", done.message
    predictions = Table(done.places["predictions"]).rows().to_pandas()
    actual = pd.read_parquet(tmp_path / "rows").set_index("id").target[predictions.id]
    if label == "regression":
        assert np.corrcoef(predictions.prediction, actual)[0, 1] > 0.4
    else:
        assert (predictions.prediction.astype(int).to_numpy() == actual.to_numpy()).mean() > 0.7
        np.testing.assert_allclose([sum(each) for each in predictions.probabilities], 1, rtol=1e-6)
        order = [(-epoch["val_accuracy"], epoch["val_loss"]) for epoch in done.trained.history]
        assert done.trained.kept_epoch == order.index(min(order))
        assert done.trained.recipe["monitor"] == "val_accuracy"
        assert done.trained.temperatures == {"target": done.evaluated.calibrated.temperature}
        assert min(epoch["loss"] for epoch in done.trained.history) > 0.29  # the entropy of a smoothed label


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "json", "function", "sql"])
def test_sources_of_each_kind_with_functions_of_ones_own(spark, everything, own, tmp_path, kind):
    rows = spark.read.parquet(str(everything)).select("id", "size", "colour", "fold", "price")
    place, source = tmp_path / "rows", f"{{kind: {kind}, path: {tmp_path}/rows, key: id}}"
    if kind in ("csv", "json"):
        rows.write.format(kind).options(**({"header": True} if kind == "csv" else {})).save(str(place))
    else:
        rows.write.parquet(str(place))
    if kind == "function":
        source = f"{{kind: function, function: '{own}:source', arguments: {{path: '{place}'}}, key: id}}"
    if kind == "sql":
        source = f"{{kind: sql, query: 'SELECT * FROM parquet.`{place}`', key: id}}"
    text = f"""
    name: sources
    root: {tmp_path}/root
    source: {source}
    features: {{size: number}}
    label: {{price: regression}}
    split: {{by: column, column: fold, train: [a], validate: [b], score: [c]}}
    model: {{factory: "{own}:build", arguments: {{width: 4}}}}
    train: {{epochs: 3, batch_size: 32, num_proc: 1, verbose: 0, optimizer: "{own}:steepest"}}
    publish: {{gate: {{min_rows: 50}}}}
    """
    done = execute(Run(Project(loads(text)), RunRequest(now=NOW)), spark)
    assert (done.outcome, done.rows["read"]) == ("promoted", 360)
    again = execute(Run(Project(loads(text)), RunRequest(now=NOW)), spark if kind in ("function", "sql") else None)
    assert (again.outcome, again.exit_code) == ("nothing new", 10)


@pytest.mark.slow
def test_predictions_do_not_depend_on_how_many_processes_train(spark, everything, own, tmp_path):
    found = []
    for processes in (1, 2):
        text = f"""
        name: ranks
        root: {tmp_path}/{processes}
        source: {{kind: parquet, path: {everything}, key: id}}
        features: {{size: number}}
        label: {{price: regression}}
        split: {{by: column, column: fold, train: [a], validate: [b], score: [c]}}
        model: {{factory: "{own}:build"}}
        train: {{epochs: 2, batch_size: {1000 // processes}, num_proc: {processes}, verbose: 0, shuffle: false}}
        publish: {{gate: {{min_rows: 50, baseline: never}}}}
        """
        done = execute(Run(Project(loads(text)), RunRequest(now=NOW)), spark)
        found.append(Table(done.places["predictions"]).rows().to_pandas().set_index("id").prediction.sort_index())
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_digits_as_pictures(spark, tmp_path):
    from sklearn.datasets import load_digits

    digits = load_digits()
    frame = pd.DataFrame({"id": range(600), "picture": [png(16 * image.clip(0, 15)) for image in digits.images[:600]]})
    frame["digit"] = digits.target[:600]
    (tmp_path / "rows").mkdir()
    frame.to_parquet(tmp_path / "rows" / "rows.parquet")
    file = loads(f"""
    name: digits
    root: {tmp_path}/root
    source: {{kind: parquet, path: {tmp_path}/rows, key: id}}
    features: {{picture: {{type: image, height: 8, width: 8, channels: 1}}}}
    label: {{digit: multiclass}}
    split: {{by: hash, train: 0.6, validate: 0.3, score: 0.1}}
    train: {{epochs: 12, batch_size: 32, learning_rate: 0.003, num_proc: 1, verbose: 0}}
    publish: {{gate: {{floors: ["accuracy >= 0.7"]}}}}
    """)
    done = execute(Run(Project(file), RunRequest(now=NOW)), spark)
    assert done.outcome == "promoted", done.message
