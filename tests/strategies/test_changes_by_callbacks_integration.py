"""What callbacks do to a model between epochs, under each strategy: right, or refused in a sentence."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace

import cloudpickle
import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import CheckpointConfig, SyncConfig, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.strategies.base import open_strategy
from sparkdl.train.callbacks import Callback
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import SOLO

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.slow  # all of it follows from one training of two ranks with each strategy

RATE = 0.005
COMPRESSED = ["bf16", "fp16", "topk(keep=1.0)", "topk(keep=0.1)", "powersgd(rank=2)", "adasum"]
AS_ONE_STEPS = "diloco(every=1, outer_lr=0.005, outer_momentum=0.9)"  # with inner steps of the whole gradient
TURNS = [
    *("local_sgd(every=1)", "local_sgd(every=3)", "diloco(every=3, outer_lr=0.3)", AS_ONE_STEPS),
    *("parameter_server(servers=2)", "parameter_server(servers=1, staleness=1)", *COMPRESSED),
]
ROUNDED = {"bf16": 0.02, "fp16": 0.002}
AS_ONE = ["local_sgd(every=1)", AS_ONE_STEPS, "topk(keep=1.0)", *ROUNDED]
GROUPS = ["all_reduce", "zero1", *AS_ONE]
REFUSED = {
    "module": (["all_reduce", "zero1", "fsdp", "bf16", "local_sgd", "parameter_server"], "was made while the model"),
    "group": (["zero2", "fsdp", "tensor", "pipeline(micro_batches=2)", "parameter_server"], "give it all from the"),
    "in a group": (["zero1"], "optimizer.add_param_group"),
    "data": (["zero2", "fsdp", "tensor"], "given other data"),
    "values": (["parameter_server"], "written into on a worker"),
}
RESUMED = [
    ("all_reduce", ""),
    ("all_reduce", "group"),
    ("diloco", "group"),
    *(pytest.param(name, "", marks=pytest.mark.slow) for name in ("fsdp", "pipeline", "diloco")),
    *(pytest.param(name, "group", marks=pytest.mark.slow) for name in ("zero1", "local_sgd")),
]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(8, 24), torch.nn.Linear(24, 8)

    def forward(self, x):
        return x + self.fc2(torch.tanh(self.fc1(x)))


def model():
    net = torch.nn.Sequential(torch.nn.Linear(5, 8), Block(), Block(), torch.nn.Linear(8, 1)).double()
    net[2].requires_grad_(False)
    return net


def sgd(net, *, strategy, change):
    """What ``AS_ONE_STEPS`` does in two steps is one with Nesterov momentum."""
    groups = [{"params": [p for p in net.parameters() if p.requires_grad or "group" not in change]}]
    rate, momentum = (1.0, 0.0) if strategy == AS_ONE_STEPS else (RATE, 0.9)
    if change == "group from the start":
        groups.append({"params": list(net[2].parameters()), "lr": rate / 2})
    return torch.optim.SGD(groups, rate, momentum=momentum, nesterov=momentum > 0)


def rows():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(103, 5, generator=generator, dtype=torch.float64)
    return {"x": x, "y": x @ torch.randn(5, generator=generator, dtype=torch.float64)}


class Turns(Callback):
    """A block is frozen while the other one is trained, and the other way round; keeps what each epoch ends with."""

    def __init__(self):
        self.weights = []

    def on_epoch_end(self, run, metrics):
        for number in (1, 2):
            run.model[number].requires_grad_(number == 2 - run.epoch % 2)
        self.weights.append({name: tensor.detach().clone() for name, tensor in run.model.named_parameters()})


class ThawOnce(Callback):
    def on_epoch_end(self, run, metrics):
        if run.epoch == 0:
            run.model[2].requires_grad_(True)
            run.model[1].requires_grad_(False)


class Change(Callback):
    def __init__(self, change):
        self.change = change

    def on_epoch_end(self, run, metrics):
        if run.epoch:
            return
        layer, optimizer = run.model[1].fc1, run.optimizer
        late = list(run.model[2].requires_grad_("group" in self.change).parameters())
        match self.change:
            case "group":
                optimizer.add_param_group({"params": late, "lr": optimizer.param_groups[0]["lr"] / 2})
            case "in a group":
                optimizer.param_groups[0]["params"] += late
            case "module":
                layer.weight = torch.nn.Parameter(layer.weight.detach() * 0.5)
            case "data":
                layer.weight.data = layer.weight.data * 0.5
            case "values":
                layer.weight.data.mul_(0.5)


def own_step(net, optimizer, batch, loss):
    optimizer.zero_grad()
    outputs = net(batch["x"])
    value = loss(outputs, batch)
    value.backward()
    optimizer.step()
    return outputs, value


def trained(strategy, world, collective, callback, *, folder=None, epochs=3, task=(), **settings):
    compressed = strategy in COMPRESSED
    sync = SyncConfig(compression=strategy) if compressed else SyncConfig()
    config = TrainConfig(epochs=epochs, sync=sync, **settings)
    opened = open_strategy("all_reduce" if compressed else strategy, collective, config)
    result = fit(
        Task(
            model=model,
            optimizer=functools.partial(sgd, strategy=strategy, change=getattr(callback, "change", "")),
            loss=torch.nn.MSELoss(),
            inputs=["x"],
            labels=["y"],
            **dict(task),
        ),
        TensorSource(rows(), global_batch_rows=17, world=replace(world, rank=opened.data_rank, size=opened.data_size)),
        collective=collective,
        config=config,
        callbacks=[callback],
        checkpoints=Checkpointer(CheckpointConfig(uri=str(folder))) if folder else None,
        strategy=opened,
    )
    collective.barrier()
    return {name: tensor.detach().clone() for name, tensor in result.model.state_dict().items()}


def turns_of(strategy, world, collective):
    turns = Turns()
    trained(strategy, world, collective, turns)
    return turns.weights


def stopped_and_resumed(strategy, change, folder, world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")

    def run(**settings):
        return trained(strategy, world, collective, Change(change) if change else ThawOnce(), **settings)

    run(folder=folder, epochs=1)
    results = run(folder=folder), run()
    collective.close()
    return results


def on_a_rank(world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    run = functools.partial(trained, world=world, collective=collective)

    def refusal(strategy, change):
        with pytest.raises(ConfigError) as refused:
            run(strategy, callback=Change(change))
        return str(refused.value)

    results = {
        "turns": {strategy: turns_of(strategy, world, collective) for strategy in TURNS},
        "group": {strategy: run(strategy, callback=Change("group")) for strategy in GROUPS},
        "data": {strategy: run(strategy, callback=Change("data")) for strategy in GROUPS},
        "own step": run("all_reduce", callback=Change("group"), task={"manual_step": own_step}),
        "refused": {
            (strategy, change): refusal(strategy, change)
            for change, (strategies, _) in REFUSED.items()
            for strategy in strategies
        },
    }
    collective.close()
    return results


@pytest.fixture(scope="module")
def together(ranks):
    return ranks.together(on_a_rank, 2, "torch")


@functools.lru_cache
def alone(change="", **settings):
    torch.set_num_threads(1)
    collective = open_collective(SOLO, backend="solo")
    if not change:
        return turns_of("all_reduce", SOLO, collective)
    return trained("all_reduce", SOLO, collective, Change(change), **settings)


def close(strategy, weights, wanted):
    bound = ROUNDED.get(strategy, 1e-9)
    torch.testing.assert_close(weights, wanted, rtol=bound, atol=bound / 10)


@pytest.mark.parametrize("strategy", TURNS)
def test_a_frozen_block_stays_bit_for_bit_and_the_other_is_trained_on_all_ranks_alike(together, strategy):
    first, second = (rank["turns"][strategy] for rank in together)
    for epoch, weights in enumerate(first):
        assert all(torch.equal(weights[name], second[epoch][name]) for name in weights)
        if not epoch:
            continue  # the model that training began with is rank 0's
        before = first[epoch - 1]
        frozen, moving = ("2.", "1.") if epoch % 2 == 0 else ("1.", "2.")
        for name in weights:
            if name.startswith((frozen, moving)):
                assert torch.equal(weights[name], before[name]) == name.startswith(frozen)


@pytest.mark.parametrize("strategy", AS_ONE)
def test_turns_of_blocks_are_those_of_one_rank_where_the_strategy_steps_as_one(together, strategy):
    for rank in together:
        for weights, wanted in zip(rank["turns"][strategy], alone(), strict=True):
            close(strategy, weights, wanted)


@pytest.mark.parametrize("change", ["group", "data"])
@pytest.mark.parametrize("strategy", GROUPS)
def test_a_group_more_and_other_values_count_as_on_one_rank(together, strategy, change):
    for rank in together:
        close(strategy, rank[change][strategy], alone(change))


def test_a_step_of_the_users_own_steps_a_group_more(together):
    for rank in together:
        close("", rank["own step"], alone("group"))


@pytest.mark.parametrize(("strategy", "change"), RESUMED)
def test_a_run_that_goes_on_keeps_what_a_callback_froze_and_the_groups_it_gave(ranks, tmp_path, strategy, change):
    results = ranks.together(functools.partial(stopped_and_resumed, strategy, change, tmp_path), 2, "torch")
    for resumed, undisturbed in results:
        torch.testing.assert_close(resumed, undisturbed, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("strategy", "change"), [(strategy, change) for change, (names, _) in REFUSED.items() for strategy in names]
)
def test_what_would_be_lost_is_refused(together, strategy, change):
    for rank in together:
        assert REFUSED[change][1] in rank["refused"][strategy, change]


def test_a_group_more_takes_part_in_a_short_last_step_and_in_warm_up():
    """Six batches have 17 rows and the seventh one: the second step of four batches has fewer than it expected."""
    late, from_the_start = (alone(change, accumulate_steps=4) for change in ("group", "group from the start"))
    torch.testing.assert_close(late, from_the_start, rtol=1e-12, atol=0)
    warmed = alone("group", warmup_steps=12)
    assert not torch.equal(warmed["2.fc1.weight"], dict(model().named_parameters())["2.fc1.weight"])
