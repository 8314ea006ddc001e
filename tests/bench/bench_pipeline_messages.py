"""A step of a pipeline on two hosts whose cables carry 0.2 and 1 Gbit/s, as torch orders its messages and as we do.

The hosts are network namespaces, one rank each, as in ``bench_planner.py``; eight micro-batches by 1F1B. Both orders
take turns. One JSON line a model and rate. Needs root, ip and tc.
"""

from __future__ import annotations

import json
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import bench_planner
from shaped_hosts import needs_hosts, run_on_hosts, versions

ROUNDS = 5
MODELS = {
    "wide MLP": (
        lambda: nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(6)], nn.Linear(1024, 1)),
        lambda n: torch.randn(n, 1024),
        512,
    ),
    "transformer": bench_planner.MODELS["transformer"],
}


def on_a_rank(world):
    """Milliseconds of a step by model and order, a round each."""
    from sparkdl.collective import open_collective
    from sparkdl.strategies import pipeline

    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    bench_planner.MODELS = MODELS
    orders = {"receives_first": pipeline.receives_first, "torch": lambda device: nullcontext()}
    times = {model: {order: [] for order in orders} for model in MODELS}
    for model in MODELS:
        for _ in range(ROUNDS):
            for order, messages in orders.items():
                pipeline.receives_first = messages
                seconds, _ = bench_planner.trained(model, "pipeline(micro_batches=8)", collective)
                times[model][order].append(1e3 * seconds)
    collective.close()
    return times


@needs_hosts
@pytest.mark.bench
def test_order_of_messages(tmp_path):
    for rate, burst in bench_planner.RATES.items():
        folder = tmp_path / rate
        folder.mkdir()
        times = run_on_hosts(folder, "bench_pipeline_messages", hosts_of_ranks=(0, 1), rate=rate, burst=burst)[0]
        for model, by_order in times.items():
            medians = {f"{order}_ms": round(statistics.median(values), 1) for order, values in by_order.items()}
            print(json.dumps({"workload": "pipeline messages", "model": model, "rate": rate} | medians | versions()))
