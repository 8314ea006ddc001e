"""What a rank holds under each strategy, against the formulas of ZeRO (Rajbhandari et al., SC 2020, figure 1) in fp32.

A model of P parameters, AdamW, few rows, so that activations are small beside it. Before an optimizer step the bytes of
parameters, gradients and optimizer state on this rank are counted, storage by storage. The peak is what the process has
allocated at most, by ``mallinfo2`` each half millisecond: while the model is made and spread, and while it trains. (A
profiler would keep what gloo works on for longer than gloo does.) Resident memory at most stands beside it. One JSON
line per strategy and number of ranks, of the rank that holds most.

With many rows it is activations that take the memory: the same model with and without ``activation_checkpointing``, and
the processor seconds of a step beside it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
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

WIDTH, BLOCKS, ROWS, STEPS = 256, 64, 8, 3
NARROW, MANY_ROWS, REPEATS = 128, 512, 3  # where activations are what counts
MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
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

CHECKPOINTED = {
    "all_reduce": "mesh(data=2, activation_checkpointing=True)",
    "fsdp": "fsdp(activation_checkpointing=True)",
    "tensor": "tensor(activation_checkpointing=True)",
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

    def __init__(self, heap):
        self.heap, self.bytes, self.ends = heap, {}, []

    def on_fit_start(self, run):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        self.peak_making = self.heap.start_anew()
        step = run.optimizer.step

        def counted(*args, **kwargs):
            parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
            state = [value for s in run.optimizer.state.values() for value in s.values() if torch.is_tensor(value)]
            self.bytes = {
                "parameters": held([*run.model.parameters(), *parameters]),
                "gradients": held([p.grad for p in parameters if p.grad is not None]),
                "optimizer": held(state),
                "live": live(),
            }
            return step(*args, **kwargs)

        run.optimizer.step = counted

    def on_step_end(self, run):
        self.ends.append(time.process_time())

    def on_fit_end(self, run):
        self.bytes |= {"peak_making": self.peak_making, "peak_training": self.heap.start_anew()}
        self.bytes["resident"] = status("VmHWM")


class Heap(threading.Thread):
    """What the process has allocated at most; ``start_anew`` begins another stretch."""

    def __init__(self):
        super().__init__(daemon=True)
        self._info, self._over = ctypes.CDLL(None).mallinfo2, threading.Event()
        self._info.restype = type(
            "mallinfo2", (ctypes.Structure,), {"_fields_": [(n, ctypes.c_size_t) for n in MALLINFO]}
        )
        self.peak = 0

    def allocated(self):
        info = self._info()
        return info.hblkhd + info.uordblks

    def start_anew(self):
        peak, self.peak = self.peak, self.allocated()
        return peak

    def run(self):
        while not self._over.wait(0.0005):
            self.peak = max(self.peak, self.allocated())

    def end(self):
        self._over.set()
        self.join()
        return self.peak


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def train(strategy, collective, heap, width, rows=ROWS):
    config = TrainConfig(epochs=1, max_steps=STEPS)
    opened = open_strategy(strategy, collective, config)
    reader = World(rank=opened.data_rank, size=opened.data_size)
    data = {name: torch.randn(rows * STEPS, width, generator=torch.Generator().manual_seed(1)) for name in ("x", "y")}
    task = Task(
        model=partial(model, width),
        optimizer=torch.optim.AdamW,
        loss=torch.nn.MSELoss(),
        inputs=["x"],
        labels=["y"],
    )
    heap.start_anew()
    watch = Watch(heap)
    with patch.object(type(opened), "gather_model", lambda strategy: strategy.model):  # what one rank gets in the end
        fit(
            task,
            TensorSource(data, global_batch_rows=rows, world=reader),
            collective=collective,
            config=config,
            callbacks=[watch],
            strategy=opened,
        )
    return watch.bytes, watch.ends[-1] - watch.ends[-2]


def on_a_rank(strategy, width, rows, world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch" if world.size > 1 else "solo")
    heap = Heap()
    heap.start()
    train(strategy, collective, heap, 8)  # loads what a first training loads
    gc.collect()
    resident, allocated = status("VmRSS"), heap.allocated()
    counted, _ = train(strategy, collective, heap, width, rows)
    counted["resident"] -= resident
    counted |= {name: counted[name] - allocated for name in ("peak_making", "peak_training")}
    heap.end()
    repeats = range(REPEATS if rows > ROWS else 0)
    counted["seconds"] = [train(strategy, collective, heap, width, rows)[1] for _ in repeats]
    collective.close()
    return counted


def counts(strategy, size, width=WIDTH, rows=ROWS):
    """What each rank counted."""
    from rank_pool import Ranks

    # Fresh processes, whose allocator gives back what is freed.
    with patch.dict(os.environ, {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}):
        pool = Ranks()
        try:
            return pool.run_at_store([], partial(on_a_rank, strategy, width, rows), size, seconds=1800.0)
        finally:
            pool.end()


def versions():
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {"git": commit, "torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}


def measure(strategy, size):
    largest = max(counts(strategy, size), key=lambda counted: counted["peak_training"])
    seconds = largest.pop("seconds")
    assert seconds == []
    parameters = sum(p.numel() for p in model(WIDTH).parameters())
    formula = FORMULAS[strategy](size)
    return {
        "workload": "memory",
        "strategy": strategy,
        "ranks": size,
        "parameters": parameters,
        "formula_bytes_per_parameter": round(formula, 2),
        **{f"{name}_bytes_per_parameter": round(count / parameters, 2) for name, count in largest.items()},
        "ratio_peak": round(largest["peak_training"] / parameters / formula, 3),
        **versions(),
    }


def measure_activations(strategy, size):
    keeping, recomputing = (counts(name, size, NARROW, MANY_ROWS) for name in (strategy, CHECKPOINTED[strategy]))
    line = {"workload": "activations", "strategy": strategy, "ranks": size, "rows_per_step": MANY_ROWS}
    for name, ranks in (("keeping", keeping), ("recomputing", recomputing)):
        line[f"{name}_peak_mib"] = round(max(rank["peak_training"] for rank in ranks) / 2**20, 1)
        seconds = [sum(rank["seconds"][i] for rank in ranks) for i in range(REPEATS)]
        line[f"{name}_processor_seconds_per_step"] = round(statistics.median(seconds), 4)
    taken = (line[f"{name}_processor_seconds_per_step"] for name in ("recomputing", "keeping"))
    line["processor_ratio"] = round(next(taken) / next(taken), 3)
    return line | versions()


@pytest.mark.bench
@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("strategy", FORMULAS)
def test_memory(strategy, size):
    if size == 1 and strategy != "all_reduce":
        pytest.skip("one rank holds all under every strategy")
    print(json.dumps(measure(strategy, size)), flush=True)


@pytest.mark.bench
@pytest.mark.parametrize("strategy", CHECKPOINTED)
def test_activations(strategy):
    print(json.dumps(measure_activations(strategy, 2)), flush=True)
