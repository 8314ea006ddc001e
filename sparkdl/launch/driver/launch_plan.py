"""The order to start: from what every rank said of itself to where each stands and what it is to use.

Enters: one introduction per slot. Leaves: one JSON-able order for all of them, the same wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sparkdl.config import LaunchConfig
from sparkdl.errors import WorldSizeError
from sparkdl.launch import rendezvous
from sparkdl.launch.driver import preflight
from sparkdl.launch.rank import resources
from sparkdl.observe import logger

__all__ = ["check_size", "make_order"]


def check_size(slot: int, found_size: int, num_proc: int) -> None:
    """Refuse a stage of another size than was asked for.

    Raises:
        WorldSizeError: ``found_size`` is not ``num_proc``, or ``slot`` lies beyond it.
    """
    if found_size != num_proc or not 0 <= slot < num_proc:
        raise WorldSizeError(
            f"slot {slot} sees {found_size} ranks, but num_proc={num_proc} were asked for: the stage was given "
            f"another number of partitions"
        )


def make_order(
    hellos: Sequence[Mapping[str, Any]],
    versions: Mapping[str, str],
    variables: Mapping[str, str],
    config: LaunchConfig,
) -> dict[str, Any]:
    """Return the order for the ranks that introduced themselves by ``hellos``, in the order of their slots.

    Args:
        hellos: ``host``, ``facts``, ``gpus``, ``cores``, ``threads`` of every slot.
        versions: what the driver has installed.
        variables: what the services want in the ranks' environment.
        config: the launch settings.

    Raises:
        PreflightError: a worker has other versions than the driver.
        ClusterError: two ranks were given the same GPU.
    """
    preflight.check_versions(versions, [(hello["host"], hello["facts"]) for hello in hellos])
    told = config.env.get("OMP_NUM_THREADS", "")
    threads = int(told) if told.isdigit() else config.cpus_per_rank
    for warning in preflight.crowded_hosts(hellos, threads):
        logger.warning("%s", warning)
    hosts = [str(hello["host"]) for hello in hellos]
    everybody = rendezvous.worlds(hosts)
    gpus: list[list[str]] = [[] if config.gpus_per_rank == 0 else list(hello["gpus"]) for hello in hellos]
    by_rank = sorted(range(len(hosts)), key=lambda slot: everybody[slot].rank)
    return {
        "kind": "go",
        "worlds": [asdict(world) for world in everybody],
        "hosts": hosts,
        "gpus": gpus,
        "gpus_of_host": {
            host: resources.shared_order([gpus[slot] for slot in by_rank if hosts[slot] == host]) for host in set(hosts)
        },
        "variables": dict(variables),
        "settings": {
            "env": dict(config.env),
            "interface": config.interface,
            "threads": threads,
            "log_kib_per_second": config.log_kib_per_second,
        },
    }
