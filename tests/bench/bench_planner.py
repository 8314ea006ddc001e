"""The planner's estimates beside what steps take on two hosts whose cables carry 0.2 and 1 Gbit/s each way.

The hosts are network namespaces, one rank each, which has one thread; the driver has one of its own. The ranks measure
the model and the link as ``strategy="auto"`` does, then train a few steps under each strategy. One JSON line a model
and rate, with the ratio of estimate to measurement by strategy, and the table of docs/strategies.md. The MLP is the one
that the planner was built with; the others show whether it holds. Needs root, ip and tc.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from shaped_hosts import needs_hosts, run_on_hosts, versions

from sparkdl.nn import MixtureOfExperts

RATES = {"1gbit": "64kb", "200mbit": "16kb"}
"""With what passes at once after a pause: little, as on a cable, or the small messages of a pipeline take no time."""
STEPS, SKIPPED, ROUNDS = 6, 2, 2
STRATEGIES = ("all_reduce", "zero1", "zero2", "fsdp", "tensor", "pipeline", "expert")


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.fc2(nn.functional.gelu(self.fc1(x)))


class Words(nn.Module):
    """A transformer over sequences of 32 words."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.last = nn.Linear(128, 1)

    def forward(self, x):
        return self.last(self.encoder(self.words(x)).mean(1))


class Wide(nn.Module):
    """An MLP behind a large table of embeddings."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50_000, 32)
        self.body = nn.Sequential(nn.Linear(8 * 32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, x):
        return self.body(self.table(x).flatten(1))


class Experts(nn.Module):
    """Sixteen words, each of which goes through two of eight experts, twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(128, 128)
        self.mixtures = nn.ModuleList(MixtureOfExperts(128, 256, 8) for _ in range(2))
        self.last = nn.Linear(128, 1)

    def forward(self, x):
        words = self.first(x)
        for mixture in self.mixtures:
            words = words + mixture(words)
        return self.last(words.mean(1))


def convolutions():
    layers, channels = [], [3, 16, 32, 64]
    for before, after in itertools.pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 512), nn.ReLU(), nn.Linear(512, 1))


MODELS = {  # makes the model, a row, and rows of the global batch
    "MLP": (lambda: nn.Sequential(*[Residual(128) for _ in range(8)]), lambda n: torch.randn(n, 128), 512),
    "transformer": (Words, lambda n: torch.randint(1000, (n, 32)), 64),
    "embedding": (Wide, lambda n: torch.randint(50_000, (n, 8)), 512),
    "CNN": (convolutions, lambda n: torch.randn(n, 3, 32, 32), 64),
    "mixture": (Experts, lambda n: torch.randn(n, 16, 128), 64),
}


def batch_of(name, steps=1):
    _, rows_of, rows = MODELS[name]
    torch.manual_seed(1)
    return rows_of(rows * steps)


def trained(name, strategy, collective):
    """Median seconds of a step on this rank."""
    from bench_strategies import Meter

    from sparkdl.config import TrainConfig
    from sparkdl.strategies.base import open_strategy
    from sparkdl.train.in_memory import TensorSource
    from sparkdl.train.task import Task
    from sparkdl.train.trainer import fit
    from sparkdl.world import World

    make, _, rows = MODELS[name]
    config = TrainConfig(epochs=1)
    opened = open_strategy(strategy, collective, config)
    x = batch_of(name, STEPS)
    y = x if name == "MLP" else torch.zeros(len(x), 1)
    meter = Meter(STEPS, SKIPPED)
    fit(
        Task(model=make, optimizer=torch.optim.AdamW, loss=nn.MSELoss(), inputs=["x"], labels=["y"]),
        TensorSource({"x": x, "y": y}, global_batch_rows=rows, shuffle=False,
                     world=World(rank=opened.data_rank, size=opened.data_size)),
        collective=collective, config=config, callbacks=[meter], strategy=opened,
    )  # fmt: skip
    seconds, _, sent, _ = meter.result()
    return seconds / (STEPS - SKIPPED), sent


