"""Ranks that step by themselves: what their means are, that a resumed run is an undisturbed one, what is refused."""

from __future__ import annotations

import functools
import sys

import cloudpickle
import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import CheckpointConfig, SyncConfig, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.spread_model import SpreadModel
from sparkdl.strategies.base import open_strategy
from sparkdl.strategies.choice import choice_of
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import SOLO

cloudpickle.register_pickle_by_value(sys.modules[__name__])

EXACT = {"rtol": 1e-9, "atol": 1e-11}
STEPS = "local_sgd(every=3)"
OUTER = "diloco(every=3)"


def model():
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def normalised():
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)).double()


class Spare(torch.nn.Module):
    """A model with a layer that it never calls."""

    def __init__(self):
        super().__init__()
        self.body, self.spare = normalised_by_row(), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.body(x)


def normalised_by_row():
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))


def rows():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(103, 5, generator=generator, dtype=torch.float64)
    return {"x": x, "y": x @ torch.randn(5, generator=generator, dtype=torch.float64)}


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": functools.partial(torch.optim.AdamW, lr=0.01),
}


def trained(strategy, *, world, collective, optimizer="sgd", folder=None, epochs=3, net=model, batches=7, **settings):
    """The last of seven batches has one row, so that a rank has none."""
    config = TrainConfig(epochs=epochs, steps_per_epoch=batches, **settings)
    opened = open_strategy(strategy, collective, config)
    result = fit(
        Task(model=net, optimizer=OPTIMIZERS[optimizer], loss=torch.nn.MSELoss(), inputs=["x"], labels=["y"]),
        TensorSource(rows(), global_batch_rows=17, world=world),
        TensorSource(rows(), global_batch_rows=17, world=world, shuffle=False),
        collective=collective,
        config=config,
        checkpoints=Checkpointer(CheckpointConfig(uri=str(folder), every_steps=4)) if folder else None,
        strategy=opened,
    )
    collective.barrier()
    weights = {name: tensor.clone() for name, tensor in result.model.state_dict().items()}
    return {"weights": weights, "losses": result.history.column("val_loss"), "steps": result.steps}


def on_a_rank(folder, world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    run = functools.partial(trained, world=world, collective=collective)
    results = {
        "every step": run("local_sgd(every=1)"),
        "every step, accumulated": run("local_sgd(every=1)", accumulate_steps=2),
        "mean": run(STEPS, optimizer="adam"),
        "outer mean": run("diloco(every=3, outer_lr=0.9999999999, outer_momentum=0.0)", optimizer="adam"),
        "outer": run(OUTER, optimizer="adam"),
        "never but at the end": run("local_sgd(every=1000)", epochs=1),
        "spare": run("local_sgd(every=1)", net=lambda: Spare().double()),
        "norms": run(STEPS, net=normalised, batches=6),
        "best": run(OUTER, optimizer="adam", folder=f"{folder}/best", restore_best=True),
    }
    spare = functools.partial(run, "local_sgd(every=1)", net=lambda: Spare().double(), folder=f"{folder}/spare")
    spare(max_steps=6)  # before the batch of which a rank has no row
    results["spare, resumed"] = spare()
    for name in (STEPS, OUTER):  # stopped behind step 10: between two means, inside an epoch
        run(name, optimizer="adam", folder=f"{folder}/{name}", max_steps=10)
        results[f"resumed {name}"] = run(name, optimizer="adam", folder=f"{folder}/{name}")
        results[f"undisturbed {name}"] = run(name, optimizer="adam")
    for first, then, way in ((OUTER, "all_reduce", "handed over"), ("all_reduce", OUTER, "taken over")):
        run(first, optimizer="adam", folder=f"{folder}/{way}", epochs=1)
        results[way] = run(then, optimizer="adam", folder=f"{folder}/{way}")
    collective.close()
    return results


@pytest.fixture(scope="module")
def together(ranks, tmp_path_factory):
    return ranks.together(functools.partial(on_a_rank, tmp_path_factory.mktemp("runs")), 2, "torch")


def bags():
    return torch.nn.Sequential(torch.nn.EmbeddingBag(11, 4, sparse=True), torch.nn.Flatten()).double()


def sparse_on_a_rank(world):
    """Two steps, of which rank 1 has rows in the first alone."""
    torch.set_num_threads(1)
    with SpreadModel("local_sgd(every=2)", backend="torch") as spread:
        optimizer = functools.partial(torch.optim.SparseAdam, lr=0.1)
        spread.build(bags, optimizer, torch.nn.MSELoss(), inputs=["x"], labels=["y"])
        for count in (2, 2 if world.is_leader else 0):
            spread.step(
                {"x": torch.arange(11).repeat(2)[: 3 * count].view(count, 3), "y": torch.ones(count, 4).double()}
            )
        return spread.state_dict()


def test_a_rank_without_rows_steps_sparse_gradients(ranks):
    state, _ = ranks.together(sparse_on_a_rank, 2, "torch")
    torch.manual_seed(0)
    begin = bags().state_dict()["0.weight"]
    is_trained = (state["model"]["0.weight"] != begin).any(1)
    assert is_trained.tolist() == [True] * 6 + [False] * 5


def alone(strategy="all_reduce", **settings):
    torch.set_num_threads(1)
    return trained(strategy, world=SOLO, collective=open_collective(SOLO, backend="solo"), **settings)


def equal(first, second):
    return all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_mean_behind_each_step_of_sgd_is_the_step_of_the_mean_gradient(together, accumulated):
    """Also where a rank has no row: its momentum and decay go on."""
    wanted = alone(accumulate_steps=accumulated)
    for rank in together:
        got = rank["every step" if accumulated == 1 else "every step, accumulated"]
        torch.testing.assert_close(got["weights"], wanted["weights"], **EXACT)
        assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-9)


