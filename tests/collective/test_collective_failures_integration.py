"""Ranks that vanish, hang, raise or bring a group of their own: a typed error in time, and a process to go on in."""

from __future__ import annotations

import itertools
import os
import time
from functools import partial

import pytest
import torch
from rank_pool import services

from sparkdl.collective import open_collective
from sparkdl.config import SyncConfig
from sparkdl.errors import ClusterError, ConfigError, WorldSizeError
from sparkdl.world import SOLO, World

BOTH = pytest.mark.parametrize("backend", ["torch", "horovod"])


def leave(collective, *, how, shared, noticed):
    """Rank 1 leaves its third step; the others find out in ``synchronize()`` or in what comes after it."""
    try:
        return three_steps(collective, how, shared, noticed)
    except ClusterError:
        noticed.touch()
        raise


def three_steps(collective, how, shared, noticed):
    layer = torch.nn.Linear(4, 1)
    sync = collective.wrap(layer, torch.optim.SGD(layer.parameters(), lr=0.1), SyncConfig(shared_memory=shared))
    for step in range(5):
        if step == 2 and collective.world.rank == 1:
            if how == "dies":
                os._exit(3)
            if how == "raises":
                raise LookupError("the data of rank 1 is gone")
            while not noticed.exists():
                time.sleep(0.02)
        sync.model(torch.ones(1, 4)).sum().backward()
        sync.synchronize()
    return "trained on"


def ends():
    """Every backend, way and end; those that are slow have a sibling that is not."""
    fast = {("torch", "sockets", "dies"), ("torch", "sockets", "raises"), ("torch", "shared", "hangs")}
    fast |= {("horovod", "shared", "dies")}
    every = itertools.product(("torch", "horovod"), ("shared", "sockets"), ("dies", "raises", "hangs"))
    return [pytest.param(*each, marks=() if each in fast else pytest.mark.slow) for each in every]


@pytest.mark.parametrize(("backend", "way", "how"), ends())
def test_a_rank_that_leaves_ends_the_others(run_collective, backend, way, how, tmp_path):
    # Longer than the test waits for an answer, where the end of a rank must be noticed without waiting it out.
    timeout = 4.0 if how == "hangs" else 300.0
    values = run_collective(
        partial(leave, how=how, shared=way == "shared", noticed=tmp_path / "noticed"),
        2,
        backend,
        timeout=timeout,
        raw=True,
    )
    assert isinstance(values[0], ClusterError), values
    assert "rank 0 lost" in str(values[0])
    if how == "raises":
        assert isinstance(values[1], LookupError)


def test_ranks_that_never_come(ranks):
    (value,) = ranks.run_at_store([], partial(alone, "torch"), 1, {"WORLD_SIZE": "2"})
    assert isinstance(value, ClusterError)
    assert "rank 1 of 2 did not join rank 0" in str(value)


def test_ranks_that_never_come_to_horovod(ranks):
    (value,) = ranks.run_at_store(services("horovod"), partial(alone, "horovod"), 1)
    assert isinstance(value, ClusterError)
    assert "rank 1 of 2 did not join rank 0" in str(value)


def alone(backend, world):
    from datetime import timedelta

    world = World(rank=0, size=2, local_size=2)
    open_collective(world, backend=backend, timeout=timedelta(seconds=2))


def again(world, *, backend):
    """Three collectives, one after the other, on one rendezvous; then the Python process goes on."""
    sums = []
    for _ in range(3):
        collective = open_collective(world, backend=backend)
        sums.append(collective.all_reduce(torch.tensor([float(world.rank + 1)])).item())
        collective.close()
        collective.close()
    return sums


def run_hosted(ranks, backend, job, size=2):
    return ranks.run_at_store(services(backend), job, size)


@BOTH
def test_init_shutdown_init_in_one_run(ranks, backend):
    assert run_hosted(ranks, backend, partial(again, backend=backend), 3) == [[6.0] * 3] * 3


def own_torch_group(world):
    """Plain torch code: it inits, leaves and inits again; in between sparkdl joins its group."""
    import torch.distributed as dist

    from sparkdl.collective.backends.torch_distributed import use_run_store

    use_run_store()
    sums = []
    for _ in range(3):
        dist.init_process_group("gloo")
        collective = open_collective(world)
        number = torch.tensor([1.0])
        dist.all_reduce(number)
        sums.append((collective.name, collective.all_reduce(number).item()))
        collective.close()
        dist.all_reduce(number)  # the user's group is still there
        dist.destroy_process_group()
    return sums


