"""``open_collective``: the ranks of a run join, the one way into a ``Collective``."""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta

from sparkdl import observe
from sparkdl.collective.backends.horovod import HorovodCollective, built_with, is_installed
from sparkdl.collective.backends.horovod_join import HostNameError
from sparkdl.collective.backends.solo import SoloCollective
from sparkdl.collective.base import Collective
from sparkdl.config import BACKENDS
from sparkdl.errors import ConfigError
from sparkdl.launch.store import store_of_this_run
from sparkdl.world import World

TIMEOUT = timedelta(minutes=5)


def open_collective(
    world: World, backend: str = "auto", *, timeout: timedelta = TIMEOUT, gradient_bytes: int | None = None
) -> Collective:
    """Join the other ranks of ``world``; every rank calls it, with the same ``backend``.

    ``"auto"`` is solo for a world of one, and torch.distributed for ranks on the CPUs of one host, whose gradients then
    travel in shared memory. Ranks on several hosts, on GPUs, or started by Horovod's own launcher get Horovod where it
    is installed, the launcher hosts its rendezvous and each host's name leads to that host, else torch.distributed. Who
    names a backend gets its all-reduce (``SyncConfig.shared_memory``).

    A group that user code opened already, with ``hvd.init()`` or ``init_process_group()``, is joined as it is, and
    outlives ``close()``.

    Args:
        world: where this rank stands.
        backend: ``"auto"``, ``"horovod"``, ``"torch"`` or ``"solo"``.
        timeout: how long to wait for the other ranks, when joining and in every later operation.
        gradient_bytes: what a step will send, where that is known; it decides Horovod's cycle time.

    Raises:
        ConfigError: the backend is unknown, not installed, or has no address to meet at.
        WorldSizeError: a group that exists already has another size than ``world``.
        ClusterError: the other ranks did not join within ``timeout``.
    """
    if backend not in (*BACKENDS, "solo"):
        raise ConfigError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}, solo: choose one of these")
    if timeout <= timedelta(0):
        raise ConfigError(f"timeout={timeout} must be above zero: give the other ranks time to join")
    chosen, why, level = (backend, "asked for", logging.INFO) if backend != "auto" else _choose(world)
    try:
        collective = _open(world, chosen, timeout, backend == "auto", gradient_bytes)
    except HostNameError as error:
        if backend != "auto":
            raise
        # All ranks come here: they were told the same.
        chosen, why, level = "torch", str(error), logging.WARNING
        collective = _open(world, chosen, timeout, True, gradient_bytes)
    observe.emit("collective", backend=chosen, reason=why, rank=world.rank, size=world.size)
    if world.is_leader:
        observe.logger.log(level, "collective: %s over %d ranks (%s)", chosen, world.size, why)
    return collective


def _open(
    world: World, backend: str, timeout: timedelta, may_share_memory: bool, gradient_bytes: int | None
) -> Collective:
    if backend == "solo":
        return SoloCollective(world)
    if backend == "horovod":
        return HorovodCollective(
            world, timeout=timeout, may_share_memory=may_share_memory, gradient_bytes=gradient_bytes
        )
    from sparkdl.collective.backends.torch_distributed import TorchCollective

    return TorchCollective(world, timeout=timeout, may_share_memory=may_share_memory)


def _choose(world: World) -> tuple[str, str, int]:
    """Return the backend, why, and how loudly to say so; a pure function of what is equal on all ranks of one launch.

    Where gradients travel in shared memory, Horovod's thread only stands by, and takes cores from training all the
    same: of 2 ranks on 2 cores, ``jobs/examples/rides`` trained for 6.4 s beside it, and for 4.2 s without.
    """
    if "horovod.torch" in sys.modules and sys.modules["horovod.torch"].is_initialized():
        return "horovod", "user code called hvd.init()", logging.INFO
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return "torch", "user code called init_process_group()", logging.INFO
    if world.size == 1:
        return "solo", "a world of one rank", logging.INFO
    torch_meets = store_of_this_run() is not None or "MASTER_ADDR" in os.environ
    if world.device == "cpu" and world.local_size == world.size and torch_meets:
        return "torch", "all ranks are on the CPUs of one host", logging.INFO
    if not is_installed():
        return "torch", "Horovod is not installed", logging.WARNING
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in os.environ:
        return "torch", "no rendezvous of Horovod", logging.WARNING
    if world.device.startswith("cuda") and not built_with()["nccl"]:
        return "torch", "Horovod was built without NCCL", logging.WARNING
    return "horovod", "installed", logging.INFO
