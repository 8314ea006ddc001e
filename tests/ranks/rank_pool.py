"""Real ranks for tests: processes that live as long as the test run, and are replaced if they die."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
from run_store import at_store, held_store

from sparkdl.compat.pickles import dumps
from sparkdl.world import World

WORKER = Path(__file__).with_name("rank_worker.py")


def services(backend):
    if backend in ("solo", "torch"):
        return []
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    from sparkdl.collective.rendezvous.horovod_store import horovod_rendezvous

    return [horovod_rendezvous]


SECONDS_WITHOUT_A_RANK = 10.0
"""How long the others may take that wait for each other once a rank has died."""


class Died(Exception):
    """The rank's process ended without an answer."""


def environment_of_ranks():
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}


class Nursery:
    """The process that ranks are forked from, see ``rank_worker.py``."""

    def __init__(self):
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, str(WORKER), str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=environment_of_ranks(), pass_fds=(theirs.fileno(),)
        )
        theirs.close()

    def fork(self, *pipes):
        """Start a rank with these two pipes; return the number of its process."""
        socket.send_fds(self._socket, [pickle.dumps(dict(environment_of_ranks()))], pipes)
        return struct.unpack("<q", self._socket.recv(8, socket.MSG_WAITALL))[0]

    def end(self):
        self._socket.close()
        self._process.wait()


class RankProcess:
    def __init__(self, nursery):
        self._answers, write = os.pipe()
        read, jobs = os.pipe()
        self._process = os.pidfd_open(nursery.fork(read, write))
        os.close(read)
        os.close(write)
        self._jobs = os.fdopen(jobs, "wb")

    def send(self, job, environment):
        blob = dumps((job, environment))
        self._jobs.write(struct.pack("<q", len(blob)) + blob)
        self._jobs.flush()

    def fileno(self):
        """What can be read once there is an answer, or the process has ended."""
        return self._answers

    def receive(self, deadline):
        size = struct.unpack("<q", self._read(8, deadline))[0]
        return cloudpickle.loads(self._read(size, deadline))

    def _read(self, size, deadline):
        data = b""
        while len(data) < size:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("a rank did not answer in time")
            part = os.read(self._answers, size - len(data))
            if not part:
                raise Died
            data += part
        return data

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def leave(self):
        with contextlib.suppress(BrokenPipeError):
            self._jobs.close()

    def end(self):
        self.leave()
        if not self.ended(1):
            self.kill()
            assert self.ended(60)
        os.close(self._answers)
        os.close(self._process)

    def ended(self, seconds=0):
        return bool(select.select([self._process], [], [], seconds)[0])


class Ranks:
    """Runs a function in several ranks at once."""

    def __init__(self):
        self.processes: list[RankProcess] = []
        self._nursery = None

    def _new(self):
        self._nursery = self._nursery or Nursery()
        return RankProcess(self._nursery)

    def run(self, job, size, environment=None, *, seconds=60.0, seconds_without_a_rank=None):
        """Run ``job(world)`` in ``size`` ranks; return their values, an exception standing for itself.

        Args:
            job: picklable; also what is called with the world.
            size: how many ranks.
            environment: variables that all ranks have meanwhile.
            seconds: how long they may take.
            seconds_without_a_rank: how long the others may take once one has died; None is as long as before.
        """
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        module = sys.modules[getattr(job, "func", job).__module__]
        if not module.__name__.startswith("sparkdl"):
            cloudpickle.register_pickle_by_value(module)
        self._replace([process for process in self.processes if process.ended()])
        while len(self.processes) < size:
            self.processes.append(self._new())
        processes = self.processes[:size]
        values = [TimeoutError("a rank did not answer in time") for _ in processes]
        waiting = set(range(size))
        try:
            for rank, process in enumerate(processes):
                world = World(rank=rank, size=size, local_rank=rank, local_size=size)
                variables = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
                process.send(partial(job, world), variables | (environment or {}))
            deadline = time.monotonic() + seconds
            while waiting and (ready := self._ready([processes[rank] for rank in waiting], deadline)):
                for rank in [rank for rank in waiting if processes[rank] in ready]:
                    try:
                        _, values[rank] = processes[rank].receive(deadline)
                    except (Died, TimeoutError) as error:
                        values[rank] = error
                        if seconds_without_a_rank is not None:
                            deadline = min(deadline, time.monotonic() + seconds_without_a_rank)
                    waiting.remove(rank)
        finally:
            for rank in waiting:  # which have the job still, whatever ended this run
                processes[rank].kill()
            if any(isinstance(value, BaseException) for value in values):
                self._replace(processes)  # one that failed may have a group open whose other ranks are gone
        return values

    def _ready(self, processes, deadline):
        return select.select(processes, [], [], max(0.0, deadline - time.monotonic()))[0]

    def _replace(self, processes):
        """End these processes; the next run makes others."""
        self.processes = [process for process in self.processes if process not in processes]
        self._end(processes)

    def _end(self, processes):
        for process in processes:
            process.leave()
        for process in processes:
            process.end()

    def run_at_store(self, services, job, size, environment=None, **options):
        """As ``run``, for ranks that find each other by ``services``."""
        cloudpickle.register_pickle_by_value(sys.modules["run_store"])
        module = sys.modules[getattr(job, "func", job).__module__]
        if not module.__name__.startswith("sparkdl"):
            cloudpickle.register_pickle_by_value(module)
        with held_store() as store:
            return self.run(partial(at_store, services, store, job), size, environment, **options)

    def together(self, job, size, backend):
        """Values of ``job(world)`` in ``size`` ranks that ``backend`` can join; the first error raises, or a death."""
        limits = {"seconds": 280.0, "seconds_without_a_rank": SECONDS_WITHOUT_A_RANK}
        values = self.run_at_store(services(backend), job, size, **limits)
        errors = [value for value in values if isinstance(value, BaseException)]
        for error in sorted(errors, key=lambda error: not isinstance(error, Died)):
            raise error
        return values

    def end(self):
        self._end(self.processes)
        if self._nursery is not None:
            self._nursery.end()
