"""Every strategy on two real ranks: one rank's weights, and checkpoints that any other strategy goes on from."""

from __future__ import annotations

import functools
import itertools
import sys
from types import SimpleNamespace
from unittest.mock import patch

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import CheckpointConfig, TrainConfig
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.shards.files import write_table_shards
from sparkdl.strategies import STRATEGIES
from sparkdl.strategies.all_reduce import AllReduce
from sparkdl.strategies.base import open_strategy
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.worker import RankJob, run_rank
from sparkdl.world import SOLO

cloudpickle.register_pickle_by_value(sys.modules[__name__])

EXACT = {"rtol": 1e-10, "atol": 1e-12}
NAMES = [*sorted(STRATEGIES), "fsdp", "zero2", "mesh(data=2, activation_checkpointing=True)"]
SECOND = NAMES[-2:]  # which share what they do with fsdp
PAIRS = [(first, then) for first in NAMES for then in NAMES]


def data():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(103, 5, generator=generator, dtype=torch.float64)
    return {"x": x, "y": x @ torch.randn(5, generator=generator, dtype=torch.float64)}


def model():
    return torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
    ).double()


def two_groups(net):
    """AdamW, and two groups of which one has a rate of its own."""
    return torch.optim.AdamW([{"params": net[0].parameters()}, {"params": net[1:].parameters(), "lr": 3e-3}], lr=1e-2)


OPTIMIZERS = {
    "groups": two_groups,
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
}
JOBS = [*((name, what) for name in NAMES for what in (*OPTIMIZERS, "best", "accumulated")), *PAIRS]
"""A strategy with an optimizer, one that does something more, or one and the strategy that goes on from it."""
RING = [*itertools.pairwise([*NAMES, NAMES[0]]), *((name, "groups") for name in SECOND), ("zero2", "accumulated")]
QUICK = [*RING, *((name, what) for name in ("all_reduce", "zero1") for what in ("groups", "accumulated"))]
SLOW = [job for job in JOBS if job not in QUICK]


def parameters(*jobs):
    return [pytest.param(*job, marks=pytest.mark.slow if job in SLOW else ()) for job in jobs]


def task(**parts):
    given = {"model": model, "optimizer": two_groups, "loss": torch.nn.MSELoss(), "inputs": ["x"], "labels": ["y"]}
    return Task(**(given | parts))


def trained(strategy, world, collective, folder=None, epochs=3, optimizer="groups", **settings):
    """Six of seven batches an epoch: the last one has a single row, which batch norm refuses."""
    config = TrainConfig(epochs=epochs, steps_per_epoch=6, max_grad_norm=0.5, warmup_steps=4, **settings)
    strategy = open_strategy(strategy, collective, config)
    tensors = data()
    result = fit(
        task(optimizer=OPTIMIZERS[optimizer]),
        TensorSource(tensors, global_batch_rows=17, world=world),
        TensorSource(tensors, global_batch_rows=17, world=world, shuffle=False),
        collective=collective,
        config=config,
        checkpoints=Checkpointer(CheckpointConfig(uri=str(folder), every_steps=4)) if folder else None,
        strategy=strategy,
    )
    collective.barrier()
    state = strategy.state_dict()
    whole = isinstance(strategy, AllReduce) or world.is_leader  # a mesh gives one plain module, to the leader
    weights = {name: tensor.clone() for name, tensor in result.model.state_dict().items()} if whole else None
    held = sum(len(each) for each in strategy.optimizer.state.values())
    history = {"epochs": result.history.column("val_loss"), "norms": list(result.history.steps["grad_norm"])}
    return {"weights": weights, "state": state, "held": held, **history}


