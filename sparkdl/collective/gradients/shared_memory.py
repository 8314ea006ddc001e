"""Gradients of ranks that share a host and compute on its CPUs: averaged in shared memory, without a network."""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from sparkdl.collective.base import Ranks
from sparkdl.collective.gradients.buckets import Bucket
from sparkdl.errors import UnreachableError

LINE_ELEMENTS = 32  # parts start on a cache line of their own, for any dtype of two bytes or more
SPIN_SECONDS = 200e-6


def open_shared_memory(ranks: Ranks) -> SharedMemoryCarrier | str:
    """Connect the ranks of this host; where they cannot share memory, say why, on every rank alike.

    The memory is a memfd, which has no name and leaves nothing behind when a rank is killed. It travels, like the
    signals of the ranks, over Unix sockets between them, so that a rank which dies is noticed at once.
    """
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
    return SharedMemoryCarrier(mesh, ranks.name)


class SharedMemoryCarrier:
    """Every rank writes its gradients into a slot of its own, and sums one part of all slots into that of rank 0.

    What copies and adds here is what computes there, so that nothing is sent while a backward pass goes on.

    Through the loopback device the kernel would copy every gradient four times, and take the cores from training while
    it does. For 5 MiB of gradients and 2 ranks on 2 cores a step of 31 ms over shared memory took 42 over Horovod's
    sockets, one of 0.74 ms (2,700 parameters) took 5 (``HorovodCollective`` has the table). What an exchange of two
    ranks that meets once instead of twice gained, 1-3 % of a step, did not earn its lines.
    """

    overlaps = False

    def __init__(self, mesh: Mesh, backend: str) -> None:
        self.name = f"{backend}, gradients in shared memory"
        self._mesh = mesh
        self._slots: WeakKeyDictionary[Bucket, list[torch.Tensor]] = WeakKeyDictionary()
        self._owed = False  # the others have not all said yet that they copied the last step's means

    def place(self, buckets: Sequence[Bucket]) -> None:
        """Collect the gradients of ``buckets`` in memory that all ranks see."""
        self._await_copies()
        sizes = [-(-bucket.flat.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE for bucket in buckets]
        slot = sum(sizes)
        if not slot:
            return
        memory = torch.frombuffer(self._mesh.share(slot * self._mesh.size), dtype=torch.uint8)
        offset = 0
        for bucket, size in zip(buckets, sizes, strict=True):
            starts = [rank * slot + offset for rank in range(self._mesh.size)]
            parts = [memory[start : start + bucket.flat.nbytes] for start in starts]
            self._slots[bucket] = [part.view(bucket.flat.dtype) for part in parts]
            bucket.place(self._slots[bucket][self._mesh.rank])
            offset += size

    def send(self, bucket: Bucket, key: str) -> None:
        """Write the gradients where the others read them, once they have copied the means of the last step."""
        self._await_copies()
        bucket.fill()

    def receive(self, buckets: Sequence[Bucket], weight: float = 1.0) -> None:
        """Sum this rank's part of every bucket, and copy the means."""
        mesh = self._mesh
        self._await_copies()
        mesh.meet()
        for bucket in buckets:
            slots = self._slots[bucket]
            part = _part(bucket.flat.numel(), mesh.rank, mesh.size)
            # In the order of the ranks, whoever sums: the layout of the buckets does not change how sums are rounded.
            total = slots[0][part]
            for slot in slots[1:]:
                total += slot[part]
            total /= mesh.size
        mesh.meet()
        for bucket in buckets:
            bucket.flat.copy_(self._slots[bucket][0])
        with suppress(UnreachableError):
            # Nobody waits for this one: a rank that is through with its last step may have hung up by now.
            mesh.signal()
        self._owed = True

    def _await_copies(self) -> None:
        if self._owed:
            self._owed = False
            self._mesh.await_signals()

    def rank_state(self, params: Sequence[torch.nn.Parameter]) -> dict[str, Any]:
        """Return nothing: all is sent."""
        return {}

    def load_rank_state(self, state: Mapping[str, Any], params: Sequence[torch.nn.Parameter]) -> None:
        """Take nothing over."""

    def close(self) -> None:
        """Unmap everything and hang up."""
        self._slots.clear()
        self._mesh.close()


def _part(elements: int, rank: int, size: int) -> slice:
    part_elements = -(-elements // (size * LINE_ELEMENTS)) * LINE_ELEMENTS
    return slice(min(elements, rank * part_elements), min(elements, (rank + 1) * part_elements))


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
            UnreachableError: a rank has ended, or did not signal within the timeout.
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

    def _lost(self, rank: int, why: str) -> UnreachableError:
        return UnreachableError(
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
