"""Ranks of one host that reach each other without a network: sockets between them, and memory that all of them map.

Enters: the ranks of a run. Leaves: a ``Mesh`` of them, where all are on this host and compute on its CPUs.

The memory is a memfd, which has no name and leaves nothing behind when a rank is killed. It travels, like the signals
of the ranks, over Unix sockets between them, so that a rank which dies is noticed at once.
"""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from sparkdl.collective.base import Ranks
from sparkdl.errors import ClusterError

__all__ = ["Mesh", "open_mesh"]

SPIN_SECONDS = 200e-6


def open_mesh(ranks: Ranks) -> Mesh | str:
    """Connect the ranks of this host; where they cannot share memory, say why, on every rank alike."""
    world = ranks.world
    usable = world.local_size == world.size and world.device == "cpu" and sys.platform == "linux"
    folder = ranks.broadcast_object(tempfile.mkdtemp(prefix="sparkdl-") if usable and world.rank == 0 else None)
    reason = "" if usable and folder else "ranks are on several hosts, or not on CPUs"
    listener: socket.socket | None = None
    try:
        if not reason:
            try:
                # Ranks in containers of their own may have the same host name, and no folder in common.
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                listener.bind(str(Path(folder, str(world.rank))))
                listener.listen(world.size)
            except OSError as error:
                reason = f"rank {world.rank}: {error}"
        reasons = [text for text in ranks.all_gather_object(reason) if text]
        if reasons or listener is None:
            return str(reasons[0])
        mesh = Mesh(world.rank, world.size, listener, Path(folder), ranks.timeout_seconds)
        ranks.barrier()
    finally:
        if listener is not None:
            listener.close()
        if world.rank == 0 and folder:
            shutil.rmtree(folder, ignore_errors=True)
    return mesh


class Mesh:
    """A socket to every other rank of this host."""

    def __init__(self, rank: int, size: int, listener: socket.socket, folder: Path, timeout_seconds: float) -> None:
        self.rank = rank
        self.size = size
        self._timeout = timeout_seconds
        self._peers: dict[int, socket.socket] = {}
        listener.settimeout(timeout_seconds)
        for lower in range(rank):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peer.settimeout(timeout_seconds)
            peer.connect(str(folder / str(lower)))
            peer.sendall(rank.to_bytes(4, "little"))
            self._peers[lower] = peer
        for _ in range(rank + 1, size):
            peer, _ = listener.accept()
            peer.settimeout(timeout_seconds)
            self._peers[int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "little")] = peer

    def signal(self) -> None:
        """Tell every other rank that this one has come here."""
        for rank, peer in self._peers.items():
            try:
                peer.sendall(b"!")
            except OSError as error:
                raise self._lost(rank, str(error)) from error

    def await_signals(self) -> None:
        """Return once every other rank has signalled once more.

        Looks for a while before it sleeps: a core that sleeps takes longer to wake than most waits last.

        Raises:
            ClusterError: a rank has ended, or did not signal within the timeout.
        """
        for rank, peer in self._peers.items():
            try:
                byte = _look(peer) or peer.recv(1)
            except TimeoutError as error:
                raise self._lost(rank, f"no sign of life for {self._timeout:.0f} s") from error
            except OSError as error:
                raise self._lost(rank, str(error)) from error
            if not byte:
                raise self._lost(rank, "its process has ended, or has left the group")

    def meet(self) -> None:
        """Return once every rank has come here."""
        self.signal()
        self.await_signals()

    def share(self, size: int) -> mmap.mmap:
        """Return ``size`` bytes of zeros that all ranks map."""
        if self.rank == 0:
            descriptor = os.memfd_create("sparkdl-gradients", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
            for peer in self._peers.values():
                socket.send_fds(peer, [b"m"], [descriptor])
        else:
            _, descriptors, _, _ = socket.recv_fds(self._peers[0], 1, 1)
            if not descriptors:
                raise self._lost(0, "it sent no memory")
            descriptor = descriptors[0]
        memory = mmap.mmap(descriptor, size)
        os.close(descriptor)
        return memory

    def close(self) -> None:
        """Hang up."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _lost(self, rank: int, why: str) -> ClusterError:
        return ClusterError(
            f"rank {self.rank} lost rank {rank} while they exchanged gradients ({why}): the rank that failed first "
            "says why"
        )


def _look(peer: socket.socket) -> bytes:
    """Return a byte that arrives soon, or none."""
    descriptor = peer.fileno()  # of a socket with a timeout, which never blocks by itself
    until = time.perf_counter() + SPIN_SECONDS
    while time.perf_counter() < until:
        with suppress(BlockingIOError):
            return os.read(descriptor, 1)
    return b""
