"""What a question to a registry and an event in it cost with 10 versions, 1,000 of one model, and 100 models of 10.

Every version is published for real, one commit each, so the registries have the logs of tables that lived. Operations
go over the three in turns, each through a registry object that was just made, while events come in between: over the
rounds, questions meet every number of commits since a checkpoint, and ``mean_ratio`` holds what checkpoints and
compactions cost besides. ``fold of all events`` is how each question is answered without a checkpoint, by delta-rs.
One JSON line an operation; ``python tests/bench/bench_registry.py [versions]``, some 15 minutes for 10,000.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import deltalake
import pyarrow
import pytest
from torch import nn

from sparkdl.models.bundle import save_bundle
from sparkdl.models.registry import ModelRegistry

VERSIONS, ROUNDS = 1000, 33


def made(folder, bundle, versions, models):
    """A registry with so many versions of so many models, the first of each a champion."""
    registry = ModelRegistry(str(folder))
    for name in (f"m{number}" for number in range(models)):
        for _ in range(versions // models):
            registry.publish(name, bundle, metrics={"mae": 1.0}, parameters={"lr": 0.1, "epochs": 5})
        registry.set_alias(name, "champion", 1, expected=None)
    return registry


def operations(uri, bundle, turn):
    """By name, a call that answers a question or commits an event."""
    name = "m0"

    def fresh():
        return ModelRegistry(uri)

    return {
        "open, list models": lambda: fresh().models(),
        "get a version": lambda: fresh().get(name, 3),
        "get by alias": lambda: fresh().get(name, "champion"),
        "publish": lambda: fresh().publish(name, bundle, metrics={"mae": 1.0 / (turn + 2)}),
        "promote": lambda: fresh().set_alias(name, "champion", 2, expected=1),
        "rollback": lambda: fresh().rollback(name, "champion"),
        "fold of all events": lambda: fresh()._log._read_table().state.get(name, "champion"),
    }


def measure(versions):
    """One line an operation."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = str(Path(folder) / "bundle")
        save_bundle(nn.Linear(8, 1), bundle)
        shapes = {"10": (10, 1), f"{versions:,}": (versions, 1), f"{versions // 10:,} x 10": (versions, versions // 10)}
        places = {
            shape: made(Path(folder) / str(n), bundle, *size).uri for n, (shape, size) in enumerate(shapes.items())
        }
        times = {}
        for turn in range(ROUNDS + 1):
            for shape, uri in places.items():
                for operation, once in operations(uri, bundle, turn).items():
                    if operation == "fold of all events" and turn % 8:
                        continue
                    start = time.perf_counter()
                    once()
                    if turn:
                        times.setdefault(operation, {}).setdefault(shape, []).append(time.perf_counter() - start)
        return [line(operation, seconds) for operation, seconds in times.items()]


def line(operation, seconds):
    """The line of an operation; ratios are of each size to the smallest."""
    medians = {shape: statistics.median(found) for shape, found in seconds.items()}
    means = {shape: statistics.mean(found) for shape, found in seconds.items()}
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "workload": f"registry: {operation}",
        "ratio": {shape: round(medians[shape] / medians["10"], 2) for shape in medians},
        "mean_ratio": {shape: round(means[shape] / means["10"], 2) for shape in means},
        "median_ms": {shape: round(median * 1e3, 2) for shape, median in medians.items()},
        "spread": {
            shape: round((q[2] - q[0]) / medians[shape], 2)
            for shape, q in ((shape, statistics.quantiles(found, n=4)) for shape, found in seconds.items())
        },
        "git": head,
        "versions": {"deltalake": deltalake.__version__, "pyarrow": pyarrow.__version__},
        "cores": os.cpu_count(),
    }


@pytest.mark.bench
@pytest.mark.timeout(3600)
def test_registry(capsys):
    lines = measure(VERSIONS)
    with capsys.disabled():
        print("\n" + "\n".join(map(json.dumps, lines)))


if __name__ == "__main__":
    for found in measure(int(sys.argv[1]) if len(sys.argv) > 1 else VERSIONS):
        print(json.dumps(found), flush=True)
