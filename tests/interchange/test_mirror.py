"""A version in MLflow, mirrored to an SQLite store by MLflow's own client: all of it, once; and what is refused."""

from __future__ import annotations

import logging
import math
import re
import socket

import numpy as np
import pandas as pd
import pytest
from torch import nn

import sparkdl
from sparkdl.errors import BundleError, ConfigError, IntegrityError, StorageError
from sparkdl.estimator import TorchModel
from sparkdl.interchange import mlflow as mirroring
from sparkdl.interchange.mlflow import find_version, mirror, mirror_published, shown
from sparkdl.models.registry import ModelRegistry, SigningKey
from sparkdl.models.signature import Signature, TensorField

pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")

ROWS = pd.DataFrame({"a": [0.5, -1.0], "b": [1, 2]})


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    """A store; its tables are made by whoever comes first."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def client(uri, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return MlflowClient(uri)


@pytest.fixture
def named(request, registry, bundles):
    """The name of a model of its own, with one version."""
    name = re.sub(r"\W", "-", request.node.name)[:60]
    registry.publish(name, str(bundles / "plain"), metrics={"auc": 0.7})
    return name


def counted(client, name):
    """Runs, logged models, registered versions of a model."""
    experiment = client.get_experiment_by_name(name).experiment_id
    versions = client.search_model_versions(f"name = '{name}'")
    return len(client.search_runs([experiment])), len(client.search_logged_models([experiment])), len(versions)


def test_everything_that_is_known_of_a_version_stands_in_mlflow(registry, uri, client):
    import mlflow

    done = mirror(registry, "churn@champion", uri)
    assert (done.name, done.version, done.aliases, done.missing) == ("churn", "1", ("champion",), ())
    run = client.get_run(done.run_id)
    assert run.data.params == {"epochs": "2", "optimizer.name": "Adam", "optimizer.lr": "0.1"}
    assert {name: value for name, value in run.data.metrics.items() if not math.isnan(value)} == {
        "auc": 0.7, "val_loss": 0.75, "epoch.loss": 0.5, "epoch.val_loss": 0.75,
    }  # fmt: skip
    curve = client.get_metric_history(done.run_id, "epoch.loss")
    assert [(point.step, point.value) for point in curve] == [(0, 1.5), (1, 0.5)]
    assert (run.info.status, run.info.run_name, run.data.tags["sparkdl.model"]) == ("FINISHED", "churn 1", "churn")
    assert run.data.tags["mlflow.source.git.commit"] == "abc"
    source = mlflow.data.get_source(run.inputs.dataset_inputs[0])
    assert (source.path, source.delta_table_version) == ("/lake/customers", 0)
    assert run.inputs.dataset_inputs[0].dataset.digest == "f" * 36
    assert [one.model_id for one in run.outputs.model_outputs] == [done.model_id]
    version = client.get_model_version_by_alias("churn", "champion")
    assert (version.version, version.run_id, version.tags["sparkdl.version"]) == (1, done.run_id, "1")
    assert version.tags["sparkdl.artifact"] in version.description
    assert version.description.startswith("Version 1 of churn in sparkdl's registry")
    loaded = mlflow.pyfunc.load_model("models:/churn@champion")
    expected = sparkdl.load_model("churn@champion", registry).predict(ROWS)
    found = loaded.predict(ROWS)
    assert list(found) == ["prediction", "probability"]
    for name in found:
        np.testing.assert_array_equal(np.stack(found[name]), np.stack(expected[name]))


def test_mirrored_again_nothing_is_made_again_and_the_aliases_follow(registry, bundles, uri, client, named):
    first = mirror(registry, f"{named}@1", uri)
    assert (first.aliases, mirror(registry, f"{named}:1", uri)) == ((), first)
    registry.publish(named, str(bundles / "vector"))
    registry.set_alias(named, "best", 1, expected=None)
    assert mirror(registry, f"{named}@1", uri).aliases == ("best",)
    registry.set_alias(named, "best", 2, expected=1)
    second = mirror(registry, named, uri)  # the newest
    assert counted(client, named) == (2, 2, 2)
    assert (second.version, client.get_model_version_by_alias(named, "best").run_id) == ("2", second.run_id)
    registry.rollback(named, "best")
    assert mirror(registry, f"{named}@best", uri) == mirror(registry, f"{named}@1", uri)
    assert client.get_model_version_by_alias(named, "best").run_id == first.run_id
    assert counted(client, named) == (2, 2, 2)


@pytest.mark.parametrize(
    "cut",
    [
        "_log",
        "write_model",
        *(pytest.param(cut, marks=pytest.mark.slow) for cut in ("log_batch", "_registered", "_noted")),
    ],
)
def test_a_mirror_that_was_cut_off_is_finished_by_the_next(registry, uri, client, named, cut, monkeypatch):
    from mlflow import MlflowClient

    def lost(*given, **more):
        raise ConnectionResetError("the cable")

    registry.set_alias(named, "best", 1, expected=None)
    with monkeypatch.context() as patch:
        if cut == "log_batch":  # between two requests, of which the first arrived
            whole = MlflowClient.log_batch
            patch.setattr(MlflowClient, "log_batch", lambda *given, **more: (whole(*given, **more), lost()))
        else:
            patch.setattr(mirroring, cut, lost)
        with pytest.raises(StorageError, match="did not take the model, ConnectionResetError: the cable"):
            mirror(registry, named, uri)
    done = mirror(registry, named, uri)
    assert counted(client, named) == (1, 1, 1)
    assert done == mirror(registry, named, uri)
    assert [point.step for point in client.get_metric_history(done.run_id, "epoch.loss")] == [0, 1]
    assert [point.value for point in client.get_metric_history(done.run_id, "auc")] == [0.7]
    assert client.get_model_version_by_alias(named, "best").run_id == done.run_id
    assert client.get_logged_model(done.model_id).status == "READY"


def test_names_of_three_parts_and_names_of_ones_own(registry, bundles, uri, client):
    import mlflow

    registry.publish("main.ml.churn", str(bundles / "plain"))
    assert mirror(registry, "main.ml.churn", uri).name == "main.ml.churn"
    done = mirror(registry, "churn", uri, name="main.sales.churn", experiment="/teams/sales")
    assert (done.name, done.version) == ("main.sales.churn", "1")
    experiment = client.get_experiment_by_name("/teams/sales")
    assert client.get_run(done.run_id).info.experiment_id == experiment.experiment_id
    assert experiment.artifact_location.startswith("file://")
    for name in ("main.ml.churn", "main.sales.churn"):
        assert len(mlflow.pyfunc.load_model(f"models:/{name}/1").predict(ROWS)) == 2


def test_an_alias_that_was_moved_during_the_upload_is_left_where_it_is(
    registry, bundles, uri, client, named, monkeypatch
):
    registry.publish(named, str(bundles / "vector"))
    registry.set_alias(named, "best", 1, expected=None)
    registry.set_alias(named, "best", 2, expected=1)
    first, write = mirror(registry, f"{named}@1", uri), mirroring.write_model

    def write_for_minutes(*given, **more):
        registry.rollback(named, "best")
        assert mirror(registry, f"{named}@1", uri).aliases == ("best",)
        write(*given, **more)

    monkeypatch.setattr(mirroring, "write_model", write_for_minutes)
    assert mirror(registry, f"{named}@2", uri).aliases == ()
    assert client.get_model_version_by_alias(named, "best").run_id == first.run_id


def test_what_the_key_has_not_signed_does_not_reach_mlflow(registry, bundles, uri, client, named, caplog):
    signed = ModelRegistry(registry.uri, key=SigningKey.of("5d41402abc4b2a76b9719d911017c592"))
    for _ in range(2):
        signed.publish(named, str(bundles / "plain"))
    signed.set_alias(named, "best", 2, expected=None)
    registry.set_alias(named, "best", 3, expected=2)
    registry.publish(named, str(bundles / "vector"))
    for refused in (named, f"{named}@4", f"{named}@1", f"{named}@best"):
        with pytest.raises(IntegrityError, match="is not signed"):
            mirror(signed, refused, uri)
        with pytest.raises(IntegrityError, match="is not signed"):
            find_version(signed, refused)
    assert client.get_experiment_by_name(named) is None
    assert mirror(signed, f"{named}@3", uri).aliases == ()
    assert (
        f"MLflow is not given the alias best: the move of 'best' to version 3 of '{named}' is not signed" in caplog.text
    )
    assert client.get_registered_model(named).aliases == {}
    signed.set_alias(named, "better", 3, expected=None)
    assert mirror(signed, f"{named}@better", uri).aliases == ("better",)
    assert mirror(registry, f"{named}@3", uri).aliases == ("best", "better")  # who has no key believes both


def test_a_bundle_that_was_replaced_does_not_reach_mlflow(registry, bundles, uri, client, named, tmp_path):
    place = tmp_path / "registry" / "artifacts" / registry.get(named, 1).artifact
    for file in (bundles / "vector").iterdir():  # whole, and of one mind with itself
        (place / file.name).write_bytes(file.read_bytes())
    with pytest.raises(IntegrityError, match="has the content hash"):
        mirror(registry, named, uri)
    assert client.get_experiment_by_name(named) is None


class _OnlyVersions:
    """A client of a registry that knows versions and descriptions, as Unity Catalog's open server does."""

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        return getattr(self._client, name)

    def set_model_version_tag(self, *given):
        raise NotImplementedError("Method not implemented")

    set_registered_model_alias = set_model_version_tag

    def search_model_versions(self, *given, **more):
        found = self._client.search_model_versions(*given, **more)
        for one in found:
            one._run_id = None
        return found


