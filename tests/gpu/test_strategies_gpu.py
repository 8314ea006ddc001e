"""Every strategy on GPUs, over NCCL: the weights of one GPU, in fp32 and bf16; skipped where there is none.

Where there are fewer GPUs than ranks, ranks share them.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from dataclasses import replace

import cloudpickle
import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import CheckpointConfig, SyncConfig, TrainConfig
from sparkdl.nn import MixtureOfExperts
from sparkdl.strategies.base import TaskView, open_strategy
from sparkdl.strategies.file_tensors import lies_in_file
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import World

cloudpickle.register_pickle_by_value(sys.modules[__name__])

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 1, reason="needs a GPU that torch can use")
STRATEGIES = {
    2: [
        *("all_reduce", "zero1", "zero2", "fsdp", "fsdp(offload=True)", "fsdp(activation_checkpointing=True)"),
        *("tensor", "pipeline(micro_batches=4)", "pipeline(schedule='gpipe', micro_batches=4)", "expert"),
    ],
    4: ["mesh(data=2, shard=2)", "mesh(data=2, tensor=2)", "mesh(data=2, pipeline=2)", "mesh(shard=2, tensor=2)"],
}
# Of these, two ranks train another model than one does, or on CPUs take another way: (strategy, gradient_compression).
AS_ON_CPUS = [
    *(("local_sgd(every=4)", None), ("diloco(every=4)", None), ("parameter_server", None)),
    *(("all_reduce", "bf16"), ("zero1", "bf16"), ("all_reduce", "powersgd(rank=2)")),
    *(("all_reduce", "topk(keep=0.25)"), ("all_reduce", "adasum")),
]
EVERY = [(size, strategy) for size, names in STRATEGIES.items() for strategy in names]
BOUNDS = {"fp32": {"rtol": 2e-3, "atol": 2e-4}, "bf16": {"rtol": 0.2, "atol": 0.02}}


class Residual(torch.nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.norm, self.fc1, self.fc2 = torch.nn.LayerNorm(16), torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
        self.experts = MixtureOfExperts(16, 32, 4) if experts else torch.nn.Identity()

    def forward(self, x):
        return x + self.experts(self.fc2(torch.nn.functional.gelu(self.fc1(self.norm(x)))))


class Looked(torch.nn.Module):
    """Looks rows of a table up, one large enough that parameter servers keep it."""

    def __init__(self):
        super().__init__()
        self.table, self.out = torch.nn.Embedding(2000, 16), torch.nn.Linear(24, 1)

    def forward(self, x):
        rows = (100 * x[:, 0].abs()).long().clamp(max=1999)
        return self.out(torch.cat([self.table(rows), x], 1))


def model(kind):
    if kind == "table":
        return Looked()
    blocks = [Residual(kind == "expert") for _ in range(4)]
    return torch.nn.Sequential(torch.nn.Linear(8, 16), *blocks, torch.nn.LayerNorm(16), torch.nn.Linear(16, 1))


def trained(strategy, of, precision, collective, world, folder=None, epochs=3, compression=None):
    torch.backends.cuda.matmul.allow_tf32 = False
    config = TrainConfig(
        epochs=epochs,
        seed=1,
        precision=precision,
        max_grad_norm=0.5,
        accumulate_steps=2,
        sync=SyncConfig(compression=compression),
    )
    opened = open_strategy(strategy, collective, config)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1003, 8, generator=generator)
    data = {"x": x, "y": x.sin().sum(1, keepdim=True)}
    reader = replace(world, rank=opened.data_rank, size=opened.data_size)
    result = fit(
        Task(
            model=functools.partial(model, of),
            optimizer=functools.partial(torch.optim.AdamW, lr=3e-3),
            loss=torch.nn.MSELoss(),
            inputs=["x"],
            labels=["y"],
        ),
        TensorSource(data, global_batch_rows=64, world=reader),
        TensorSource(data, global_batch_rows=64, world=reader, shuffle=False),
        collective=collective,
        config=config,
        checkpoints=Checkpointer(CheckpointConfig(uri=str(folder), every_steps=3)) if folder else None,
        strategy=opened,
    )
    state = opened.state_dict()
    placed = {
        "parameters": {local(parameter).device.type for parameter in opened.parameters()},
        "pinned": all(local(parameter).is_pinned() for parameter in opened.parameters()),
        "whole": {tensor.device.type for tensor in state["model"].values()} if state else set(),
    }
    return {
        "losses": result.history.column("val_loss"),
        "weights": {name: tensor.cpu() for name, tensor in state["model"].items()} if state else {},
        "placed": placed,
    }


def local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def with_a_gpu(world):
    """``world`` with the GPU of this rank, which others may have, too.

    NCCL refuses two ranks on one GPU of a host, so each rank says that it is a host of its own.
    """
    os.environ.update(NCCL_HOSTID=str(os.getpid()), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    device = f"cuda:{world.local_rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    return replace(world, device=device)


def on_a_gpu(strategy, folder, world):
    world = with_a_gpu(world)
    collective = open_collective(world, backend="torch" if world.size > 1 else "solo")
    results = {precision: trained(strategy, kind(strategy), precision, collective, world) for precision in BOUNDS}
    trained(strategy, kind(strategy), "fp32", collective, world, folder, epochs=2)
    results["resumed"] = trained(strategy, kind(strategy), "fp32", collective, world, folder)
    collective.close()
    return results


@functools.lru_cache
def alone(of, precision):
    world = World(device="cuda:0")
    return trained("all_reduce", of, precision, open_collective(world, backend="solo"), world)


@pytest.fixture(scope="module")
def together(ranks, tmp_path_factory):
    @functools.lru_cache
    def run(size, strategy):
        return ranks.together(functools.partial(on_a_gpu, strategy, tmp_path_factory.mktemp("runs")), size, "torch")

    return run


def kind(strategy):
    return "expert" if "expert" in strategy else "dense"


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize(("size", "strategy"), EVERY)
def test_gpus_train_what_one_gpu_trains(together, size, strategy, precision):
    wanted = alone(kind(strategy), precision)
    leader, *others = (rank[precision] for rank in together(size, strategy))
    assert leader["losses"] == pytest.approx(wanted["losses"], rel=BOUNDS[precision]["rtol"])
    torch.testing.assert_close(leader["weights"], wanted["weights"], **BOUNDS[precision])
    assert all(other["losses"] == leader["losses"] for other in others)


@pytest.mark.parametrize(("size", "strategy"), EVERY)
def test_a_run_that_is_resumed_on_gpus_ends_as_the_undisturbed_one(together, size, strategy):
    leader = together(size, strategy)[0]
    assert leader["resumed"]["losses"] == pytest.approx(leader["fp32"]["losses"], rel=BOUNDS["fp32"]["rtol"])
    torch.testing.assert_close(leader["resumed"]["weights"], leader["fp32"]["weights"], **BOUNDS["fp32"])


@pytest.mark.parametrize(("size", "strategy"), EVERY)
def test_what_lies_on_a_gpu_and_what_in_the_memory_of_its_host(together, size, strategy):
    for rank in together(size, strategy):
        placed = rank["fp32"]["placed"]
        if "offload" in strategy:
            assert placed["parameters"] == {"cpu"}
            assert placed["pinned"]
        else:
            assert placed["parameters"] == {"cuda"}
    if strategy not in ("all_reduce", "zero1"):  # the whole model need not fit the leader's GPU
        assert together(size, strategy)[0]["fp32"]["placed"]["whole"] == {"cpu"}


def test_a_mesh_of_one_gpu_is_that_gpu():
    world = World(device="cuda:0")
    collective = open_collective(world, backend="solo")
    wanted = alone("dense", "fp32")
    result = trained("mesh(activation_checkpointing=True)", "dense", "fp32", collective, world)
    torch.testing.assert_close(result["weights"], wanted["weights"], **BOUNDS["fp32"])


def as_copies(device, strategy, compression, world):
    world = with_a_gpu(world) if device == "cuda" else world
    collective = open_collective(world, backend="torch")
    kinds = ("dense", "table") if strategy == "parameter_server" else ("dense",)
    results = [trained(strategy, kind, "fp32", collective, world, compression=compression) for kind in kinds]
    collective.close()
    return results


@pytest.mark.parametrize(("strategy", "compression"), AS_ON_CPUS)
def test_two_ranks_train_on_gpus_what_they_train_on_cpus(ranks, strategy, compression):
    on_gpus, on_cpus = (
        ranks.together(functools.partial(as_copies, device, strategy, compression), 2, "torch")
        for device in ("cuda", "cpu")
    )
    for got, wanted in zip(on_gpus[0], on_cpus[0], strict=True):
        assert got["losses"] == pytest.approx(wanted["losses"], rel=BOUNDS["fp32"]["rtol"])
        torch.testing.assert_close(got["weights"], wanted["weights"], **BOUNDS["fp32"])
        assert got["placed"]["parameters"] == {"cuda"}


def peak(world):
    """Bytes of this GPU at most while 40 MiB of weights are trained, by strategy, above what is there for good."""
    world = with_a_gpu(world)
    collective = open_collective(world, backend="torch")
    layer = torch.nn.Linear(512, 512, device=world.device)
    # From the first product on cuBLAS keeps a workspace.
    layer(torch.ones(4, 512, device=world.device)).sum().backward()
    del layer
    peaks = {}
    for strategy in ("all_reduce", "fsdp", "fsdp(offload=True)"):
        gc.collect()
        there = torch.cuda.memory_allocated()
        opened = open_strategy(strategy, collective, TrainConfig())
        torch.manual_seed(0)
        opened.build(
            lambda: torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(40)]).to(world.device),
            lambda model: torch.optim.AdamW(model.parameters()),
            TaskView(),
        )
        assert not any(lies_in_file(local(parameter)) for parameter in opened.parameters())
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            opened.net(torch.randn(4, 512, device=world.device)).square().mean().backward()
            opened.exchange()
            opened.optimizer.step()
            opened.optimizer.zero_grad()
        peaks[strategy] = torch.cuda.max_memory_allocated() - there
        opened.close()
        del opened
    collective.close()
    return peaks


def test_shards_take_less_of_a_gpu_and_offloaded_ones_least(ranks):
    for peaks in ranks.together(peak, 2, "torch"):
        assert peaks["fsdp"] < 0.7 * peaks["all_reduce"]
        assert peaks["fsdp(offload=True)"] < 0.1 * peaks["fsdp"]
