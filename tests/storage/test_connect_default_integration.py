"""On Spark Connect a plain path is the server's: a server in a process of its own, whose default filesystem is HDFS."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("grpc")

from sparkdl.storage import Storage

SCRIPT = """
import json
import torch
from pyspark.sql import SparkSession
from sparkdl import TorchModel, write_shards
from sparkdl.errors import ConfigError
from sparkdl.shards.manifest import Manifest
from sparkdl.storage import Storage

session = SparkSession.builder.remote("local[2]").getOrCreate()
assert type(session).__module__.startswith("pyspark.sql.connect")
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plain_path_is_the_servers_or_refused_with_the_reason(hadoop, hdfs, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={
            **os.environ,
            "HADOOP_CONF_DIR": str(hadoop),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
        },
        cwd=tmp_path,
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
    assert not [name for name in os.listdir(tmp_path) if name not in ("artifacts", "spark-warehouse")]
