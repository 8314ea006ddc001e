"""Checkpoints where runs really keep them: in an object store, and on a disk that fills up."""

from __future__ import annotations

import os
import subprocess
import uuid

import fsspec.config
import pytest
import torch
from train_helpers import Interrupted, RaiseAt, state_equal

from sparkdl.config import CheckpointConfig
from sparkdl.errors import CheckpointError
from sparkdl.train.checkpoint.checkpoint import Checkpointer


@pytest.fixture
def bucket(monkeypatch):
    """The URI of a fresh bucket on an S3 server of this test."""
    pytest.importorskip("s3fs")
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    url, region = f"http://{host}:{port}", "us-east-1"
    options = {"key": "k", "secret": "s", "endpoint_url": url, "client_kwargs": {"region_name": region}}
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    client = boto3.client("s3", endpoint_url=url, aws_access_key_id="k", aws_secret_access_key="s", region_name=region)
    name = f"bucket-{uuid.uuid4().hex[:10]}"
    client.create_bucket(Bucket=name)
    yield name, client
    server.stop()


def test_a_run_goes_on_from_s3_bit_for_bit_and_past_a_damaged_object(task, train, source, bucket):
    name, client = bucket
    config = CheckpointConfig(uri=f"s3://{name}/run", every_steps=5, keep_last=2)
    undisturbed = train(task(dropout=0.5), source(), epochs=2)
    with pytest.raises(Interrupted):
        train(task(dropout=0.5), source(), epochs=2, checkpoints=Checkpointer(config), callbacks=[RaiseAt(11)])

    keys = [entry["Key"] for entry in client.list_objects_v2(Bucket=name)["Contents"]]
    assert [key for key in keys if key.endswith(".json")] == ["run/step-0000000007.json", "run/step-0000000010.json"]
    assert len(keys) == 4  # and the tensors of these two, nothing half-written or outdated
    newest = next(key for key in keys if key.startswith("run/step-0000000010.") and key.endswith(".safetensors"))
    whole = client.get_object(Bucket=name, Key=newest)["Body"].read()
    client.put_object(Bucket=name, Key=newest, Body=whole[:-1] + bytes([whole[-1] ^ 1]))

    resumed = train(task(dropout=0.5), source(), epochs=2, checkpoints=Checkpointer(config))
    assert resumed.resumed_step == 7
    assert state_equal(resumed.model, undisturbed.model)


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_one_clear_error_and_costs_no_earlier_checkpoint(small_disk):
    keeper = Checkpointer(CheckpointConfig(uri=str(small_disk / "run"), keep_last=3))
    state = {"w": torch.arange(12_000.0)}  # 48 kB
    keeper.save(state, step=1, epoch=0)
    keeper.wait()
    (small_disk / "other").write_bytes(bytes(160_000))
    keeper.save(state, step=2, epoch=0)
    with pytest.raises(CheckpointError, match=r"a checkpoint could not be written to .*No space left on device"):
        keeper.wait()
    left = Checkpointer(keeper.config)
    assert left.steps() == [1]
    assert len(list((small_disk / "run").glob("*.safetensors"))) == 1  # what was half-written is gone
    assert torch.equal(left.latest().state["w"], state["w"])
    (small_disk / "other").unlink()
    keeper.save(state, step=3, epoch=0)
    keeper.close()
    assert left.steps() == [1, 3]
