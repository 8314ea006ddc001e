"""A part of a sharded model may return a view, and the model may change it in place: one rank's weights still."""

from __future__ import annotations

import sys
import warnings
from unittest.mock import patch

import cloudpickle
import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import TrainConfig
from sparkdl.strategies import sharded
from sparkdl.strategies.base import open_strategy
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import SOLO

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Turned(torch.nn.Linear):
    """Gives a pair, whose second is a view of its own making."""

    def forward(self, x):
        return x.sum(), {"hidden": super().forward(x).transpose(1, 2)}


class InPlace(torch.nn.Module):
    """Rows are sequences of three, and what each layer gives is changed in place."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 8), torch.nn.Linear(8, 8), Turned(8, 8)])
        self.head = torch.nn.Linear(24, 1)

    def forward(self, x):
        hidden = self.layers[0](x.view(len(x), 3, 2))
        hidden += 1
        hidden = self.layers[1](hidden).sigmoid_()
        hidden = self.layers[2](hidden)[1]["hidden"]
        hidden *= 2
        return self.head(hidden.flatten(1)).squeeze(1)


def trained(strategy, world, collective):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, 6, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    task = Task(
        model=lambda: InPlace().double(),
        optimizer=lambda net: torch.optim.Adam(net.parameters(), lr=0.01),
        loss=torch.nn.MSELoss(),
        inputs=["x"],
        labels=["y"],
    )
    source = TensorSource({"x": x, "y": x[:, 0] * x[:, 1]}, global_batch_rows=16, world=world)
    config = TrainConfig(epochs=2)
    opened = open_strategy(strategy, collective, config)
    result = fit(task, source, collective=collective, config=config, strategy=opened)
    return result.model.state_dict() if world.is_leader else None


def on_a_rank(copies, world):
    torch.set_num_threads(1)
    collective = open_collective(world, backend="torch")
    try:
        with warnings.catch_warnings(), patch.object(sharded, "copy_views", sharded.copy_views if copies else id):
            warnings.filterwarnings("error", message=".*view")
            return trained("fsdp", world, collective)
    finally:
        collective.close()


def test_what_a_layer_gives_may_be_changed_in_place(ranks):
    leader, _ = ranks.together(lambda world: on_a_rank(True, world), 2, "torch")
    torch.testing.assert_close(leader, trained("all_reduce", SOLO, open_collective(SOLO, backend="solo")))


def test_torch_still_warns_of_views(ranks):
    with pytest.raises(UserWarning, match="returned a view tensor"):
        ranks.together(lambda world: on_a_rank(False, world), 2, "torch")
