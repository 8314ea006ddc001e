"""The collective over Horovod: gloo between CPUs, NCCL between GPUs where Horovod was built with it."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

from sparkdl import observe
from sparkdl.collective.backends.group import GroupCollective
from sparkdl.collective.backends.horovod_join import await_everyone, init_variables
from sparkdl.collective.base import Pending, as_bytes
from sparkdl.collective.rendezvous.horovod_store import CYCLE_MS
from sparkdl.compat.environment import environment
from sparkdl.errors import ClusterError, ConfigError, UnreachableError, WorldSizeError, first_line
from sparkdl.world import World

SHORT_CYCLE_MS = 1.0
SMALL_GRADIENT_BYTES = 2**20

FUSION = "HOROVOD_FUSION_THRESHOLD"
"""Horovod's own setting, not set by us: buckets arrive fused already."""

_started = threading.Event()

POLL_SECONDS = 50e-6
CLOSE_SECONDS = 5.0


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
        part_sum = received.view(torch.bfloat16).view(self._group.world.size, self._part).sum(0, dtype=torch.float32)
        with self._group.guard("starting a reduction"):
            handle = self._group.hvd.allgather_async(
                part_sum.to(torch.bfloat16).view(torch.float16), name=f"{self._key}.back"
            )
        summed = _Handle(self._group, handle).wait()
        self._flat.copy_(summed.view(torch.bfloat16)[: self._flat.numel()])


def cycle_ms(gradient_bytes: int | None) -> float:
    """How often Horovod's thread looks for work, ms.

    Each time it asks all ranks. A short cycle answers soon and takes the cores from training, a long one delays the
    last bucket of every step. Step times, ms, at cycles of 1, 2.5, 5 and 10 ms, 2 ranks of 1 thread on 2 cores
    (``tests/bench/bench_collective.py`` with ``HOROVOD_CYCLE_TIME`` set):

    | gradients | ms |
    |---|---|
    | 0.01 MB (40-64-1) | 2.4, 3.3, 5.1, 10.1 |
    | 5 MB (MLP) | 46.7, 43.3, 42.3, 44.9 |
    | 17 MB (transformer) | 258, 248, 238, 240 |

    So 5 ms, and 1 ms where so little travels that a step waits for little else. It follows no number of ranks: more of
    them answer the same question in the same cycle.

    Args:
        gradient_bytes: what a step sends; None where that is not known.
    """
    small = gradient_bytes is not None and gradient_bytes < SMALL_GRADIENT_BYTES
    return SHORT_CYCLE_MS if small else CYCLE_MS


class HorovodCollective(GroupCollective):
    """The ranks of one Horovod.

    Where user code called ``hvd.init()`` already, that Horovod is used as it is, and left running.

    Args:
        world: where this rank stands.
        timeout: how long to wait for the other ranks.
        may_share_memory: whether gradients may go round Horovod where ``SyncConfig`` does not say.
        gradient_bytes: what a step will send, where that is known: it decides Horovod's cycle time.
    """

    def __init__(
        self,
        world: World,
        *,
        timeout: timedelta,
        may_share_memory: bool = False,
        gradient_bytes: int | None = None,
    ) -> None:
        super().__init__(world, timeout, may_share_memory=may_share_memory)
        self.hvd = _hvd()
        self._owned = not self.hvd.is_initialized()
        if world.device.startswith("cuda") and not self.hvd.nccl_built():
            raise ConfigError(
                f"device={world.device} needs a Horovod built with NCCL, and this one was built without: choose "
                "backend='torch', or build it with HOROVOD_GPU_OPERATIONS=NCCL"
            )
        if self._owned:
            self._init(gradient_bytes)
        if self.hvd.size() != world.size or self.hvd.rank() != world.rank:
            horovod_position = f"rank {self.hvd.rank()} of {self.hvd.size()}"
            if self._owned:
                self.hvd.shutdown()
            raise WorldSizeError(
                f"this is rank {world.rank} of {world.size}, but Horovod says {horovod_position}: call hvd.shutdown() "
                "first, or leave hvd.init() to sparkdl"
            )

    @property
    def name(self) -> str:
        """The backend's name."""
        return "horovod"

    def _init(self, gradient_bytes: int | None) -> None:
        variables: dict[str, str | None] = {**init_variables(self._world, self._timeout)}
        cycle_time = os.environ.get("HOROVOD_CYCLE_TIME", str(CYCLE_MS))
        if cycle_time == "(None,)" or float(cycle_time) == CYCLE_MS:  # horovod.run's, or ours, where nobody chose
            cycle_time = str(cycle_ms(gradient_bytes))
        variables["HOROVOD_CYCLE_TIME"] = cycle_time
        if _started.is_set() and FUSION in os.environ:
            # With both of its knobs fixed, Horovod 0.28.1 dies of a segmentation fault the second time it starts.
            observe.logger.warning("%s=%s is left out: Horovod starts again here", FUSION, os.environ[FUSION])
            variables[FUSION] = None
        _started.set()
        await_everyone(self._world, self.timeout_seconds)
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
        row_count = torch.tensor([rows.shape[0]], dtype=torch.int64)
        with self.guard("gathering"):
            counts = _Handle(self, hvd.allgather_async(row_count, name="sparkdl.counts")).wait().tolist()
            shape = rows.shape[1:]
            if sum(counts) == 0 or shape.numel() == 0:
                return [rows.new_empty((count, *shape)) for count in counts]
            flat = as_bytes(rows)
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
        """Turn Horovod's errors inside the block into ``UnreachableError``."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, ClusterError):
                raise
            raise UnreachableError(
                f"rank {self._world.rank} lost the other ranks while {doing} ({first_line(error)}): the rank "
                "that failed first says why"
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