def test_a_registry_without_aliases_and_tags_gets_the_version_and_the_log_says_what_it_lacks(
    registry, uri, client, named, monkeypatch, caplog
):
    import mlflow

    whole = mlflow.MlflowClient
    monkeypatch.setattr(mlflow, "MlflowClient", lambda **given: _OnlyVersions(whole(**given)))
    registry.set_alias(named, "champion", 1, expected=None)
    with caplog.at_level(logging.INFO, logger="sparkdl"):
        done = mirror(registry, named, uri)
        assert mirror(registry, named, uri) == done  # found again by its description
    assert (done.version, done.aliases, done.missing) == ("1", (), ("tags", "the alias champion"))
    assert "that registry does not hold tags and the alias champion" in caplog.messages[-1]
    assert counted(client, named) == (1, 1, 1)
    version = client.get_model_version(named, "1")
    assert (version.tags, "auc 0.7" in version.description) == ({}, True)


def test_an_alias_that_mlflow_does_not_take_is_named(registry, uri, named):
    registry.set_alias(named, "best.one", 1, expected=None)
    done = mirror(registry, named, uri)
    assert (done.aliases, done.missing) == ((), ("the alias best.one",))


def test_nothing_is_sent_anywhere_else(registry, uri, named, monkeypatch):
    reached = []

    def connect(self, address):
        reached.append(address)
        raise OSError("no way out")

    monkeypatch.setattr(socket.socket, "connect", connect)
    for name in ("CI", "GITHUB_ACTIONS", "PYTEST_CURRENT_TEST"):  # where MLflow sends nothing by itself
        monkeypatch.delenv(name, raising=False)
    mirror(registry, named, uri)
    assert reached == []


