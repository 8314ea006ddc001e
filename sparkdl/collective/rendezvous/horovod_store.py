"""The rendezvous of Horovod's ranks, for whoever hosts one: neither Horovod nor torch is loaded for it.

Enters: an address. Leaves: the variables with which ``hvd.init()`` in a rank finds the others.
"""

from __future__ import annotations

from sparkdl.collective.rendezvous.http_store import HttpStore

__all__ = ["CYCLE_MS", "HorovodRendezvous"]

CYCLE_MS = 5.0
"""How often Horovod's thread looks for work, ms, where nobody chose: see ``HorovodCollective``."""


class HorovodRendezvous:
    """The key-value store where Horovod's ranks find each other, hosted by the driver on one interface."""

    def __init__(self) -> None:
        self._store: HttpStore | None = None

    def start(self, bind_host: str, world_size: int) -> dict[str, str]:
        """Listen on ``bind_host``; return the variables with which ``hvd.init()`` in a rank connects.

        Raises:
            ClusterError: the address cannot be bound.
        """
        self.stop()
        self._store = HttpStore(bind_host, backlog=4 * world_size + 16)
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": bind_host,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._store.port),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_CYCLE_TIME": str(CYCLE_MS),
        }

    def stop(self) -> None:
        """Stop listening. Idempotent."""
        if self._store is not None:
            self._store.close()
            self._store = None
