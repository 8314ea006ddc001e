"""Parameter servers beside all-reduce: bytes and steps a second where ranks are slow, and of a table by its rows.

Three ranks over the loopback interface. A slow rank sleeps behind its steps: always the same one, or each step another
one, by a seeded order that all ways share. Every rank has its part of each global batch, so whoever is always slow sets
the time of all; where ranks take turns, workers that may run ahead need not wait for each. Ways take turns. Bytes are
those that the kernel sent for a rank's TCP connections. One JSON line each, and one with what it takes a worker to see
whether weights were written into, twice a step, beside copying them, which a pull does besides receiving them.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import TrainConfig
from sparkdl.strategies.base import open_strategy
from sparkdl.strategies.parameter_server import sum_of_bits
from sparkdl.train.callbacks import Callback
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit

cloudpickle.register_pickle_by_value(sys.modules[__name__])
BENCH = str(Path(__file__).parent)  # which ranks import from, too

RANKS, ROWS, WIDTH, STEPS, SKIPPED, ROUNDS = 3, 48, 256, 20, 4, 3
SLEEP_SECONDS = 0.2
WAYS = (
    "all_reduce",
    "parameter_server(servers=1)",
    "parameter_server(servers=3)",
    "parameter_server(servers=1, staleness=4)",
    "parameter_server(servers=1, staleness=None)",
)
SLOW = ("nobody", "rank 1", "each step another")
TABLE_ROWS, TABLE_WIDTH = 100_000, 32
TABLE_WAYS = ("all_reduce", "parameter_server(servers=1)", "parameter_server(servers=3)")


class Clicks(torch.nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.words = torch.nn.Embedding(TABLE_ROWS, TABLE_WIDTH, sparse=sparse)
        self.out = torch.nn.Linear(TABLE_WIDTH, 1)

    def forward(self, words):
        return self.out(self.words(words).sum(1))


def layers():
    return torch.nn.Sequential(
        *(layer for _ in range(6) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())),
        torch.nn.Linear(WIDTH, 1),
    )


class Calling(Callback):
    def __init__(self, function):
        self.function = function

    def on_step_end(self, run=None):
        self.function(run)


class Sleeper(Callback):
    """Is slow behind its steps."""

    def __init__(self, slow, rank):
        order = torch.randint(0, RANKS, (STEPS,), generator=torch.Generator().manual_seed(3)).tolist()
        self.sleeps = {"nobody": [], "rank 1": [rank == 1] * STEPS, "each step another": [r == rank for r in order]}[
            slow
        ]

    def on_step_end(self, run=None):
        if self.sleeps and self.sleeps[run.step - 1]:
            time.sleep(SLEEP_SECONDS)


def trained(strategy, collective, task, data, callbacks=()):
    """Seconds, and bytes that this rank sent, of a step; ranks meet before the first that counts, and at the end."""
    from bench_strategies import sent_bytes

    config = TrainConfig(epochs=1, window_steps=1000)
    opened = open_strategy(strategy, collective, config)
    seconds, sent = [], []

    def note(run):
        if run.step in (SKIPPED, STEPS):
            collective.barrier()
            seconds.append(time.perf_counter())
            sent.append(sent_bytes())

    source = TensorSource(data, global_batch_rows=ROWS, world=collective.world, shuffle=False)
    fit(task, source, collective=collective, config=config, callbacks=[*callbacks, Calling(note)], strategy=opened)
    return [(last - first) / (STEPS - SKIPPED) for first, last in (seconds, sent)]


def dense_workload(slow, rank):
    generator = torch.Generator().manual_seed(1)
    data = {"x": torch.randn(ROWS * STEPS, WIDTH, generator=generator)}
    data["y"] = data["x"].mean(1)
    task = Task(model=layers, optimizer=torch.optim.AdamW, loss=torch.nn.MSELoss(), inputs=["x"], labels=["y"])
    return task, data, [Sleeper(slow, rank)]


def table_workload(sparse):
    generator = torch.Generator().manual_seed(1)
    data = {"words": torch.randint(0, TABLE_ROWS, (ROWS * STEPS, 4), generator=generator)}
    data["y"] = torch.randn(ROWS * STEPS, generator=generator)
    task = Task(
        model=partial(Clicks, sparse),
        optimizer=partial(torch.optim.Adagrad, lr=0.01),
        loss=torch.nn.MSELoss(),
        inputs=["words"],
        labels=["y"],
    )
    return task, data


def on_a_rank(world):
    sys.path.insert(0, BENCH)
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    results = {}
    for number in range(ROUNDS + 1):
        for slow in SLOW:
            for way in WAYS:
                result = trained(way, collective, *dense_workload(slow, world.rank))
                if number:
                    results.setdefault(("dense", slow, way), []).append(result)
        for kind, sparse in (("table", False), ("table by rows", True)):
            for way in TABLE_WAYS:
                result = trained(way, collective, *table_workload(sparse))
                if number:
                    results.setdefault((kind, "nobody", way), []).append(result)
    collective.close()
    return results


def measure():
    from rank_pool import Ranks

    pool = Ranks()
    try:
        ranks = pool.run_at_store([], on_a_rank, RANKS, seconds=1800.0)
    finally:
        pool.end()
    for value in ranks:
        if isinstance(value, BaseException):
            raise value
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    for workload, slow, way in ranks[0]:
        rounds = [[rank[workload, slow, way][i] for rank in ranks] for i in range(ROUNDS)]
        rates = [1 / max(seconds for seconds, _ in of_ranks) for of_ranks in rounds]
        yield {
            "workload": workload, "slow": slow, "strategy": way, "ranks": RANKS,
            "steps_per_second": round(statistics.median(rates), 2),
            "spread": [round(min(rates), 2), round(max(rates), 2)],
            "rank_0_sent_bytes_per_step": round(rounds[-1][0][1]),
            "other_sent_bytes_per_step": round(max(sent for _, sent in rounds[-1][1:])),
            "git": git, "torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count(),
        }  # fmt: skip


@pytest.mark.bench
def test_parameter_servers():
    for line in measure():
        print(json.dumps(line), flush=True)


@pytest.mark.bench
def test_sums_of_bits():
    torch.set_num_threads(1)
    weights = torch.randn(25_000_000)
    copied = weights.clone()
    milliseconds = {}
    for name, call in (("sum_of_bits", lambda: sum_of_bits(weights)), ("copy", lambda: copied.copy_(weights))):
        taken = []
        for _ in range(9):
            begin = time.perf_counter()
            call()
            taken.append((time.perf_counter() - begin) * 1000)
        milliseconds[name] = round(statistics.median(taken), 1)
    print(json.dumps({"workload": "bits of 100 MB", "milliseconds": milliseconds}), flush=True)
