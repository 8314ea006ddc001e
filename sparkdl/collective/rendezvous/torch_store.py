"""The store where torch's ranks find each other: up before any rank connects, on one interface.

Enters: an address, or a socket that listens already. Leaves: the variables with which ranks, and plain torch code in
them, connect. Kept apart from the collective, so that whoever hosts a store loads no more than that takes.
"""

from __future__ import annotations

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from sparkdl.errors import ClusterError

__all__ = ["TorchRendezvous"]


class TorchRendezvous:
    """One ``TCPStore`` in this process, on a socket that is bound before its port is told to anybody."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None

    def start(self, bind_host: str, world_size: int) -> dict[str, str]:
        """Listen on ``bind_host`` and no other interface; return the variables with which ranks connect.

        Raises:
            ClusterError: the address cannot be bound.
        """
        try:
            family = socket.getaddrinfo(bind_host, 0, type=socket.SOCK_STREAM)[0][0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.bind((bind_host, 0))
            listener.listen(4 * world_size + 16)
        except OSError as error:
            raise ClusterError(
                f"no store can listen on {bind_host} ({error}): name an address of this host's own interfaces"
            ) from error
        port = listener.getsockname()[1]
        self.adopt(listener)
        return {"MASTER_ADDR": bind_host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def adopt(self, listener: socket.socket) -> None:
        """Serve on ``listener``, which is owned from now on; connections that wait there already are served too."""
        self.stop()
        host, port = listener.getsockname()[:2]
        self._store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())

    def stop(self) -> None:
        """Stop listening. Idempotent."""
        self._store = None
