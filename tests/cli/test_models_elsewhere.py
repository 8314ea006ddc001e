"""``sparkdl models mirror`` and ``export``: the words, what is printed, what a refusal becomes."""

from __future__ import annotations

import json

import pytest
import torch

from sparkdl.cli import main
from sparkdl.models.bundle import save_bundle
from sparkdl.models.registry import ModelRegistry
from sparkdl.models.signature import Signature, TensorField


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A registry with one version of a model."""
    monkeypatch.setenv("COLUMNS", "300")
    fed = Signature(inputs=(TensorField(name="x", shape=(2,), columns=("a", "b")),), outputs=(TensorField(name="y"),))
    save_bundle(torch.nn.Linear(2, 1), str(tmp_path / "bundle"), signature=fed)
    place = ModelRegistry(str(tmp_path / "registry"))
    place.publish("ride", str(tmp_path / "bundle"), metrics={"rmse": 1.5})
    place.set_alias("ride", "champion", 1, expected=None)
    return place


@pytest.fixture
def run(capsys):
    def run(*words):
        code = main(["models", *map(str, words)])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


@pytest.mark.slow
def test_a_version_is_mirrored_under_a_name_of_its_own(registry, run, tmp_path):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    to = f"sqlite:///{tmp_path}/mlflow.db"
    words = ("mirror", registry.uri, "ride@champion", "--to", to, "--as", "main.ml.ride", "--experiment", "rides")
    code, out, _ = run(*words)
    assert code == 0
    assert "ride@champion is main.ml.ride version 1 of sqlite:" in out
    told = json.loads(run(*words, "--json")[1])
    assert (told["name"], told["version"], told["aliases"], told["missing"]) == ("main.ml.ride", "1", ["champion"], [])
    assert told["run_id"] in out


@pytest.mark.slow
def test_an_alias_that_moves_here_moves_there(registry, run, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    to, client = f"sqlite:///{tmp_path}/mlflow.db", mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    registry.publish("ride", str(tmp_path / "bundle"))

    def champion():
        return client.get_model_version_by_alias("ride", "champion").tags["sparkdl.version"]

    assert run("mirror", registry.uri, "ride:1", "--to", to)[0] == 0
    assert run("promote", registry.uri, "ride", 2, "--mlflow", to, "--dry-run")[0] == 0
    assert champion() == "1"
    assert run("promote", registry.uri, "ride", 2, "--mlflow", to)[0] == 0
    assert champion() == "2"
    assert run("rollback", registry.uri, "ride", "--mlflow", to)[0] == 0
    assert champion() == "1"
    assert len(client.search_model_versions("name = 'ride'")) == 2


@pytest.mark.slow
def test_mlflow_that_is_away_is_one_sentence(registry, run, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    code, out, error = run("mirror", registry.uri, "ride:1", "--to", "http://127.0.0.1:9")
    assert (code, out) == (1, "")
    assert error.startswith("sparkdl: MLflow at http://127.0.0.1:9 did not take the model, MlflowException")
    assert run("mirror", registry.uri, "ride@best", "--to", "http://127.0.0.1:9")[0] == 1


@pytest.mark.slow
def test_a_version_and_a_bundle_are_exported(registry, run, tmp_path):
    version = tmp_path / "version.pt2"
    code, out, _ = run("export", registry.uri, "ride@champion", "--format", "torch", "--to", version)
    assert code == 0
    assert "answers as the bundle does, on 3, 1, 7 rows" in out
    told = json.loads((tmp_path / "version.pt2.json").read_text())
    assert told["bundle"] == registry.get("ride", 1).artifact
    bundle = tmp_path / "bundle.pt2"
    found = json.loads(run("export", tmp_path / "bundle", "--format", "torch", "--to", bundle, "--json")[1])
    assert {name: value for name, value in found.items() if name != "file"} == {
        name: value for name, value in told.items() if name != "file"
    }
    code, _, error = run("export", registry.uri, "ride", "--format", "torch", "--to", bundle)
    assert (code, "exists already" in error) == (1, True)
