"""Every strategy on GPUs, over NCCL: the weights of one GPU, in fp32 and bf16; skipped where there are too few."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace

import cloudpickle
import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import CheckpointConfig, TrainConfig
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
STRATEGIES = {
    2: [
        *("all_reduce", "zero1", "zero2", "fsdp", "fsdp(offload=True)", "fsdp(activation_checkpointing=True)"),
        *("tensor", "pipeline(micro_batches=4)", "pipeline(schedule='gpipe', micro_batches=4)", "expert"),
    ],
    4: ["mesh(data=2, shard=2)", "mesh(data=2, tensor=2)", "mesh(data=2, pipeline=2)", "mesh(shard=2, tensor=2)"],
}
EVERY = [
    pytest.param(size, strategy, marks=pytest.mark.skipif(size > GPUS, reason=f"needs {size} GPUs"))
    for size, names in STRATEGIES.items()
    for strategy in names
]
BOUNDS = {"fp32": {"rtol": 2e-3, "atol": 2e-4}, "bf16": {"rtol": 0.2, "atol": 0.02}}


class Residual(torch.nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.norm, self.fc1, self.fc2 = torch.nn.LayerNorm(16), torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
        self.experts = MixtureOfExperts(16, 32, 4) if experts else torch.nn.Identity()

    def forward(self, x):
        return x + self.experts(self.fc2(torch.nn.functional.gelu(self.fc1(self.norm(x)))))


def model(experts):
    blocks = [Residual(experts) for _ in range(4)]
    return torch.nn.Sequential(torch.nn.Linear(8, 16), *blocks, torch.nn.LayerNorm(16), torch.nn.Linear(16, 1))


def trained(strategy, of, precision, collective, world, folder=None, epochs=3):
    torch.backends.cuda.matmul.allow_tf32 = False
    config = TrainConfig(epochs=epochs, seed=1, precision=precision, max_grad_norm=0.5, accumulate_steps=2)
    opened = open_strategy(strategy, collective, config)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1003, 8, generator=generator)
    data = {"x": x, "y": x.sin().sum(1, keepdim=True)}
    reader = replace(world, rank=opened.data_rank, size=opened.data_size)
    result = fit(
        Task(
            model=functools.partial(model, "expert" in of),
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


def on_a_gpu(strategy, folder, world):
    world = replace(world, device=f"cuda:{world.local_rank}")
    torch.cuda.set_device(world.device)
    collective = open_collective(world, backend="torch" if world.size > 1 else "solo")
    results = {precision: trained(strategy, strategy, precision, collective, world) for precision in BOUNDS}
    trained(strategy, strategy, "fp32", collective, world, folder, epochs=2)
    results["resumed"] = trained(strategy, strategy, "fp32", collective, world, folder)
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


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_a_mesh_of_one_gpu_is_that_gpu():
    world = World(device="cuda:0")
    collective = open_collective(world, backend="solo")
    wanted = alone("dense", "fp32")
    result = trained("mesh(activation_checkpointing=True)", "dense", "fp32", collective, world)
    torch.testing.assert_close(result["weights"], wanted["weights"], **BOUNDS["fp32"])


def on_the_same_gpu(strategy, world):
    """What a rank trains that shares ``cuda:0`` with all others, over gloo: NCCL wants a GPU a rank."""
    import torch.distributed as dist

    join = dist.init_process_group
    dist.init_process_group = lambda backend, **options: join("gloo", **options)
    try:
        world = replace(world, device="cuda:0")
        torch.cuda.set_device(world.device)
        collective = open_collective(world, backend="torch")
        result = trained(strategy, strategy, "fp32", collective, world)
        collective.close()
        return result
    finally:
        dist.init_process_group = join


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
@pytest.mark.parametrize("strategy", ["all_reduce", "zero1", "local_sgd(every=1)"])
def test_two_ranks_on_one_gpu_train_what_one_trains(ranks, strategy):
    """How gradients leave a GPU and come back, where there is one alone; gloo sums up CUDA tensors, and no more."""
    leader, other = ranks.together(functools.partial(on_the_same_gpu, strategy), 2, "torch")
    assert leader["losses"] == other["losses"]
    assert leader["placed"]["parameters"] == {"cuda"}
    if strategy != "local_sgd(every=1)":  # AdamW of each rank's own rows is another optimizer
        torch.testing.assert_close(leader["weights"], alone("dense", "fp32")["weights"], **BOUNDS["fp32"])


def peak(world):
    """Bytes of this GPU at most while 40 MiB of weights are trained, by strategy."""
    world = replace(world, device=f"cuda:{world.local_rank}")
    torch.cuda.set_device(world.device)
    collective = open_collective(world, backend="torch")
    peaks = {}
    for strategy in ("all_reduce", "fsdp", "fsdp(offload=True)"):
        opened = open_strategy(strategy, collective, TrainConfig())
        torch.cuda.reset_peak_memory_stats()
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
        peaks[strategy] = torch.cuda.max_memory_allocated()
        opened.close()
        del opened
    collective.close()
    return peaks


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_shards_take_less_of_a_gpu_and_offloaded_ones_least(ranks):
    for peaks in ranks.together(peak, 2, "torch"):
        assert peaks["fsdp"] < 0.7 * peaks["all_reduce"]
        assert peaks["fsdp(offload=True)"] < 0.5 * peaks["fsdp"]
