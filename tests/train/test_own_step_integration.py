"""Real ranks that run a function which owns its steps: N of them train what one plain process trains with it."""

from __future__ import annotations

import functools

import pytest
import torch
from own_step_functions import FUNCTIONS, by_hand, trained
from train_helpers import NEEDS_HOROVOD

from sparkdl.collective import open_collective
from sparkdl.config import SyncConfig
from sparkdl.errors import ConfigError

GROUPS = [
    pytest.param(("torch", 2), marks=pytest.mark.slow),
    pytest.param(("torch", 3), marks=pytest.mark.slow),
    pytest.param(("horovod", 2), marks=NEEDS_HOROVOD),
]


def every_function(backend):
    def rank(world):
        torch.set_num_threads(1)
        collective = open_collective(world, backend=backend)
        found = {}
        for name in FUNCTIONS:
            result = trained(name, collective)
            found[name] = [p.detach() for p in result.model.parameters()], list(result.history.steps["loss"])
        collective.close()
        return found

    return rank


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def together(request, ranks):
    backend, size = request.param
    return ranks.together(every_function(backend), size, backend)


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_ranks_with_unequal_and_empty_parts_train_what_a_plain_process_trains(together, solo, name):
    """103 rows in global batches of 17: the last one has a single row, and ranks without any."""
    torch.set_num_threads(1)
    wanted, losses = list(by_hand(name).parameters()), list(trained(name, solo).history.steps["loss"])
    for parameters, seen in (rank[name] for rank in together):
        torch.testing.assert_close(parameters, wanted, rtol=1e-8, atol=1e-10)
        assert seen == pytest.approx(losses, rel=1e-8)


def joined_by_adasum(names, world):
    collective = open_collective(world, backend="torch")
    found = {}
    for name in names:
        try:
            found[name] = trained(name, collective, sync=SyncConfig(compression="adasum")).metrics["loss"]
        except ConfigError as error:
            found[name] = str(error)
    collective.close()
    return found


def test_adasum_joins_the_gradients_of_one_pass_alone(ranks):
    names = ["own loss", "closure", "two passes", "horovod's own, two passes"]
    for found in ranks.together(functools.partial(joined_by_adasum, names), 2, "torch"):
        assert isinstance(found["own loss"], float)
        assert isinstance(found["closure"], float)
        for name in names[2:]:
            assert found[name].startswith("train_minibatch_fn goes backward once more before it steps")
