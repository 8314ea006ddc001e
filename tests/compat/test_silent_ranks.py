"""Ranks that are not there: torch's parts run with them, and nothing of them stays."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from sparkdl.compat.silent_ranks import silent_ranks


def test_one_of_several_ranks_has_its_part_and_waits_for_nobody():
    with silent_ranks(4, "cpu") as mesh:
        assert (mesh.size(), mesh.get_local_rank()) == (4, 0)
        part = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)], src_data_rank=None)
        assert part.to_local().tolist() == [0.0, 1.0]
        assert part.full_tensor().shape == (8,)
    assert not dist.is_initialized()


def test_a_group_within_one_that_is_open_leaves_that_alone():
    with silent_ranks(2, "cpu"):
        with silent_ranks(1, "cpu") as mesh:
            assert mesh.size() == 1
        with silent_ranks(2, "cpu") as first, silent_ranks(2, "cpu") as second:
            assert first != second
        assert dist.get_world_size() == 2
