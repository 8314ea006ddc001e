"""A process that trains on one mesh after the other keeps neither sockets of the earlier ones nor their groups."""

from __future__ import annotations

import functools
import os

import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.config import TrainConfig
from sparkdl.strategies.base import TaskView, open_strategy


def open_files_after_a_step(strategy, world):
    collective = open_collective(world, backend="torch")
    opened = open_strategy(strategy, collective, TrainConfig())
    opened.build(
        lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        TaskView(inputs=("x",)),
    )
    opened.net(torch.ones(2, 4)).sum().backward()
    opened.state_dict()  # gathers parts, by the groups
    opened.close()
    collective.close()
    del opened, collective
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("strategy", ["tensor", "fsdp"])
def test_a_later_mesh_of_the_same_ranks_opens_groups_of_its_own_and_leaves_no_file_open(ranks, strategy):
    job = functools.partial(open_files_after_a_step, strategy)
    first, second, third = (ranks.together(job, 2, "torch") for _ in range(3))
    assert second == third
    assert all(after <= before + 2 for before, after in zip(first, third, strict=True))