def refusals(world, collective, folder):
    """Sentences of what does not go with zero1."""
    told = {}
    trained("all_reduce", world, collective, f"{folder}/refused", epochs=1)
    attempts = {
        "other groups": lambda: trained("zero1", world, collective, f"{folder}/refused", optimizer="momentum"),
        "own step": lambda: fit(
            task(manual_step=lambda net, optimizer, batch, loss: None),
            TensorSource(data(), global_batch_rows=17, world=world),
            collective=collective,
            config=TrainConfig(),
            strategy=open_strategy("zero1", collective, TrainConfig()),
        ),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except (CheckpointError, ConfigError) as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


def on_a_rank(jobs, folder, world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    run = functools.partial(trained, world=world, collective=collective)
    found = {}
    for name, what in jobs:
        if what in OPTIMIZERS:
            found[name, what] = run(name, optimizer=what)
        elif what == "best":
            found[name, what] = run(name, restore_best=True, folder=f"{folder}/best-{name}")
        elif what == "accumulated":
            found[name, what] = run(name, accumulate_steps=4)
        else:
            run(name, folder=f"{folder}/{name}-{what}", epochs=1)
            found[name, what] = run(what, folder=f"{folder}/{name}-{what}")
    found["refusals"] = refusals(world, collective, folder)
    collective.close()
    return found


@pytest.fixture(scope="module")
def together(ranks, tmp_path_factory):
    jobs = [job for job in JOBS if job not in SLOW]
    return ranks.together(functools.partial(on_a_rank, jobs, tmp_path_factory.mktemp("checkpoints")), 2, "torch")


@pytest.fixture(scope="module")
def on_each_rank(ranks, tmp_path_factory, together):
    """A function of a job that gives what came of it on each rank; the slow ones run when one is asked for."""

    @functools.cache
    def later():
        return ranks.together(functools.partial(on_a_rank, SLOW, tmp_path_factory.mktemp("later")), 2, "torch")

    return lambda *job: [rank[job] for rank in (later() if job in SLOW else together)]


def alone(**settings):
    torch.set_num_threads(1)
    return trained("all_reduce", SOLO, open_collective(SOLO, backend="solo"), **settings)


def same_weights(rank, wanted):
    if rank["weights"] is not None:
        torch.testing.assert_close(rank["weights"], wanted["weights"], **EXACT)


@pytest.mark.parametrize(("strategy", "optimizer"), parameters(*itertools.product(NAMES, OPTIMIZERS)))
def test_two_ranks_end_with_the_weights_and_the_state_of_one(on_each_rank, strategy, optimizer):
    wanted = alone(optimizer=optimizer)
    for rank in on_each_rank(strategy, optimizer):
        same_weights(rank, wanted)
        assert rank["epochs"] == pytest.approx(wanted["epochs"], rel=1e-9)
        assert rank["norms"] == pytest.approx(wanted["norms"], rel=1e-9)
    assert max(wanted["norms"]) > 0.5  # so that steps were clipped
    leader, other = (rank["state"] for rank in on_each_rank(strategy, optimizer))
    assert other is None
    torch.testing.assert_close(leader["model"], wanted["state"]["model"], **EXACT)
    torch.testing.assert_close(leader["optimizer"], wanted["state"]["optimizer"], **EXACT)


@pytest.mark.parametrize(("strategy", "more"), parameters(*((name, "accumulated") for name in NAMES)))
def test_accumulated_batches_are_exchanged_once(on_each_rank, strategy, more):
    wanted = alone(accumulate_steps=4)
    for rank in on_each_rank(strategy, more):
        same_weights(rank, wanted)


@pytest.mark.parametrize(("first", "then"), parameters(*PAIRS))
def test_a_strategy_goes_on_from_the_checkpoint_of_another(on_each_rank, first, then):
    for resumed, undisturbed in zip(on_each_rank(first, then), on_each_rank("all_reduce", "groups"), strict=True):
        if {first, then} <= set(STRATEGIES):  # which add up in the same order
            assert all(torch.equal(resumed["weights"][name], one) for name, one in undisturbed["weights"].items())
            assert resumed["epochs"] == undisturbed["epochs"]
        same_weights(resumed, undisturbed)
        assert resumed["epochs"] == pytest.approx(undisturbed["epochs"], rel=1e-9)


@pytest.mark.parametrize(("strategy", "more"), parameters(*((name, "best") for name in NAMES)))
def test_every_rank_gets_the_best_weights(on_each_rank, strategy, more):
    for rank in on_each_rank(strategy, more):
        same_weights(rank, alone(restore_best=True))


def test_a_rank_of_zero1_holds_the_state_of_its_own_parameters_alone(together):
    first, second = (rank["zero1", "groups"]["held"] for rank in together)
    assert first > 0
    assert second > 0
    assert first + second == together[0]["all_reduce", "groups"]["held"]


def test_what_zero1_cannot_do_is_refused_on_every_rank(together):
    for rank in together:
        assert "CheckpointError: the optimizer in the checkpoint does not fit" in rank["refusals"]["other groups"]
        assert "groups of [2, 4] parameters for groups of [6]" in rank["refusals"]["other groups"]
        assert rank["refusals"]["own step"].startswith("ConfigError: the strategy takes no step of a user's own")


def test_zero1_is_refused_where_horovod_carries_and_an_unknown_strategy_is_named():
    class Horovod:
        name, world = "horovod", SOLO

    with pytest.raises(ConfigError, match="choose backend='torch', or strategy='all_reduce'"):
        open_strategy("zero1", Horovod(), TrainConfig())
    with pytest.raises(ConfigError, match="strategy='fsdp9' is unknown: choose one of"):
        open_strategy("fsdp9", Horovod(), TrainConfig())


class SameRows(AllReduce):
    """All ranks read all rows, as those of one pipeline do."""

    def __init__(self, collective, config):
        super().__init__(collective, config)
        self.data_rank, self.data_size = 0, 1


def dropped():
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)).double()


