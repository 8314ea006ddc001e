"""Published models, one that takes columns as they are and one with every type of feature, and an SQLite store."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from sparkdl.features.fitted import fit
from sparkdl.features.spec import Category, DateParts, Ids, Image, Number, Text, Vector
from sparkdl.features.statistics import statistics_of
from sparkdl.models.adjusted import adjusted
from sparkdl.models.bundle import save_bundle
from sparkdl.models.folder import Adjustment
from sparkdl.models.networks import TabularEnsemble
from sparkdl.models.preprocessing import preprocessing_of
from sparkdl.models.registry import Lineage, ModelRegistry
from sparkdl.models.signature import Signature, TensorField

HISTORY = [{"epoch": 0, "loss": 1.5, "val_loss": None}, {"epoch": 1, "loss": 0.5, "val_loss": 0.75}]
ADJUSTMENTS = (Adjustment(output="late", ascending=True), Adjustment(output="kind", temperature=2.5))
FEATURES = {
    "age": Number(fill="median"),
    "city": Category(min_count=1),
    "history": Ids(min_count=1),
    "note": Text(min_count=1),
    "embedding": Vector(),
    "photo": Image(height=2, width=2, invalid="zeros"),
    "born": DateParts(parts=("year", "weekday")),
    "seen": DateParts(parts=("hour",), timezone="America/New_York"),
}
TYPES = {
    "age": "bigint", "city": "string", "history": "array<bigint>", "note": "string", "embedding": "array<float>",
    "photo": "binary", "born": "date", "seen": "timestamp", "unused": "string",
}  # fmt: skip


def raw_rows(n=20, seed=0):
    """Raw rows, some of them with gaps."""
    draw = np.random.default_rng(seed)

    def some(values):
        return [values[place] for place in draw.integers(0, len(values), n)]

    when = dt.datetime(2024, 2, 28, 23, 30)
    return pa.table(
        {
            "age": pa.array(some([31, 47, None]), pa.int64()),
            "city": pa.array(some(["Rio", "Oslo", None]), pa.string()),
            "history": pa.array(some([[1, 2], [], None, [3]]), pa.list_(pa.int64())),
            "note": pa.array(some(["a fine day", "", None]), pa.string()),
            "embedding": pa.array(draw.normal(size=(n, 3)).tolist(), pa.list_(pa.float32())),
            "photo": pa.array(some([None, b"no picture"]), pa.binary()),
            "born": pa.array(some([dt.date(1969, 7, 20), None]), pa.date32()),
            "seen": pa.array([when + dt.timedelta(hours=5 * k) for k in range(n)], pa.timestamp("us", "UTC")),
        }
    )


def _input(one):
    field = TensorField(name=one.name, dtype=one.dtype, shape=one.shape or (None,), columns=(one.name,))
    mask = TensorField(name=f"{one.name}_mask", dtype="bool", shape=(None,), form="mask", of=one.name)
    return [field] if one.shape else [replace(field, form="padded"), mask]


@pytest.fixture(scope="session")
def bundles(tmp_path_factory):
    """Bundles in one folder: ``plain``, a classifier of two columns; ``vector``, one output of several numbers;
    ``adjusted``, quantiles in order and calibrated logits; ``everything``, a regression on every type of feature."""
    root = tmp_path_factory.mktemp("bundles")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
    columns = (TensorField(name="features", shape=(2,), columns=("a", "b")),)
    signature = Signature(inputs=columns, outputs=(TensorField(name="kind", shape=(3,)),), labels=("kind",))
    training = {
        "history": HISTORY, "meanings": {"kind": "classes"},
        "columns": {"predictionCol": "prediction", "probabilityCol": "probability"},
    }  # fmt: skip
    known = preprocessing_of(None, {"a": "double", "b": "bigint"}, training=training)
    save_bundle(net, str(root / "plain"), signature=signature, preprocessing=known)
    save_bundle(net, str(root / "vector"), signature=signature)
    labels = [
        {"name": name, "outputs": outputs, "mean": 0.0, "deviation": 1.0}
        for name, outputs in (("late", 3), ("kind", 4))
    ]
    pair = TabularEnsemble({"inputs": [{"name": "numbers", "shape": [2]}], "labels": labels}, width=8, depth=1)
    fed = Signature(
        inputs=(TensorField(name="numbers", shape=(2,), columns=("a", "b")),),
        outputs=(TensorField(name="late", shape=(3,)), TensorField(name="kind", shape=(4,))),
        call="dict",
    )
    save_bundle(adjusted(pair, ADJUSTMENTS), str(root / "adjusted"), signature=fed)
    features = fit(FEATURES, statistics_of(raw_rows(60), FEATURES))
    label = {"name": "y", "outputs": 1, "mean": 3.0, "deviation": 2.0}
    described = [{**one, "knots": features.knots} if one["name"] == "numbers" else one for one in features.describe()]
    whole = TabularEnsemble({"inputs": described, "labels": [label]}, width=8, depth=1)
    inputs = tuple(field for one in features.inputs for field in _input(one))
    fed = Signature(inputs=inputs, outputs=(TensorField(name="y"),), call="dict")
    save_bundle(whole, str(root / "everything"), signature=fed, preprocessing=preprocessing_of(features, TYPES))
    return root


@pytest.fixture
def registry(tmp_path, bundles):
    """A registry with one version of ``churn``, the plain classifier, which is its champion."""
    made = ModelRegistry(str(tmp_path / "registry"))
    made.publish(
        "churn", str(bundles / "plain"), metrics={"auc": 0.7, "val_loss": 0.75},
        parameters={"epochs": 2, "optimizer": {"name": "Adam", "lr": 0.1}},
        lineage=Lineage(source_table="/lake/customers", source_version=0, shard_key="f" * 64, code_version="abc"),
    )  # fmt: skip
    made.set_alias("churn", "champion", 1, expected=None)
    return made
