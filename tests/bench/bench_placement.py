"""What it matters which ranks share a host: one mesh over two hosts, its tensor groups within hosts or across them.

The hosts are network namespaces whose cables carry 1 Gbit/s each way, the driver has one of its own. Well placed is
what the launcher and ``Mesh`` make of the hosts; badly, ranks are numbered in turns over the hosts by a launcher that
knows none. One JSON line a mesh, of runs in turns; needs root, ip and tc.

A second workload has few rows and many parameters, whose gradients are averaged over copies on the two hosts: while the
backward pass goes on, and in turns behind it.
"""

from __future__ import annotations

import json
import statistics
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from shaped_hosts import needs_hosts, run_on_hosts, versions

RATE, ROUNDS, BLOCKS, STEPS, SKIPPED = "1gbit", 3, 8, 4, 1
SIZES = {"placement": (128, 2048), "copies": (512, 256)}  # width, and rows of a global batch
MESHES = {
    "placement": ("mesh(data=2, tensor=2)", "mesh(data=2, pipeline=2, micro_batches=4)"),
    "copies": ("mesh(data=2, tensor=2)", "mesh(data=2, pipeline=2, micro_batches=4)"),
}
WAYS = {"placement": ("well", "badly"), "copies": ("within", "behind")}  # the second one is worse


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = torch.nn.Linear(width, 4 * width)
        self.fc2 = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.fc2(torch.nn.functional.gelu(self.fc1(x)))


def trained(strategy, collective, width, rows):
    """Seconds and sent bytes of a step on this rank."""
    from bench_strategies import Meter

    from sparkdl.config import TrainConfig
    from sparkdl.strategies.base import open_strategy
    from sparkdl.train.in_memory import TensorSource
    from sparkdl.train.task import Task
    from sparkdl.train.trainer import fit
    from sparkdl.world import World

    config = TrainConfig(epochs=1)
    opened = open_strategy(strategy, collective, config)
    data = {name: torch.randn(rows * STEPS, width, generator=torch.Generator().manual_seed(1)) for name in ("x", "y")}
    meter = Meter(STEPS, SKIPPED)
    fit(
        Task(
            model=lambda: torch.nn.Sequential(*[Block(width) for _ in range(BLOCKS)]),
            optimizer=torch.optim.AdamW,
            loss=torch.nn.MSELoss(),
            inputs=["x"],
            labels=["y"],
        ),
        TensorSource(
            data, global_batch_rows=rows, world=World(rank=opened.data_rank, size=opened.data_size), shuffle=False
        ),
        collective=collective,
        config=config,
        callbacks=[meter],
        strategy=opened,
    )
    seconds, _, sent, _ = meter.result()
    return seconds / (STEPS - SKIPPED), sent


def on_a_rank(world):
    """By workload, mesh and way, what each round took."""
    from sparkdl.collective import open_collective
    from sparkdl.strategies.copies import CopiesAverage

    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    # Rank r of the mesh, counted host by host, is then the r-th in turns over the hosts.
    turns = replace(world, node_rank=0, local_rank=2 * world.local_rank + world.node_rank, local_size=4, num_nodes=1)
    results = {}
    for workload, meshes in MESHES.items():
        for strategy in meshes:
            for number in range(ROUNDS + 1):
                for way in WAYS[workload]:
                    collective._world = turns if way == "badly" else world
                    collective.barrier()
                    begins = {"begin": lambda average, passes=1: None} if way == "behind" else {}
                    with patch.multiple(CopiesAverage, **begins) if begins else nullcontext():
                        result = trained(strategy, collective, *SIZES[workload])
                    if number:
                        results.setdefault((workload, strategy, way), []).append(result)
    collective._world = world
    collective.close()
    return results


def measure(folder):
    ranks = run_on_hosts(folder, "bench_placement", hosts_of_ranks=(0, 1, 0, 1), rate=RATE, seconds=3000)
    for workload, strategy in [(workload, strategy) for workload, meshes in MESHES.items() for strategy in meshes]:
        line = {"workload": workload, "strategy": strategy, "rate": RATE, "hosts": 2, "ranks": len(ranks)}
        seconds = {}
        for way in WAYS[workload]:
            rounds = [[rank[workload, strategy, way][i] for rank in ranks] for i in range(ROUNDS)]
            seconds[way] = [max(taken for taken, _ in of_ranks) for of_ranks in rounds]
            line[f"{way}_seconds_per_step"] = round(statistics.median(seconds[way]), 4)
            line[f"{way}_spread"] = [round(min(seconds[way]), 4), round(max(seconds[way]), 4)]
            line["sent_bytes_per_step"] = round(max(sent for _, sent in rounds[-1]))
        better, worse = (seconds[way] for way in WAYS[workload])
        line["ratio"] = round(statistics.median(b / a for a, b in zip(better, worse, strict=True)), 2)
        line["ratio_of_minima"] = round(min(worse) / min(better), 2)
        print(json.dumps(line | versions()), flush=True)


@needs_hosts
@pytest.mark.bench
def test_placement(tmp_path):
    measure(tmp_path)
