"""The default network on ranks: what they train is what one rank trains, its members' own losses among it."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace

import cloudpickle
import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import TrainConfig
from sparkdl.models.networks import TabularEnsemble
from sparkdl.strategies.base import open_strategy
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import SOLO

cloudpickle.register_pickle_by_value(sys.modules[__name__])

FEATURES = {
    "inputs": [
        {"name": "numbers", "shape": [2], "knots": [[-2.0, -1.0, 0.0, 1.0, 2.0], []]},
        {"name": "categories", "shape": [2], "cardinalities": [5, 40]},
    ],
    "labels": [{"name": "y", "type": "regression", "outputs": 1, "mean": 1.0, "deviation": 3.0, "loss": "mse"}],
}


def data():
    generator = torch.Generator().manual_seed(7)
    numbers = torch.randn(103, 2, generator=generator)
    categories = torch.stack([torch.randint(0, count, (103,), generator=generator) for count in (5, 40)], 1)
    return {"numbers": numbers, "categories": categories, "y": numbers.sum(1) * categories[:, 0]}


def trained(strategy, world, collective):
    """The weights and losses after two epochs; the seventh batch has one row, so that every other reader has none."""
    config = TrainConfig(epochs=2, max_grad_norm=5.0)
    opened = open_strategy(strategy, collective, config)
    reader = replace(world, rank=opened.data_rank, size=opened.data_size)
    result = fit(
        Task(
            model=lambda: TabularEnsemble(FEATURES, width=16, dropout=0.0),
            optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
            loss=torch.nn.MSELoss(),
            inputs=["numbers", "categories"],
            labels=["y"],
            input_style="dict",
        ),
        TensorSource(data(), global_batch_rows=17, world=reader),
        TensorSource(data(), global_batch_rows=17, world=reader, shuffle=False),
        collective=collective,
        config=config,
        strategy=opened,
    )
    weights = {name: tensor.clone() for name, tensor in result.model.state_dict().items()}
    return weights, [(row["loss"], row["val_loss"]) for row in result.history.epochs]


def on_a_rank(strategy, world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    outcome = trained(strategy, world, collective)
    collective.close()
    return outcome


@functools.lru_cache
def alone():
    return trained("all_reduce", SOLO, open_collective(SOLO, backend="solo"))


@pytest.mark.parametrize(
    ("size", "strategy"),
    [(2, "all_reduce"), (2, "zero1"), (2, "fsdp"), pytest.param(4, "all_reduce", marks=pytest.mark.slow)],
)
def test_ranks_train_the_members_that_one_rank_trains(ranks, size, strategy):
    weights, losses = alone()
    assert losses[1][0] < losses[0][0]
    assert losses[0][0] > losses[0][1]  # the loss of training counts each member's
    for rank, (rank_weights, rank_losses) in enumerate(
        ranks.together(functools.partial(on_a_rank, strategy), size, "torch")
    ):
        assert rank_losses == [pytest.approx(pair, rel=1e-4) for pair in losses]
        if rank == 0:
            torch.testing.assert_close(rank_weights, weights, rtol=1e-3, atol=1e-4)
