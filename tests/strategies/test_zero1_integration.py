"""What ``zero1`` deals out: parameters of several dtypes, in many rounds, to more ranks than there are parameters."""

from __future__ import annotations

import functools
import sys
from unittest.mock import patch

import cloudpickle
import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import CheckpointConfig, TrainConfig
from sparkdl.spread_model import SpreadModel
from sparkdl.strategies import zero1
from sparkdl.strategies.base import open_strategy
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import SOLO

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Mixed(torch.nn.Module):
    """Weights of three dtypes, a convolution in channels-last order, one that is never used, one of no dimension."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.table = torch.nn.Embedding(3, 8, dtype=torch.bfloat16)
        self.convolution = torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.idle = torch.nn.Linear(3, 3)
        self.scale = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.last = torch.nn.Linear(3, 1).double()

    def forward(self, x):
        hidden = self.first(x) + self.table(torch.arange(len(x)) % 3).float()
        seen = self.convolution(hidden.view(-1, 2, 2, 2)).flatten(1)
        return self.last(seen.double()) * self.scale


def without_a_first(net):
    """A group that has no parameter, before the one that has all."""
    return torch.optim.AdamW([{"params": [], "weight_decay": 0.0}, {"params": list(net.parameters())}], lr=0.01)


def trained(strategy, world, collective, round_bytes=64 << 20):
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(48, 6, generator=generator)
    config = TrainConfig(epochs=2, seed=5)
    with patch.object(zero1, "_ROUND_BYTES", round_bytes):
        opened = open_strategy(strategy, collective, config)
        result = fit(
            Task(model=Mixed, optimizer=without_a_first, loss=torch.nn.MSELoss(), inputs=["x"], labels=["y"]),
            TensorSource({"x": x, "y": x.double().sum(1, keepdim=True)}, global_batch_rows=12, world=world),
            collective=collective,
            config=config,
            strategy=opened,
        )  # fmt: skip
    weights = {name: tensor.clone() for name, tensor in result.model.state_dict().items()}
    last = result.model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
    return weights, len(opened.optimizer.state), last


def of_ranks(round_bytes, world):
    collective = open_collective(world, backend="torch")
    found = [trained(name, world, collective, round_bytes) for name in ("all_reduce", "zero1")]
    collective.close()
    return found


@pytest.mark.parametrize(("size", "round_bytes"), [(2, 64 << 20), (2, 100), (4, 100)])
def test_dealt_weights_of_any_kind_are_those_of_plain_copies(ranks, size, round_bytes):
    results = ranks.together(functools.partial(of_ranks, round_bytes), size, "torch")
    for (copied, _, _), (dealt, _, channels_last) in results:
        assert all(torch.equal(dealt[name], tensor) for name, tensor in copied.items())
        assert channels_last
    untrained = Mixed().state_dict()
    assert not torch.equal(results[0][1][0]["scale"], untrained["scale"])
    assert sum(states for _, (_, states, _) in results) == results[0][0][1]


def named(net):
    """Groups that keep the names of their parameters."""
    first = list(net.first.named_parameters())
    others = [(name, param) for name, param in net.named_parameters() if not name.startswith("first")]
    return torch.optim.AdamW([{"params": first, "lr": 0.02}, {"params": others}], lr=0.01)


def with_names(folder, world):
    """Two epochs, and one after the other from a checkpoint."""
    torch.set_num_threads(1)
    collective, found = open_collective(world, backend="torch"), []
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(3))
    for runs in ([2], [1, 2]):
        for epochs in runs:
            config = TrainConfig(epochs=epochs, seed=5)
            opened = open_strategy("zero1", collective, config)
            result = fit(
                Task(model=Mixed, optimizer=named, loss=torch.nn.MSELoss(), inputs=["x"], labels=["y"]),
                TensorSource({"x": x, "y": x.double().sum(1, keepdim=True)}, global_batch_rows=12, world=world),
                collective=collective, config=config, strategy=opened,
                checkpoints=Checkpointer(CheckpointConfig(uri=f"{folder}/{len(runs)}", every_steps=4)),
            )  # fmt: skip
        weights = {name: tensor.clone() for name, tensor in result.model.state_dict().items()}
        found.append((weights, [group["param_names"] for group in opened.optimizer.param_groups]))
    collective.close()
    return found


def test_names_of_parameters_stay_and_a_resumed_run_is_the_undisturbed_one(ranks, tmp_path):
    for (plain, names), (resumed, names_then) in ranks.together(functools.partial(with_names, tmp_path), 2, "torch"):
        assert names == names_then
        assert names[0] == ["weight", "bias"]
        assert all(torch.equal(resumed[name], tensor) for name, tensor in plain.items())


def more_ranks_than_parameters(world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    opened = open_strategy("zero1", collective, TrainConfig(epochs=1))
    x = torch.arange(8.0).view(8, 1)
    result = fit(
        Task(model=functools.partial(torch.nn.Linear, 1, 1), optimizer=functools.partial(torch.optim.SGD, lr=0.01),
             loss=torch.nn.MSELoss(), inputs=["x"], labels=["y"]),
        TensorSource({"x": x, "y": 2 * x}, global_batch_rows=4, world=world),
        collective=collective, config=TrainConfig(epochs=1), strategy=opened,
    )  # fmt: skip
    collective.close()
    return [tensor.tolist() for tensor in result.model.state_dict().values()], len(opened.optimizer.own.param_groups)


def test_a_rank_without_a_parameter_gets_all_the_same(ranks):
    found = ranks.together(more_ranks_than_parameters, 3, "torch")
    assert found[0] == found[1] == found[2]
    assert found[0][1] == 1


def ten_layers():
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(10)))
    net[:6].requires_grad_(False)
    return net


def in_turns(strategy, world):
    """Bytes that travel in each of three steps of AdamW, behind which layers are frozen and thawed; the weights."""
    torch.set_num_threads(1)
    sent = []

    def counting(parts, group):
        sent[-1] += sum(part.nbytes for part in parts)
        return give_to_all(parts, group)

    give_to_all = zero1.give_to_all
    with patch.object(zero1, "give_to_all", counting), SpreadModel(strategy, backend="torch") as model:
        optimizer = functools.partial(torch.optim.AdamW, lr=0.01)
        model.build(ten_layers, optimizer, torch.nn.MSELoss(), inputs=["x"], labels=["y"])
        layers = model.module
        for thawed, frozen in ((None, None), (0, 9), (None, 8)):
            sent.append(0)
            if thawed is not None:
                layers[thawed].requires_grad_(True)
                layers[frozen].requires_grad_(False)
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(world.rank))
            model.backward({"x": x, "y": x.flip(1)})
            if thawed is None and frozen is not None:
                layers[frozen].requires_grad_(False)  # it has a gradient of this step
            model.optimizer.step()
            model.optimizer.zero_grad()
        return sent, [layer.weight.detach().clone() for layer in layers], len(model.optimizer.state)


def test_frozen_parameters_do_not_travel_and_those_of_a_rank_are_about_as_many(ranks):
    copied = ranks.together(functools.partial(in_turns, "all_reduce"), 2, "torch")
    dealt = ranks.together(functools.partial(in_turns, "zero1"), 2, "torch")
    for (_, wanted, _), (sent, weights, states) in zip(copied, dealt, strict=True):
        assert sent == [4 * 256, 4 * 256, 4 * 256]
        assert all(torch.equal(weight, other) for weight, other in zip(weights, wanted, strict=True))
        assert states in (2, 3)  # of five layers that were trained


def test_one_rank_alone_keeps_its_own_optimizer():
    collective = open_collective(SOLO, backend="solo")
    weights, states, _ = trained("zero1", SOLO, collective)
    plain, all_states, _ = trained("all_reduce", SOLO, collective)
    assert states == all_states
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.items())
