"""How long the ranks of a pipeline wait, against (K-1)/(M+K-1), and of how many micro-batches they hold activations.

The layers sleep, 20 ms forward and 40 ms backward for each micro-batch, so that K stages overlap on fewer cores. One
JSON line per schedule, K and M.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from sparkdl.batches.reading.batch import Batch
from sparkdl.collective import open_collective
from sparkdl.strategies.pipeline import Pipeline, measure_bubble
from sparkdl.strategies.stages import split
from sparkdl.train.objective.batch_loss import BatchLoss
from sparkdl.train.objective.loss import Objective
from sparkdl.train.task import Task

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MICRO_BATCHES = (1, 2, 4, 8, 16)
REPEATS = 5
FORWARD, BACKWARD = 0.02, 0.04  # seconds
WIDTH = 8


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BACKWARD)
        return gradient


class Sleeping(torch.nn.Linear):
    __module__ = "torch.nn"  # a leaf, which no trace looks into

    def forward(self, x):
        return Sleep.apply(super().forward(x))


def on_a_rank(world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    task = Task(model=None, optimizer=None, loss=torch.nn.MSELoss(), inputs=["x"], labels=["y"])
    device = torch.device("cpu")
    loss = BatchLoss(task, Objective(task, device, 1, lambda divisors: divisors), "fp32", device)
    model = torch.nn.Sequential(*[Sleeping(WIDTH, WIDTH) for _ in range(world.size)])
    stage = split(model, [str(i) for i in range(1, world.size)], inputs=["x"])[world.rank]
    results = []
    for schedule in ("gpipe", "1f1b"):
        for number in MICRO_BATCHES:
            pipeline = Pipeline(stage, dist.group.WORLD, device, micro_batches=number, schedule=schedule)
            batch = Batch({"x": torch.randn(2 * number, WIDTH), "y": torch.randn(2 * number, WIDTH)})
            pipeline.step(batch, loss)
            steps = [measure_bubble(pipeline, batch, loss) for _ in range(REPEATS)]
            results.append((schedule, number, steps))
    collective.close()
    return results


@pytest.mark.bench
@pytest.mark.parametrize("stages", [2, 4])
def test_bubble(ranks, stages):
    for of_ranks in zip(*ranks.together(partial(on_a_rank), stages, "torch"), strict=True):
        schedule, number, _ = of_ranks[0]
        shares = [statistics.mean(rank[2][i].share for rank in of_ranks) for i in range(REPEATS)]
        line = {
            "schedule": schedule,
            "stages": stages,
            "micro_batches": number,
            "bubble": round(statistics.median(shares), 3),
            "spread": [round(min(shares), 3), round(max(shares), 3)],
            "formula": round((stages - 1) / (number + stages - 1), 3),
            "held_by_rank": [max(step.held for step in rank[2]) for rank in of_ranks],
            "torch": torch.__version__,
        }
        print(json.dumps(line), flush=True)
