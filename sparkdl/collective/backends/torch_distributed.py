"""The collective over ``torch.distributed``: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from sparkdl.collective.backends.group import GroupCollective, never_came
from sparkdl.collective.base import Pending
from sparkdl.collective.rendezvous.torch_store import run_store
from sparkdl.compat.dtensor_caches import forget_meshes
from sparkdl.compat.environment import environment
from sparkdl.errors import ClusterError, ConfigError, UnreachableError, WorldSizeError, first_line
from sparkdl.world import World

# torch.distributed.nn.functional is imported before there is a group. Its functions have the default group of that
# moment as the default of an argument, for good, and an optimizer imports it, with torch._dynamo: the connections of a
# group that was there already would outlive it, and the other ranks would not learn that this one has left.

_TAG = 0x5D1  # of no message of a pipeline, which may be under way between the same ranks
_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class _Work:
    """An operation of torch.distributed under way."""

    def __init__(self, group: TorchCollective, work: Any) -> None:
        self._group = group
        self._work = work

    def wait(self) -> None:
        """Return once the result is in place."""
        with self._group.guard("waiting for the other ranks"):
            self._work.wait()


class TorchCollective(GroupCollective):
    """The ranks of one ``torch.distributed`` process group.

    A process group that user code made already is used as it is, and left standing.
    """

    def __init__(self, world: World, *, timeout: timedelta, may_share_memory: bool = False) -> None:
        super().__init__(world, timeout, may_share_memory=may_share_memory)
        self._channels: dict[str, Any] = {}
        self._owned = not dist.is_initialized()
        if self._owned:
            with self.guard("joining the other ranks"):
                _join(world, timeout)
        elif dist.get_world_size() != world.size or dist.get_rank() != world.rank:
            raise WorldSizeError(
                f"this is rank {world.rank} of {world.size}, but init_process_group made it rank {dist.get_rank()} of "
                f"{dist.get_world_size()}: call dist.destroy_process_group() first, or leave the group to sparkdl"
            )

    @property
    def name(self) -> str:
        """The backend's name."""
        return "torch"

    def start_all_reduce(self, flat: torch.Tensor, op: str, key: str, *, channel: str = "") -> Pending:
        """Begin to reduce ``flat`` in place."""
        with self.guard("starting a reduction"):
            return _Work(self, dist.all_reduce(flat, _OPS[op], group=self._channel(channel), async_op=True))

    def open_channel(self, channel: str) -> None:
        """Connect the ranks once more, so that operations of ``channel`` need no order among the others'.

        Every rank opens the same channels in the same order.
        """
        if channel not in self._channels:
            with self.guard("opening a channel"):
                self._channels[channel] = dist.new_group(timeout=self._timeout)

    def _channel(self, channel: str) -> Any:
        return self._channels[channel] if channel else None

    def broadcast_flat(self, flat: torch.Tensor, root: int) -> None:
        """Overwrite ``flat`` with that of ``root``."""
        if flat.numel():
            with self.guard("broadcasting"):
                dist.broadcast(flat, root)

    def gather_rows(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's rows."""
        with self.guard("gathering"):
            row_count = torch.tensor([rows.shape[0]], dtype=torch.int64, device=rows.device)
            counts = [torch.empty_like(row_count) for _ in range(self._world.size)]
            dist.all_gather(counts, row_count)
            sizes = [int(count.item()) for count in counts]
            longest = max(sizes)
            if longest == 0:
                return [rows.new_empty(rows.shape) for _ in sizes]
            padded = rows.new_zeros((longest, *rows.shape[1:]))
            padded[: rows.shape[0]] = rows
            parts = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(parts, padded)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def gather_equal(self, flat: torch.Tensor) -> torch.Tensor:
        """Return every rank's ``flat``."""
        parts = flat.new_empty((self._world.size, flat.numel()))
        with self.guard("gathering"):
            dist.all_gather(list(parts.unbind()), flat)
        return parts

    def sum_of_few(self, flat: torch.Tensor) -> torch.Tensor:
        """Add up by recursive doubling: partners at distances 1, 2, 4 and so on exchange the sums that they have.

        It takes a third to a half of gloo's own time and of a gather's (``bench_all_reduce.py``).
        """
        rank, size = self._world.rank, self._world.size
        if not flat.is_cpu or size & (size - 1):
            return super().sum_of_few(flat)
        distance = 1
        with self.guard("adding up"):
            while distance < size:
                received, partner = torch.empty_like(flat), rank ^ distance
                # What says that one can receive would wait behind what is sent on the same connection.
                pending = [dist.irecv(received, partner, tag=_TAG), dist.isend(flat, partner, tag=_TAG)]
                for work in pending:
                    work.wait()  # type: ignore[union-attr]
                flat = flat + received
                distance *= 2
        return flat

    def barrier(self) -> None:
        """Return once every rank has called it."""
        # A reduction of one number: dist.barrier() of gloo looks for dead peers rank by rank, and takes longer.
        self.start_all_reduce(torch.zeros(1, device=self._world.device), "sum", "barrier").wait()

    @contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """Turn torch's errors inside the block into ``UnreachableError``."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            if isinstance(error, ClusterError):
                raise
            raise UnreachableError(
                f"rank {self._world.rank} lost the other ranks while {doing} ({first_line(error)}): the rank that "
                "failed first says why"
            ) from error

    def leave(self, *, failed: bool) -> None:
        """Leave the group, unless user code made it."""
        self._channels.clear()
        forget_meshes()
        if not self._owned or not dist.is_initialized():
            return
        with suppress(Exception):
            if failed and self._world.device.startswith("cuda"):
                # NCCL kernels under way never end once a peer is gone; gloo's end by themselves.
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()


def _join(world: World, timeout: timedelta) -> None:
    """Make the default group of this process, at the store of its run or the one that its environment names."""
    store = run_store() or _store_of_environment(world, timeout)
    meeting = _next_round(store, world.rank, "sparkdl")
    meeting.set(f"here/{world.rank}", "1")
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or ("lo" if world.num_nodes == 1 else None)
    _forget_failed_groups()
    with environment({"GLOO_SOCKET_IFNAME": interface} if interface else {}):
        try:
            dist.init_process_group(
                backend="cpu:gloo,cuda:nccl" if world.device.startswith("cuda") else "gloo",
                store=meeting,
                rank=world.rank,
                world_size=world.size,
                timeout=timeout,
            )
        except RuntimeError as error:
            missing = [rank for rank in range(world.size) if not meeting.check([f"here/{rank}"])]
            if not missing:
                raise
            raise ClusterError(never_came(world, missing, timeout.total_seconds())) from error


def _store_of_environment(world: World, timeout: timedelta) -> Any:
    """Return torch's own store, which knows no secret, for ranks that another launcher started."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise ConfigError(
            f"MASTER_ADDR={host!r} and MASTER_PORT={port!r} do not say where {world.size} ranks meet: start them with "
            "sparkdl.run, or set both"
        )
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(host, int(port), is_master=not hosted and world.rank == 0, timeout=timeout, multi_tenant=not hosted)


