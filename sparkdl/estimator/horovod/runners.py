"""The runners that other libraries' users know, on sparkdl's launcher: HorovodRunner, TorchDistributor, log_to_driver.

Enters: a training function, as it was written for one of them. Leaves: rank 0's value, as theirs do. The function may
call ``hvd.init()`` or ``init_process_group()`` itself.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.launch.driver.slots import hold_slots, slots_of
from sparkdl.observe import emit, logger
from sparkdl.runner import run

__all__ = ["HorovodRunner", "TorchDistributor", "log_to_driver"]

LOG_LIMIT = 4000
"""Characters of one message that ``log_to_driver`` sends."""


def log_to_driver(message: str) -> None:
    """Print ``message`` on the driver; what exceeds 4,000 characters is cut off. For use on a rank.

    Args:
        message: one line or several.
    """
    text = str(message)[:LOG_LIMIT]
    emit("driver_log", message=text)
    if "RANK" not in os.environ:  # called on the driver itself
        print(text, flush=True)


class HorovodRunner:
    """Runs a Horovod training function on the cluster, with the semantics of Databricks' HorovodRunner.

    Args:
        np: number of ranks. Below 0: ``-np`` processes on the driver's host. Above 0: tasks of one barrier stage, which
            waits until so many slots are free; more than the cluster has is refused. 0 takes every slot, and is
            deprecated.
        driver_log_verbosity: ``"all"`` prints what the ranks print, each line with its rank; ``"log_callback_only"``
            prints what they send by ``log_to_driver``.

    Raises:
        ConfigError: a value is of the wrong kind.
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        if not isinstance(np, int) or isinstance(np, bool):
            raise ConfigError(f"np={np!r} is a {type(np).__name__}: give the number of ranks as an integer")
        if driver_log_verbosity not in ("all", "log_callback_only"):
            raise ConfigError(f"driver_log_verbosity={driver_log_verbosity!r} is not 'all' or 'log_callback_only'")
        if np == 0:
            logger.warning("HorovodRunner(np=0) is deprecated: it takes every slot; give the number of ranks")
        self.num_processor = np
        self.driver_log_verbosity = driver_log_verbosity

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Run ``main(**kwargs)`` on every rank; return rank 0's value.

        Raises:
            PreflightError: ``np`` exceeds the cluster's slots.
            RankFailedError: a rank raised or died.
        """
        if not callable(main):
            raise ConfigError(f"main={main!r} is a {type(main).__name__}: give the training function itself")
        return _leader_value(
            main,
            kwargs=kwargs,
            num_proc=self.num_processor,
            log_to_driver=self.driver_log_verbosity == "all",
        )


class TorchDistributor:
    """Runs a PyTorch training function or script on the cluster, with the arguments of PySpark's TorchDistributor.

    Args:
        num_processes: number of ranks.
        local_mode: processes on the driver's host, instead of tasks of a barrier stage.
        use_gpu: give each rank a GPU.

    Raises:
        ConfigError: ``num_processes`` is below 1.
    """

    def __init__(self, num_processes: int = 1, local_mode: bool = True, use_gpu: bool = True) -> None:
        if not isinstance(num_processes, int) or isinstance(num_processes, bool) or num_processes < 1:
            raise ConfigError(
                f"num_processes={num_processes!r} is no number of ranks: give a whole number of at least 1"
            )
        self.num_processes = num_processes
        self.local_mode = local_mode
        self.use_gpu = use_gpu

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Run a function with ``args`` and ``kwargs``, or a Python file with ``args`` as its command line.

        Returns:
            rank 0's value; None for a file.

        Raises:
            ConfigError: the file does not exist, or keyword arguments are given for one.
            RankFailedError: a rank raised or died.
        """
        settings: dict[str, Any] = {"use_gpu": self.use_gpu, "backend": "torch"}
        settings["num_proc"] = -self.num_processes if self.local_mode else self.num_processes
        if callable(train_object):
            return _leader_value(train_object, args=args, kwargs=kwargs, **settings)
        path = Path(train_object)
        if not path.is_file():
            raise ConfigError(
                f"the training file {train_object!r} does not exist: give a function, or the path of a file"
            )
        if kwargs:
            raise ConfigError(
                f"a training file takes no keyword arguments, {sorted(kwargs)} were given: pass them in args"
            )
        source = path.read_text(encoding="utf-8")
        return _leader_value(_run_source, args=(path.name, source, [str(one) for one in args]), **settings)


def _run_source(name: str, source: str, arguments: list[str]) -> None:
    """Run a script as ``__main__``, on a host where its file need not exist."""
    import tempfile

    before = list(sys.argv)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / name
        script.write_text(source, encoding="utf-8")
        sys.argv = [str(script), *arguments]
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            sys.argv = before


def _leader_value(fn: Callable[..., Any], *, num_proc: int, **settings: Any) -> Any:
    slots: AbstractContextManager[None] = nullcontext()
    if num_proc >= 0:
        from pyspark.sql import SparkSession

        spark = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
        num_proc = num_proc or slots_of(spark)
        settings["spark"] = spark
        slots = hold_slots(spark, num_proc)
    with slots:
        return run(fn, num_proc=num_proc, on_event=_print_log, **settings)[0]


def _print_log(event: Mapping[str, Any]) -> None:
    if event.get("kind") == "driver_log":
        print(event["message"], flush=True)
