"""DTensor's caches of meshes whose groups are closed: they go with the groups."""

from __future__ import annotations

import gc
import sys
from importlib import import_module


def forget_meshes() -> None:
    """Forget all meshes; what DTensors of open ones need is found out again.

    DTensor keeps how it moves tensors by their meshes for as long as the process lives, and takes two meshes of the
    same ranks and names for one. So a later training, in a Spark worker or a notebook, met the closed groups of an
    earlier one, and the sockets and threads of these stayed: 37 files and 27 threads a rank for two short trainings
    (torch 2.13). ``tests/compat/test_dtensor_caches.py`` notices when torch lets go of them itself.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    debug, redistribute, costs = (
        import_module(f"torch.distributed.tensor.{name}") for name in ("debug", "_redistribute", "_collective_utils")
    )
    debug._clear_sharding_prop_cache()
    redistribute._gen_transform_infos.cache_clear()
    redistribute.clear_redistribute_planner_cache()
    costs.MeshTopoInfo.build_from_mesh.cache_clear()
    gc.collect()  # models that fully_shard or a pipeline has cut refer to themselves
