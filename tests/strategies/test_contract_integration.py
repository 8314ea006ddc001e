"""Every way to spread a model against one rank: the same weights, history and metrics, whatever a training asks for."""

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
from sparkdl.strategies.base import open_strategy
from sparkdl.train.callbacks import Callback
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import SOLO

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STRATEGIES = {
    2: [
        "all_reduce",
        "zero1",
        "zero2",
        "fsdp",
        "fsdp(activation_checkpointing=True)",
        "tensor",
        "pipeline(micro_batches=3)",
        "pipeline(schedule='gpipe', micro_batches=2, cuts=('2',))",
        "expert",
        "parameter_server(servers=2)",
    ],
    4: [
        "mesh(data=2, shard=2)",
        "mesh(data=2, tensor=2)",
        "mesh(data=2, pipeline=2, micro_batches=3)",
        "mesh(shard=2, tensor=2)",
        "mesh(shard=2, pipeline=2, micro_batches=2)",
        "mesh(pipeline=2, tensor=2, micro_batches=2)",
        "mesh(data=2, expert=2)",
        "mesh(expert=2, shard=2)",
        "mesh(expert=2, tensor=2)",
        "mesh(expert=2, pipeline=2, schedule='naive')",
        "mesh(expert=2, pipeline=2, schedule='gpipe', micro_batches=3)",
        "parameter_server(servers=3)",
    ],
    8: [
        "mesh(data=2, shard=2, tensor=2)",
        "mesh(data=2, pipeline=2, tensor=2, micro_batches=2)",
        "mesh(shard=2, pipeline=2, tensor=2, micro_batches=2)",
        "mesh(data=2, expert=2, shard=2)",
        "mesh(expert=2, shard=2, tensor=2)",
        "mesh(expert=2, pipeline=2, tensor=2, schedule='naive')",
    ],
}
SLOW = {"fsdp(activation_checkpointing=True)", "pipeline(schedule='gpipe', micro_batches=2, cuts=('2',))"}
SLOW |= {"zero2", "tensor", "expert"}  # which fsdp, and tests of their own, show as well
FEW = ("clipped", "weights", "best", "thawed")  # of more than two ranks, on two processors
WHOLE = {"all_reduce"}  # whose other cases, too, are trained at once


def marks(size, strategy, case="clipped"):
    if size > 2 or strategy in SLOW or (case not in FEW and strategy not in WHOLE):
        return [pytest.mark.slow]
    return []


EVERY = [
    pytest.param(size, strategy, marks=marks(size, strategy), id=f"{size}-{strategy}")
    for size, names in STRATEGIES.items()
    for strategy in names
]


class Residual(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.fc1 = torch.nn.Linear(8, 16)
        self.fc2 = torch.nn.Linear(16, 8)

    def forward(self, x):
        return x + self.fc2(torch.nn.functional.gelu(self.fc1(self.norm(x))))


class Mixture(torch.nn.Module):
    def __init__(self, capacity_factor):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.experts = MixtureOfExperts(8, 16, 4, capacity_factor=capacity_factor)

    def forward(self, x):
        return x + self.experts(self.norm(x))


def model(kind):
    blocks = {
        "dense": Residual,
        "mixture": functools.partial(Mixture, 1.0),
        "mixture without a limit": functools.partial(Mixture, None),
    }
    return torch.nn.Sequential(
        torch.nn.Linear(5, 8), blocks[kind](), Residual(), blocks[kind](), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1)
    )


def adamw(net):
    """Two groups, of which one has a rate of its own."""
    return torch.optim.AdamW([{"params": net[0].parameters()}, {"params": net[1:].parameters(), "lr": 3e-3}], lr=1e-2)


