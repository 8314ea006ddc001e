"""Real ranks for tests: processes that live as long as the test run, and are replaced if they die."""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
from run_store import at_store, held_store

from sparkdl.world import World

WORKER = Path(__file__).with_name("rank_worker.py")


def services(backend):
    if backend in ("solo", "torch"):
        return []
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    from sparkdl.collective.rendezvous.horovod_store import horovod_rendezvous

    return [horovod_rendezvous]


class Died(Exception):
    """The rank's process ended without an answer."""


class RankProcess:
    def __init__(self):
        self._answers, write = os.pipe()
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
        command = [sys.executable, str(WORKER), str(write)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, env=env, pass_fds=(write,))
        os.close(write)

    def send(self, job, environment):
        blob = cloudpickle.dumps((job, environment))
        self.process.stdin.write(struct.pack("<q", len(blob)) + blob)
        self.process.stdin.flush()

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

    def end(self):
        self.process.stdin.close()
        try:
            self.process.wait(1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._answers)


class Ranks:
    """Runs a function in several ranks at once."""

    def __init__(self):
        self.processes: list[RankProcess] = []

    def run(self, job, size, environment=None, *, seconds=60.0):
        """Run ``job(world)`` in ``size`` ranks; return their values, an exception standing for itself."""
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        module = sys.modules[getattr(job, "func", job).__module__]
        if not module.__name__.startswith("sparkdl"):
            cloudpickle.register_pickle_by_value(module)
        while len(self.processes) < size:
            self.processes.append(RankProcess())
        for rank in range(size):
            world = World(rank=rank, size=size, local_rank=rank, local_size=size)
            variables = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
            self.processes[rank].send(partial(job, world), variables | (environment or {}))
        deadline = time.monotonic() + seconds
        values = []
        for rank in range(size):
            try:
                _, value = self.processes[rank].receive(deadline)
            except (Died, TimeoutError) as error:
                value = error
                self.processes[rank].process.kill()
                self.processes[rank].end()
                self.processes[rank] = None
            values.append(value)
        self.processes = [process or RankProcess() for process in self.processes]
        return values

    def run_at_store(self, services, job, size, environment=None, **options):
        """As ``run``, for ranks that find each other by ``services``."""
        cloudpickle.register_pickle_by_value(sys.modules["run_store"])
        module = sys.modules[getattr(job, "func", job).__module__]
        if not module.__name__.startswith("sparkdl"):
            cloudpickle.register_pickle_by_value(module)
        with held_store() as store:
            return self.run(partial(at_store, services, store, job), size, environment, **options)

    def together(self, job, size, backend):
        """Values of ``job(world)`` in ``size`` ranks that ``backend`` can join; the first error raises."""
        values = self.run_at_store(services(backend), job, size, seconds=280.0)
        for value in values:
            if isinstance(value, BaseException):
                raise value
        return values

    def end(self):
        for process in self.processes:
            process.end()
