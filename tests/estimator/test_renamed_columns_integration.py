"""A model whose columns are called otherwise: what it then reads, how its predictions are called, what is refused."""

import functools

import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

import sparkdl
from sparkdl.errors import ConfigError, SchemaError
from sparkdl.estimator import TorchEstimator, TorchModel
from sparkdl.estimator.store import Store
from sparkdl.features.fitted import fit
from sparkdl.features.spec import Number
from sparkdl.features.statistics import statistics_of
from sparkdl.interchange.served import predicted
from sparkdl.models.signature import Signature, TensorField

A, C = 1.0, 10.0
ROWS = pd.DataFrame({"a": [A], "b": [2.0], "c": [C], "d": [20.0]})
PAIR = Signature(
    inputs=(TensorField(name="x", shape=(2,), columns=("b", "a")),),  # packed in another order than it was named
    outputs=(TensorField(name="y"),),
)


def digits(signature=None, **params):
    """Predicts ``a + 2 b``, whatever the order of its columns."""
    first = [2.0, 1.0] if signature else [1.0, 2.0]
    net = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([first]))
    return TorchModel(
        model=net, signature=signature, **{"feature_columns": ["a", "b"], "label_columns": ["y"], **params}
    )


@pytest.fixture(scope="module")
def df(spark):
    return spark.createDataFrame(ROWS)


def one(scored, column="y__output"):
    return scored.first()[column]


@pytest.mark.parametrize("signature", [PAIR, pytest.param(None, marks=pytest.mark.slow)])
def test_other_columns_are_read_by_their_place(df, signature):
    model = digits(signature)
    assert one(model.transform(df)) == 5
    assert one(model.transform(df, {model.feature_columns: ["c", "d"]})) == 50
    assert one(model.transform(df, {model.feature_columns: ["b", "a"]})) == 4
    assert one(model.transform(df)) == 5
    assert one(model.setFeatureColumns(["b", "c"]).transform(df)) == 22
    assert one(model.setFeatureColumns(["a", "b"]).transform(df)) == 5


