"""On Spark Connect a plain path is the server's: a server in a process of its own, whose default filesystem is HDFS."""

import json
import os
import subprocess
import sys

import pytest

from sparkdl.storage import Storage

SCRIPT = """
import json, sys
import torch
from pyspark import SparkContext
from pyspark.sql import SparkSession
from sparkdl import TorchModel, write_shards
from sparkdl.errors import ConfigError
from sparkdl.shards.manifest import Manifest
from sparkdl.storage import Storage

session = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
assert type(session).__module__.startswith("pyspark.sql.connect")
assert SparkContext._active_spark_context is None
session.range(5).write.parquet("/connect/rows")
refused = []
for text in ("relative", "~/model"):
    try:
        Storage.of(text)
    except ConfigError as error:
        refused.append(str(error))
frame = session.range(0, 64).selectExpr("CAST(id AS FLOAT) AS x", "CAST(id AS FLOAT) AS y")
write_shards(frame, "/connect/set", columns=["x"], labels=["y"])
model = TorchModel(model=torch.nn.Linear(1, 1), feature_columns=["x"], label_columns=["y"])
model.write().session(session).overwrite().save("/connect/model")
again = TorchModel.read().session(session).load("/connect/model")
same = torch.equal(again.getModel().weight, model.getModel().weight)
print("RESULTS " + json.dumps([Storage.of("/connect").uri, refused, Manifest.load("/connect/set").rows, same]))
session.stop()
"""


@pytest.fixture
def server(hadoop, connect_server):
    """The URL of a server that takes plain paths for HDFS's; the client's environment says nothing of that."""
    with connect_server(HADOOP_CONF_DIR=str(hadoop)) as url:
        yield url


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plain_path_is_the_servers_or_refused_with_the_reason(server, hdfs, tmp_path):
    (tmp_path / "client").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, server],
        cwd=tmp_path / "client",
        capture_output=True,
        text=True,
        check=False,
    )
    assert "RESULTS" in done.stdout, done.stderr[-6000:]
    address, refused, rows, same = json.loads(done.stdout.rpartition("RESULTS ")[2].splitlines()[0])
    assert (address, rows, same) == (f"{hdfs}/connect", 64, True)
    assert "only the Spark Connect server knows" in refused[0]
    assert "means a folder of this machine" in refused[1]
    assert [entry.name for entry in Storage.of(f"{hdfs}/connect").list()] == ["model", "rows", "set"]
    assert os.listdir(tmp_path / "client") == []
