"""What shards refuse: layers that compute on some ranks alone, whose messages would meet those of others."""

from __future__ import annotations

import functools
import sys

import cloudpickle
import pytest
import torch

from sparkdl.errors import ConfigError
from sparkdl.spread_model import SpreadModel

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Kinds(torch.nn.Module):
    """Two layers of one size, each for the rows of a kind; ``blocks`` are gathered one by one."""

    def __init__(self, *, blocks):
        super().__init__()
        layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
        self.kinds = torch.nn.ModuleList(layers) if blocks else None
        if not blocks:
            self.positive, self.negative = layers
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x):
        hidden = torch.zeros_like(x)
        layers = self.kinds or (self.positive, self.negative)
        for rows, layer in zip((x[:, 0] > 0, x[:, 0] <= 0), layers, strict=True):
            if rows.any():
                hidden = hidden.index_put((rows.nonzero()[:, 0],), layer(x[rows]))
        return self.head(hidden)


def steps(strategy, blocks, world):
    """A step of rows of both kinds, and one where half of the ranks have rows of one kind alone."""
    torch.set_num_threads(1)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(world.rank))
    mixed = torch.cat([x.abs(), -x.abs()])
    losses = []
    with SpreadModel(strategy, backend="torch") as model:
        build = functools.partial(Kinds, blocks=blocks)
        model.build(build, functools.partial(torch.optim.SGD, lr=0.1), torch.nn.MSELoss(), inputs=["x"], labels=["y"])
        for rows in (mixed, x.abs() if model.reader.rank < model.reader.size // 2 else -x.abs()):
            try:
                losses.append(model.step({"x": rows, "y": rows.sum(1, keepdim=True)}).item())
            except ConfigError as error:
                losses.append(str(error))
    return losses


@pytest.mark.parametrize("blocks", [False, True], ids=["one group", "blocks"])
@pytest.mark.parametrize("strategy", ["zero2", "fsdp", "mesh(data=2, shard=2)"])
def test_a_layer_that_computes_on_some_ranks_alone_is_refused_before_the_optimizer_steps(ranks, strategy, blocks):
    size = 4 if "data" in strategy else 2
    for first, second in ranks.together(functools.partial(steps, strategy, blocks), size, "torch"):
        assert isinstance(first, float)
        assert "a layer computed on some ranks alone" in str(second)
