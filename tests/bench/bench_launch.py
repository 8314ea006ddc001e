"""Launch -> first all-reduce -> every rank's value, on 2 ranks: ours beside horovod.spark.run and TorchDistributor.

Every contender is a process of its own with a ``local[2]`` session that has run one Spark job without Python. Cold is
the first launch of a session; warm the median of the later ones. The contenders take turns, a session each, so that
whatever else the machine does meets them all, and a round is only begun when there is time for it. Ours runs as the
README advises, with prewarmed Python workers, and again with Spark's default workers. ``as rows of the stage`` is the
way for Spark Connect (``launch/driver/stage_rows.py``), which needs no connection to the driver.

Each figure is printed as a JSON line as it comes, the ratios at the end of each round; also a script:

    python tests/bench/bench_launch.py --budget_seconds 220
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

COMMON = """
import json, os, sys, time
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.memory", "1g").config("spark.ui.showConsoleProgress", "false")
for setting in sys.argv[1:]:
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

def measure(launch, expected):
    # One launch for each line on stdin, the import of the launcher being part of the first.
    print("READY", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        value = launch()
        seconds = time.perf_counter() - start
        assert value == expected, value
        print("SECONDS " + json.dumps(seconds), flush=True)
    spark.stop()
"""
OURS = """
def launch():
    from sparkdl.config import LaunchConfig
    from sparkdl.runner import run
    return run({function}, num_proc=2, backend={backend!r}, config=LaunchConfig(gather_rendezvous={gather}))
measure(launch, [2.0, 2.0])
"""
HOROVOD_SPARK = """
def launch():
    import horovod.spark
    return horovod.spark.run(with_horovod, num_proc=2, verbose=0)
measure(launch, [2.0, 2.0])
"""
DISTRIBUTOR = """
def launch():
    from pyspark.ml.torch.distributor import TorchDistributor
    return TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(with_torch)
measure(launch, 2.0)
"""
DAEMON = "spark.python.daemon.module=sparkdl.launch.daemon"
PEERS = ("horovod.spark.run", "TorchDistributor")
OUR_LAUNCHES_A_TURN = 5


class Contender:
    """One launcher in a process and a session of its own; a context manager."""

    def __init__(self, python: Path | str, program: str, *settings: str) -> None:
        self._python, self._program, self._settings = python, COMMON + program, settings

    def __enter__(self) -> Contender:
        env = {**os.environ, "PYSPARK_PYTHON": str(self._python), "PYSPARK_DRIVER_PYTHON": str(self._python)}
        env["PATH"] = f"{Path(self._python).parent}{os.pathsep}{env['PATH']}"
        if self._python != sys.executable:
            env.pop("PYTHONPATH", None)
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [str(self._python), "-c", self._program, *self._settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=env,
        )
        self._wait_for("READY")
        return self

    def launch(self) -> float:
        """Launch once; return the seconds it took."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._wait_for("SECONDS "))

    def _wait_for(self, word: str) -> str:
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        self._errors.seek(0)
        raise RuntimeError(f"a contender failed:\n{self._errors.read()[-6000:]}")

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def contenders() -> dict[str, Contender]:
    """Return the launchers by name; the peers, which take longest, come last."""
    sys.path.insert(0, str(HERE))
    from peers import interpreter

    launchers = {}
    for settings in ((DAEMON,), ()):
        for backend in ("torch", "horovod"):
            name = f"sparkdl, {backend}, {'prewarmed' if settings else 'default'} workers"
            program = OURS.format(function=f"with_{backend}", backend=backend, gather=False)
            launchers[name] = Contender(sys.executable, program, *settings)
    program = OURS.format(function="with_torch", backend="torch", gather=True)
    launchers["sparkdl, torch, prewarmed workers, as rows of the stage"] = Contender(sys.executable, program, DAEMON)
    launchers["TorchDistributor"] = Contender(sys.executable, DISTRIBUTOR)
    launchers["horovod.spark.run"] = Contender(interpreter(), HOROVOD_SPARK)
    return launchers


def measure(budget_seconds: float = 220.0) -> Iterator[dict[str, object]]:
    """Yield a row for each contender whenever its figures change, and for each pair at the end of each round."""
    everybody = contenders()
    seconds = {which: {name: [] for name in everybody} for which in ("cold", "warm")}
    began = time.monotonic()
    longest = 0.0
    while time.monotonic() - began + longest < budget_seconds:
        round_began = time.monotonic()
        for name, contender in everybody.items():
            with contender:
                seconds["cold"][name].append(contender.launch())
                yield _row("cold", name, seconds)
                launches = 1 if name in PEERS else OUR_LAUNCHES_A_TURN
                seconds["warm"][name] += [contender.launch() for _ in range(launches)]
                yield _row("warm", name, seconds)
        longest = max(longest, time.monotonic() - round_began)
        for which in ("cold", "warm"):
            for name in everybody:
                if name not in PEERS:
                    yield from (_row(which, name, seconds, peer) for peer in PEERS)


def _row(which: str, name: str, seconds: dict[str, dict[str, list[float]]], peer: str = "") -> dict[str, object]:
    """Return the figure of ``name``, beside that of ``peer`` if one is given."""
    mine, theirs = seconds[which][name], seconds[which].get(peer, [])
    row: dict[str, object] = {"workload": f"launch to first all-reduce, 2 ranks, {which}", "contender": name}
    row |= {"median_seconds": round(statistics.median(mine), 3), "spread": [round(min(mine), 3), round(max(mine), 3)]}
    row |= {"launches": len(mine), "load": round(os.getloadavg()[0], 1)}
    if peer:
        row |= {"peer": peer, "ratio": round(statistics.median(theirs) / statistics.median(mine), 1)}
        row |= {"peer_median_seconds": round(statistics.median(theirs), 3)}
        row |= {"peer_spread": [round(min(theirs), 3), round(max(theirs), 3)], **_about()}
    return row


def _about() -> dict[str, object]:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout
    versions = {name: version(name) for name in ("pyspark", "torch", "horovod")}
    versions["python"] = platform.python_version()
    return {"git": git.strip(), "cores": os.cpu_count(), "versions": versions}


@pytest.mark.bench
@pytest.mark.timeout(1800)
def test_launch():
    rows = []
    for row in measure():
        print(json.dumps(row), flush=True)
        rows.append(row)
    assert {row["peer"] for row in rows if "peer" in row} == set(PEERS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget_seconds", type=float, default=220.0, help="after which no round is begun")
    for line in measure(**vars(parser.parse_args())):
        print(json.dumps(line), flush=True)
