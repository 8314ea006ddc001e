"""Options that a user gives with an address are used wherever that address goes; nothing is configured elsewhere."""

from __future__ import annotations

import pickle
from datetime import timedelta

import fsspec.config
import pytest
import torch
from torch import nn

from sparkdl.config import CheckpointConfig
from sparkdl.models.bundle import copy_bundle, load_bundle, read_bundle, save_bundle
from sparkdl.models.registry import ModelRegistry
from sparkdl.train.checkpoint.checkpoint import Checkpointer


@pytest.fixture
def place(s3_root, monkeypatch):
    """A place that only its own options open."""
    monkeypatch.setitem(fsspec.config.conf, "s3", {})
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    return s3_root


@pytest.fixture(autouse=True)
def _no_copies(tmp_path, monkeypatch):
    """No copy of an earlier run is taken for the bundle."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_a_bundle_is_read_copied_and_loaded(place):
    model = nn.Linear(3, 1)
    saved = save_bundle(model, place.child("bundle"))
    for info in (saved, read_bundle(place.child("bundle")), pickle.loads(pickle.dumps(saved))):
        assert "testing" not in repr(info)
        copy_bundle(info, place.child("copy"))
    assert torch.equal(load_bundle(place.child("copy")).model.weight, model.weight)


def test_a_checkpointer_writes_and_reads_also_after_it_has_travelled(place):
    keeper = Checkpointer(CheckpointConfig(uri=place.child("run")))
    keeper.save({"x": torch.ones(2)}, step=1, epoch=0)
    keeper.close()
    there = pickle.loads(pickle.dumps(keeper))
    assert there.latest().step == 1
    assert "testing" not in repr(there.config)


def test_a_registry_reaches_its_artifacts_as_it_reaches_its_events(place, s3_endpoint, tmp_path):
    options = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    model = nn.Linear(2, 1)
    save_bundle(model, str(tmp_path / "bundle"))
    registry = ModelRegistry(place.child("registry").uri, options)
    registry.publish("m", str(tmp_path / "bundle"))
    assert torch.equal(registry.load("m", 1).model.weight, model.weight)
    registry.delete("m", 1)
    assert len(registry.vacuum(timedelta(0))) == 1


def test_a_relative_checkpoint_folder_stays_the_drivers_when_it_travels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keeper = pickle.dumps(Checkpointer(CheckpointConfig(uri="run")))
    monkeypatch.chdir("/")
    assert pickle.loads(keeper).folder.local_path() == tmp_path / "run"
