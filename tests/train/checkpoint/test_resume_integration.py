"""Runs of several ranks that are cut off and go on: bit for bit at three ranks over sockets."""

from __future__ import annotations

import functools
import sys

import cloudpickle
import pytest
import torch
from train_helpers import NEEDS_HOROVOD, Interrupted, RaiseAt, linear_data

from sparkdl.collective import open_collective
from sparkdl.config import CheckpointConfig, SyncConfig, TrainConfig
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.task import Task
from sparkdl.train.trainer import fit

cloudpickle.register_pickle_by_value(sys.modules[__name__])

HOROVOD = pytest.param("horovod", marks=NEEDS_HOROVOD)
SOCKETS = SyncConfig(shared_memory=False, bucket_mib=0.01)  # seven buckets


def model(width=60):
    """The first layer is used last, so that buckets are laid out anew after the first step."""

    class Crossed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.last = torch.nn.Linear(width, 1)
            self.layers = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
            self.first = torch.nn.Linear(5, width)

        def forward(self, x):
            return self.last(torch.tanh(self.layers(torch.dropout(self.first(x), 0.3, self.training))))

    return Crossed()


def train(world, collective, *, sync, width=60, epochs=3, folder=None, stop=None):
    task = Task(
        model=functools.partial(model, width),
        optimizer=functools.partial(torch.optim.Adam, lr=1e-2),
        loss=torch.nn.MSELoss(),
        inputs=["x"],
        labels=["y"],
    )
    result = fit(
        task,
        TensorSource(linear_data()[0], global_batch_rows=17, world=world),
        collective=collective,
        config=TrainConfig(epochs=epochs, sync=sync),
        checkpoints=Checkpointer(CheckpointConfig(uri=f"{folder}", every_steps=5)) if folder else None,
        callbacks=[RaiseAt(stop)] if stop else [],
    )
    weights = torch.cat([parameter.detach().flatten() for parameter in result.model.parameters()])
    return weights, list(result.history.steps["loss"]), result.resumed_step


def cut_off(world, collective, **options):
    """The run up to an error in the middle of an epoch, and what goes on from its last checkpoint."""
    with pytest.raises(Interrupted):
        train(world, collective, **options)
    collective.barrier()  # rank 0 has closed its writer: what was saved is there
    return train(world, collective, **(options | {"stop": None}))


def resumed_and_undisturbed(backend, folder):
    def rank(world):
        torch.set_num_threads(1)
        collective = open_collective(world, backend=backend)
        undisturbed = train(world, collective, sync=SOCKETS)
        resumed = cut_off(world, collective, sync=SOCKETS, folder=f"{folder}/bits", stop=11)
        collective.close()
        return undisturbed, resumed

    return rank


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", HOROVOD])
def test_three_ranks_over_sockets_go_on_bit_for_bit_in_the_middle_of_an_epoch(backend, tmp_path, ranks):
    for (weights, losses, _), (weights_again, losses_again, step) in ranks.together(
        resumed_and_undisturbed(backend, tmp_path), 3, backend
    ):
        assert step == 10
        assert torch.equal(weights_again, weights)
        assert losses_again == losses
