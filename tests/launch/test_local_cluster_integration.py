"""``local-cluster``: one host, but executors in processes of their own, each with one slot."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("pyspark")
pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, sys, time
from pyspark.sql import SparkSession
from sparkdl.launch.driver import barrier
from sparkdl.config import LaunchConfig
from sparkdl.errors import PreflightError, RankFailedError
from sparkdl.runner import run

session = (
    SparkSession.builder.master("local-cluster[2,1,512]")
    .config("spark.driver.memory", "512m").config("spark.executor.memory", "512m")
    .config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
    .getOrCreate()
)
results = {}

def reduce_all():
    import torch, torch.distributed as dist
    print("speaking")
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return [int(os.environ["RANK"]), total.item(), os.getppid()]

results["reduced"] = run(reduce_all, num_proc=2, backend="torch")
try:
    run(reduce_all, num_proc=3)
except PreflightError as error:
    results["refused"] = str(error)

heard = os.path.abspath("heard")

def die(world):
    if world.rank == 1:
        print("the last words")
        while not os.path.exists(heard):  # until the line has left the process
            time.sleep(0.02)
        os._exit(9)
    time.sleep(600)

class Console:
    def write(self, text):
        if "the last words" in text:
            open(heard, "w").close()
    def flush(self):
        pass

out, sys.stdout = sys.stdout, Console()
try:
    barrier.launch(session, die, num_proc=2)
except RankFailedError as error:
    results["died"] = [error.rank, list(error.log_tail)]
sys.stdout = out
results["again"] = run(lambda: int(os.environ["RANK"]), num_proc=2)
session.stop()

session = (
    SparkSession.builder.master("local-cluster[1,2,512]")
    .config("spark.driver.memory", "512m").config("spark.executor.memory", "512m")
    .config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
    .config("spark.dynamicAllocation.enabled", "true").config("spark.dynamicAllocation.shuffleTracking.enabled", "true")
    .getOrCreate()
)
try:
    run(reduce_all, num_proc=2)
except PreflightError as error:
    results["dynamic"] = str(error)
session.stop()
print("RESULTS " + json.dumps(results))
"""


def test_ranks_in_executors_of_their_own(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, env=env, cwd=tmp_path
    )
    assert "RESULTS" in done.stdout, done.stderr[-6000:]
    results = json.loads(done.stdout.rpartition("RESULTS ")[2])
    assert [row[:2] for row in results["reduced"]] == [[0, 2.0], [1, 2.0]]
    assert len({daemon for _, _, daemon in results["reduced"]}) == 2, "each executor has a Python daemon of its own"
    assert "[rank 1] speaking\n" in done.stdout
    assert "num_proc=3 ranks do not fit the cluster's 2 task slots" in results["refused"]
    assert results["died"] == [1, ["the last words"]]
    assert results["again"] == [0, 1]
    assert "cannot run with spark.dynamicAllocation.enabled=true: set it to false" in results["dynamic"]
