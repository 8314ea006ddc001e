"""Scoring and table writing through a real Spark Connect server, started from the pip wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.slow

CLIENT = """
import sys
import torch
from pyspark.sql import SparkSession
from sparkdl.models.bundle import Signature, TensorField, load_bundle, save_bundle
from sparkdl.scoring.score import score
from sparkdl.tables.table import Table

folder = sys.argv[1]
spark = SparkSession.builder.remote("local[2]").getOrCreate()
assert "connect" in type(spark).__module__
frame = spark.range(100).selectExpr("id", "cast(id as float) a", "cast(id * 2 as float) b", "cast(id as double) c")
field = TensorField(name="x", shape=(3,), columns=("a", "c", "b"))
signature = Signature(inputs=(field,), outputs=(TensorField(name="y"),))
model = torch.nn.Linear(3, 1)
save_bundle(model, folder + "/bundle", signature=signature)
table = Table(folder + "/predictions")
print("written", table.write(score(frame, folder + "/bundle")).rows)
rows = table.read(spark).collect()
with torch.inference_mode():
    wanted = {r.id: model(torch.tensor([[r.a, r.c, r.b]])).item() for r in rows}
assert all(abs(row.y - wanted[row.id]) < 1e-3 for row in rows), rows[:3]
print("module", score(frame, model, signature=signature, keep=["id"]).count())
spark.stop()
"""


def test_score_and_write_through_connect(tmp_path):
    pytest.importorskip("grpc")
    script = tmp_path / "client.py"
    script.write_text(textwrap.dedent(CLIENT))
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_CONNECT_MODE_ENABLED": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, env=env, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["written", "100", "module", "100"]