class NormalisedSteps(torch.optim.Optimizer):
    """Steps of one length a parameter: what it does with a part of one depends on the other parts."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / (parameter.grad.norm() + 0.1) * group["lr"])


class Thaw(Callback):
    """Train a block from the second epoch on, and another one no more."""

    def on_epoch_end(self, run, metrics):
        run.model[2].requires_grad_(True)
        run.model[1].requires_grad_(False)


def frozen(net):
    net[2].requires_grad_(False)
    return net


def rate_by_epoch(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def data(dtype):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(103, 5, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(5, generator=generator, dtype=torch.float64)
    return {"x": x.to(dtype), "y": y.to(dtype), "w": (x[:, 0].abs() + 0.1).to(dtype)}


# 103 rows in batches of 17: the seventh has one row, so that every other reader has none.
CASES = {
    "plain": ({}, {}),
    "clipped": ({}, {"max_grad_norm": 0.3, "warmup_steps": 4}),
    "accumulated": ({}, {"accumulate_steps": 3, "max_grad_norm": 0.3}),
    "weights": ({"sample_weight": "w"}, {}),
    "sum": ({"loss": torch.nn.L1Loss(reduction="sum")}, {"max_grad_norm": 0.1}),
    "momentum": ({"optimizer": functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9)}, {}),
    "norms": ({"optimizer": NormalisedSteps}, {}),
    "instances": ({"instances": True}, {"max_grad_norm": 0.3}),
    "thawed": ({"frozen": True}, {"max_grad_norm": 0.3}),
    "schedule": ({"scheduler": rate_by_epoch}, {"scale_lr": False}),
    "best": (
        {"metrics": {"mae": torch.nn.L1Loss()}, "optimizer": functools.partial(torch.optim.Adagrad, lr=0.05)},
        {"restore_best": True, "early_stopping_patience": 2},
    ),
    "single precision": ({}, {"max_grad_norm": 0.3}),
    "bf16": ({}, {"precision": "bf16"}),
}
# Ranks add up in another order, which is all there is: the same cases agree to 1e-9 in float64.
BOUNDS = {"single precision": {"rtol": 1e-5, "atol": 1e-6}, "bf16": {"rtol": 0.2, "atol": 0.02}}
EXACT = {"rtol": 1e-9, "atol": 1e-11}


def trained(strategy, world, collective, case, folder=None, epochs=2, of="", **extra):
    """``of`` names the strategy whose model is trained."""
    parts, settings = CASES[case]
    dtype = torch.float32 if case in BOUNDS else torch.float64
    config = TrainConfig(epochs=epochs, **(settings | extra))
    opened = open_strategy(strategy, collective, config)
    reader = replace(world, rank=opened.data_rank, size=opened.data_size)
    task = {
        "model": lambda: model(model_of(of or strategy)).to(dtype),
        "optimizer": adamw,
        "loss": torch.nn.MSELoss(),
        "inputs": ["x"],
    }
    if parts.get("instances"):
        torch.manual_seed(0)
        task["model"] = task["model"]()
        task["optimizer"] = adamw(task["model"])
        for parameter in task["model"].parameters():  # an optimizer that has stepped before
            parameter.grad = torch.ones_like(parameter)
        task["optimizer"].step()
        parts = {}
    callbacks = []
    if parts.get("frozen"):
        make_model, parts, callbacks = task["model"], {}, [Thaw()]
        task["model"] = lambda: frozen(make_model())
    result = fit(
        Task(**(task | {"labels": ["y"]} | parts)),
        TensorSource(data(dtype), global_batch_rows=17, world=reader),
        TensorSource(data(dtype), global_batch_rows=17, world=reader, shuffle=False),
        collective=collective,
        config=config,
        checkpoints=Checkpointer(CheckpointConfig(uri=str(folder), every_steps=4)) if folder else None,
        callbacks=callbacks,
        strategy=opened,
    )
    collective.barrier()
    state = opened.state_dict()
    history = [{k: v for k, v in row.items() if k != "seconds"} for row in result.history.epochs]
    plain = {name: tensor.clone() for name, tensor in result.model.state_dict().items()} if world.is_leader else None
    return {"state": state, "weights": plain, "epochs": history, "steps": result.history.steps}


TRAINED = [
    pytest.param(size, strategy, case, marks=marks(size, strategy, case), id=f"{size}-{strategy}-{case}")
    for size, names in STRATEGIES.items()
    for strategy in names
    for case in (CASES if size == 2 else FEW)
]


def on_a_rank(strategy, folder, world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    results = {case: trained(strategy, world, collective, case) for case in FEW}
    results["taken over"] = trained(strategy, world, collective, "clipped", f"{folder}/begun by fewer")
    trained(strategy, world, collective, "clipped", f"{folder}/begun", max_steps=10)
    collective.close()
    return results


def other_cases_on_a_rank(strategy, world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    results = {case: trained(strategy, world, collective, case) for case in CASES if case not in FEW}
    collective.close()
    return results


def begun_by_two(strategy, of, folder, world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    trained(strategy, world, collective, "clipped", folder, of=of, max_steps=10)
    collective.close()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    return functools.lru_cache(lambda size, strategy: tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def together(ranks, folder_of):
    @functools.lru_cache
    def run(size, strategy):
        folder = folder_of(size, strategy)
        if size > 2:
            other = "expert" if "expert" in strategy else "fsdp"
            ranks.together(functools.partial(begun_by_two, other, strategy, folder / "begun by fewer"), 2, "torch")
        else:
            by_one("clipped", strategy, folder / "begun by fewer", max_steps=10)
        return ranks.together(functools.partial(on_a_rank, strategy, folder), size, "torch")

    return run


@pytest.fixture(scope="module")
def others_together(ranks):
    return functools.lru_cache(
        lambda size, strategy: ranks.together(functools.partial(other_cases_on_a_rank, strategy), size, "torch")
    )


def by_one(case, of, folder=None, **extra):
    torch.set_num_threads(1)
    return trained("all_reduce", SOLO, open_collective(SOLO, backend="solo"), case, folder, of=of, **extra)


@functools.lru_cache
def alone_with(case, kind):
    return by_one(case, next(name for names in STRATEGIES.values() for name in names if model_of(name) == kind))


def alone(case, strategy):
    return alone_with(case, model_of(strategy))


def model_of(strategy):
    if "expert" not in strategy:
        return "dense"
    return "mixture without a limit" if "micro_batches" in strategy else "mixture"


def same(rank, wanted, bounds):
    for row, wanted_row in zip(rank["epochs"], wanted["epochs"], strict=True):
        assert row == pytest.approx(wanted_row, rel=bounds["rtol"], abs=bounds["atol"])
    norms, wanted_norms = rank["steps"]["grad_norm"], wanted["steps"]["grad_norm"]
    assert norms == pytest.approx(wanted_norms, rel=bounds["rtol"], abs=bounds["atol"], nan_ok=True)
    if rank["weights"] is not None:
        torch.testing.assert_close(rank["weights"], wanted["weights"], **bounds)
        torch.testing.assert_close(rank["state"]["model"], wanted["state"]["model"], **bounds)
        torch.testing.assert_close(rank["state"]["optimizer"], wanted["state"]["optimizer"], **bounds)


@pytest.mark.parametrize(("size", "strategy", "case"), TRAINED)
def test_ranks_train_what_one_rank_trains(together, others_together, size, strategy, case):
    wanted = alone(case, strategy)
    for rank in (together if case in FEW else others_together)(size, strategy):
        same(rank[case], wanted, BOUNDS.get(case, EXACT))


@pytest.mark.parametrize(("size", "strategy"), EVERY)
def test_a_checkpoint_inside_an_epoch_goes_on_under_another_strategy_on_other_ranks(
    together, folder_of, size, strategy
):
    undisturbed = alone("clipped", strategy)
    for rank in together(size, strategy):
        same(rank["taken over"], undisturbed, EXACT)
    same(by_one("clipped", strategy, folder_of(size, strategy) / "begun"), undisturbed, EXACT)