def _next_round(store: Any, rank: int, scope: str) -> Any:
    """Return a clean part of ``store``, the same one for all ranks that have joined as often.

    A store that outlives a group keeps its keys, the addresses of connections long closed among them.
    """
    joined = store.add(f"{scope}/joined/{rank}", 1)
    return PrefixStore(f"{scope}/round/{joined}", store)


def _forget_failed_groups() -> None:
    """Number process groups from 0 again: an init that failed in this process would set it apart from fresh ones."""
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0


def use_run_store() -> None:
    """Have plain torch code in this process, ``init_process_group("gloo")``, meet at the store of its run.

    It may do so again after ``destroy_process_group()``: the store outlives a group, and torch would find the keys of
    the first group and connect to ports that nobody listens on. Outside of a run, nothing changes. Idempotent.
    """
    _forget_failed_groups()
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    meet = handlers["env"]
    if getattr(meet, "at_run_store", False):
        return

    def meet_at_run_store(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        store = run_store()
        if store is None:
            yield from meet(url, *args, **kwargs)
            return
        query = dict(parse_qsl(urlsplit(url).query))
        rank = int(query.get("rank", os.environ["RANK"]))
        size = int(query.get("world_size", os.environ["WORLD_SIZE"]))
        yield _next_round(store, rank, "plain"), rank, size

    meet_at_run_store.at_run_store = True  # type: ignore[attr-defined]
    handlers["env"] = meet_at_run_store


@contextmanager
def kept_groups() -> Iterator[None]:
    """Hold every process group that is made inside the block until its end, destroyed or not.

    A DistributedDataParallel that outlives ``destroy_process_group()`` is the last to hold its group. It then waits for
    the group's thread with the interpreter's lock in its hands, while that thread may want the lock to let go of its
    last all-reduce: the process freezes for good (torch 2.13, within a dozen short runs). A reference from Python is
    dropped without the lock.
    """
    module: Any = dist.distributed_c10d
    groups: list[Any] = []
    make = module._new_process_group_helper

    def make_and_keep(*args: Any, **kwargs: Any) -> Any:
        group = make(*args, **kwargs)
        groups.append(group)
        return group

    module._new_process_group_helper = make_and_keep
    try:
        yield
    finally:
        module._new_process_group_helper = make
