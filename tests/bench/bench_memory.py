"""What a rank holds under each strategy, against the formulas of ZeRO (Rajbhandari et al., SC 2020, figure 1) in fp32.

A model of P parameters, AdamW, few rows, so that activations are small beside it. Before an optimizer step the bytes of
parameters, gradients and optimizer state on this rank are counted, storage by storage. The peak is that of torch's
allocator, from the first parameter to the last step, by ``torch.profiler``; the process's own is its resident memory at
most while it trains, less that before. One JSON line per strategy and number of ranks, of the rank that holds most.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import patch

import cloudpickle
import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import TrainConfig
from sparkdl.strategies.base import open_strategy
from sparkdl.train.callbacks import Callback
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import World

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WIDTH, BLOCKS, ROWS, STEPS = 64, 64, 8, 3
RANKS = (1, 2, 4)
# By strategy, bytes a parameter that its states take on one of N ranks at the peak of a step; fp32 and Adam have 4 of
# the parameter, 4 of its gradient and 8 of moments.
FORMULAS = {
    "all_reduce": lambda n: 16,
    "zero1": lambda n: 8 + 8 / n,
    "zero2": lambda n: 4 + 12 / n,
    "fsdp": lambda n: 16 / n,
    "tensor": lambda n: 16 / n,
    "pipeline(micro_batches=4)": lambda n: 16 / n,
}


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = torch.nn.Linear(width, 4 * width)
        self.fc2 = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.fc2(torch.nn.functional.gelu(self.fc1(x)))


def model(width):
    return torch.nn.Sequential(*[Block(width) for _ in range(BLOCKS)])


def held(tensors):
    """Bytes of memory that ``tensors`` lie in, each storage once."""
    storages = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type != "meta":
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def live():
    """Bytes of all tensors that Python reaches."""
    every = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return held([tensor for tensor in every if tensor.layout == torch.strided])


class Watch(Callback):
    """Counts what lies on this rank before each optimizer step, and what the process holds while it trains."""

    def __init__(self):
        self.bytes = {}

    def on_fit_start(self, run):
        with torch.profiler.record_function("training"):
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        step = run.optimizer.step
        moments = getattr(run.optimizer, "optim", run.optimizer)  # ZeroRedundancyOptimizer keeps its part in another

        def counted(*args, **kwargs):
            parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
            state = [value for s in moments.state.values() for value in s.values() if torch.is_tensor(value)]
            self.bytes = {
                "parameters": held([*run.model.parameters(), *parameters]),
                "gradients": held([p.grad for p in parameters if p.grad is not None]),
                "optimizer": held(state),
                "live": live(),
            }
            return step(*args, **kwargs)

        run.optimizer.step = counted

    def on_fit_end(self, run):
        self.bytes["resident"] = status("VmHWM")


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def train(strategy, world, collective, width):
    config = TrainConfig(epochs=1, max_steps=STEPS)
    opened = open_strategy(strategy, collective, config)
    rows = World(rank=opened.data_rank, size=opened.data_size)
    data = {name: torch.randn(ROWS * STEPS, width, generator=torch.Generator().manual_seed(1)) for name in ("x", "y")}
    task = Task(
        model=partial(model, width),
        optimizer=torch.optim.AdamW,
        loss=torch.nn.MSELoss(),
        inputs=["x"],
        labels=["y"],
    )
    watch = Watch()
    with patch.object(type(opened), "gather_model", lambda strategy: strategy.model):  # what one rank gets in the end
        fit(
            task,
            TensorSource(data, global_batch_rows=ROWS, world=rows),
            collective=collective,
            config=config,
            callbacks=[watch],
            strategy=opened,
        )
    return watch.bytes


def on_a_rank(strategy, world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch" if world.size > 1 else "solo")
    train(strategy, world, collective, 8)  # loads what a first training loads
    gc.collect()
    before = status("VmRSS")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        counted = train(strategy, world, collective, WIDTH)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    training = next(event["ts"] for event in events if event["name"] == "training")
    allocated = [(event["ts"], event["args"]["Total Allocated"]) for event in events if event["name"] == "[memory]"]
    counted["peak_making"] = max(total for at, total in allocated if at < training)
    counted["peak_training"] = max(total for at, total in allocated if at >= training)
    counted["resident"] -= before
    collective.close()
    return counted


def measure(strategy, size):
    from rank_pool import Ranks

    # Fresh processes, whose allocator gives back what is freed.
    with patch.dict(os.environ, {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}):
        pool = Ranks()
        try:
            counts = pool.together(partial(on_a_rank, strategy), size, "torch" if size > 1 else "solo")
        finally:
            pool.end()
    parameters = sum(p.numel() for p in model(WIDTH).parameters())
    largest = max(counts, key=lambda counted: counted["peak_training"])
    formula = FORMULAS[strategy](size)
    per_parameter = {name: round(count / parameters, 2) for name, count in largest.items()}
    return {
        "workload": "memory",
        "strategy": strategy,
        "ranks": size,
        "parameters": parameters,
        "formula_bytes_per_parameter": round(formula, 2),
        **{f"{name}_bytes_per_parameter": count for name, count in per_parameter.items()},
        "ratio_peak": round(largest["peak_training"] / parameters / formula, 3),
        "git": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


@pytest.mark.bench
@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("strategy", FORMULAS)
def test_memory(strategy, size):
    if size == 1 and strategy != "all_reduce":
        pytest.skip("one rank holds all under every strategy")
    print(json.dumps(measure(strategy, size)), flush=True)