def on_a_rank(world):
    """By model, what was estimated and what each round took."""
    from sparkdl.collective import open_collective
    from sparkdl.strategies.mesh_strategy import check_layers
    from sparkdl.strategies.planner import measure_link, measure_model, rank_strategies

    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    results = {}
    for name, (make, _, _) in MODELS.items():
        collective.barrier()
        model = make()
        costs = measure_model(model, lambda m: torch.optim.AdamW(m.parameters()), {"x": batch_of(name)}, ranks=[2])
        link = measure_link(collective)
        plan = rank_strategies(costs, link, world.size, check=lambda mesh, model=model: check_layers(mesh, model))
        estimates = {e.strategy: (e.seconds, e.computing, e.sent_bytes) for e in plan.fitting}
        taken = {}
        for strategy in STRATEGIES:
            if strategy in estimates:
                taken[strategy] = [trained(name, strategy, collective) for _ in range(ROUNDS + 1)][1:]
        results[name] = {"link": dataclasses.asdict(link), "estimates": estimates, "taken": taken,
                         "impossible": dict(plan.impossible)}  # fmt: skip
    collective.close()
    return results


def measure(folder, rate):
    ranks = run_on_hosts(folder, "bench_planner", hosts_of_ranks=(0, 1), rate=rate, burst=RATES[rate], seconds=1200)
    lines = []
    for name in MODELS:
        line = {"workload": "planner", "model": name, "rate": rate, "ranks": len(ranks)}
        for strategy, (estimate, computing, sent) in ranks[0][name]["estimates"].items():
            if strategy not in ranks[0][name]["taken"]:
                continue
            rounds = [[rank[name]["taken"][strategy][i] for rank in ranks] for i in range(ROUNDS)]
            seconds = [max(taken for taken, _ in of_ranks) for of_ranks in rounds]
            line[strategy] = {
                "ratio": round(estimate / statistics.median(seconds), 2),
                "estimate": round(estimate, 4),
                "measured": round(statistics.median(seconds), 4),
                "spread": [round(min(seconds), 4), round(max(seconds), 4)],
                "computing": round(computing, 4),
                "sent_estimate": round(sent),
                "sent_measured": round(max(sent for _, sent in rounds[-1])),
            }
        line["impossible"] = ranks[0][name]["impossible"]
        line["link"] = ranks[0][name]["link"]
        print(json.dumps(line | versions()), flush=True)
        lines.append(line)
    return lines


def table(lines):
    """The table of ``docs/strategies.md``: a row a strategy, a column a model, the ratios by rate."""
    ratios = {(line["model"], strategy, line["rate"]): line[strategy]["ratio"]
              for line in lines for strategy in STRATEGIES if strategy in line}  # fmt: skip
    rates = list(dict.fromkeys(line["rate"] for line in lines))
    yield f"| estimate / measured, {' and '.join(rates)} | {' | '.join(MODELS)} |"
    yield f"|---|{'---|' * len(MODELS)}"
    for strategy in STRATEGIES:
        cells = [", ".join(f"{ratios.get((model, strategy, rate), '-')}" for rate in rates) for model in MODELS]
        yield f"| `{strategy}` | {' | '.join(cells)} |"
    for rate in rates:
        values = [ratio for (_, _, of_rate), ratio in ratios.items() if of_rate == rate]
        yield f"{rate}: {sum(0.85 <= ratio <= 1.15 for ratio in values)} of {len(values)} within 15 %"


@needs_hosts
@pytest.mark.bench
@pytest.mark.timeout(1800)
def test_planner(tmp_path):
    lines = []
    for rate in RATES:
        (tmp_path / rate).mkdir()
        lines += measure(tmp_path / rate, rate)
    print("\n".join(table(lines)), flush=True)
