"""Mixtures of experts on real ranks: with experts on ranks and without, they train as one rank's do."""

from __future__ import annotations

import functools
import logging
import sys
from contextlib import nullcontext
from dataclasses import replace

import cloudpickle
import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.nn.mixture import MixtureOfExperts, mixtures, share_tokens, stand_in, take_dropped
from sparkdl.observe import logger
from sparkdl.strategies import expert
from sparkdl.strategies.base import open_strategy
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import SOLO

cloudpickle.register_pickle_by_value(sys.modules[__name__])

EXACT = {"rtol": 1e-10, "atol": 1e-12}
SIZES = (9, 9, 7, 1, 8)  # rows of global batches: ragged ones, and one that leaves a rank without rows
CASES = {
    "two experts": {},
    "one expert": {"k": 1, "capacity_factor": 0.7},
    "no limit": {"k": 3, "capacity_factor": None},
}


class Blocks(torch.nn.Module):
    """Two mixtures with residuals, of ``(rows, 3, 6)``: three tokens a row."""

    def __init__(self, **settings):
        super().__init__()
        given = {"features": 6, "hidden": 5, "experts": 4, "capacity_factor": 0.8, "balance_weight": 0.1} | settings
        self.first, self.second = MixtureOfExperts(**given), MixtureOfExperts(**given)
        self.inner = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6))
        self.last = torch.nn.Linear(6, 1)

    def forward(self, x):
        x = self.inner(x + self.first(x))
        return self.last(x + self.second(x)).squeeze(-1).mean(-1)


def model(**settings):
    torch.manual_seed(5)
    return Blocks(**settings).double()


def data(rows):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(rows, 3, 6, generator=generator, dtype=torch.float64)
    x[1::5] = x[0]  # equal tokens, on whichever rank
    return {"x": x, "y": torch.randn(rows, generator=generator, dtype=torch.float64)}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def average(net, size, holders):
    """What a strategy does behind the backward pass: the mean of all gradients, experts' over their holders alone."""
    experts = {id(p) for layer in mixtures(net).values() for p in layer.expert_parameters().values()}
    for parameter in net.parameters():
        gradient = parameter.grad
        if size > 1 and id(parameter) not in experts:
            torch.distributed.all_reduce(gradient)
            gradient /= size
        elif holders is not None:
            torch.distributed.all_reduce(gradient.to_local(), group=holders)
            gradient /= torch.distributed.get_world_size(holders)


def steps(net, rank, size, autocast=False, holders=None):
    """AdamW over the batches of ``SIZES``; what each rank saw and has, whole."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    tensors = {name: tensor.to(net.last.bias.dtype) for name, tensor in data(sum(SIZES)).items()}
    first, seen = 0, []
    for rows in SIZES:
        low, high = first + rows * rank // size, first + rows * (rank + 1) // size
        x, y = tensors["x"][low:high], tensors["y"][low:high]
        weight = (high - low) * size / rows
        with nullcontext() if len(x) else stand_in(net), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = net(x if len(x) else torch.ones_like(tensors["x"][:1]))
        auxiliary = weight * (net.first.auxiliary_loss + net.second.auxiliary_loss)
        loss = weight * (outputs - y).square().mean() if len(x) else 0 * outputs.sum()
        (loss + auxiliary).backward()
        average(net, size, holders)
        gradients = {name: whole(parameter.grad).clone() for name, parameter in net.named_parameters()}
        seen.append(
            {
                "outputs": outputs.detach()[: len(x)],
                "loss": loss.item(),
                "auxiliary": auxiliary.item(),
                "dropped": take_dropped(net),
                "gradients": gradients,
            }
        )
        optimizer.step()
        optimizer.zero_grad()
        first += rows
    weights = {name: whole(parameter.detach()).clone() for name, parameter in net.named_parameters()}
    net.eval()
    with torch.inference_mode():
        evaluated = net(tensors["x"][rank : 4 + rank])
    held = {name: p.to_local().shape if hasattr(p, "to_local") else p.shape for name, p in net.named_parameters()}
    return {"steps": seen, "weights": weights, "evaluated": evaluated, "held": held}


def split(case, mesh, dtype=torch.float64):
    net = model(**CASES[case]).to(dtype)
    expert.split(net, mesh)
    return net


class Messages(logging.Handler):
    """What this rank logs of dropped choices, until they are taken."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.messages, self.level_before = [], logger.level
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record):
        if "choices of an expert" in record.getMessage():
            self.messages.append(record.getMessage())

    def taken(self):
        logger.removeHandler(self)
        logger.setLevel(self.level_before)
        return self.messages


