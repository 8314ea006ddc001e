"""Ranks live through any number of functional all-gathers, which give the parts of all ranks."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.compat.gloo_all_gather import replace_all_gather
from sparkdl.config import TrainConfig
from sparkdl.strategies.base import open_strategy

GATHERS = """
import sys, time
import torch, torch.distributed as dist
from sparkdl.compat.gloo_all_gather import replace_all_gather

if sys.argv[1] == "replaced":
    replace_all_gather()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
gather, wait = torch.ops._c10d_functional.all_gather_into_tensor, torch.ops._c10d_functional.wait_tensor
part, name, end = torch.ones(1), dist.group.WORLD.group_name, time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    for gathered in [gather(part, 1, name) for _ in range(10)]:  # both threads of the group have work at once
        assert wait(gathered) == 1
dist.destroy_process_group()
"""


def exit_status(all_gather, seconds):
    return subprocess.run([sys.executable, "-c", GATHERS, all_gather, str(seconds)], capture_output=True).returncode


@pytest.mark.slow
def test_a_process_outlives_gathers_that_end_at_once():
    assert exit_status("replaced", 5) == 0


@pytest.mark.slow
def test_torchs_own_all_gather_ends_the_process():
    assert exit_status("torch's own", 90) < 0  # if this fails, the module can go


def gathered(dtype, shape, world):
    replace_all_gather()
    collective = open_collective(world, backend="torch")
    part = torch.full(shape, world.rank + 1).to(dtype)
    name = torch.distributed.group.WORLD.group_name
    whole = torch.ops._c10d_functional.all_gather_into_tensor(part, world.size, name)
    whole = torch.ops._c10d_functional.wait_tensor(whole)
    collective.close()
    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(1,), (3, 2), (2, 1, 4)])
def test_the_parts_of_all_ranks_lie_by_rank(ranks, dtype, shape):
    wanted = torch.cat([torch.full(shape, rank + 1).to(dtype) for rank in range(2)])
    for whole in ranks.together(functools.partial(gathered, dtype, shape), 2, "torch"):
        torch.testing.assert_close(whole, wanted, rtol=0, atol=0)


def replacements_by_a_mesh(world):
    replace_all_gather.cache_clear()
    collective = open_collective(world, backend="torch")
    open_strategy("fsdp", collective, TrainConfig()).close()
    collective.close()
    return replace_all_gather.cache_info().currsize


def test_a_mesh_of_ranks_gathers_by_it(ranks):
    assert ranks.together(replacements_by_a_mesh, 2, "torch") == [1, 1]
