"""A group of ranks with this process alone: what the others would send arrives at once, as anything."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_NUMBERS = itertools.count()


@contextmanager
def silent_ranks(count: int, device_type: str) -> Iterator[DeviceMesh]:
    """Yield a mesh of ``count`` ranks of which this is one and the others are silent.

    Where ``torch.distributed`` is open already all of its ranks call it together, and ``count`` divides their number.

    torch's own tests measure with it what a rank does besides waiting. It has no public name (2.13):
    ``torch.testing._internal`` registers it, and ``tests/compat/test_silent_ranks.py`` notices when that changes. It
    can go when the backend ``"fake"``, which ``torch.distributed`` lists, opens without that import.
    """
    import_module("torch.testing._internal.distributed.fake_pg")  # registers it
    alone = not dist.is_initialized()
    group: Any
    if alone:
        dist.init_process_group("fake", rank=0, world_size=count, store=dist.HashStore())  # type: ignore[attr-defined]
        group = dist.group.WORLD
    else:
        group, _ = dist.new_subgroups(count, backend="fake")  # type: ignore[no-untyped-call]
    try:
        # DTensor keeps what it has planned for a mesh by the ranks and names of that: none may be taken for another.
        yield DeviceMesh.from_group(group, device_type, mesh_dim_names=(f"silent{next(_NUMBERS)}",))
    finally:
        dist.destroy_process_group(None if alone else group)