def trained(strategy, world, collective, **parts):
    """A fit over the same batches, by the trainer."""
    settings = parts.pop("settings", {})
    config = TrainConfig(epochs=2, max_grad_norm=0.5, **settings)
    told, opened = Messages(), open_strategy(strategy, collective, config)
    reader = replace(world, rank=opened.data_rank, size=opened.data_size)
    result = fit(
        Task(
            **{
                "model": functools.partial(model, **CASES["two experts"]),
                "optimizer": functools.partial(torch.optim.AdamW, lr=1e-2),
                "loss": torch.nn.MSELoss(),
                "inputs": ["x"],
                "labels": ["y"],
                **parts,
            }
        ),
        TensorSource(data(28), global_batch_rows=9, world=reader),  # the last batch of an epoch has one row
        TensorSource(data(28), global_batch_rows=9, world=reader, shuffle=False),
        collective=collective,
        config=config,
        strategy=opened,
    )
    history = [(row["loss"], row["val_loss"]) for row in result.history.epochs]
    return {
        # Of a mesh, the leader has the plain model.
        "weights": {name: tensor.clone() for name, tensor in result.model.state_dict().items()}
        if world.is_leader or not strategy.startswith("mesh")
        else None,
        "history": history,
        "dropped": collective.broadcast_object(told.taken()),
        "left": [layer.gather_rows is not None for layer in mixtures(result.model).values()],
    }


def manual_step(net, optimizer, batch, loss):
    optimizer.zero_grad()
    outputs = net(batch["x"])
    value = loss(outputs, batch)
    value.backward()
    optimizer.step()
    return outputs, value.detach()


FITS = {
    "all_reduce": ("all_reduce", {}),
    "zero1": ("zero1", {}),
    "accumulated": ("all_reduce", {"settings": {"accumulate_steps": 3}}),
    "manual": ("all_reduce", {"manual_step": manual_step}),
}
QUICK_PRODUCTS = ("shard", "pipeline")
WITHOUT_LIMIT = {"model": functools.partial(model, **CASES["no limit"])}
PRODUCTS = {
    "four": ("all_reduce", {}),
    "shard": ("mesh(expert=2, shard=2)", {}),
    "tensor": ("mesh(expert=2, tensor=2)", {}),
    "pipeline": ("mesh(expert=2, pipeline=2, schedule='naive')", {}),
    "micro-batches": ("mesh(expert=2, pipeline=2, schedule='gpipe', micro_batches=2)", WITHOUT_LIMIT),
    "whole experts": ("mesh(data=2, pipeline=2, schedule='naive')", {}),
}


def on_two_by_two(world):
    """Two ranks share the experts, and two such pairs the rows."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    net = split("two experts", mesh["expert"])
    share_tokens(net, expert.GroupTokens(torch.distributed.group.WORLD))
    return steps(net, world.rank, world.size, holders=mesh["data"].get_group())


def fits_on_a_rank(fits, world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    ran = {name: trained(strategy, world, collective, **parts) for name, (strategy, parts) in fits.items()}
    collective.close()
    return ran


def on_a_rank(fits, world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    mesh = torch.distributed.init_device_mesh("cpu", (world.size,), mesh_dim_names=("expert",))
    ran = {case: steps(split(case, mesh), world.rank, world.size) for case in CASES}
    bf16 = split("two experts", mesh, torch.float32)
    ran["bf16"] = steps(bf16, world.rank, world.size, autocast=True)
    ran |= {name: trained(strategy, world, collective, **parts) for name, (strategy, parts) in fits.items()}
    if world.size == 4:
        ran["two by two"] = on_two_by_two(world)
    collective.close()
    return ran


@pytest.fixture(scope="module")
def two(ranks):
    return ranks.together(functools.partial(on_a_rank, FITS), 2, "torch")


@pytest.fixture(scope="module")
def products(ranks):
    """A few of the products of meshes on four ranks, where the others are not asked for."""
    fits = {name: PRODUCTS[name] for name in QUICK_PRODUCTS}
    return ranks.together(functools.partial(fits_on_a_rank, fits), 4, "torch")


@pytest.fixture(scope="module")
def four(ranks):
    """In two jobs: the second meets what torch keeps of the first one's meshes, whose groups are closed."""
    first = {name: PRODUCTS[name] for name in ("four", "tensor")}
    second = {name: fit for name, fit in PRODUCTS.items() if name not in (*first, *QUICK_PRODUCTS)}
    jobs = functools.partial(on_a_rank, first), functools.partial(fits_on_a_rank, second)
    ran = [ranks.together(job, 4, "torch") for job in jobs]
    return [of_first | of_second for of_first, of_second in zip(*ran, strict=True)]


@functools.cache
def alone(case, dtype=torch.float64, autocast=False):
    torch.set_num_threads(1)
    return steps(model(**CASES[case]).to(dtype), 0, 1, autocast)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", ["two", pytest.param("four", marks=pytest.mark.slow)])
