"""What opens a filesystem travels to where the work is done, and into no log and no plan of Spark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid

import pytest

SECRET = "hidden-5ecret"
JOURNEY = """
import json, logging, sys
import fsspec.config
from pyspark.sql import SparkSession

logging.basicConfig(level=logging.DEBUG)
url, bucket, secret, log = sys.argv[1:]
fsspec.config.conf["s3"] = {
    "key": "testing", "secret": secret, "endpoint_url": url, "client_kwargs": {"region_name": "us-east-1"}
}
import torch
from sparkdl import ModelRegistry, TorchEstimator, write_shards
from sparkdl.batches.reading.loader import ShardedDataset
from sparkdl.tables.table import Table

builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
for name, value in {"enabled": "true", "dir": f"file://{log}", "compress": "false"}.items():
    builder = builder.config(f"spark.eventLog.{name}", value)
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("DEBUG")
frame = spark.range(64).selectExpr("CAST(id AS FLOAT) / 64 AS x", "CAST(id AS FLOAT) AS y")
manifest = write_shards(frame, f"s3://{bucket}/set", columns=["x"], labels=["y"])
net = torch.nn.Linear(1, 1)
fitted = TorchEstimator(
    model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss=torch.nn.MSELoss(), feature_cols=["x"],
    label_cols=["y"], epochs=1, batch_size=8, num_proc=2, max_failures=1, store=f"s3://{bucket}/store", verbose=0,
).fit(frame)
scored = fitted.transform(frame)
scored.explain(True)
rows = scored.count(), len(scored.collect())
fitted.save(f"s3://{bucket}/model")
fitted.write().overwrite().save(f"s3://{bucket}/model")
Table(f"s3://{bucket}/table").write(scored.select("x", "y__output"))
registry = ModelRegistry(f"s3://{bucket}/registry")
version = registry.publish("net", f"s3://{bucket}/model/bundle").version
print(fitted, registry, fsspec.config.conf.keys())
read = sum(batch.rows for batch in ShardedDataset(f"s3://{bucket}/set").loader(batch_size=8))
spark.stop()
print(json.dumps([manifest.rows, read, *rows, Table(f"s3://{bucket}/table").rows().num_rows, version]))
"""


@pytest.mark.slow
def test_settings_reach_every_stage_and_neither_sparks_logs_nor_its_plans_show_a_secret(s3_endpoint, tmp_path):
    boto3 = pytest.importorskip("boto3")
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=s3_endpoint, **keys).create_bucket(Bucket=bucket)
    env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    (tmp_path / "log").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", JOURNEY, s3_endpoint, bucket, SECRET, str(tmp_path / "log")],
        env={**env, "SPARK_LOCAL_IP": "127.0.0.1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [64, 64, 64, 64, 64, 1]
    logged = [path.read_text() for path in (tmp_path / "log").rglob("*") if path.is_file()]
    assert any("SparkListenerTaskEnd" in text for text in logged)
    assert "Physical Plan" in done.stdout
    for text in (*logged, done.stdout, done.stderr):
        assert SECRET not in text, text[max(0, text.find(SECRET) - 300) :][:400]