def counted(output, label):
    """A metric that counts its rows."""
    return float(len(label))


SHARED = {
    "metrics": ({"metrics": {"counted": counted}}, {"max_grad_norm": 0.5}),
    "sample weights": ({"sample_weight": "w"}, {"accumulate_steps": 2}),
    "sum": ({"loss": torch.nn.MSELoss(reduction="sum")}, {"scale_lr": True, "max_grad_norm": 0.1}),
}


def of_shared_rows(case, folder, collective):
    """A run of ``SameRows`` that goes on from a checkpoint inside of an epoch."""
    parts, settings = SHARED[case]
    tensors = data()
    tensors["w"] = tensors["x"][:, 0].abs()
    for steps in ({"max_steps": 5}, {}):
        config = TrainConfig(epochs=2, seed=3, **settings, **steps)
        result = fit(
            task(**({"model": dropped, "optimizer": OPTIMIZERS["momentum"]} | parts)),
            TensorSource(tensors, global_batch_rows=17),
            TensorSource(tensors, global_batch_rows=17, shuffle=False),
            collective=collective,
            config=config,
            checkpoints=Checkpointer(CheckpointConfig(uri=f"{folder}/{case}", every_steps=2)),
            strategy=SameRows(collective, config),
        )
        collective.barrier()
    columns = [{name: value for name, value in row.items() if name != "seconds"} for row in result.history.epochs]
    return result.model.state_dict(), columns


def shared_rows_on_a_rank(folder, world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    found = {case: of_shared_rows(case, folder, collective) for case in SHARED}
    collective.close()
    return found


@pytest.fixture(scope="module")
def sharing(ranks, tmp_path_factory):
    return ranks.together(functools.partial(shared_rows_on_a_rank, tmp_path_factory.mktemp("shared")), 2, "torch")


@pytest.mark.parametrize("case", SHARED)
def test_rows_that_ranks_share_count_once_and_are_dropped_alike(sharing, tmp_path, case):
    torch.set_num_threads(1)
    weights, columns = of_shared_rows(case, tmp_path, open_collective(SOLO, backend="solo"))
    for rank in sharing:
        assert all(torch.equal(rank[case][0][name], tensor) for name, tensor in weights.items())
        assert rank[case][1] == columns


def of_shards(uri, world):
    parts = {"optimizer": functools.partial(torch.optim.SGD, lr=0.1), "inputs": ["x"], "labels": ["y"]}
    made = Task(model=functools.partial(torch.nn.Linear, 1, 1), loss=torch.nn.MSELoss(), **parts)
    job = RankJob(task=made, train_uri=uri, batch_size=16, train=TrainConfig(epochs=2), strategy="same rows")
    module = SimpleNamespace(SameRows=SameRows)  # on a rank this file is no module
    registry = sys.modules["sparkdl.strategies"].STRATEGIES  # the rank's own, not the one that came with this
    with patch.dict(registry, {"same rows": "same_rows:SameRows"}), pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "same_rows", module)  # patch.dict would forget what the training imports
        return run_rank(world, job)


def test_the_strategy_says_which_rows_a_rank_reads(ranks, tmp_path):
    x = np.random.default_rng(3).normal(size=100).astype("float32")
    write_table_shards(
        pa.table({"x": pa.FixedSizeListArray.from_arrays(x, 1), "y": 3 * x}), str(tmp_path), labels=["y"]
    )
    first, second = ranks.together(functools.partial(of_shards, str(tmp_path)), 2, "torch")
    wanted = of_shards(str(tmp_path), SOLO)
    assert first.result.steps == wanted.result.steps == 2 * 7  # a seventh step for what is left of 100 rows
    torch.testing.assert_close(first.weights, wanted.weights)
    assert second.weights is None