@pytest.mark.parametrize("way", ["spare", "spare, resumed"])
def test_what_the_model_never_calls_stays_as_it_is_where_a_rank_has_no_row(together, way):
    wanted = alone(net=lambda: Spare().double())
    for rank in together:
        torch.testing.assert_close(rank[way]["weights"], wanted["weights"], **EXACT)


def test_one_rank_that_meets_nobody_trains_as_ever():
    assert equal(alone(STEPS, optimizer="adam"), alone("all_reduce", optimizer="adam"))


@pytest.mark.parametrize("way", ["mean", "outer", "never but at the end", "norms", "taken over", "handed over"])
def test_all_ranks_end_with_one_model(together, way):
    first, second = (rank[way] for rank in together)
    assert equal(first, second)
    assert first["losses"] == second["losses"]
    assert first["losses"][-1] < rows()["y"].var().item()


def test_an_outer_step_of_all_the_way_goes_to_the_mean(together):
    for rank in together:
        torch.testing.assert_close(rank["outer mean"]["weights"], rank["mean"]["weights"], rtol=1e-6, atol=1e-8)
        assert not equal(rank["outer"], rank["mean"])


@pytest.mark.parametrize("strategy", [STEPS, OUTER])
def test_a_run_that_stopped_between_two_means_goes_on_exactly(together, strategy):
    for rank in together:
        assert equal(rank[f"resumed {strategy}"], rank[f"undisturbed {strategy}"])
        assert rank[f"resumed {strategy}"]["losses"] == rank[f"undisturbed {strategy}"]["losses"]


def test_outer_steps_keep_no_gradient():
    with SpreadModel("diloco(every=1)") as spread:
        spread.build(model, OPTIMIZERS["adam"], torch.nn.MSELoss(), inputs=["x"], labels=["y"])
        spread.step({name: tensor[:8] for name, tensor in rows().items()})
        assert all(common.grad is None for common in spread._strategy._common)


def test_the_best_epoch_is_the_one_that_was_validated(together):
    for rank in together:
        best = model()
        best.load_state_dict(rank["best"]["weights"])
        data = rows()
        with torch.inference_mode():
            loss = torch.nn.functional.mse_loss(best(data["x"]).squeeze(1), data["y"]).item()
        assert loss == pytest.approx(min(rank["best"]["losses"]), rel=1e-9)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("local_sgd(every=0)", "every=0 is no number of steps between two means: give 1 or more"),
        ("diloco(every=2.5)", "every=2.5 is no number of steps"),
        ("diloco(outer_lr=0)", "outer_lr=0 does not go with outer steps: give a number above 0"),
        ("diloco(outer_momentum=1)", "outer_momentum=1 does not go with outer steps: give a number of 0 and more, bel"),
        ("diloco(h=4)", "'h' is no option of diloco: choose of every, outer_lr, outer_momentum"),
    ],
)
def test_options_that_cannot_be_are_one_sentence(text, sentence):
    with pytest.raises(ConfigError) as refused:
        choice_of(text)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(precision="fp16"),
        TrainConfig(sync=SyncConfig(compression="bf16")),
        TrainConfig(sync=SyncConfig(sync_batch_norm=True)),
    ],
)
def test_settings_of_gradients_that_travel_are_refused(config):
    with pytest.raises(ConfigError, match="strategy='local_sgd'"):
        open_strategy("local_sgd", open_collective(SOLO, backend="solo"), config)