def test_a_process_group_of_the_user_is_joined_and_left_standing(ranks):
    assert run_hosted(ranks, "torch", own_torch_group) == [[("torch", 4.0)] * 3] * 2


def outlives_its_group(world):
    """Plain torch code whose model is freed after its group, right behind the last all-reduce, again and again."""
    import torch.distributed as dist

    from sparkdl.collective.backends.torch_distributed import kept_groups, use_run_store

    def train():
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.ones(64, 2)).sum().backward()
            optimizer.step()
        dist.destroy_process_group()

    use_run_store()
    for _ in range(25):
        with kept_groups():
            train()
    return "done"


def test_a_model_that_outlives_its_group_does_not_freeze_the_process(ranks):
    assert run_hosted(ranks, "torch", outlives_its_group) == ["done"] * 2


def own_horovod(world):
    import horovod.torch as hvd

    variables = {"RANK": world.rank, "SIZE": world.size, "LOCAL_RANK": world.rank, "LOCAL_SIZE": world.size}
    variables |= {"CROSS_RANK": 0, "CROSS_SIZE": 1, "HOSTNAME": "here", "GLOO_IFACE": "lo"}
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in variables.items()})
    hvd.init()
    collective = open_collective(world)
    total = collective.all_reduce(torch.tensor([1.0])).item()
    collective.close()
    after = hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum, name="after").item()
    wrong = ""
    try:
        open_collective(World(rank=0, size=5))
    except WorldSizeError as error:
        wrong = str(error)
    hvd.shutdown()
    return collective.name, total, after, wrong


def test_a_horovod_of_the_user_is_joined_and_left_running(ranks):
    for rank, (name, total, after, wrong) in enumerate(run_hosted(ranks, "horovod", own_horovod)):
        assert (name, total, after) == ("horovod", 2.0, 2.0)
        assert "rank 0 of 5" in wrong
        assert f"rank {rank} of 2" in wrong


def unpicklable(collective):
    return collective.all_gather_object((x for x in ()) if collective.world.rank == 1 else 1)


@BOTH
def test_a_value_that_cannot_travel_fails_on_every_rank(run_collective, backend):
    for value in run_collective(unpicklable, 2, backend, raw=True):
        assert isinstance(value, ClusterError)
        assert "rank 1 sent" in str(value)
        assert "generator" in str(value)


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="backend='mpi'"):
        open_collective(SOLO, backend="mpi")
    with pytest.raises(WorldSizeError, match="has 2"):
        open_collective(World(rank=0, size=2), backend="solo")
    collective = open_collective(SOLO)
    with pytest.raises(ConfigError, match="op='median'"):
        collective.all_reduce(torch.ones(1), "median")
    with pytest.raises(ConfigError, match=r"weight=2\.0"):
        collective.all_reduce(torch.ones(1), "sum", weight=2.0)
    with pytest.raises(ConfigError, match="root=1"):
        collective.broadcast_object(1, root=1)


@BOTH
def test_no_address_to_meet_at(backend, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        monkeypatch.delenv(name, raising=False)
    if backend == "horovod":
        pytest.importorskip("horovod.torch")
    with pytest.raises(ConfigError, match=r"sparkdl\.run"):
        open_collective(World(rank=0, size=2), backend=backend)


def on_a_host_with_a_wrong_name(world, *, backend):
    """Rank 1 says that it is another host; its name leads to no interface that the others reach."""
    world = World(rank=world.rank, size=2, node_rank=world.rank, num_nodes=2)
    os.environ["HOROVOD_GLOO_IFACE"] = "no-such-interface"
    collective = open_collective(world, backend=backend)
    name = collective.name
    collective.close()
    return name


def test_horovod_is_refused_where_the_host_name_leads_elsewhere(ranks):
    pytest.importorskip("horovod.torch")
    for value in run_hosted(ranks, "horovod", partial(on_a_host_with_a_wrong_name, backend="horovod")):
        assert isinstance(value, ConfigError)
        assert "which is not on interface 'no-such-interface'" in str(value)
    job = partial(on_a_host_with_a_wrong_name, backend="auto")
    assert run_hosted(ranks, "horovod", job) == ["torch", "torch"]
