"""A bundle as MLflow loads it: what it says of its rows, and that it predicts what sparkdl predicts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

import sparkdl
from sparkdl.errors import BundleError, ConfigError, SchemaError
from sparkdl.interchange.mlflow import check_servable, write_model
from sparkdl.models.adjusted import adjusted
from sparkdl.models.bundle import load_bundle, save_bundle
from sparkdl.models.folder import read_bundle
from sparkdl.models.registry import ModelRegistry
from sparkdl.models.signature import Signature, TensorField

pytest.importorskip("mlflow")

WITHOUT_SPARK = """
import sys
sys.modules["pyspark"] = None
import mlflow, pandas
model = mlflow.pyfunc.load_model(sys.argv[1])
print(model.predict(pandas.DataFrame({"a": [0.5], "b": [2]})).to_json())
"""


@pytest.fixture(scope="module")
def written():
    """By name, the files of a model when it was written; who loads it may leave compiled code beside them."""
    return {}


@pytest.fixture(scope="module")
def models(bundles, written, tmp_path_factory):
    """Each bundle as a folder that MLflow loads; what they were made of is gone."""
    root = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        for name in ("plain", "vector", "adjusted", "everything"):
            (root / name).mkdir()
            write_model(root / name / "model", read_bundle(str(bundles / name)), run_id="0" * 32, model_id="m-1")
            folder = root / name / "model"
            written[name] = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
            for made in (root / name).iterdir():
                if made.name != "model":
                    shutil.rmtree(made) if made.is_dir() else made.unlink()
    return root


@pytest.fixture
def load(models, monkeypatch):
    """By name, the model as MLflow loads it."""
    import mlflow

    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return lambda name: mlflow.pyfunc.load_model(str(models / name / "model"))


def ours(bundles, name, tmp_path):
    registry = ModelRegistry(str(tmp_path / name))
    registry.publish(name, str(bundles / name))
    return sparkdl.load_model(f"{name}@1", registry)


def same(found, rows, expected):
    made = [name for name in expected.columns if name not in rows.columns]
    assert list(found.columns) == made
    assert list(found.index) == list(rows.index)
    for name in made:
        np.testing.assert_array_equal(np.stack(found[name].to_numpy()), np.stack(expected[name].to_numpy()))


def types_of(schema):
    return {one.name: str(one.type).removeprefix("DataType.") for one in schema.inputs}


def test_it_predicts_what_sparkdl_predicts(load, bundles, tmp_path):
    rows = pd.DataFrame({"a": [0.5, -1.0, 2.0], "other": "x", "b": [1, 2, 3]}, index=[4, 2, 9])
    model = load("plain")
    same(model.predict(rows), rows, ours(bundles, "plain", tmp_path).predict(rows))
    assert list(model.predict(rows).columns) == ["prediction", "probability"]
    vector = load("vector").predict(rows)
    same(vector, rows, ours(bundles, "vector", tmp_path).predict(rows))
    assert vector["kind__output"].iloc[0].shape == (3,)


def test_quantiles_are_in_order_and_logits_calibrated_as_sparkdl_has_them(load, bundles, tmp_path):
    rows = pd.DataFrame(np.random.default_rng(0).normal(size=(200, 2)), columns=["a", "b"])
    found = load("adjusted").predict(rows)
    same(found, rows, ours(bundles, "adjusted", tmp_path).predict(rows))
    plain = adjusted(load_bundle(str(bundles / "adjusted")).model, ())
    with torch.no_grad():
        late, kind = plain({"numbers": torch.tensor(rows.to_numpy(), dtype=torch.float32)})
    assert (late.diff(dim=1) < 0).any()  # or nothing was to be sorted
    np.testing.assert_allclose(np.stack(found["late__output"]), late.sort(dim=1).values, atol=1e-6)
    np.testing.assert_allclose(np.stack(found["kind__output"]), kind / 2.5, atol=1e-6)


def test_columns_of_every_type_go_in_as_they_do_into_sparkdl(load, bundles, tmp_path):
    from tests.interchange.conftest import raw_rows

    rows = raw_rows(30, seed=5).to_pandas()
    model = load("everything")
    expected = ours(bundles, "everything", tmp_path).predict(rows)
    same(model.predict(rows), rows, expected)
    assert expected["y__output"].nunique() > 10
    exact = raw_rows(30, seed=5).to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)  # 31 instead of 31.0
    same(model.predict(exact), exact, expected)


def test_what_is_known_of_a_column_is_told_and_the_rest_stays_open(load):
    plain, everything = load("plain").metadata.signature, load("everything").metadata.signature
    assert types_of(plain.inputs) == {"a": "double", "b": "Any"}
    assert types_of(plain.outputs) == {"prediction": "double", "probability": "Array(float)"}
    assert types_of(everything.inputs) == {
        "age": "Any", "city": "string", "history": "Any", "note": "string", "embedding": "Any", "photo": "binary",
        "born": "datetime", "seen": "Any",
    }  # fmt: skip
    assert types_of(everything.outputs) == {"y__output": "float"}
    assert [one.name for one in load("vector").metadata.signature.outputs.inputs] == [None]  # a struct, for spark_udf


def test_the_example_is_a_row_that_the_model_takes(load):
    for name in ("plain", "vector"):
        model = load(name)
        assert len(model.predict(model.input_example)) == 1
    model = load("everything")
    example = model.input_example.assign(seen=pd.Timestamp("2024-03-01 12:00", tz="UTC"))  # JSON knows no instants
    assert example["age"][0] in (31, 47)
    assert example["city"][0] in ("Rio", "Oslo")
    assert np.isfinite(model.predict(example)["y__output"]).all()


def test_instants_without_their_zone_are_refused_instead_of_taken_for_local_times(load):
    from tests.interchange.conftest import raw_rows

    rows = raw_rows(3).to_pandas()
    with pytest.raises(SchemaError, match="'seen' held instants in training and comes without a time zone"):
        load("everything").predict(rows.assign(seen=rows["seen"].dt.tz_localize(None)))


def test_there_is_no_pickle_in_it_and_no_code_of_ours(models, written):
    assert written["plain"] == {
        "MLmodel", "artifacts/bundle/bundle.json", "artifacts/bundle/weights.safetensors", "conda.yaml",
        "input_example.json", "python_env.yaml", "requirements.txt", "serving_input_example.json", "sparkdl_bundle.py",
    }  # fmt: skip
    needed = (models / "everything" / "model" / "requirements.txt").read_text().split()
    assert [line.split("==")[0] for line in needed] == ["mlflow-skinny", "sparkdl", "torch", "pillow"]


def test_a_bundle_that_was_altered_is_not_loaded(models, tmp_path):
    import mlflow

    shutil.copytree(models / "plain" / "model", tmp_path / "model")
    weights = tmp_path / "model" / "artifacts" / "bundle" / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(Exception, match="was recorded"):
        mlflow.pyfunc.load_model(str(tmp_path / "model"))


def test_pickles_and_models_that_nobody_can_feed_are_refused(tmp_path):
    fed = Signature(inputs=(TensorField(name="x", shape=(2,), columns=("a", "b")),), outputs=(TensorField(name="y"),))

    class Local(nn.Linear):
        pass

    info = save_bundle(Local(2, 1), str(tmp_path / "pickled"), signature=fed, allow_pickle=True)
    with pytest.raises(BundleError, match="holds a pickle, and none goes to MLflow: publish the model with factory="):
        check_servable(info)
    with pytest.raises(ConfigError, match="has no signature"):
        check_servable(save_bundle(nn.Linear(2, 1), str(tmp_path / "bare")))


@pytest.mark.slow
def test_it_is_served_where_there_is_no_spark(models, load):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SPARK, str(models / "plain" / "model")],
        env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == load("plain").predict(pd.DataFrame({"a": [0.5], "b": [2]})).to_json()