def test_a_publication_is_mirrored_and_stands_where_mlflow_is_away(registry, uri, client, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    fed = Signature(inputs=(TensorField(name="x", shape=(2,), columns=("a", "b")),), outputs=(TensorField(name="y"),))
    model = TorchModel(model=nn.Linear(2, 1), signature=fed)
    done = model.publish(registry, "line", metrics={"rmse": 2.0}, mlflow=uri)
    assert client.get_model_version("line", "1").tags["sparkdl.version"] == str(done.version) == "1"
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        done = model.publish(registry, "line", mlflow="http://me:secret@127.0.0.1:9")
    assert (done.version, len(registry.list("line"))) == (2, 2)
    assert not any("secret" in one for one in caplog.messages)
    said = caplog.messages[-1]
    command = f"sparkdl models mirror {registry.uri} line:2 --to 'http://***@127.0.0.1:9'"
    assert said.startswith(f"line:2 stays published in {registry.uri}: MLflow at http://***@127.0.0.1:9 did not take")
    assert said.endswith(command)


def test_what_could_never_be_mirrored_is_refused_before_it_is_published(registry, uri, monkeypatch):
    class Local(nn.Linear):
        pass

    fed = Signature(inputs=(TensorField(name="x", shape=(2,), columns=("a", "b")),), outputs=(TensorField(name="y"),))
    model = TorchModel(model=Local(2, 1), signature=fed)
    with pytest.raises(BundleError, match="holds a pickle"):
        model.publish(registry, "local", allow_pickle=True, mlflow=uri)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"MLflow is not installed: pip install 'sparkdl\[mlflow\]'"):
        TorchModel(model=nn.Linear(2, 1), signature=fed).publish(registry, "local", mlflow=uri)
    assert "local" not in registry.models()


