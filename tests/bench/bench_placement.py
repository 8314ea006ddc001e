"""What it matters which ranks share a host: one mesh over two hosts, its tensor groups within hosts or across them.

The hosts are network namespaces whose cables carry 1 Gbit/s each way, the driver has one of its own. Well placed is
what the launcher and ``Mesh`` make of the hosts; badly, ranks are numbered in turns over the hosts by a launcher that
knows none. One JSON line, of runs in turns; needs root, ip and tc.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parent
sys.path.insert(0, str(BENCH.parent / "launch"))  # for hosts

RATE, ROUNDS = "1gbit", 5
MESHES = ("mesh(data=2, tensor=2)", "mesh(shard=2, tensor=2)", "mesh(data=2, pipeline=2)")
WIDTH, BLOCKS, ROWS, STEPS, SKIPPED = 128, 8, 4096, 8, 3
WORK = f"""
def work(world):
    import sys
    sys.path.insert(0, {str(BENCH)!r})
    import bench_placement
    return bench_placement.on_a_rank(world)
"""


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.fc2 = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fc2(torch.nn.functional.gelu(self.fc1(x)))


def trained(strategy, collective):
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
    data = {name: torch.randn(ROWS * STEPS, WIDTH, generator=torch.Generator().manual_seed(1)) for name in ("x", "y")}
    meter = Meter(STEPS, SKIPPED)
    fit(
        Task(
            model=lambda: torch.nn.Sequential(*[Block() for _ in range(BLOCKS)]),
            optimizer=torch.optim.AdamW,
            loss=torch.nn.MSELoss(),
            inputs=["x"],
            labels=["y"],
        ),
        TensorSource(
            data, global_batch_rows=ROWS, world=World(rank=opened.data_rank, size=opened.data_size), shuffle=False
        ),
        collective=collective,
        config=config,
        callbacks=[meter],
        strategy=opened,
    )
    seconds, _, sent, _ = meter.result()
    return seconds / (STEPS - SKIPPED), sent


def on_a_rank(world):
    """By mesh and placement, what each round took."""
    from sparkdl.collective import open_collective

    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    # Rank r of the mesh, counted host by host, is then the r-th in turns over the hosts.
    turns = replace(world, node_rank=0, local_rank=2 * world.local_rank + world.node_rank, local_size=4, num_nodes=1)
    results = {}
    for strategy in MESHES:
        for number in range(ROUNDS + 1):
            for placed, seen in (("well", world), ("badly", turns)):
                collective._world = seen
                collective.barrier()
                result = trained(strategy, collective)
                if number:
                    results.setdefault((strategy, placed), []).append(result)
    collective._world = world
    collective.close()
    return results


def measure(folder):
    from hosts import Run, hosts

    with hosts(3) as (driver, *computing):
        for host in computing:
            host.shape(RATE)
        run = Run(folder, [computing[number] for number in (0, 1, 0, 1)], WORK, driver=driver)
        try:
            run.start_ranks()
            _, values = run.result()
        finally:
            run.end()
    ranks = ast.literal_eval(values)
    for strategy in MESHES:
        line = {"workload": "placement", "strategy": strategy, "rate": RATE, "hosts": 2, "ranks": len(ranks)}
        taken = {}
        for placed in ("well", "badly"):
            taken[placed] = [max(rank[strategy, placed][i][0] for rank in ranks) for i in range(ROUNDS)]
            line[f"{placed}_seconds_per_step"] = round(statistics.median(taken[placed]), 4)
            line[f"{placed}_spread"] = [round(min(taken[placed]), 4), round(max(taken[placed]), 4)]
            line["sent_bytes_per_step"] = round(max(rank[strategy, placed][-1][1] for rank in ranks))
        ratios = [bad / good for bad, good in zip(taken["badly"], taken["well"], strict=True)]
        line["ratio"] = round(statistics.median(ratios), 2)
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        line |= {"git": commit, "torch": torch.__version__, "python": platform.python_version()}
        print(json.dumps(line | {"cores": os.cpu_count()}), flush=True)


@pytest.mark.bench
def test_placement(tmp_path):
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "tc", "unshare")):
        pytest.skip("needs root, ip and tc")
    measure(tmp_path)
