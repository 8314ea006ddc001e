"""Spark's Python daemon with torch loaded before it forks workers."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from sparkdl.compat.garbage import freeze
from sparkdl.compat.spark_archives import leave_spark_archives

DEFAULT_PRELOAD = ("torch", "torch.distributed", "horovod.torch", "sparkdl.launch.rank.rank")


def preload(names: str | None = None) -> list[str]:
    """Import ``names`` (with commas between them; None takes the default); return those that were there.

    A module that is named but cannot be imported is reported on stderr, and so is one that starts a thread: a fork
    copies no threads, so such a module may not work in the workers. Neither stops the daemon.
    """
    module_names = [name.strip() for name in names.split(",") if name.strip()] if names is not None else DEFAULT_PRELOAD
    loaded = []
    for name in module_names:
        threads = _running_threads()
        try:
            importlib.import_module(name)
        except Exception as error:
            if names is not None:
                print(f"sparkdl: SPARKDL_PRELOAD names {name}, which cannot be imported: {error}", file=sys.stderr)
            continue
        loaded.append(name)
        if _running_threads() > threads:
            print(f"sparkdl: {name} starts threads when imported: take it out of SPARKDL_PRELOAD", file=sys.stderr)
    return loaded


def _running_threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


def preload_after_first_fork(names: str) -> None:
    """Import ``names`` in this daemon once its first worker is born, which therefore lacks them.

    While a daemon starts, until it has answered with its first worker, its executor holds a lock that every task needs
    which is to get a Python worker, of whatever daemon (``SparkEnv.createPythonWorker`` of Spark 4.2). A daemon that
    imports torch after that answer does not stop the work beside it.
    """
    daemon, waiting = os.getpid(), [names]

    def load() -> None:
        if waiting and os.getpid() == daemon:
            preload(waiting.pop())
            freeze()

    os.register_at_fork(after_in_parent=load)


def main() -> None:
    """Load the modules, then be Spark's own daemon.

    The heavy modules are imported once per executor, instead of once in every worker (``import torch`` alone costs 1 to
    3 s). It is used by the setting

        spark.python.daemon.module   sparkdl.launch.daemon

    for which the module must be importable on the executors. The variable SPARKDL_PRELOAD says which modules are
    loaded, a list with commas (``spark.executorEnv.SPARKDL_PRELOAD``); the default is every module of DEFAULT_PRELOAD
    that is installed. A session's other Python work gets the same workers, which share the loaded pages. What
    SPARKDL_PRELOAD_LATER names is loaded once the first worker has been born.
    """
    # Spark talks to the daemon over stdout from its first byte on: what an import prints must not get there.
    to_spark = os.dup(1)
    os.dup2(2, 1)
    leave_spark_archives()
    try:
        preload(os.environ.get("SPARKDL_PRELOAD"))
    finally:
        sys.stdout.flush()
        os.dup2(to_spark, 1)
        os.close(to_spark)
    # Spark collects garbage in the worker after every task; what is loaded now need not be looked at each time.
    freeze()
    if later := os.environ.get("SPARKDL_PRELOAD_LATER"):
        preload_after_first_fork(later)
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()