@pytest.mark.parametrize(
    ("asked", "found"), [("churn", 1), ("churn@champion", 1), ("churn:champion", 1), ("churn@1", 1), ("churn:1", 1)]
)
def test_a_version_is_named_in_several_ways(registry, asked, found):
    assert find_version(registry, asked).version == found


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("other", "no model 'other'"),
        ("churn@2", "no version 2"),
        ("churn:best", "no alias 'best'"),
        ("churn@²", "no alias '²'"),
    ],
)
def test_a_version_that_is_not_there_is_refused_before_mlflow_is_asked(registry, asked, said):
    with pytest.raises(ConfigError, match=said):
        mirror(registry, asked, "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("", "the address '' of MLflow is empty: give one"),
        ("sqlite://", "sqlite:// names no file, and is gone with this process"),
        ("sqlite:///:memory:", "sqlite:///:memory: names no file"),
    ],
)
def test_an_address_that_keeps_nothing_is_refused(registry, tmp_path, monkeypatch, address, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        mirror(registry, "churn", address)
    assert [path.name for path in tmp_path.iterdir()] == ["registry"]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("nonsense://x", "UnsupportedModelRegistryStoreURIException"),
        ("sqlite:////proc/nowhere/mlflow.db", "FileNotFoundError"),
        ("sqlite:////etc/hostname", "file is not a database"),
    ],
)
def test_an_address_that_is_none_is_one_sentence(registry, address, said):
    with pytest.raises(StorageError, match=f"MLflow at {re.escape(address)} did not take the model, .*{said}.*: start"):
        mirror(registry, "churn", address)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("postgresql://me:s3cret@host:5432/db", "postgresql://***@host:5432/db"),
        ("postgresql://me:s3cret#ret@host/db", "postgresql://***@host/db"),
        ("postgresql://me:s3cret/x@y@host/db", "postgresql://***@host/db"),
        ("postgresql://me:s3cret[x@host/db", "postgresql://***@host/db"),  # no address that Python's parser takes
        ("postgresql://me:s3cret?x@host/db", "postgresql://***"),
        ("postgresql:/me:s3cret@host/db", "postgresql:/***@host/db"),
        ("mysql+pymysql://host/db?user=me&password=s3cret", "mysql+pymysql://host/db?***"),
        ("http://127.0.0.1:9/?token=s3cret", "http://127.0.0.1:9/?***"),
        ("mysql+pymysql://host/db?password=x@s3cret", "mysql+pymysql://***"),
    ],
)
def test_no_password_is_shown(registry, monkeypatch, caplog, address, told):
    assert shown(address) == told
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        assert mirror_published(registry, registry.get("churn", 1), address) is None  # which stands, whatever happens
    assert told in caplog.messages[-1]
    assert "s3cret" not in caplog.text


def test_an_address_without_a_password_is_shown_whole():
    for plain in ("http://host:5000", "sqlite:////data/a@b.db", "databricks", "databricks://profile"):
        assert shown(plain) == plain
