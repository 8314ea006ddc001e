"""A standalone cluster of Spark from the pip wheel: a master, and workers that may see another machine than it does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyspark

__all__ = ["Worker", "standalone_cluster"]


@dataclass(frozen=True)
class Worker:
    """A worker of two cores.

    Attributes:
        options: further ones of its command line.
        env: further variables of its environment.
        inside: a command that it is started by.
    """

    options: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)
    inside: Sequence[str] = ()


@contextmanager
def standalone_cluster(folder: Path, workers: Sequence[Worker]) -> Iterator[str]:
    """Yield the master's URL once all workers have registered; logs and their work lie in ``folder``."""
    home = Path(pyspark.__file__).parent
    env = {
        **os.environ,
        "SPARK_HOME": str(home),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_NO_DAEMONIZE": "1",
    }
    start = str(home / "bin" / "spark-class")
    processes = []

    def spawn(name: str, command: Sequence[str], **more: str) -> Path:
        log = folder / f"{name}.log"
        with log.open("wb") as out:
            processes.append(subprocess.Popen(command, stdout=out, stderr=out, env={**env, **more}, cwd=folder))
        return log

    try:
        ports = ["--host", "127.0.0.1", "--webui-port", "0"]
        master = spawn("master", [start, "org.apache.spark.deploy.master.Master", *ports, "--port", "0"])
        url = wait_for(master, r"spark://127\.0\.0\.1:\d+")
        logs = []
        for number, worker in enumerate(workers):
            command = [*worker.inside, start, "org.apache.spark.deploy.worker.Worker", *ports, "--cores", "2"]
            work = ["--memory", "1g", "--work-dir", str(folder / f"work{number}")]
            logs.append(spawn(f"worker{number}", [*command, *work, *worker.options, url], **worker.env))
        for log in logs:
            wait_for(log, "Successfully registered")
        yield url
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(timeout=20)


def wait_for(log: Path, pattern: str) -> str:
    """Wait until a log holds a pattern; return what it found there."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        found = re.search(pattern, log.read_text(errors="replace"))
        if found:
            return found[0]
        time.sleep(0.1)
    raise AssertionError(f"{pattern} did not appear in {log.read_text()}")
