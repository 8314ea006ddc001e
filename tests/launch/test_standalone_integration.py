"""A standalone cluster of one master and two workers from the pip wheel, with GPU addresses declared by a script."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

pyspark = pytest.importorskip("pyspark")
pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, sys
from pyspark.sql import SparkSession
from sparkdl.runner import run
from sparkdl.launch.driver import barrier
from sparkdl.config import LaunchConfig
from sparkdl.errors import PreflightError, RankFailedError

session = (
    SparkSession.builder.master(sys.argv[1])
    .config("spark.driver.memory", "512m").config("spark.executor.memory", "512m").config("spark.ui.enabled", "false")
    .config("spark.executor.cores", "2").config("spark.cores.max", "4").config("spark.task.cpus", "1")
    .config("spark.executor.resource.gpu.amount", "4").config("spark.task.resource.gpu.amount", "1")
    .config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.python.daemon.module", "sparkdl.launch.daemon")
    .getOrCreate()
)
results = {}

def look(world):
    names = ("CUDA_VISIBLE_DEVICES", "SPARKDL_DEVICE", "SPARKDL_DEVICES", "LOCAL_RANK", "OMP_NUM_THREADS")
    return [world.rank, world.local_rank, world.device, *[os.environ.get(name) for name in names]]

quiet = LaunchConfig(log_to_driver=False)
results["one"] = barrier.launch(session, look, num_proc=4, config=quiet)
results["none"] = barrier.launch(session, look, num_proc=2, config=LaunchConfig(gpus_per_rank=0))
results["two"] = barrier.launch(session, look, num_proc=2, config=LaunchConfig(gpus_per_rank=2, cpus_per_rank=2))
try:
    barrier.launch(session, look, num_proc=5, config=quiet)
except PreflightError as error:
    results["refused"] = str(error)

def reduce_all():
    import torch, torch.distributed as dist, horovod.torch as hvd
    dist.init_process_group("gloo")
    ours = torch.ones(1)
    dist.all_reduce(ours)
    hvd.init()
    return [ours.item(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()]

results["reduced"] = run(reduce_all, num_proc=4, config=quiet)

def die(world):
    if world.rank == 2:
        os._exit(9)
    import time
    time.sleep(60)

try:
    barrier.launch(session, die, num_proc=4, config=quiet)
except RankFailedError as error:
    results["died"] = [error.rank, error.cause]
results["again"] = barrier.launch(session, lambda world: world.rank, num_proc=4, config=quiet)
session.stop()
print("RESULTS " + json.dumps(results))
"""


@pytest.fixture
def cluster(tmp_path):
    """Yield the master's URL; worker 1 sees GPUs 4-7 of the machine under the addresses 0-3."""
    from tests.launch.standalone import Worker, standalone_cluster

    discovery = tmp_path / "gpus.sh"
    discovery.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["0", "1", "2", "3"]}'\n""")
    discovery.chmod(discovery.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    settings = tmp_path / "worker.conf"
    settings.write_text(f"spark.worker.resource.gpu.amount 4\nspark.worker.resource.gpu.discoveryScript {discovery}\n")
    options = ("--properties-file", str(settings))
    workers = [Worker(options, {"CUDA_VISIBLE_DEVICES": visible}) for visible in ("0,1,2,3", "4,5,6,7")]
    with standalone_cluster(tmp_path, workers) as url:
        yield url


def test_gpus_follow_spark_and_several_executors_work_together(cluster, tmp_path):
    import json

    script = tmp_path / "driver.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), cluster],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
    )
    assert done.returncode == 0, done.stderr[-8000:]
    results = json.loads(done.stdout.rpartition("RESULTS ")[2])

    one = results["one"]
    assert [row[0] for row in one] == [row[1] for row in one] == [0, 1, 2, 3]
    visible = {row[3] for row in one}
    assert len(visible) == 1, "the ranks of a host see one list"
    order = visible.pop().split(",")
    assert len(set(order)) == 4
    assert {gpu in "0123" for gpu in order} == {True, False}, "both workers' GPUs, by their physical names"
    assert [row[2] for row in one] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]

    assert [row[2] for row in results["none"]] == ["cpu", "cpu"]
    two = results["two"]
    assert [row[2] for row in two] == ["cuda:0", "cuda:1"]
    assert [row[5] for row in two] == ["cuda:0,cuda:2", "cuda:1,cuda:3"]
    assert [row[7] for row in two] == ["2", "2"]
    assert "num_proc=5 ranks do not fit the cluster's 4 task slots" in results["refused"]
    assert results["reduced"] == [[4.0, 4.0]] * 4
    assert results["died"][0] == 2
    assert results["again"] == [0, 1, 2, 3]
