"""A step on a processor where freed memory is kept, and where glibc gives it back; see ``compat/heap.py``.

A process each, which take turns. One JSON line a workload: a step of ``jobs/examples/rides``' network, one of small
convolutions, one of plain layers, and 4,096 rows through the default network. ``python tests/bench/bench_heap.py``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from sparkdl.compat.heap import kept_heap
from sparkdl.models.networks import TabularEnsemble

PAIRS, STEPS = 3, 40
IDS = [60, 60, 6, 6, 4]


def table_network(width, depth):
    knots = [sorted(torch.randn(32).tolist()) for _ in range(14)]
    inputs = [
        {"name": "numbers", "shape": [14], "knots": knots},
        {"name": "categories", "shape": [len(IDS)], "cardinalities": IDS},
    ]
    label = {"name": "y", "type": "regression", "outputs": 1, "mean": 0.0, "deviation": 1.0, "loss": "mse"}
    return TabularEnsemble({"inputs": inputs, "labels": [label]}, width=width, depth=depth)


def table_rows(rows):
    ids = torch.stack([torch.randint(0, count, (rows,)) for count in IDS], 1)
    return {"numbers": torch.randn(rows, 14), "categories": ids}


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 32 * 32, 10),
    )  # fmt: skip


def layers():
    return nn.Sequential(nn.Linear(100, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))


def training(model, inputs):
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def scoring(model, inputs):
    model.eval()

    def step():
        with torch.inference_mode():
            model(inputs)

    return step


WORKLOADS = {
    "rides, 512 rows": lambda: training(table_network(64, 1), table_rows(512)),
    "convolutions, 64 pictures": lambda: training(convolutions(), torch.randn(64, 3, 32, 32)),
    "layers, 1,024 rows": lambda: training(layers(), torch.randn(1024, 100)),
    "default network, 4,096 rows scored": lambda: scoring(table_network(192, 3), table_rows(4096)),
}


def milliseconds(workload):
    torch.set_num_threads(1)
    step, seconds = WORKLOADS[workload](), []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds[STEPS // 4 :])


def measure(workload):
    by_way = {"kept": [], "given_back": []}
    for _ in range(PAIRS):
        for way, times in by_way.items():
            run = subprocess.run([sys.executable, __file__, way, workload], capture_output=True, text=True, check=True)
            times.append(float(run.stdout))
    kept, given_back = (statistics.median(by_way[way]) for way in by_way)
    return {
        "workload": workload,
        "kept_ms": round(kept, 2),
        "given_back_ms": round(given_back, 2),
        "given_back_to_kept": round(given_back / kept, 2),
        "torch": torch.__version__,
    }


@pytest.mark.bench
@pytest.mark.parametrize("workload", WORKLOADS)
def test_heap(workload):
    print(json.dumps(measure(workload)))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        with kept_heap() if sys.argv[1] == "kept" else nullcontext():
            print(milliseconds(sys.argv[2]))
    else:
        for name in WORKLOADS:
            print(json.dumps(measure(name)))