def test_experts_on_ranks_train_as_on_one(case, size, request):
    together, wanted = request.getfixturevalue(size), alone(case)
    for number, step in enumerate(wanted["steps"]):
        parts = [rank[case]["steps"][number] for rank in together]
        torch.testing.assert_close(torch.cat([part["outputs"] for part in parts]), step["outputs"], **EXACT)
        for part in parts:
            torch.testing.assert_close(part["gradients"], step["gradients"], **EXACT)
        for name in ("loss", "auxiliary"):
            assert sum(part[name] for part in parts) / len(parts) == pytest.approx(step[name], rel=1e-10)
        assert [sum(numbers) for numbers in zip(*(part["dropped"] for part in parts), strict=True)] == [
            *step["dropped"]
        ]
    for rank in together:
        torch.testing.assert_close(rank[case]["weights"], wanted["weights"], **EXACT)
        assert rank[case]["held"]["first.weight_in"] == (4 // len(together), 6, 5)
    dropped = sum(step["dropped"][0] for step in wanted["steps"])
    assert bool(dropped) == (case != "no limit")
    assert any(step["dropped"][1] == 0 for rank in together for step in rank[case]["steps"])  # a rank without rows


@pytest.mark.slow
def test_experts_on_two_ranks_of_four_train_as_on_one(four):
    wanted = alone("two experts")
    for rank in four:
        for step, other in zip(rank["two by two"]["steps"], wanted["steps"], strict=True):
            torch.testing.assert_close(step["gradients"], other["gradients"], **EXACT)
        torch.testing.assert_close(rank["two by two"]["weights"], wanted["weights"], **EXACT)
        assert rank["two by two"]["held"]["first.weight_in"] == (2, 6, 5)


def test_evaluation_is_that_of_the_whole_layer(two):
    for number, rank in enumerate(two):
        net = model()
        net.load_state_dict(rank["two experts"]["weights"])
        torch.testing.assert_close(
            rank["two experts"]["evaluated"], net.eval()(data(36)["x"][number : 4 + number]), **EXACT
        )


def test_bf16_goes_the_way_of_one_rank(two):
    wanted = alone("two experts", torch.float32, autocast=True)
    for number, step in enumerate(wanted["steps"]):
        parts = [rank["bf16"]["steps"][number] for rank in two]
        torch.testing.assert_close(
            torch.cat([part["outputs"] for part in parts]), step["outputs"], rtol=0.02, atol=0.02
        )
    for rank in two:
        torch.testing.assert_close(rank["bf16"]["weights"], wanted["weights"], rtol=0.0, atol=2e-2)


@pytest.mark.parametrize("name", FITS)
def test_without_a_split_the_ranks_still_route_the_global_batch(two, name):
    parts = FITS[name][1]
    torch.set_num_threads(1)
    wanted = trained("all_reduce", SOLO, open_collective(SOLO, backend="solo"), **parts)
    assert len(wanted["dropped"]) == 2  # one an epoch
    for rank in two:
        torch.testing.assert_close(rank[name]["weights"], wanted["weights"], **EXACT)
        assert rank[name]["dropped"] == wanted["dropped"]
        assert rank[name]["left"] == [False, False]
        for row, other in zip(rank[name]["history"], wanted["history"], strict=True):
            assert row == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize(
    ("ran", "name"),
    [
        *(("products", name) for name in QUICK_PRODUCTS),
        *(pytest.param("four", name, marks=pytest.mark.slow) for name in PRODUCTS if name not in QUICK_PRODUCTS),
    ],
)
def test_four_ranks_route_the_global_batch_in_whatever_mesh(request, ran, name):
    four = request.getfixturevalue(ran)
    wanted = trained("all_reduce", SOLO, open_collective(SOLO, backend="solo"), **PRODUCTS[name][1])
    torch.testing.assert_close(four[0][name]["weights"], wanted["weights"], **EXACT)  # the leader's, gathered
    assert len(wanted["dropped"]) == (0 if name == "micro-batches" else 2)
    for rank in four:
        assert rank[name]["dropped"] == wanted["dropped"]
        for row, other in zip(rank[name]["history"], wanted["history"], strict=True):
            assert row == pytest.approx(other, rel=1e-9)


def compiled_on_a_rank(world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    ran = trained("all_reduce", world, collective, settings={"compile": True})
    collective.close()
    return ran


@pytest.mark.slow
def test_compiled_ranks_exchange_as_others_do(ranks):
    wanted = trained("all_reduce", SOLO, open_collective(SOLO, backend="solo"))
    for rank in ranks.together(compiled_on_a_rank, 2, "torch"):
        torch.testing.assert_close(rank["weights"], wanted["weights"], **EXACT)
        assert rank["dropped"] == wanted["dropped"]


def test_what_does_not_go_over_the_ranks_is_refused():
    expert.check(model(), 4)
    with pytest.raises(ConfigError, match="the 4 experts of layer 'first' do not divide by 3 ranks"):
        expert.check(model(), 3)
    with pytest.raises(ConfigError, match="the 4 experts of the mixture do not divide by 8 ranks"):
        expert.check(MixtureOfExperts(2, 2, 4), 8)
    with pytest.raises(ConfigError, match=r"the model Linear has no sparkdl.nn.MixtureOfExperts"):
        expert.check(torch.nn.Linear(2, 2), 2)
