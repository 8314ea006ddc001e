"""Each strategy beside a plain torch script that does the same with the same parts, as torch's own examples have it.

Ours is a whole training by ``fit``; theirs is the shortest loop. Both take turns on the same ranks, so that a busy
machine slows both; where it is busy, the ratio of processor seconds tells more. Bytes are those that the kernel sent
for this rank's TCP connections; memory is the process's resident memory at most, less that before. One JSON line per
strategy and number of ranks, of the slowest and largest rank. Ranks talk over the loopback interface, through gloo.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import platform
import socket
import statistics
import struct
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from sparkdl.collective import open_collective
from sparkdl.config import TrainConfig
from sparkdl.strategies.base import open_strategy
from sparkdl.train.callbacks import Callback
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import World

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WIDTH, BLOCKS, ROWS = 256, 8, 256
STEPS, SKIPPED, ROUNDS, MEMORY_ROUNDS = 8, 2, 15, 3
MICRO_BATCHES = 8


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.fc2 = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fc2(torch.nn.functional.gelu(self.fc1(x)))


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[Block() for _ in range(BLOCKS)])


def batches(reader, readers):
    """This rank's part of ``STEPS`` global batches."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(STEPS * ROWS, WIDTH, generator=generator) for _ in range(2))
    part = ROWS // readers
    for step in range(STEPS):
        rows = slice(step * ROWS + reader * part, step * ROWS + (reader + 1) * part)
        yield x[rows], y[rows]


# --- what is measured ---------------------------------------------------------------------------------------------