@pytest.mark.slow
def test_weights_that_change_in_place_predict_at_once(df):
    model = digits(PAIR)
    copy = model.copy()
    assert one(model.transform(df)) == 5
    published = dict(model._published)
    assert one(copy.transform(df)) == 5
    assert model._published == published  # written once
    model.getModel().load_state_dict({"weight": torch.tensor([[20.0, 10.0]])})
    assert one(model.transform(df)) == one(copy.transform(df)) == 50
    optimizer = torch.optim.SGD(model.getModel().parameters(), lr=1.0)
    model.getModel()(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert one(model.transform(df)) == 47
    model.getModel().weight = nn.Parameter(torch.tensor([[0.0, 1.0]]))
    assert one(model.transform(df)) == 1


@pytest.mark.parametrize("signature", [pytest.param(PAIR, marks=pytest.mark.slow), None])
def test_predictions_are_called_by_the_labels(df, signature):
    model = digits(signature)
    model.transform(df)
    assert one(model.transform(df, {model.label_columns: ["z"]}), "z__output") == 5
    assert one(model.setLabelColoumns(["w"]).transform(df), "w__output") == 5
    assert one(model.setOutputCols(["p"]).transform(df), "p") == 5


def test_pandas_rows_a_saved_and_a_published_model_know_the_other_names(df, tmp_path):
    model = digits(PAIR).set_origin(None, {"columns": {"a": "double", "b": "float"}})
    model.setFeatureColumns(["c", "d"]).setLabelColoumns(["z"])
    assert model.predict(ROWS)["z__output"].tolist() == [50]
    assert (model.signature.columns, model.signature.labels) == (["d", "c"], ("z",))
    model.save(str(tmp_path / "saved"))
    loaded = TorchModel.load(str(tmp_path / "saved"))
    for given in (model, loaded):
        registry = str(tmp_path / f"registry {given is model}")
        given.publish(registry, "m")
        bundle = given.save_bundle(str(tmp_path / f"bundle {given is model}"))
        assert (bundle.signature.columns, bundle.signature.labels) == (["d", "c"], ("z",))
        assert bundle.preprocessing["column_types"] == {"c": "double", "d": "float"}
        assert [one.column for one in predicted(bundle)] == ["z__output"]
        again = sparkdl.load_model("m@1", registry)
        assert again.getLabelColumns() == ["z"]
        assert again.predict(ROWS)["z__output"].tolist() == [50]
        assert given.predict(ROWS)["z__output"].tolist() == [50]
        assert one(given.transform(df), "z__output") == 50
        assert one(given.setFeatureColumns(["a", "b"]).transform(df), "z__output") == 5


def test_what_is_set_to_what_it_was_changes_nothing(df, tmp_path):
    model = digits(PAIR)
    before = model.signature
    model.setFeatureColumns(["a", "b"]).setLabelColoumns(["y"])
    assert model.signature.inputs == before.inputs == PAIR.inputs
    assert model.signature == before
    model.save(str(tmp_path / "m"))
    loaded = TorchModel.load(str(tmp_path / "m"))
    assert (loaded.signature, loaded.getFeatureColumns()) == (before, ["a", "b"])
    assert one(loaded.transform(df)) == 5
    shaped = Signature(inputs=(TensorField(name="v", shape=(2,), columns=("v",)),), outputs=PAIR.outputs)
    array = TorchModel(model=nn.Linear(2, 1), signature=shaped, feature_columns=["v"], input_shapes=[[-1, 2]])
    assert array.signature.inputs == shaped.inputs


@pytest.mark.parametrize(
    ("setter", "value", "said"),
    [
        ("setFeatureColumns", ["c"], r"feature_columns=\['c'\] are 1 names for the 2 columns \['a', 'b'\]"),
        ("setLabelColoumns", ["y", "z"], r"label_columns=\['y', 'z'\] are 2 names for the 1 outputs \['y'\]"),
        ("setInputShapes", [[-1, 1], [-1, 1]], r"input_shapes gives \[-1, 1\] for 'a', .* made to take \[-1, 2\]"),
        ("setInputShapes", [[-1, 2]], r"input_shapes gives 1 shapes for the 2 columns \['a', 'b'\]"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(df, tmp_path, setter, value, said):
    model = digits(PAIR)
    getattr(model, setter)(value)
    attempts = (
        lambda: model.transform(df),
        lambda: model.predict(ROWS),
        lambda: model.publish(str(tmp_path / "registry"), "m"),
        lambda: model.save(str(tmp_path / "m")),
    )
    for attempt in attempts:
        with pytest.raises(ConfigError, match=said):
            attempt()
    assert not list(tmp_path.iterdir())


def test_a_column_of_another_type_is_refused(spark):
    words = spark.createDataFrame([("x", 1.0)], "c string, d double")
    with pytest.raises(SchemaError, match="'c'"):
        digits(PAIR).setFeatureColumns(["c", "d"]).transform(words)


def test_columns_that_features_know_by_name_are_not_renamed(df):
    options = {"a": Number(standardise=False)}
    features = fit(options, statistics_of(pa.Table.from_pandas(ROWS), options))
    fed = Signature(
        inputs=(TensorField(name="x", shape=(1,), columns=(features.inputs[0].name,)),), outputs=PAIR.outputs
    )
    model = TorchModel(model=nn.Linear(1, 1), signature=fed, feature_columns=["a"]).setFeatures(features)
    made = model.predict(ROWS)
    assert model.setLabelColoumns(["z"]).predict(ROWS)["z__output"].tolist() == made["y__output"].tolist()
    with pytest.raises(ConfigError, match=r"feature_columns=\['c'\] cannot rename \['a'\], which .* know by name"):
        model.setFeatureColumns(["c"]).transform(df)


def test_a_column_called_like_a_copy_is_read_by_its_own_name(spark, tmp_path):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, continuous, categorical):
            weighted = continuous[:, 0] + 10 * continuous[:, 1] + 1000 * categorical[:, 0]
            return (weighted * self.scale).unsqueeze(1)

    rows = spark.createDataFrame(
        pd.DataFrame({"a": [1.0], "c": [1], "x__feature": [2.0], "y": [0.0]}),
        "a float, c long, x__feature float, y float",
    )
    model = TorchEstimator(
        model=Sum(), optimizer=functools.partial(torch.optim.SGD, lr=0.0), loss=nn.MSELoss(), num_proc=1, verbose=0,
        feature_cols=["a", "c", "x__feature"], continuous_cols=["a", "x__feature"], categorical_cols=["c"],
        label_cols=["y"], epochs=1, batch_size=1, store=Store(prefix_path=str(tmp_path)),
    ).fit(rows)  # fmt: skip
    assert one(model.transform(rows)) == 1021
