"""The ranks that exchange most stand on one host, in whatever order they come; on network namespaces."""

from __future__ import annotations

import ast

import pytest
from hosts import Run, hosts

pytestmark = pytest.mark.slow

WORK = """
def work(world):
    import socket
    import torch
    from sparkdl.collective import open_collective
    from sparkdl.config import TrainConfig
    from sparkdl.strategies.base import open_strategy, TaskView
    collective = open_collective(world, backend="torch")
    strategy = open_strategy("mesh(data=2, tensor=2)", collective, TrainConfig())
    layers = lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    strategy.build(layers, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), TaskView())
    group = strategy.model[0].weight.device_mesh.mesh.tolist()
    placed = world.rank, socket.gethostname(), group, strategy.data_rank
    collective.close()
    return placed
"""


@pytest.mark.parametrize("order", [(0, 1, 0, 1), (1, 0, 0, 1), (0, 0, 1, 1)])
def test_a_tensor_group_is_of_one_host(tmp_path, order):
    with hosts(3) as (driver, *computing):
        run = Run(tmp_path, [computing[number] for number in order], WORK, driver=driver)
        try:
            run.start_ranks()
            _, values = run.result()
        finally:
            run.end()
    placed = ast.literal_eval(values)
    host_of = {rank: host for rank, host, _, _ in placed}
    assert sorted(host_of.values()) == sorted(computing[number].address for number in order)
    for rank, _, group, _ in placed:
        assert rank in group
        assert len({host_of[member] for member in group}) == 1
    readers = {tuple(group): reader for _, _, group, reader in placed}
    assert sorted(readers.values()) == [0, 1]


SERVED = """
def work(world):
    import socket
    import torch
    from sparkdl.collective import open_collective
    from sparkdl.config import TrainConfig
    from sparkdl.strategies.base import open_strategy, TaskView
    collective = open_collective(world, backend="torch")
    strategy = open_strategy("parameter_server(servers=2)", collective, TrainConfig())
    torch.manual_seed(0)
    strategy.build(lambda: torch.nn.Linear(4, 8), lambda net: torch.optim.SGD(net.parameters(), lr=1.0), TaskView())
    (strategy.model.weight.sum() * (world.rank + 1)).backward()
    before = strategy.model.weight.detach().clone()
    strategy.optimizer.step()
    moved = (before - strategy.model.weight).unique().tolist()
    places = [listener.address[0] for listener in strategy._listeners]
    strategy.close()
    collective.close()
    return world.rank, places, [round(step, 4) for step in moved]
"""


def test_parameter_servers_are_reached_at_the_address_of_their_host(tmp_path):
    with hosts(3) as (driver, *computing):
        run = Run(tmp_path, computing, SERVED, driver=driver)
        try:
            run.start_ranks()
            _, values = run.result()
        finally:
            run.end()
    served = {rank: (places, moved) for rank, places, moved in ast.literal_eval(values)}
    assert {rank: places for rank, (places, _) in served.items()} == {
        rank: [host.address] for rank, host in enumerate(computing)
    }
    assert all(moved == [1.5] for _, moved in served.values())  # the mean of 1 and 2
