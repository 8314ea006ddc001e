"""How long the ranks of a pipeline wait, against (K-1)/(M+K-1), and of how many micro-batches they hold activations.

The layers sleep, 50 ms forward and 100 ms backward for each micro-batch, so that K stages overlap on fewer cores. One
JSON line per schedule, K and M, and a plot of all, ``bench-results/pipeline.png``; ``python
tests/bench/bench_pipeline_stages.py LOG PNG`` draws the lines of an earlier run.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

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

RESULTS = Path(__file__).parents[2] / "bench-results"
STAGES, MICRO_BATCHES = (2, 4), (1, 2, 4, 8, 16)
REPEATS = 3
FORWARD, BACKWARD = 0.05, 0.1  # seconds
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


def measure(ranks, stages):
    lines = []
    for of_ranks in zip(*ranks.together(partial(on_a_rank), stages, "torch"), strict=True):
        schedule, number, _ = of_ranks[0]
        shares = [statistics.mean(rank[2][i].share for rank in of_ranks) for i in range(REPEATS)]
        lines.append(
            {
                "schedule": schedule,
                "stages": stages,
                "micro_batches": number,
                "bubble": round(statistics.median(shares), 3),
                "spread": [round(min(shares), 3), round(max(shares), 3)],
                "formula": round((stages - 1) / (number + stages - 1), 3),
                "held_by_rank": [max(step.held for step in rank[2]) for rank in of_ranks],
                "torch": torch.__version__,
            }
        )
        print(json.dumps(lines[-1]), flush=True)
    return lines


def draw(lines, file):
    """The bubble of each number of stages, then the micro-batches that the first stage holds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(STAGES) + 1, figsize=(12, 3.8), constrained_layout=True)
    styles = {"gpipe": ("o", "GPipe"), "1f1b": ("x", "1F1B")}
    for panel, stages in zip(panels, STAGES, strict=False):
        curve = [(stages - 1) / (number + stages - 1) for number in MICRO_BATCHES]
        panel.plot(MICRO_BATCHES, curve, color="0.6", label="(K-1)/(M+K-1)")
        panel.set_title(f"Waiting of {stages} stages")
        panel.set_ylabel("share of the step")
        panel.set_ylim(0, 0.8)
    panels[-1].set_title(f"Memory of the first of {STAGES[-1]} stages")
    panels[-1].set_ylabel("micro-batches whose activations are held")
    for schedule, (marker, label) in styles.items():
        own = {(line["stages"], line["micro_batches"]): line for line in lines if line["schedule"] == schedule}
        drawn = {"marker": marker, "linestyle": "", "markerfacecolor": "none", "label": label}
        for panel, stages in zip(panels, STAGES, strict=False):
            panel.plot(MICRO_BATCHES, [own[stages, number]["bubble"] for number in MICRO_BATCHES], **drawn)
        held = [own[STAGES[-1], number]["held_by_rank"][0] for number in MICRO_BATCHES]
        panels[-1].plot(MICRO_BATCHES, held, **(drawn | {"linestyle": "-"}))
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xticks(MICRO_BATCHES, [str(number) for number in MICRO_BATCHES])
        panel.set_xlabel("micro-batches M")
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(file, dpi=80)


@pytest.mark.bench
def test_bubble(ranks):
    RESULTS.mkdir(exist_ok=True)
    lines = [line for stages in STAGES for line in measure(ranks, stages)]
    draw(lines, RESULTS / "pipeline.png")
    assert (RESULTS / "pipeline.png").stat().st_size > 10_000


if __name__ == "__main__":
    log, png = sys.argv[1:]
    draw([json.loads(line) for line in Path(log).read_text().splitlines() if line.startswith('{"schedule"')], png)
