"""The collective over Horovod: gloo between CPUs, NCCL between GPUs where Horovod was built with it.

Enters: a world, and the address of the rendezvous that the driver hosts (``HorovodRendezvous``). Leaves: a
``Collective``. Where user code called ``hvd.init()`` already, that Horovod is used as it is, and left running.
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import psutil
import torch

from sparkdl import observe
from sparkdl.collective.backends.group import GroupCollective, Pending, never_came
from sparkdl.collective.rendezvous.horovod_store import CYCLE_MS, HorovodRendezvous
from sparkdl.collective.rendezvous.http_store import call_roll
from sparkdl.collective.rendezvous.route import interface_towards
from sparkdl.collective.tune import Tuner
from sparkdl.compat.environment import environment
from sparkdl.errors import ClusterError, ConfigError, WorldSizeError
from sparkdl.world import World

__all__ = ["HorovodCollective", "HorovodRendezvous", "HostNameError", "built_with", "is_installed"]

CYCLES_MS = (1.0, 2.5, 10.0)
RESTARTS_PAY_AFTER_SECONDS = 60.0

FUSION = "HOROVOD_FUSION_THRESHOLD"
"""Not set by us: buckets arrive fused already."""

_started = threading.Event()

POLL_SECONDS = 50e-6
CLOSE_SECONDS = 5.0


class HostNameError(ConfigError):
    """Horovod cannot connect the hosts of this run; every rank raises it."""


def is_installed() -> bool:
    """Whether ``horovod.torch`` can be imported here; imports it."""
    try:
        importlib.import_module("horovod.torch")
    except Exception:
        return False
    return True


def built_with() -> dict[str, bool]:
    """Which transports this Horovod was built with, by name.

    Raises:
        ConfigError: Horovod is not installed, or does not load beside this torch.
    """
    hvd = _hvd()
    return {"gloo": bool(hvd.gloo_built()), "nccl": bool(hvd.nccl_built()), "mpi": bool(hvd.mpi_built())}


def _hvd() -> Any:
    try:
        return importlib.import_module("horovod.torch")
    except Exception as error:
        raise ConfigError(
            f"backend='horovod' needs horovod.torch, which does not load ({type(error).__name__}: {error}): build it "
            "with docker/horovod/build_wheel.sh, or choose backend='torch'"
        ) from error


class _Handle:
    """An operation of Horovod under way."""

    def __init__(self, group: HorovodCollective, handle: int) -> None:
        self._group = group
        self._handle = handle

    def wait(self) -> Any:
        """Return the operation's result once it is there."""
        hvd = self._group.hvd
        deadline = time.monotonic() + self._group.timeout_seconds
        with self._group.guard("waiting for the other ranks"):
            # Horovod's own wait spins, takes the core from the thread that does the work, and has no end.
            while not hvd.poll(self._handle):
                time.sleep(POLL_SECONDS)
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no answer for {self._group.timeout_seconds:g} s")
            return hvd.synchronize(self._handle)