def sent_bytes():
    """Bytes that the kernel sent for the TCP connections of this process: ``tcpi_bytes_sent`` of ``tcp(7)``."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
        except OSError:
            continue  # of another family, or closed since
        total += struct.unpack_from("<Q", info, 200)[0]
    return total


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


class Meter(Callback):
    """Seconds of the steps behind the first few, bytes sent in one, and memory at most."""

    def __init__(self, steps=STEPS, skipped=SKIPPED):
        self.steps, self.skipped = steps, skipped
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        self.before, self.ends, self.sent, self.processor = status("VmRSS"), [], 0, 0.0

    def on_step_end(self, run=None):
        self.ends.append(time.perf_counter())
        if len(self.ends) in (self.skipped, self.steps):
            self.sent = sent_bytes() - self.sent
            self.processor = time.process_time() - self.processor

    def result(self):
        steps = [end - begin for begin, end in itertools.pairwise(self.ends[self.skipped - 1 :])]
        return sum(steps), self.processor, self.sent / len(steps), status("VmHWM") - self.before


# --- ours ---------------------------------------------------------------------------------------------------------


def ours(strategy, collective):
    config = TrainConfig(epochs=1)
    opened = open_strategy(strategy, collective, config)
    generator = torch.Generator().manual_seed(1)
    data = {name: torch.randn(STEPS * ROWS, WIDTH, generator=generator) for name in ("x", "y")}
    meter = Meter()
    fit(
        Task(model=model, optimizer=torch.optim.AdamW, loss=torch.nn.MSELoss(), inputs=["x"], labels=["y"]),
        TensorSource(
            data,
            global_batch_rows=ROWS,
            world=World(rank=opened.data_rank, size=opened.data_size),
            shuffle=False,
        ),
        collective=collective,
        config=config,
        callbacks=[meter],
        strategy=opened,
    )
    return meter.result()


# --- theirs -------------------------------------------------------------------------------------------------------


def loop(net, optimizer, reader, readers, meter):
    loss_of = torch.nn.MSELoss()
    for x, y in batches(reader, readers):
        optimizer.zero_grad()
        loss_of(net(x), y).backward()
        optimizer.step()
        meter.on_step_end()
    return meter.result()


def data_parallel(*, zero=False):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    meter = Meter()
    net = DistributedDataParallel(model())
    if zero:
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW)
    else:
        optimizer = torch.optim.AdamW(net.parameters())
    return loop(net, optimizer, dist.get_rank(), dist.get_world_size(), meter)


def sharded(*, keep=False, sizes=None):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    meter, net = Meter(), model()
    sizes = sizes or (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "shard")[-len(sizes) :])
    for block in net:
        fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
    fully_shard(net, mesh=mesh, reshard_after_forward=not keep)
    optimizer = torch.optim.AdamW(net.parameters())
    return loop(net, optimizer, dist.get_rank(), dist.get_world_size(), meter)


def split(*, data=1, over=""):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
    from torch.nn.parallel import DistributedDataParallel

    meter, net = Meter(), model()
    mesh = init_device_mesh("cpu", (data, dist.get_world_size() // data), mesh_dim_names=("data", "tensor"))
    plan = {f"{i}.{name}": style() for i in range(BLOCKS) for name, style in
            (("fc1", ColwiseParallel), ("fc2", RowwiseParallel))}  # fmt: skip
    parallelize_module(net, mesh["tensor"], plan)
    if over == "shard":
        for block in net:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(net, mesh=mesh["data"])
    elif over == "copies":
        _pre_dp_module_transform(net)
        net = DistributedDataParallel(net, process_group=mesh["data"].get_group())
    optimizer = torch.optim.AdamW(net.parameters())
    return loop(net, optimizer, mesh["data"].get_local_rank(), data, meter)


def staged(*, data=1):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn.parallel import DistributedDataParallel

    meter = Meter()
    stages = dist.get_world_size() // data
    mesh = init_device_mesh("cpu", (stages, data), mesh_dim_names=("pipeline", "data"))
    index, each = mesh["pipeline"].get_local_rank(), BLOCKS // stages
    part = torch.nn.Sequential(*list(model())[index * each : (index + 1) * each])
    optimizer = torch.optim.AdamW(part.parameters())
    net = DistributedDataParallel(part, process_group=mesh["data"].get_group()) if data > 1 else part
    group = mesh["pipeline"].get_group()
    stage = PipelineStage(net, index, stages, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=torch.nn.MSELoss())
    for x, y in batches(mesh["data"].get_local_rank(), data):
        optimizer.zero_grad()
        if index == 0:
            schedule.step(x)
        elif index == stages - 1:
            schedule.step(target=y, losses=[])
        else:
            schedule.step()
        optimizer.step()
        meter.on_step_end()
    return meter.result()


PEERS = {
    "all_reduce": data_parallel,
    "zero1": partial(data_parallel, zero=True),
    "zero2": partial(sharded, keep=True),
    "fsdp": sharded,
    "tensor": split,
    f"pipeline(micro_batches={MICRO_BATCHES})": staged,
    "mesh(data=2, shard=2)": partial(sharded, sizes=(2, 2)),
    "mesh(data=2, tensor=2)": partial(split, data=2, over="copies"),
    "mesh(shard=2, tensor=2)": partial(split, data=2, over="shard"),
    f"mesh(data=2, pipeline=2, micro_batches={MICRO_BATCHES})": partial(staged, data=2),
}


def alone():
    """The loop of one rank."""
    meter, net = Meter(), model()
    return loop(net, torch.optim.AdamW(net.parameters()), 0, 1, meter)


# --- in turns -----------------------------------------------------------------------------------------------------


def on_a_rank(strategy, rounds, world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch" if world.size > 1 else "solo")
    peer = PEERS[strategy] if world.size > 1 else alone
    turns = {"ours": partial(ours, strategy, collective), "theirs": peer}
    results = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name in list(turns)[:: 1 if number % 2 else -1]:
            collective.barrier()
            result = turns[name]()
            if number:  # the first one of each loads what it needs
                results[name].append(result)
    collective.close()
    return results


def on_ranks(strategy, rounds, size):
    from rank_pool import Ranks

    pool = Ranks()  # fresh processes
    try:
        ranks = pool.run_at_store([], partial(on_a_rank, strategy, rounds), size, seconds=1800.0)
    finally:
        pool.end()
    for value in ranks:
        if isinstance(value, BaseException):
            raise value
    return ranks


def measure(strategy, size):
    ranks = on_ranks(strategy, ROUNDS, size)
    # Memory is told by an allocator that gives back what is freed, and pays for it with time: in runs of their own.
    with patch.dict(os.environ, {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}):
        in_memory = on_ranks(strategy, MEMORY_ROUNDS, size)
    line = {"workload": "strategies", "strategy": strategy, "ranks": size}
    seconds = {
        name: [max(rank[name][i][0] for rank in ranks) / (STEPS - SKIPPED) for i in range(ROUNDS)]
        for name in ("ours", "theirs")
    }
    ratios = [mine / other for mine, other in zip(seconds["ours"], seconds["theirs"], strict=True)]
    line |= {"ratio": round(statistics.median(ratios), 3), "spread": [round(min(ratios), 3), round(max(ratios), 3)]}
    # On a busy machine seconds tell of its other work; what the processors did for all ranks tells of ours.
    worked = {name: [sum(rank[name][i][1] for rank in ranks) for i in range(ROUNDS)] for name in seconds}
    processor = [mine / other for mine, other in zip(worked["ours"], worked["theirs"], strict=True)]
    line["processor_ratio"] = round(statistics.median(processor), 3)
    line["processor_spread"] = [round(min(processor), 3), round(max(processor), 3)]
    line["ratio_of_minima"] = round(min(seconds["ours"]) / min(seconds["theirs"]), 3)
    for name, taken in seconds.items():
        line[f"{name}_rows_per_second"] = round(ROWS / statistics.median(taken))
        line[f"{name}_sent_bytes_per_step"] = round(max(rank[name][-1][2] for rank in ranks))
        most = [max(rank[name][i][3] for rank in in_memory) for i in range(MEMORY_ROUNDS)]
        line[f"{name}_resident_mib"] = round(statistics.median(most) / 2**20, 1)
    line["git"] = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return line | {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}


@pytest.mark.bench
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("strategy", PEERS)
def test_strategy(strategy, size):
    if (size == 1 and strategy != "all_reduce") or (size < 4 and strategy.startswith("mesh")):
        pytest.skip("that many ranks have no such mesh")
    print(json.dumps(measure(strategy, size)), flush=True)
