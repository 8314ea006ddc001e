"""Launch -> first all-reduce -> every rank's value, on 2 ranks: ours beside horovod.spark.run and TorchDistributor.

Each contender runs in a fresh process on ``local[2]``. Cold is its first launch in a session that has run one Spark
job without Python; warm the median of the later ones. One JSON line per workload; also a script.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

COMMON = """
import json, os, sys, time
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.memory", "1g").config("spark.ui.showConsoleProgress", "false")
for setting in sys.argv[2:]:
    builder = builder.config(*setting.split("=", 1))
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("OFF")
spark.range(100).selectExpr("sum(id)").collect()

def with_torch():
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()

def with_horovod():
    import torch, horovod.torch as hvd
    hvd.init()
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    hvd.shutdown()
    return total

def measure(launch, check):
    seconds = []
    for _ in range(int(sys.argv[1])):
        start = time.perf_counter()
        values = launch()
        seconds.append(time.perf_counter() - start)
        assert check(values), values
    spark.stop()
    print("SECONDS " + json.dumps(seconds), flush=True)
"""
OURS = """
from sparkdl.runner import run
measure(lambda: run({function}, num_proc=2, backend={backend!r}), lambda values: values == [2.0, 2.0])
"""
HOROVOD_SPARK = """
import horovod.spark
measure(lambda: horovod.spark.run(with_horovod, num_proc=2, verbose=0), lambda values: values == [2.0, 2.0])
"""
DISTRIBUTOR = """
from pyspark.ml.torch.distributor import TorchDistributor
distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
measure(lambda: distributor.run(with_torch), lambda value: value == 2.0)
"""
DAEMON = "spark.python.daemon.module=sparkdl.cluster.daemon"


def seconds_of(python: Path | str, program: str, launches: int, *settings: str) -> list[float]:
    """Run ``program`` in a fresh interpreter; return the seconds of each of its launches."""
    env = {**os.environ, "PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)}
    env["PATH"] = f"{Path(python).parent}{os.pathsep}{env['PATH']}"
    if python != sys.executable:
        env.pop("PYTHONPATH", None)
    command = [str(python), "-c", COMMON + program, str(launches), *settings]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    if "SECONDS " not in done.stdout:
        raise RuntimeError(f"a contender failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return list(json.loads(done.stdout.rpartition("SECONDS ")[2].splitlines()[0]))


def measure(our_launches: int = 21, peer_launches: int = 4) -> list[dict[str, object]]:
    """Run all contenders; return a row per workload and peer."""
    sys.path.insert(0, str(HERE))
    from peers import interpreter

    peers = {
        "horovod.spark.run": seconds_of(interpreter(), HOROVOD_SPARK, peer_launches),
        "TorchDistributor": seconds_of(sys.executable, DISTRIBUTOR, peer_launches),
    }
    ours = {
        f"{backend}{', prewarmed' if settings else ''}": seconds_of(
            sys.executable, OURS.format(function=f"with_{backend}", backend=backend), our_launches, *settings
        )
        for settings in ((), (DAEMON,))
        for backend in ("torch", "horovod")
    }
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout
    about = {
        "git": git.strip(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("pyspark", "torch", "horovod")}
        | {"python": platform.python_version()},
    }
    rows: list[dict[str, object]] = []
    for name, mine in ours.items():
        for peer, theirs in peers.items():
            for temperature, pick in (("cold", slice(0, 1)), ("warm", slice(1, None))):
                a, b = statistics.median(mine[pick]), statistics.median(theirs[pick])
                rows.append(
                    {
                        "workload": f"launch to first all-reduce, 2 ranks, {temperature}",
                        "ours": name,
                        "peer": peer,
                        "ratio": round(b / a, 1),
                        "our_seconds": round(a, 3),
                        "peer_seconds": round(b, 3),
                        "our_spread": [round(min(mine[pick]), 3), round(max(mine[pick]), 3)],
                        "peer_spread": [round(min(theirs[pick]), 3), round(max(theirs[pick]), 3)],
                        **about,
                    }
                )
    return rows


@pytest.mark.bench
@pytest.mark.timeout(1800)
def test_launch():
    for row in measure():
        print(json.dumps(row))


if __name__ == "__main__":
    for line in measure():
        print(json.dumps(line), flush=True)
