"""Fitted models in a registry and back: what is recorded without being asked, the same predictions, refusals."""

from __future__ import annotations

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import sparkdl
from sparkdl.errors import BundleError, ConfigError, IntegrityError, SchemaError
from sparkdl.estimator import TorchEstimator, TorchModel
from sparkdl.models.registry import Lineage
from sparkdl.models.signature import Signature, TensorField
from sparkdl.tables.table import Table


class Halves(nn.Module):
    """Cannot be rebuilt from its attributes: the width is not kept."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, width * 2), nn.Linear(width * 2, 1)

    def forward(self, features):
        return self.last(torch.relu(self.first(features)))


def halves(width: int) -> nn.Module:
    return Halves(width)


@pytest.fixture(scope="module")
def table(spark, tmp_path_factory):
    """A Delta table with two numbers and a label of two classes."""
    x = np.random.default_rng(4).normal(size=(200, 2)).astype("float32")
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "k": (x.sum(1) > 0).astype("int64")})
    made = Table(str(tmp_path_factory.mktemp("table") / "rows"))
    made.write(spark.createDataFrame(frame).coalesce(1), "overwrite")
    return made


@pytest.fixture(scope="module")
def fitted(table):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    estimator = TorchEstimator(
        model=net, optimizer=torch.optim.Adam(net.parameters(), lr=0.02), loss=nn.CrossEntropyLoss(),
        feature_cols=["a", "b"], label_cols=["k"], validation=0.25, batch_size=25, epochs=2, num_proc=1, verbose=0,
        predictionCol="prediction", probabilityCol="probability",
    )  # fmt: skip
    return estimator.fit_on_table(table.uri)


@pytest.fixture
def registry(tmp_path):
    return sparkdl.ModelRegistry(str(tmp_path / "registry"))


def values(frame, name):
    return np.stack([np.asarray(row[name].toArray() if hasattr(row[name], "toArray") else row[name]) for row in frame])


def test_what_a_fit_knows_is_recorded_without_being_asked(fitted, registry, table):
    version = fitted.publish(registry, "churn")
    assert version.metrics == {
        name: value for name, value in fitted.summary.metrics.items() if name in ("loss", "val_loss")
    }
    assert (version.lineage["source_table"], version.lineage["source_version"]) == (table.uri, 0)
    assert len(version.lineage["shard_key"]) == 64
    assert {"torch", "python", "pyspark", "sparkdl"} <= set(version.lineage["versions"])
    told = version.parameters
    assert (told["epochs"], told["batch_size"], told["label_cols"], told["loss"]) == (2, 25, ["k"], "CrossEntropyLoss")
    assert (told["optimizer"]["name"], told["optimizer"]["lr"]) == ("Adam", 0.02)
    assert (told["num_proc"], told["epochs_trained"]) == (1, 2)

    again = fitted.publish(
        registry.uri, "churn", metrics={"auc": 0.9}, parameters={"batch_size": 7, "why": "a test"},
        lineage=Lineage(code_version="abc", source_version=3), publication="mine",
    )  # fmt: skip
    assert (again.version, again.metrics) == (2, {"auc": 0.9})
    assert (again.parameters["batch_size"], again.parameters["why"], again.parameters["epochs"]) == (7, "a test", 2)
    assert (again.lineage["code_version"], again.lineage["source_version"]) == ("abc", 3)
    assert again.lineage["source_table"] == table.uri
    assert fitted.publish(registry, "churn", publication="mine").version == 2


def test_a_published_model_predicts_as_the_fitted_one_did_in_spark_and_in_pandas(spark, fitted, registry, table):
    fitted.publish(registry, "churn")
    rows = table.read(spark).drop("k")
    loaded = sparkdl.load_model("churn@champion", registry=registry.uri)
    assert isinstance(loaded, TorchModel)
    expected = fitted.transform(rows).orderBy("a", "b").collect()
    assert set(expected[0].asDict()) == {"a", "b", "prediction", "probability"}
    in_pandas = loaded.predict(rows.toPandas()).sort_values(["a", "b"])
    found = loaded.transform(rows).orderBy("a", "b").collect()
    by_registry = registry.transform(rows, "churn@1").orderBy("a", "b").collect()
    for name in ("prediction", "probability"):
        assert np.array_equal(values(found, name), values(expected, name))
        assert np.array_equal(values(by_registry, name), values(expected, name))
        np.testing.assert_array_equal(np.stack([np.asarray(one) for one in in_pandas[name]]), values(expected, name))
    assert set(in_pandas["prediction"]) == {0.0, 1.0}
    before = fitted.history.drop(columns="seconds")
    pd.testing.assert_frame_equal(loaded.history[list(before)], before, check_dtype=False)
    assert loaded.origin["lineage"]["source_table"] == table.uri
    assert loaded.origin["columns"] == fitted.origin["columns"] == {"a": "float", "b": "float"}


def test_the_first_version_is_the_champion_and_no_later_one(fitted, registry):
    assert fitted.publish(registry, "churn", publication="first").aliases == ("champion",)
    assert fitted.publish(registry, "churn").aliases == ()
    registry.set_alias("churn", "champion", 2, expected=1)
    assert fitted.publish(registry, "churn", publication="first").aliases == ()
    assert registry.aliases("churn") == {"champion": 2}
    assert fitted.publish(registry, "other", first_alias="best").aliases == ("best",)
    assert fitted.publish(registry, "none", first_alias=None).aliases == ()
    with pytest.raises(ConfigError, match=r"no alias 'champion' nor any other: name a version, such as none@1"):
        sparkdl.load_model("none@champion", registry)


def test_models_and_versions_say_in_a_line_and_in_a_notebook_what_they_are(fitted, registry):
    version = fitted.publish(registry, "churn", metrics={"auc": 0.91234, "<b>": 1.0})
    line = rf"churn@1: champion; {version.published:%Y-%m-%d %H:%M} UTC; auc 0.9123, <b> 1; .*/rows"
    assert re.fullmatch(line, repr(version))
    assert re.fullmatch(
        r"TorchModel_\w+: Sequential of 22 parameters; a, b -> k; 2 epochs; loss [\d.]+, val_loss [\d.]+", repr(fitted)
    )
    assert repr(registry.load_model("churn@1")).endswith("2 epochs; auc 0.9123, <b> 1")
    assert repr(TorchModel()).endswith(": no model")
    wide = TorchModel(model=nn.Linear(40, 1), feature_columns=[f"x{n}" for n in range(40)], label_columns=["y"])
    assert "Linear of 41 parameters; x0, x1, x2, x3, x4, x5, and 34 more -> y" in repr(wide)
    for shown in (fitted, version):
        assert re.fullmatch(r"<table>.*</table>", shown._repr_html_())
    assert "auc 0.9123, &lt;b&gt; 1" in version._repr_html_()


def test_a_loaded_model_is_saved_loaded_and_published_again(fitted, registry, tmp_path):
    fitted.publish(registry, "churn")
    loaded = registry.load_model("churn@1")
    loaded.write().save(str(tmp_path / "saved"))
    again = TorchModel.load(str(tmp_path / "saved")).publish(registry, "churn")
    first = registry.get("churn", 1)
    assert (again.version, again.artifact) == (2, first.artifact)
    assert (again.metrics, again.parameters, again.lineage) == (first.metrics, first.parameters, first.lineage)


def test_another_module_is_not_published_with_what_the_first_one_achieved(fitted, registry):
    first = fitted.publish(registry, "churn")
    other = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    for model in (registry.load_model("churn@1"), fitted.copy()):
        made = model.setModel(other).publish(registry, "churn")
        assert (made.metrics, made.parameters) == ({}, {})
        assert not {"source_table", "source_version", "shard_key"} & {name for name, one in made.lineage.items() if one}
        assert (len(model.history), model.hasSummary) == (0, False)
        loaded = registry.load_model(f"churn@{made.version}")
        assert len(loaded.history) == 0
        assert loaded.origin["columns"] == fitted.origin["columns"]
        rows = pd.DataFrame({"a": np.ones(2, "float32"), "b": np.ones(2, "float32")})
        assert list(loaded.predict(rows)) == ["a", "b", "prediction", "probability"]
    assert fitted.hasSummary
    assert fitted.publish(registry, "churn").metrics == first.metrics != {}
    with pytest.raises(ConfigError, match="metric"):
        registry.promote_if_better("churn", "champion", 2, metric="val_loss")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("churn", r"'churn' does not say which version: write churn@best or churn@champion"),
        ("other", r"write other@champion or other@3"),
        ("churn@champoin", r"model 'churn' has no alias 'champoin', only \['best', 'champion'\]"),
        ("churn@²", r"model 'churn' has no alias '²', only"),
        ("churn@7", r"model 'churn' has no version 7, only \[1\]"),
        ("chum@champion", r"there is no model 'chum' in this registry, only \['churn'\]"),
        ("@champion", "does not say which version"),
        ("churn@", "does not say which version"),
    ],
)
def test_a_name_that_means_nothing_is_refused_with_those_there_are(fitted, registry, asked, said):
    fitted.publish(registry, "churn")
    registry.set_alias("churn", "best", 1, expected=None)
    with pytest.raises(ConfigError, match=said):
        sparkdl.load_model(asked, registry)


def test_a_model_of_ones_own_is_published_by_its_factory_and_loaded_by_who_trusts_it(registry):
    signature = Signature(
        inputs=(TensorField(name="features", shape=(2,), columns=("a", "b")),), outputs=(TensorField(name="k"),)
    )
    model = TorchModel(model=halves(3), signature=signature)
    with pytest.raises(BundleError, match="factory="):
        model.publish(registry, "own")
    assert not registry.models()
    version = model.publish(registry, "own", factory=halves, arguments={"width": 3})
    assert (version.metrics, version.lineage["source_table"]) == ({}, None)
    with pytest.raises(BundleError, match=__name__):
        sparkdl.load_model("own@1", registry)
    loaded = sparkdl.load_model("own@1", registry, trusted=[__name__])
    rows = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0], "other": ["x", "y"]}, index=[7, 8])
    found = loaded.predict(rows)
    assert list(found.index) == [7, 8]
    with torch.no_grad():
        expected = model.getModel()(torch.tensor(rows[["a", "b"]].to_numpy(), dtype=torch.float32))[:, 0]
    np.testing.assert_array_equal(found["k__output"], expected)
    with pytest.raises(SchemaError, match=r"needs the columns \['b'\]"):
        loaded.predict(rows.drop(columns="b"))
    with pytest.raises(SchemaError, match="k__output"):
        loaded.predict(found)


PAIR = Signature(inputs=(TensorField(name="x", shape=(2,), columns=("a", "b")),), outputs=(TensorField(name="k"),))


class Bent(nn.Module):
    """Its weights fit whatever its activation; without a bias, zeros cannot tell which it is."""

    def __init__(self, width: int, act: str = "relu") -> None:
        super().__init__()
        self.layer, self.bend = nn.Linear(width, 1, bias=False), getattr(torch, act)
        nn.init.ones_(self.layer.weight)

    def forward(self, x):
        return self.bend(self.layer(x))


class Drawn(Bent):
    """Answers by chance."""

    def forward(self, x):
        return super().forward(x) + torch.rand(len(x), 1)


class Picky(Bent):
    """Takes no made-up rows."""

    def forward(self, x):
        if (x < 1).any():
            raise ValueError("numbers from 1 on")
        return super().forward(x)


def test_a_factory_whose_model_answers_differently_is_not_published(registry):
    model = TorchModel(model=Bent(2, "tanh"), signature=PAIR)
    with pytest.raises(BundleError, match=r"answers the example differently.*arguments="):
        model.publish(registry, "bent", factory=Bent, arguments={"width": 2})
    assert not registry.models()
    model.publish(registry, "bent", factory=Bent, arguments={"width": 2, "act": "tanh"})


@pytest.mark.parametrize("kind", [Drawn, Picky])
def test_a_model_whose_answers_cannot_be_compared_is_published_with_a_warning(registry, kind, caplog):
    model = TorchModel(model=kind(2), signature=PAIR)
    with caplog.at_level("WARNING", logger="sparkdl"):
        model.publish(registry, "odd", factory=kind, arguments={"width": 2})
    assert f"factory={kind.__qualname__} makes is published without comparing its answers" in caplog.text
    assert registry.models() == ["odd"]


def test_a_model_that_takes_no_made_up_rows_is_saved_as_a_pickle(spark, tmp_path):
    net = Picky(2)
    net.width, net.act = 2, "relu"  # which its class would be made with, were there an answer to compare
    with pytest.raises(BundleError, match=r"ValueError: numbers from 1 on.*factory="):
        TorchModel(model=net, signature=PAIR).save_bundle(str(tmp_path / "bundle"))
    TorchModel(model=net, signature=PAIR).save(str(tmp_path / "m"))
    with sparkdl.allow_pickle():
        loaded = TorchModel.load(str(tmp_path / "m"))
    assert loaded.predict(pd.DataFrame({"a": [1.0], "b": [2.0]}))["k__output"].tolist() == [3.0]


def test_a_published_pickle_is_loaded_inside_a_block_that_allows_it(registry):
    net = Halves(2)
    TorchModel(model=net, signature=PAIR).publish(registry, "odd", allow_pickle=True)
    with pytest.raises(BundleError, match="holds a pickle"):
        sparkdl.load_model("odd@champion", registry)
    with sparkdl.allow_pickle():
        loaded = sparkdl.load_model("odd@champion", registry)
    assert torch.equal(loaded.getModel().first.weight, net.first.weight)


def test_a_model_that_nobody_could_feed_is_not_published(registry):
    with pytest.raises(ConfigError, match="has no signature"):
        TorchModel(model=nn.Linear(2, 1)).publish(registry, "own")
    with pytest.raises(ConfigError, match="has no signature"):
        TorchModel(model=nn.Linear(2, 1)).predict(pd.DataFrame({"a": [1.0]}))
    assert not registry.models()


def test_a_bundle_whose_training_is_none_is_refused(fitted, registry, tmp_path):
    from sparkdl.models.folder import content_hash_of

    bundle = fitted.save_bundle(str(tmp_path / "bundle"))
    document = tmp_path / "bundle" / "bundle.json"
    text = json.loads(document.read_text())
    text["preprocessing"]["training"]["columns"] = {"model": "other"}
    text["content_hash"] = content_hash_of(text)
    document.write_text(json.dumps(text))
    registry.publish("churn", bundle.uri)
    with pytest.raises(IntegrityError, match=r"preprocessing.training"):
        sparkdl.load_model("churn@1", registry)


def test_a_loaded_model_is_published_without_the_parent_of_another_models_numbers(fitted, registry):
    fitted.publish(registry, "churn", lineage=Lineage(parent=4))
    assert registry.get("churn", 1).lineage["parent"] == 4
    again = registry.load_model("churn@1").publish(registry, "other")
    assert again.lineage == {**registry.get("churn", 1).lineage, "parent": None}
