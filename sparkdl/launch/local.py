"""Ranks as processes of this machine, without Spark: for tests, notebooks and ``np < 0``."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from sparkdl.config import LaunchConfig
from sparkdl.errors import PreflightError, RankFailedError
from sparkdl.launch.driver.channel import Channel, Report
from sparkdl.launch.driver.supervisor import Supervisor
from sparkdl.launch.preload import likely
from sparkdl.launch.rank.link import ConnectionInfo
from sparkdl.launch.rank.rank import Slot, run_rank
from sparkdl.launch.rank.resources import host_gpus
from sparkdl.launch.store import Service
from sparkdl.launch.wire import dump_function
from sparkdl.observe import Event
from sparkdl.world import World

_LOOPBACK = "127.0.0.1"
_LAST_WORDS_BYTES = 64 << 10


def launch(
    fn: Callable[[World], Any],
    *,
    num_proc: int,
    config: LaunchConfig | None = None,
    services: Sequence[Service] = (),
    preload: Sequence[str] = (),
    on_event: Callable[[Event], None] | None = None,
) -> list[Any]:
    """Run ``fn(world)`` in ``num_proc`` fresh processes of this machine; else as ``driver.barrier.launch``.

    Raises:
        PreflightError: this host has fewer GPUs than the ranks need.
        SparkdlError: what ``driver.barrier.launch`` raises, but for what only a stage can.
    """
    config = config or LaunchConfig()
    slots = _slots(num_proc, config)
    function = dump_function(fn)
    early = () if config.env else (*likely(preload, function[0]), *config.preload)
    channel = Channel(
        _LOOPBACK, num_proc, config.silence_seconds, preload=early, services=services, interface=config.interface
    )
    with channel, _Processes(channel, slots) as processes:
        return Supervisor(channel, processes, config, on_event).run(function)


def _slots(num_proc: int, config: LaunchConfig) -> list[Slot]:
    if num_proc < 1:
        raise PreflightError(f"num_proc={num_proc} must be at least 1: ask for one rank or more")
    gpus_per_rank = config.gpus_per_rank or 0
    # Positions, not names: a rank translates them by its own CUDA_VISIBLE_DEVICES, as Spark's addresses are.
    gpus = [str(position) for position, _ in enumerate(host_gpus())]
    if gpus_per_rank * num_proc > len(gpus):
        raise PreflightError(
            f"{num_proc} ranks with {gpus_per_rank} GPUs each need {gpus_per_rank * num_proc}, but this host has "
            f"{len(gpus)}: lower num_proc, or leave use_gpu out"
        )
    cpus = config.cpus_per_rank or max(1, len(os.sched_getaffinity(0)) // num_proc)
    return [
        Slot(
            number=number,
            host="localhost",
            found_size=num_proc,
            gpus=tuple(gpus[number * gpus_per_rank : (number + 1) * gpus_per_rank]),
            cpus=cpus,
        )
        for number in range(num_proc)
    ]


class _Processes:
    """The ranks' processes; a context manager that leaves none behind."""

    def __init__(self, channel: Channel, slots: Sequence[Slot]) -> None:
        self._channel = channel
        self._processes: list[subprocess.Popen[bytes]] = []
        self._output: dict[int, bytearray] = {}
        self._threads: list[threading.Thread] = []
        for slot in slots:
            self._start(channel.connection_info, slot)

    def _start(self, info: ConnectionInfo, slot: Slot) -> None:
        # A session of its own: Ctrl-C in the terminal reaches the driver alone, which then ends the ranks in order.
        # The secret goes through a pipe, where no list of processes shows it.
        process = subprocess.Popen(
            [sys.executable, "-m", "sparkdl.launch.local"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self._processes.append(process)
        if process.stdin is None:
            raise AssertionError("the process was started with a pipe")
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(cloudpickle.dumps((info, slot)))
            process.stdin.close()
        self._output[slot.number] = bytearray()
        thread = threading.Thread(target=self._follow, args=(slot.number, process), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _follow(self, number: int, process: subprocess.Popen[bytes]) -> None:
        """Keep the last words that a rank says outside of its function, and report its end."""
        if process.stdout is not None:
            while data := os.read(process.stdout.fileno(), 1 << 16):
                self._output[number] = (self._output[number] + data)[-_LAST_WORDS_BYTES:]
            process.stdout.close()
        if process.wait():
            error = RankFailedError(number, f"the process did not live to say why: {self.post_mortem(number)}")
            self._channel.put(Report(kind="ended", message={"error": error}))

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for process in self._processes if kind is None else ():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
        self.cancel()

    def cancel(self) -> None:
        """Kill what still runs, and all that the ranks have started in their sessions and left behind."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for thread in self._threads:
            thread.join(timeout=5)

    def post_mortem(self, slot: int) -> str:
        """Say how the process ended."""
        try:
            code = self._processes[slot].wait(timeout=2)
        except subprocess.TimeoutExpired:
            return ""
        if threading.current_thread() is not self._threads[slot]:
            self._threads[slot].join(timeout=2)  # until its last words are read
        words = self._output[slot].decode("utf-8", "replace").strip()
        if code >= 0:
            ending = f"exit code {code}"
        elif code == -signal.SIGKILL:
            ending = "killed by SIGKILL, which is also what the kernel sends when memory runs out"
        elif code == -signal.SIGBUS:
            ending = "killed by SIGBUS, which is how reading a mapped file ends that somebody has cut short"
        else:
            ending = f"killed by {signal.Signals(-code).name}"
        return f"{ending}\n{words}" if words else ending


def _main() -> int:
    """Be one rank: what it is to be comes on stdin."""
    info, slot = pickle.load(sys.stdin.buffer)
    return 0 if run_rank(info, slot) else 1


if __name__ == "__main__":
    sys.exit(_main())
