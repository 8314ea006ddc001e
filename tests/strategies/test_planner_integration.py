"""Estimates for mixtures of experts beside what ranks hold and send, and what a planner that takes them trains."""

from __future__ import annotations

import functools
import os
import socket
import struct
import sys
from dataclasses import replace
from unittest import mock

import cloudpickle
import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import TrainConfig
from sparkdl.nn import MixtureOfExperts
from sparkdl.strategies import planner
from sparkdl.strategies.base import open_strategy
from sparkdl.train.callbacks import Callback
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import SOLO

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS, TOKENS, WIDTH, STEPS, SKIPPED = 64, 8, 32, 8, 2
CHOSEN = {2: "expert", 4: "mesh(data=2, expert=2)"}
"""By ranks, what holds least of two experts, which do not divide by four."""
SIZES = [2, pytest.param(4, marks=pytest.mark.slow)]


class Mixture(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = MixtureOfExperts(WIDTH, 512, 2, k=1, capacity_factor=None)

    def forward(self, x):
        return x + self.experts(x)


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), Mixture(), Mixture(), torch.nn.Linear(WIDTH, 1))


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-3)


def rows():
    x = torch.randn(STEPS * ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(7))
    return {"x": x, "y": x.sum(-1, keepdim=True)}


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


class Meter(Callback):
    """What a step sends, and what there is between its backward pass and the optimizer's step."""

    def __init__(self):
        self.steps, self.sent, self.held = 0, 0, 0
        self.kept = {}  # bytes of what is saved for a backward pass, by its memory

    def optimizer(self, net):
        made = adamw(net)
        made.register_step_pre_hook(lambda *_: self.look(made))
        return made

    def look(self, optimizer):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = [value for state in optimizer.state.values() for value in state.values()]
        own = [tensor for tensor in (*parameters, *states) if isinstance(tensor, torch.Tensor)]
        own += [parameter.grad for parameter in parameters]
        memory = {tensor.untyped_storage().data_ptr() for tensor in own}
        activations = sum(size for place, size in self.kept.items() if place not in memory)
        self.held = sum(tensor.nbytes for tensor in own) + activations

    def keep(self, tensor):
        self.kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def on_step_end(self, run):
        self.kept.clear()
        self.steps += 1
        if self.steps in (SKIPPED, STEPS):
            self.sent = sent_bytes() - self.sent


def trained(strategy, world, collective, meter=None):
    config = TrainConfig(epochs=1)
    opened = open_strategy(strategy, collective, config)
    reader = replace(world, rank=opened.data_rank, size=opened.data_size)
    result = fit(
        Task(
            model=model,
            optimizer=meter.optimizer if meter else adamw,
            loss=torch.nn.MSELoss(),
            inputs=["x"],
            labels=["y"],
        ),
        TensorSource(rows(), global_batch_rows=ROWS, world=reader),
        collective=collective,
        config=config,
        callbacks=[meter] if meter else [],
        strategy=opened,
    )
    return {name: tensor.clone() for name, tensor in result.model.state_dict().items()} if world.is_leader else None


def on_a_rank(world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    example, strategy = {"x": rows()["x"][:ROWS]}, CHOSEN[world.size]
    costs = planner.measure_model(model(), adamw, example, ranks=[world.size])
    plan = planner.rank_strategies(costs, planner.measure_link(collective), world.size)
    estimates = {estimate.strategy: estimate for estimate in plan.fitting}
    estimate = estimates[strategy]
    memory = 1.05 * estimate.memory_bytes
    with mock.patch.object(planner, "measure_model", return_value=costs):  # which takes seconds
        chosen, _ = planner.choose(collective, TrainConfig(), model(), adamw, example, memory_bytes=memory)
    meters, weights = {}, {}
    for name in (chosen, "zero2"):
        meters[name] = meter = Meter()
        with torch.autograd.graph.saved_tensors_hooks(meter.keep, lambda tensor: tensor):
            weights[name] = trained(name, world, collective, meter)
    collective.close()
    return {
        "estimates": estimates,
        "chosen": chosen,
        "weights": weights[chosen],
        "held": {name: meter.held for name, meter in meters.items()},
        "sent": {name: meter.sent / (STEPS - SKIPPED) for name, meter in meters.items()},
    }


@pytest.fixture(scope="module")
def together(ranks):
    return functools.lru_cache(lambda size: ranks.together(on_a_rank, size, "torch"))


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_where_memory_is_short_experts_are_dealt_and_trained_as_on_one_rank(together, size):
    torch.set_num_threads(1)
    wanted = trained("all_reduce", SOLO, open_collective(SOLO, backend="solo"))
    first = together(size)[0]
    assert {rank["chosen"] for rank in together(size)} == {CHOSEN[size]}
    torch.testing.assert_close(first["weights"], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_held_and_sent_is_what_was_estimated(together, size):
    ranks = together(size)
    for name in (CHOSEN[size], "zero2"):  # which cuts two experts for four ranks as if there were four
        estimate = ranks[0]["estimates"][name]
        assert max(rank["held"][name] for rank in ranks) == pytest.approx(estimate.memory_bytes, rel=0.1)
        assert max(rank["sent"][name] for rank in ranks) == pytest.approx(estimate.sent_bytes, rel=0.1)
