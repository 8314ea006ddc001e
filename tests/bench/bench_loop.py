"""What the loop costs: ``fit`` against a loop written by hand on the same tensors in memory, and against itself with
checkpoints.

The hand-written loop is the shortest there is: no loss is kept, nothing is counted, logged or checked. Both draw the
same permutation, and take turns, so that a busy machine slows both. One JSON line per workload;
``python tests/bench/bench_loop.py [workload ...]``.

A checkpoint costs training twice: the snapshot (``checkpoint_stall_share``: the whole step that holds it, less a usual
one), and the interpreter's lock, which the thread that writes takes in the steps behind it
(``checkpoint_cost_share``: the same over 20 steps).
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import CheckpointConfig, TrainConfig
from sparkdl.train.callbacks import Callback
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import SOLO

ROWS_PER_STEP = {"small": 1024, "mlp": 512}
STEPS = {"small": 600, "mlp": 120}
PAIRS = {"small": 15, "mlp": 9}
CHECKPOINT_STEPS = 200


def small():
    """40-64-1, 2,700 parameters: the peers' own benchmark model, with steps of well under a millisecond."""
    return torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))


def mlp():
    """1.3 million parameters."""
    return torch.nn.Sequential(
        torch.nn.Linear(40, 1024),
        torch.nn.ReLU(),
        torch.nn.Linear(1024, 1216),
        torch.nn.ReLU(),
        torch.nn.Linear(1216, 1),
    )


MODELS = {"small": small, "mlp": mlp}


def tensors(name):
    rows = ROWS_PER_STEP[name] * STEPS[name]
    return {"x": torch.randn(rows, 40), "y": torch.randn(rows, 1)}


def by_hand(model, data, rows, epochs):
    """Seconds of each epoch."""
    optimizer, loss_of, seconds = torch.optim.Adam(model.parameters()), torch.nn.MSELoss(), []
    x, y = data["x"], data["y"]
    for _ in range(epochs):
        start = time.perf_counter()
        for chosen in torch.randperm(len(x)).split(rows):
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model(x.index_select(0, chosen)), y.index_select(0, chosen))
            loss.backward()
            optimizer.step()
        seconds.append(time.perf_counter() - start)
    return seconds


class Stalls(Callback):
    """Seconds that training waited for checkpoints: the whole of the step that took one, less a median step."""

    def __init__(self):
        self.steps, self.last, self.marked = [], 0.0, []

    def on_epoch_start(self, run):
        self.last = time.perf_counter()

    def on_checkpoint(self, run):
        if run.batch:  # at the end of an epoch the next step also holds the start of another
            self.marked.append(len(self.steps))

    def on_step_end(self, run):
        now = time.perf_counter()
        self.steps.append(now - self.last)
        self.last = now

    def share(self, steps=1):
        """Share of training time that one checkpoint in ``CHECKPOINT_STEPS`` takes from the ``steps`` behind it."""
        usual = statistics.median(self.steps)
        # the step after the hook holds the wait; the first of all also allocates the buffer
        behind = [self.steps[at : at + steps] for at in self.marked[1:]]
        extra = [sum(taken) - steps * usual for taken in behind if len(taken) == steps]
        return statistics.median(extra) / (usual * CHECKPOINT_STEPS)


def by_fit(model, data, rows, epochs, folder=None, callbacks=()):
    """Seconds of each epoch."""
    task = Task(model=model, optimizer=torch.optim.Adam, loss=torch.nn.MSELoss(), inputs=("x",), labels=("y",))
    source = TensorSource(data, global_batch_rows=rows)
    keep = None
    if folder is not None:
        config = CheckpointConfig(uri=folder, every_steps=CHECKPOINT_STEPS, every_epochs=None, keep_best=False)
        keep = Checkpointer(config)
    result = fit(
        task,
        source,
        collective=open_collective(SOLO, backend="solo"),
        config=TrainConfig(epochs=epochs),
        callbacks=callbacks,
        checkpoints=keep,
    )
    return result.history.column("seconds")


def measure(name):
    torch.set_num_threads(1)
    data, rows = tensors(name), ROWS_PER_STEP[name]
    model = MODELS[name]
    by_hand(model(), data, rows, 1)
    by_fit(model(), data, rows, 1)
    hand, ours, ratios = [], [], []
    gc.disable()
    try:
        for pair in range(PAIRS[name]):
            turns = [(hand, by_hand), (ours, by_fit)]
            for seconds, run in turns if pair % 2 else reversed(turns):
                seconds += run(model(), data, rows, 1)
            ratios.append(ours[-1] / hand[-1])
    finally:
        gc.enable()
    stalls = Stalls()
    with tempfile.TemporaryDirectory() as folder:
        by_fit(model(), data, rows, -(-6 * CHECKPOINT_STEPS // STEPS[name]), folder, [stalls])
    per_step = 1e6 / STEPS[name]
    return {
        "workload": f"loop-{name}",
        "ratio": round(statistics.median(ratios), 4),
        "ratio_of_medians": round(statistics.median(ours) / statistics.median(hand), 4),
        "ratio_of_minima": round(min(ours) / min(hand), 4),
        "fit_us_per_step": round(statistics.median(ours) * per_step, 1),
        "hand_us_per_step": round(statistics.median(hand) * per_step, 1),
        "spread": [round(q, 4) for q in statistics.quantiles(ratios, n=4)],
        "checkpoint_stall_share": round(stalls.share(), 5),
        "checkpoint_cost_share": round(stalls.share(20), 5),
        "checkpoint_steps": CHECKPOINT_STEPS,
        "git": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


@pytest.mark.bench
@pytest.mark.parametrize("name", list(MODELS))
def test_loop(name):
    print(json.dumps(measure(name)))


if __name__ == "__main__":
    for workload in sys.argv[1:] or MODELS:
        print(json.dumps(measure(workload)), flush=True)
