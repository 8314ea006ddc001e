"""Which network interface leads to a peer: the one that ranks bind to, never all of them.

Enters: a peer's address. Leaves: the name of the interface whose address this host uses towards it.
"""

from __future__ import annotations

import socket

import psutil

__all__ = ["interface_towards"]


def interface_towards(host: str) -> str | None:
    """Return the name of the interface that the route to ``host`` leaves by; None where it cannot be told.

    Nothing is sent: connecting a datagram socket only asks the kernel for the route.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == own for entry in addresses):
            return str(name)
    return "lo" if own.startswith("127.") else None
