"""Tables, bundles and the registry on an S3 server on the loopback interface, with one configuration for all."""

from __future__ import annotations

import threading
import uuid
from datetime import timedelta

import boto3
import fsspec.config
import pytest
import torch
from torch import nn

from sparkdl.errors import ConflictError, SchemaError
from sparkdl.models.bundle import save_bundle
from sparkdl.models.registry import ModelRegistry
from sparkdl.tables.table import Table


@pytest.fixture(scope="module")
def endpoint():
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint, monkeypatch):
    options = {"key": "testing", "secret": "testing", "endpoint_url": endpoint}
    monkeypatch.setitem(fsspec.config.conf, "s3", {**options, "client_kwargs": {"region_name": "us-east-1"}})
    name = f"bucket-{uuid.uuid4().hex[:10]}"
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=name)
    return f"s3://{name}"


@pytest.mark.slow
def test_spark_tasks_write_and_one_commit_shows_it(spark, bucket):
    table = Table(f"{bucket}/features")
    frame = spark.createDataFrame([(i, f"d{i % 3}") for i in range(30)], "id long, day string")
    result = table.write(frame, partition_by=["day"])
    assert (result.version, result.rows) == (0, 30)
    table.write(frame.where("day = 'd1'").selectExpr("id + 100 as id", "day"), "replace")
    rows = table.rows().to_pylist()
    assert len(rows) == 30
    assert {row["day"] for row in rows if row["id"] >= 100} == {"d1"}
    with pytest.raises(SchemaError):
        table.write(frame.withColumnRenamed("id", "key"))
    assert table.vacuum(timedelta(0)) == []


def test_of_two_writers_of_one_version_one_is_told(bucket):
    import pyarrow as pa

    table = Table(f"{bucket}/log")
    table.append(pa.table({"x": [1]}))
    outcomes = []

    def write():
        try:
            outcomes.append(table.append(pa.table({"x": [2]}), expected_version=0))
        except ConflictError:
            outcomes.append("conflict")

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes, key=str) == [1, "conflict", "conflict"]


def test_a_model_is_published_promoted_and_loaded(bucket, tmp_path):
    model = nn.Linear(2, 1)
    save_bundle(model, str(tmp_path / "bundle"))
    registry = ModelRegistry(f"{bucket}/registry")
    for _ in range(2):
        registry.publish("m", str(tmp_path / "bundle"), metrics={"mae": 1.0})
    registry.promote_if_better("m", "champion", 2, metric="mae")
    assert torch.equal(registry.load("m", "champion").model.weight, model.weight)
    save_bundle(model, f"{bucket}/models/direct")
    registry.delete("m", 1)
    assert registry.vacuum(timedelta(0)) == []
