"""The way of a rank to Horovod's other ranks: who must be there, which hosts connect, what is set."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil

from sparkdl.collective.backends.group import never_came
from sparkdl.collective.rendezvous.horovod_store import call_roll
from sparkdl.errors import ClusterError, ConfigError
from sparkdl.launch.store import store_of_this_run
from sparkdl.world import World


class HostNameError(ConfigError):
    """Horovod cannot connect the hosts of this run; every rank raises it."""


def await_everyone(world: World, seconds: float) -> None:
    """Return once every rank has come to the store of the run.

    ``hvd.init()`` aborts the whole process when another rank does not come, so it is called when all are there. Where
    user code hosts a rendezvous of its own, no roll is called.

    Where joining cannot work, every rank raises one typed error before ``hvd.init()``.

    Raises:
        ClusterError: some rank did not come in time; it is named.
        HostNameError: the host of some rank cannot be connected.
    """
    store = store_of_this_run()
    if world.size == 1 or store is None:
        return
    called = call_roll(store, "sparkdl/horovod", world.rank, world.size, seconds, _refusal(world))
    if called.missing:
        raise ClusterError(never_came(world, called.missing, seconds))
    if called.refusals:
        rank, text = min(called.refusals.items())
        raise HostNameError(
            f"Horovod cannot run on the host of rank {rank}: {text}, and Horovod 0.28.1 binds its data connections to "
            "what the host name resolves to; correct /etc/hosts there, or choose backend='torch'"
        )


def _refusal(world: World) -> str:
    """Say why Horovod's data connections cannot work here, or nothing.

    ``HOROVOD_GLOO_IFACE`` reaches the connections that Horovod agrees over, and not those that it reduces over: these
    listen on the first address of the host name that can be bound, and it aborts the process where there is none.
    """
    name = socket.gethostname()
    try:
        resolved = [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError as error:
        return f"its name {name!r} does not resolve ({error})"
    usable = next((address for address in resolved if _binds(address)), None)
    if usable is None:
        return f"its name {name!r} resolves to {', '.join(resolved)}, which is no address of its own"
    interface = os.environ.get("HOROVOD_GLOO_IFACE", "")
    interface_addresses = [entry.address for entry in psutil.net_if_addrs().get(interface, [])]
    if world.num_nodes > 1 and interface and usable not in interface_addresses:
        return f"its name {name!r} resolves to {usable}, which is not on interface {interface!r}"
    return ""


def _binds(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def init_variables(world: World, timeout: timedelta) -> dict[str, str]:
    """What ``hvd.init()`` reads, from ``world``; what the launcher or the user set already stays."""
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in os.environ and world.size > 1:
        raise ConfigError(
            f"HOROVOD_GLOO_RENDEZVOUS_ADDR is not set, so {world.size} ranks cannot meet: start them with sparkdl.run"
        )
    seconds = max(1, int(timeout.total_seconds()))
    defaults = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        # Buckets arrive fused. What else Horovod joins depends on a clock, and with it how three ranks round a sum.
        "HOROVOD_DISABLE_GROUP_FUSION": "1",
        "HOROVOD_HOSTNAME": f"node{world.node_rank}",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, seconds // 2)),
    } | ({"HOROVOD_GLOO_IFACE": "lo"} if world.num_nodes == 1 else {})
    positions = {
        "HOROVOD_RANK": world.rank,
        "HOROVOD_SIZE": world.size,
        "HOROVOD_LOCAL_RANK": world.local_rank,
        "HOROVOD_LOCAL_SIZE": world.local_size,
        "HOROVOD_CROSS_RANK": world.node_rank,
        "HOROVOD_CROSS_SIZE": world.num_nodes,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": seconds,
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": seconds,
    }
    environment = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return environment | {name: str(value) for name, value in positions.items()}