class _Bfloat16Sum:
    """A sum in bfloat16, of which Horovod's gloo has none: each rank sums one part in float32 and sends it back.

    As many bytes travel as in a ring, and every sum is rounded once.
    """

    def __init__(self, group: HorovodCollective, flat: torch.Tensor, key: str) -> None:
        self._group = group
        self._flat = flat
        self._key = key
        size = group.world.size
        self._part = -(-flat.numel() // size)
        padded = flat.new_zeros(self._part * size)
        padded[: flat.numel()] = flat
        with group.guard("starting a reduction"):
            # float16 stands for "two bytes": nothing is computed on the way.
            handle = group.hvd.alltoall_async(padded.view(torch.float16), name=f"{key}.to")
        self._parts = _Handle(group, handle)

    def wait(self) -> None:
        """Return once the sum is in place."""
        parts = self._parts.wait()
        received = parts[0] if isinstance(parts, tuple) else parts
        mine = received.view(torch.bfloat16).view(self._group.world.size, self._part).sum(0, dtype=torch.float32)
        with self._group.guard("starting a reduction"):
            handle = self._group.hvd.allgather_async(
                mine.to(torch.bfloat16).view(torch.float16), name=f"{self._key}.back"
            )
        summed = _Handle(self._group, handle).wait()
        self._flat.copy_(summed.view(torch.bfloat16)[: self._flat.numel()])


class HorovodCollective(GroupCollective):
    """The ranks of one Horovod.

    Horovod's own thread looks for work once a cycle, and asks all ranks each time: a short cycle answers soon and
    takes the cores from training, a long one delays the last bucket of every step. Step times, ms, at cycles of 1, 2.5,
    5 and 10 ms (2 ranks of 1 thread, 2 cores; where they share memory, the thread only stands by):
    over sockets: 40-64-1 2.4, 3.3, 5.1, 10.1; MLP of 1.3 M 46.7, 43.3, 42.3, 44.9; transformer 258, 248, 238, 240;
    in shared memory: 0.82, 0.78, 0.74, 0.73; 41.9, 33.4, 31.1, 31.3; 244, 241, 223, 218.
    So 5 ms, unless the user says otherwise or a long run over sockets measures another (``tuners``).
    """

    def __init__(self, world: World, *, timeout: timedelta, cycle_ms: float | None = None) -> None:
        super().__init__(world, timeout)
        self.hvd = _hvd()
        self._owned = not self.hvd.is_initialized()
        if world.device.startswith("cuda") and not self.hvd.nccl_built():
            raise ConfigError(
                f"device={world.device} needs a Horovod built with NCCL, and this one was built without: choose "
                "backend='torch', or build it with HOROVOD_GPU_OPERATIONS=NCCL"
            )
        if self._owned:
            self._init(cycle_ms)
        if self.hvd.size() != world.size or self.hvd.rank() != world.rank:
            found = f"rank {self.hvd.rank()} of {self.hvd.size()}"
            if self._owned:
                self.hvd.shutdown()
            raise WorldSizeError(
                f"this is rank {world.rank} of {world.size}, but Horovod says {found}: call hvd.shutdown() first, or "
                "leave hvd.init() to sparkdl"
            )

    @property
    def name(self) -> str:
        """The backend's name."""
        return "horovod"

    def tuners(self) -> list[Tuner]:
        """Try other cycle times, each of which takes a restart, once a training is long enough to earn that back."""
        chosen = float(os.environ.get("HOROVOD_CYCLE_TIME", CYCLE_MS)) != CYCLE_MS
        if chosen or not self._owned or FUSION in os.environ:
            return []
        candidates = [CYCLE_MS, *CYCLES_MS]
        rest = RESTARTS_PAY_AFTER_SECONDS
        return [Tuner(self, "Horovod's cycle time, ms", candidates, self._restart, rest_seconds=rest)]

    def _restart(self, cycle_ms: float) -> None:
        """Restart Horovod with another cycle time; every rank calls it, with nothing under way."""
        self.barrier()
        self.hvd.shutdown()
        self._init(cycle_ms)

    def _init(self, cycle_ms: float | None) -> None:
        variables: dict[str, str | None] = {**_variables(self._world, self._timeout)}
        if cycle_ms is not None:
            variables["HOROVOD_CYCLE_TIME"] = str(cycle_ms)
        if _started.is_set() and FUSION in os.environ:
            # With both of its knobs fixed, Horovod 0.28.1 dies of a segmentation fault the second time it starts.
            observe.logger.warning("%s=%s is left out: Horovod starts again here", FUSION, os.environ[FUSION])
            variables[FUSION] = None
        _started.set()
        _await_everyone(self._world, self.timeout_seconds)
        with environment(variables):
            try:
                self.hvd.init()
            except (ValueError, RuntimeError) as error:
                raise ClusterError(
                    f"rank {self._world.rank} of {self._world.size} could not join the others within "
                    f"{self._timeout.total_seconds():.0f} s ({error}): see which rank did not start, or raise timeout"
                ) from error

    def start_all_reduce(self, flat: torch.Tensor, op: str, key: str, *, channel: str = "") -> Pending:
        """Begin to reduce ``flat`` in place."""
        hvd = self.hvd
        key = f"sparkdl.{channel}.{key}"
        if flat.dtype == torch.bfloat16 and flat.device.type == "cpu":
            return _Bfloat16Sum(self, flat, key)
        kind = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}[op]
        with self.guard("starting a reduction"):
            # Horovod keeps what it agreed on once under a name; a name stands for one shape and one operation.
            name = f"{key}.{op}.{flat.dtype}.{flat.numel()}"
            return _Handle(self, hvd.allreduce_async_(flat, name=name, op=kind))

    def open_channel(self, channel: str) -> None:
        """Nothing to do: Horovod orders operations by their names."""

    def broadcast_flat(self, flat: torch.Tensor, root: int) -> None:
        """Overwrite ``flat`` with that of ``root``."""
        if flat.numel():
            with self.guard("broadcasting"):
                handle = self.hvd.broadcast_async_(flat, root, name="sparkdl.broadcast")
            _Handle(self, handle).wait()

    def gather_rows(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's rows."""
        hvd = self.hvd
        mine = torch.tensor([rows.shape[0]], dtype=torch.int64)
        with self.guard("gathering"):
            counts = _Handle(self, hvd.allgather_async(mine, name="sparkdl.counts")).wait().tolist()
            shape = rows.shape[1:]
            if sum(counts) == 0 or shape.numel() == 0:
                return [rows.new_empty((count, *shape)) for count in counts]
            flat = rows.contiguous().view(-1).view(torch.uint8)
            gathered = _Handle(self, hvd.allgather_async(flat, name="sparkdl.rows")).wait()
        width = shape.numel() * rows.element_size()
        parts = gathered.split([count * width for count in counts])
        return [part.clone().view(rows.dtype).view(-1, *shape) for part in parts]

    def gather_equal(self, flat: torch.Tensor) -> torch.Tensor:
        """Return every rank's ``flat``."""
        with self.guard("gathering"):
            handle = self.hvd.allgather_async(flat, name=f"sparkdl.equal.{flat.dtype}.{flat.numel()}")
        gathered: torch.Tensor = _Handle(self, handle).wait()
        return gathered.view(self._world.size, -1)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.start_all_reduce(torch.zeros(1), "sum", "barrier").wait()

    @contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """Turn Horovod's errors inside the block into ``ClusterError``."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, ClusterError):
                raise
            text = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ClusterError(
                f"rank {self._world.rank} lost the other ranks while {doing} ({text}): the rank that failed first "
                "says why"
            ) from error

    def leave(self, *, failed: bool) -> None:
        """Leave the group, unless user code made it."""
        if not self._owned or not self.hvd.is_initialized():
            return
        if not failed:
            with suppress(Exception):
                self.hvd.shutdown()
            return
        # After a failure the thread that shuts down may wait for a peer that answers no more.
        worker = threading.Thread(target=self.hvd.shutdown, name="sparkdl-horovod-shutdown", daemon=True)
        worker.start()
        worker.join(CLOSE_SECONDS)


def _await_everyone(world: World, seconds: float) -> None:
    """Return once every rank has come to the rendezvous.

    ``hvd.init()`` aborts the whole process when another rank does not come, so it is called when all are there.

    Raises:
        ClusterError: some rank did not come in time; it is named.
    """
    address, port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    if world.size == 1 or address is None or port is None:
        return
    try:
        called = call_roll(address, int(port), world.rank, world.size, seconds, _objection(world, address))
    except OSError as error:
        raise ClusterError(
            f"rank {world.rank} does not reach the rendezvous at {address}:{port} ({error}): check that the driver is "
            "alive, and that its address is reachable from this host"
        ) from error
    if called.missing:
        raise ClusterError(never_came(world, called.missing, seconds))
    if called.objections:
        rank, text = min(called.objections.items())
        raise HostNameError(
            f"Horovod cannot run on the host of rank {rank}: {text}, and Horovod 0.28.1 binds its data connections to "
            "what the host name resolves to; correct /etc/hosts there, or choose backend='torch'"
        )


def _objection(world: World, address: str) -> str:
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
    interface = os.environ.get("HOROVOD_GLOO_IFACE") or interface_towards(address)
    own = [entry.address for entry in psutil.net_if_addrs().get(interface or "", [])]
    if world.num_nodes > 1 and usable not in own:
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


def _variables(world: World, timeout: timedelta) -> dict[str, str]:
    """What ``hvd.init()`` reads, from ``world``; what the launcher or the user set already stays."""
    address = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if address is None and world.size > 1:
        raise ConfigError(
            f"HOROVOD_GLOO_RENDEZVOUS_ADDR is not set, so {world.size} ranks cannot meet: start them with sparkdl.run"
        )
    seconds = max(1, int(timeout.total_seconds()))
    interface = interface_towards(address) if address else None
    defaults = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_CYCLE_TIME": str(CYCLE_MS),
        # Buckets arrive fused. What else Horovod joins depends on a clock, and with it how three ranks round a sum.
        "HOROVOD_DISABLE_GROUP_FUSION": "1",
        "HOROVOD_HOSTNAME": f"node{world.node_rank}",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, seconds // 2)),
    } | ({"HOROVOD_GLOO_IFACE": interface} if interface else {})
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
    kept = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return kept | {name: str(value) for name, value in positions.items()}
