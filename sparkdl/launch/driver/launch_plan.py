"""The launch plan: the place of every rank and what it is to use, made of what each said of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sparkdl.config import LaunchConfig
from sparkdl.errors import WorldSizeError
from sparkdl.launch import addresses
from sparkdl.launch.driver import preflight
from sparkdl.launch.rank import resources
from sparkdl.observe import logger


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


def make_plan(
    registered: Sequence[Mapping[str, Any]], versions: Mapping[str, str], config: LaunchConfig
) -> dict[str, Any]:
    """Return the plan for the ranks that ``registered``, which are in the order of their slots.

    It is the same wherever it is computed.

    MASTER_ADDR and MASTER_PORT name a free port of rank 0, for programs that read them; nobody listens there, for
    ``init_process_group()`` is handed the authenticated store of the run.

    Args:
        registered: ``host``, ``facts``, ``gpus``, ``cores``, ``threads`` of every slot; of the first also ``address``
            and ``port``.
        versions: what the driver has installed.
        config: the launch settings.

    Raises:
        PreflightError: a worker has other versions than the driver.
        ClusterError: two ranks were given the same GPU.
    """
    preflight.check_versions(versions, [(rank_facts["host"], rank_facts["facts"]) for rank_facts in registered])
    threads = resources.threads_of(config.env.get("OMP_NUM_THREADS", "")) or config.cpus_per_rank
    for warning in preflight.crowded_hosts(registered, threads):
        logger.warning("%s", warning)
    hosts = [str(rank_facts["host"]) for rank_facts in registered]
    everybody = addresses.worlds(hosts)
    gpus: list[list[str]] = [[] if config.gpus_per_rank == 0 else list(rank_facts["gpus"]) for rank_facts in registered]
    by_rank = sorted(range(len(hosts)), key=lambda slot: everybody[slot].rank)
    return {
        "kind": "go",
        "worlds": [asdict(world) for world in everybody],
        "hosts": hosts,
        "gpus": gpus,
        "gpus_of_host": {
            host: resources.shared_order([gpus[slot] for slot in by_rank if hosts[slot] == host]) for host in set(hosts)
        },
        "variables": {"MASTER_ADDR": registered[0]["address"], "MASTER_PORT": str(registered[0]["port"])},
        "settings": {
            "env": dict(config.env),
            "interface": config.interface,
            "threads": threads,
            "log_kib_per_second": config.log_kib_per_second,
            "tell_streams_apart": config.tells_streams_apart,
        },
    }
