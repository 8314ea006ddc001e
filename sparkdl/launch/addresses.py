"""The hosts, addresses and interfaces by which ranks find each other."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

import psutil

from sparkdl.errors import ClusterError, ConfigError
from sparkdl.world import World


def worlds(hosts: Sequence[str], devices: Sequence[str] | None = None) -> list[World]:
    """Number the slots of a job: ``worlds(hosts)[slot]`` is the world of the slot that runs on ``hosts[slot]``.

    Ranks of one host are neighbours, as torchrun and Horovod have it, hosts in the order of their first slot.
    """
    names = list(dict.fromkeys(hosts))
    members = {name: [slot for slot, host in enumerate(hosts) if host == name] for name in names}
    order = [slot for name in names for slot in members[name]]
    return [
        World(
            rank=order.index(slot),
            size=len(hosts),
            local_rank=members[host].index(slot),
            local_size=len(members[host]),
            node_rank=names.index(host),
            num_nodes=len(names),
            device=devices[slot] if devices else "cpu",
        )
        for slot, host in enumerate(hosts)
    ]


def variables(world: World, everybody: Sequence[World], host: str) -> dict[str, str]:
    """Return the variables of ``world`` that torchrun's and Horovod's own launchers would set.

    Horovod's cross communicator joins the ranks with the same local rank on all hosts that have one.
    """
    cross = sorted(peer.node_rank for peer in everybody if peer.local_rank == world.local_rank)
    plain = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "GROUP_RANK": world.node_rank,
        "GROUP_WORLD_SIZE": world.num_nodes,
        "SPARKDL_DEVICE": world.device,
        "HOROVOD_RANK": world.rank,
        "HOROVOD_SIZE": world.size,
        "HOROVOD_LOCAL_RANK": world.local_rank,
        "HOROVOD_LOCAL_SIZE": world.local_size,
        "HOROVOD_CROSS_RANK": cross.index(world.node_rank),
        "HOROVOD_CROSS_SIZE": len(cross),
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    return {name: str(value) for name, value in plain.items()}


def address_of(host: str) -> str:
    """Resolve ``host`` to one IP address.

    Raises:
        ClusterError: the name is not known here.
    """
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ClusterError(
            f"host {host!r} cannot be resolved ({error}): set driver_host, or spark.driver.host, to an address "
            f"that every executor reaches"
        ) from error


def own_address_to(host: str) -> str:
    """Return the local address from which packets to ``host`` leave, by the routing table; nothing is sent."""
    address = address_of(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise ClusterError(f"there is no route from here to {host}: check the network of this host") from error
        return str(probe.getsockname()[0])


def interface_to(host: str) -> str:
    """Return the name of the network interface whose address packets to ``host`` carry (``"lo"`` for 127.0.0.1)."""
    address = own_address_to(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in addresses):
            return name
    raise ClusterError(f"no network interface has the address {address}: name one with LaunchConfig(interface=...)")


def meeting_address(here: str, peers: Sequence[str], interface: str | None) -> str:
    """Return the address of this host, which its peers know as ``here``, at which they are to meet.

    It lies on ``interface`` if one is named, on the route to the first other host of ``peers`` if there is one, and on
    the loopback interface otherwise. Not what the host's own name leads to: that is 127.0.1.1 on many.

    Raises:
        ConfigError: this host has no such interface, or the interface has no address.
        ClusterError: there is no route.
    """
    if interface is None:
        away = next((host for host in peers if host != here), None)
        return "127.0.0.1" if away is None else own_address_to(away)
    _check_interface(interface)
    address_by_family = {entry.family: entry.address for entry in reversed(psutil.net_if_addrs()[interface])}
    address = address_by_family.get(socket.AF_INET) or address_by_family.get(socket.AF_INET6)
    if address is None:
        raise ConfigError(f"interface={interface!r} has no IP address here: name one that has")
    return address.partition("%")[0]


def free_port(address: str) -> int:
    """Return a port of ``address`` that nobody listens on now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _check_interface(name: str) -> None:
    if name not in psutil.net_if_addrs():
        have = ", ".join(sorted(psutil.net_if_addrs()))
        raise ConfigError(f"interface={name!r} is not one of this host's ({have}): name one of these")


def interface_variables(name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Bind gloo, NCCL and Horovod to interface ``name``, where the user has not bound them already.

    Raises:
        ConfigError: this host has no such interface.
    """
    _check_interface(name)
    variable_names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
    return {variable: name for variable in variable_names if not environment.get(variable)}
