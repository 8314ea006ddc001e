"""What a slow link leaves of each way to keep copies together: loss by steps and by seconds, on two hosts.

The hosts are network namespaces whose cables carry 0.1 or 1 Gbit/s each way, the driver has one of its own; one rank on
each. Every way trains the same network, from the same weights, on the same batches, for the same time. Now and then the
loss on rows held out is computed, and the clock stands still meanwhile; of ranks that step by themselves that is where
they have just met. One JSON line a way and rate, with the curve; ``pages.py`` draws the plot. Needs root, ip and tc.

``beats_all_reduce_from_second``: the time after which the least loss of a way so far stays below all-reduce's; None if
it ends above. ``worse_from_second`` likewise where it ends above; 0 says that the two never changed places.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from shaped_hosts import needs_hosts, run_on_hosts, versions

# By rate, seconds that each way trains, and steps between two looks at the loss of ways that send in every step.
RATES = {"100mbit": (16.0, 4), "1gbit": (6.0, 8)}
WAYS = {
    "all_reduce": ("all_reduce", None),
    "fp16": ("all_reduce", "fp16"),
    "bf16": ("all_reduce", "bf16"),
    "topk": ("all_reduce", "topk(keep=0.01)"),
    "powersgd": ("all_reduce", "powersgd(rank=4)"),
    "adasum": ("all_reduce", "adasum"),
    "local_sgd(every=4)": ("local_sgd(every=4)", None),
    "local_sgd(every=16)": ("local_sgd(every=16)", None),
    "local_sgd(every=64)": ("local_sgd(every=64)", None),
    "diloco": ("diloco", None),
}
ROWS, BATCHES = 128, 640  # rows of a global batch, and steps at most
FEATURES, WIDTH, KINDS, HELD_OUT = 64, 1024, 10, 1024


def network():
    """1.1 M parameters, of which a step sends 4.5 MB whole."""
    layers = [torch.nn.Linear(FEATURES, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, KINDS))


def rows(number, seed):
    """Rows, and the kind of each by a small network with random weights, which is what there is to learn."""
    teacher = torch.Generator().manual_seed(5)
    inner = torch.randn(FEATURES, 24, generator=teacher) / FEATURES**0.5
    outer = torch.randn(24, KINDS, generator=teacher)
    x = torch.randn(number, FEATURES, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "y": ((2 * x @ inner).tanh() @ outer).argmax(1)}


def watch(seconds, look):
    """A callback that looks at the loss on rows held out, and asks to stop when the time is up."""
    from bench_strategies import sent_bytes

    from sparkdl.train.callbacks import Callback

    class Watch(Callback):
        def __init__(self):
            self.held_out, self.curve, self.paused, self.skipped = rows(HELD_OUT, 3), [], 0.0, 2

        def on_fit_start(self, run):
            self.look(run)
            self.started = time.perf_counter()

        def on_step_end(self, run):
            now = time.perf_counter()
            if run.step == self.skipped:
                self.sent = sent_bytes()
            self.bytes = (sent_bytes() - self.sent) / (run.step - self.skipped) if run.step > self.skipped else 0.0
            if run.step % look == 0:
                taken = now - self.started - self.paused
                self.look(run, taken)
                if taken > seconds:
                    run.request_stop("the time is up")
            self.paused += time.perf_counter() - now

        def look(self, run, taken=0.0):
            with torch.inference_mode():
                loss = torch.nn.functional.cross_entropy(run.model(self.held_out["x"]), self.held_out["y"])
            self.curve.append((run.step, round(taken, 3), round(loss.item(), 4)))

    return Watch()


def trained(way, collective, seconds, look):
    """The curve of this rank, and the bytes that it sent in a step."""
    from sparkdl.config import SyncConfig, TrainConfig
    from sparkdl.strategies.base import open_strategy
    from sparkdl.train.in_memory import TensorSource
    from sparkdl.train.task import Task
    from sparkdl.train.trainer import fit
    from sparkdl.world import World

    strategy, compression = WAYS[way]
    look = look if strategy == "all_reduce" else 16
    config = TrainConfig(epochs=1, window_steps=look, sync=SyncConfig(compression=compression))
    opened = open_strategy(strategy, collective, config)
    looks = watch(seconds, look)
    fit(
        Task(
            model=network,
            optimizer=partial(torch.optim.AdamW, lr=5e-4),
            loss=torch.nn.CrossEntropyLoss(),
            inputs=["x"],
            labels=["y"],
        ),
        TensorSource(
            rows(ROWS * BATCHES, 1),
            global_batch_rows=ROWS,
            world=World(rank=opened.data_rank, size=opened.data_size),
            shuffle=False,
        ),
        collective=collective,
        config=config,
        callbacks=[looks],
        strategy=opened,
    )
    every = getattr(getattr(opened, "steps", None), "every", 1)
    return [look for look in looks.curve if look[0] % every == 0], looks.bytes


def on_a_rank(world, rate):
    """By way, the curve and the bytes of a step."""
    from sparkdl.collective import open_collective

    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    results = {}
    for way in WAYS:
        collective.barrier()
        results[way] = trained(way, collective, *RATES[rate])
    collective.close()
    return results


# --- what the curves say ------------------------------------------------------------------------------------------


def last_crossing(curve, other):
    """Whether ``curve`` ends below ``other``, and since when, over the time that both were trained."""
    (_, seconds, losses), (_, other_seconds, other_losses) = (np.array(looks).T for looks in (curve, other))
    losses, other_losses = np.minimum.accumulate(losses), np.minimum.accumulate(other_losses)  # the best so far
    times = np.union1d(seconds, other_seconds)
    times = times[(times > 0) & (times <= min(seconds[-1], other_seconds[-1]))]
    below = np.interp(times, seconds, losses) < np.interp(times, other_seconds, other_losses)
    (changes,) = np.nonzero(below[1:] != below[:-1])
    return bool(below[-1]), float(times[changes[-1] + 1]) if len(changes) else 0.0


def seconds_to(loss, curve):
    """When a curve first is at ``loss``; None if never."""
    return next((seconds for _, seconds, value in curve if value <= loss), None)


def measure(folder, rate):
    ranks = run_on_hosts(folder, "bench_slow_link", rate, hosts_of_ranks=(0, 1), rate=rate, seconds=1200)
    reference = ranks[0]["all_reduce"][0]
    for way in WAYS:
        curve = ranks[0][way][0]
        below, since = last_crossing(curve, reference)
        line = {"workload": "slow_link", "way": way, "rate": rate, "ranks": len(ranks)}
        line["sends_every_step"] = WAYS[way][0] == "all_reduce"
        line["parameters"] = sum(parameter.numel() for parameter in network().parameters())
        line["sent_bytes_per_step"] = round(max(rank[way][1] for rank in ranks))
        line |= {"steps": curve[-1][0], "milliseconds_per_step": round(1000 * curve[-1][1] / curve[-1][0], 1)}
        line["last_loss"] = curve[-1][2]
        line["seconds_to_loss_of_all_reduce"] = seconds_to(reference[-1][2], curve)
        line["beats_all_reduce_from_second"] = since if below else None
        line["worse_from_second"] = None if below or way == "all_reduce" else since
        line |= versions() | {"load": round(os.getloadavg()[0], 1), "curve": curve}
        print(json.dumps(line), flush=True)


@needs_hosts
@pytest.mark.bench
@pytest.mark.parametrize("rate", RATES)
def test_slow_link(tmp_path, rate):
    measure(tmp_path, rate)
