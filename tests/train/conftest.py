"""One rank, small data, small models: what the tests of the loop share."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch

from sparkdl import observe
from sparkdl.collective import open_collective
from sparkdl.config import TrainConfig
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit
from sparkdl.world import SOLO

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))  # for train_helpers


@pytest.fixture
def solo():
    collective = open_collective(SOLO, backend="solo")
    yield collective
    collective.close()


@pytest.fixture
def data():
    """103 rows of 5 features, a linear target and three classes: a number that nothing divides."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(103, 5, generator=generator)
    y = x @ torch.randn(5, generator=generator) + 0.1 * torch.randn(103, generator=generator)
    return {"x": x, "y": y, "k": (y > 0.5).long() + (y > 1.5).long(), "w": torch.rand(103, generator=generator)}


@pytest.fixture
def source(data):
    return lambda rows=16, **options: TensorSource(data, global_batch_rows=rows, **options)


def mlp(outputs=1, dropout=0.0):
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(8, outputs)
    )


@pytest.fixture
def task():
    """Make a regression task; keywords replace its parts."""

    def make(**parts):
        defaults = {
            "model": parts.pop("model", None) or mlp(dropout=parts.pop("dropout", 0.0)),
            "optimizer": functools.partial(torch.optim.Adam, lr=1e-2),
            "loss": None if parts.get("train_step") else torch.nn.MSELoss(),
            "inputs": ("x",),
            "labels": ("y",),
        }
        return Task(**(defaults | parts))

    return make


@pytest.fixture
def train(solo):
    """Call ``fit`` on one rank; keywords that ``fit`` does not know go into its config."""

    def run(task, train, validation=None, *, callbacks=(), checkpoints=None, **config):
        return fit(
            task,
            train,
            validation,
            collective=solo,
            config=TrainConfig(**config),
            callbacks=callbacks,
            checkpoints=checkpoints,
        )

    return run


@pytest.fixture
def events():
    """All events of the test, in order."""
    seen = []
    before = observe.set_sink(lambda event: seen.append(dict(event)))
    yield seen
    observe.set_sink(before)
