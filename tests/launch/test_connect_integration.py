"""Spark Connect: a real server from the wheel, in a process of its own, since one process speaks one dialect."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("grpc")

SCRIPT = """
import json, os, sys, time
from pyspark.sql import SparkSession
import numpy
from sparkdl import observe
from sparkdl.launch.driver import barrier
from sparkdl.config import LaunchConfig
from sparkdl.errors import *
from sparkdl.runner import run

session = SparkSession.builder.remote("local[2]").getOrCreate()
assert type(session).__module__.startswith("pyspark.sql.connect")
results, events = {}, []

def reduce_all():
    import torch, torch.distributed as dist
    print("speaking")
    observe.emit("here")
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return [int(os.environ["RANK"]), total.item(), numpy.arange(3_000_000)]

reachable = LaunchConfig(driver_host="127.0.0.1")
for name, config in (("gathered", LaunchConfig()), ("channel", reachable)):
    values = run(reduce_all, num_proc=2, config=config, on_event=lambda event: events.append(event["rank"]))
    results[name] = [[rank, total, int(array.sum())] for rank, total, array in values]
results["events"] = sorted(events)

def fail(world):
    if world.rank == 1:
        print("the last words")
        raise ValueError("no good")
    time.sleep(60)

def attempt(name, *args, **kwargs):
    try:
        barrier.launch(session, *args, **kwargs)
    except ClusterError as error:
        rank, tail = getattr(error, "rank", None), list(getattr(error, "log_tail", ()))
        results[name] = [type(error).__name__, rank, tail, str(error)[:200]]

attempt("raised", fail, num_proc=2, config=LaunchConfig())
attempt("refused", fail, num_proc=3, config=LaunchConfig())

def late(world):
    from sparkdl.launch.store import store_of_this_run
    if world.rank == 0:
        return "done"
    time.sleep(2)  # rank 0, whose task holds the store, has returned
    store_of_this_run().set("late", b"there")
    return store_of_this_run().get("late", 5).decode()

results["late"] = barrier.launch(session, late, num_proc=2, config=LaunchConfig())

def hang(world):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if world.rank == 1:
        print("so far")
        time.sleep(60)
    dist.all_reduce(torch.ones(1))

config = LaunchConfig(timeout_seconds=15.0)
attempt("timed out", hang, num_proc=2, config=config, preload=["torch", "torch.distributed"])

def deaf(world):
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass

attempt("unheard", deaf, num_proc=2, config=LaunchConfig(timeout_seconds=1.0))
print("RESULTS " + json.dumps(results))
session.stop()
"""


@pytest.mark.slow
def test_connect_with_and_without_a_channel(tmp_path):
    script = tmp_path / "client.py"
    script.write_text(SCRIPT)
    # Spark's own switch for a server on a free port instead of 15002.
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_TESTING": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, env=env)
    assert "RESULTS" in done.stdout, done.stderr[-6000:]
    results = json.loads(done.stdout.rpartition("RESULTS ")[2])
    total = 3_000_000 * 2_999_999 // 2
    assert results["gathered"] == results["channel"] == [[0, 2.0, total], [1, 2.0, total]]
    assert results["events"] == [0, 0, 1, 1]
    for rank in (0, 1):
        assert done.stdout.count(f"[rank {rank}] speaking\n") == 2
    assert results["raised"][:3] == ["RankFailedError", 1, ["the last words"]]
    assert "ValueError: no good" in results["raised"][3]
    assert results["refused"][0] == "PreflightError"
    assert results["late"] == ["done", "there"]
    assert results["timed out"][:3] == ["LaunchTimeoutError", 1, ["so far"]]
    assert "rank 1 did not return within 15 s" in results["timed out"][3]
    assert results["unheard"][0] == "LaunchTimeoutError"
    assert "could not be interrupted" in results["unheard"][3]
