"""The runners that other libraries' users know: HorovodRunner, TorchDistributor, log_to_driver."""

from __future__ import annotations

import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.launch.driver.slots import hold_slots, slots_of
from sparkdl.launch.rank.rank import RETIRED
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
        _ssl_conf: the Spark setting that, where it is true, lets tasks run on a cluster with ``spark.ssl.enabled``,
            though what ranks send each other is not encrypted.

    Raises:
        ConfigError: ``num_processes`` is below 1.
    """

    def __init__(
        self,
        num_processes: int = 1,
        local_mode: bool = True,
        use_gpu: bool = True,
        _ssl_conf: str = "pytorch.spark.distributor.ignoreSsl",
    ) -> None:
        if not isinstance(num_processes, int) or isinstance(num_processes, bool) or num_processes < 1:
            raise ConfigError(
                f"num_processes={num_processes!r} is no number of ranks: give a whole number of at least 1"
            )
        self.num_processes = num_processes
        self.local_mode = local_mode
        self.use_gpu = use_gpu
        self.ssl_conf = _ssl_conf

    @property
    def input_params(self) -> dict[str, Any]:
        """What it was made with, by PySpark's names; a task is one rank."""
        return {
            "num_processes": self.num_processes,
            "local_mode": self.local_mode,
            "use_gpu": self.use_gpu,
            "num_tasks": self.num_processes,
        }

    def run(self, train_object: Callable[..., Any] | str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Run a function with ``args`` and ``kwargs``, or a Python file with ``args`` as its command line.

        A file runs where it lies, as ``python file`` would run it: modules beside it are found, ``__file__`` is true,
        ``sys.exit()`` with 0 or nothing is success. On a host that has no such file at this path, the file of this name
        that Spark has shipped there runs (``--files``, ``addFile``), else a copy, with nothing beside it. What it
        registers with ``atexit`` is not called in Spark's tasks, whose processes Spark ends.

        Returns:
            rank 0's value; None for a file.

        Raises:
            ConfigError: the file does not exist, or is another one on some host; keyword arguments are given for one;
                or the cluster's setting asks for encryption.
            RankFailedError: a rank raised, died, or left by ``sys.exit()`` with another code than 0.
        """
        settings: dict[str, Any] = {"use_gpu": self.use_gpu, "backend": "torch"}
        settings["num_proc"] = -self.num_processes if self.local_mode else self.num_processes
        if not self.local_mode:
            self._check_encryption()
        if callable(train_object):
            return _leader_value(train_object, args=args, kwargs=kwargs, **settings)
        path = Path(train_object).absolute()
        if not path.is_file():
            raise ConfigError(
                f"the training file {str(train_object)!r} does not exist: give a function, or the path of a file"
            )
        if kwargs:
            raise ConfigError(
                f"a training file takes no keyword arguments, {sorted(kwargs)} were given: pass them in args"
            )
        job = (str(path), path.read_bytes(), [str(argument) for argument in args])
        return _leader_value(_run_script, args=job, **settings)

    def _train_on_dataframe(self, train_function: Any, spark_dataframe: Any, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            "TorchDistributor._train_on_dataframe is PySpark's own: use sparkdl.run_on_dataframe(fn, df, num_proc), "
            "whose fn gets a loader of its rank's batches as its first argument"
        )

    def _check_encryption(self) -> None:
        from pyspark.sql import SparkSession

        conf = (SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()).conf
        is_ssl_enabled, ignored = (
            str(conf.get(name, "false")).lower() == "true" for name in ("spark.ssl.enabled", self.ssl_conf)
        )
        if is_ssl_enabled and not ignored:
            raise ConfigError(
                "spark.ssl.enabled=true asks for encryption, and what ranks send each other is not encrypted: set "
                f"{self.ssl_conf}=true in Spark to run all the same"
            )


def _run_script(path: str, source: bytes, arguments: list[str]) -> None:
    """Run a script as ``__main__``, as a process of its own would: this one is not used again.

    Raises:
        ConfigError: this host has another file at its path.
        RuntimeError: it left with an exit code other than 0.
    """
    RETIRED.set()
    state = sys.argv, sys.path[:], os.getcwd(), dict(sys.modules)
    with tempfile.TemporaryDirectory() as folder:
        script = _script_here(path, source, folder)
        sys.argv = [script, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                message = "" if isinstance(end.code, int) else f" ({end.code})"
                code = end.code if isinstance(end.code, int) else 1
                raise RuntimeError(f"{os.path.basename(path)} ended with exit code {code}{message}") from None
        finally:
            home = sys.path[0]
            sys.argv, sys.path[:] = state[0], state[1]
            os.chdir(state[2])
            for name in sys.modules.keys() - state[3].keys():  # another script may have modules of these names
                if str(getattr(sys.modules[name], "__file__", None) or "").startswith(f"{home}{os.sep}"):
                    del sys.modules[name]


def _script_here(path: str, source: bytes, folder: str) -> str:
    """Return the path under which this host has the script: the driver's, else where Spark puts files, else a copy."""
    if os.path.isfile(path):
        if Path(path).read_bytes() != source:
            raise ConfigError(
                f"{path} on {socket.gethostname()} is another file than the driver's: bring the two to one state, or "
                "put it where all hosts see the same"
            )
        return path
    shipped = os.path.abspath(os.path.basename(path))
    if os.path.isfile(shipped) and Path(shipped).read_bytes() == source:
        return shipped
    print(
        f"sparkdl: {socket.gethostname()} has no {path}: a copy runs, with nothing beside it; ship what it needs with "
        "Spark's --files and --py-files, or put its folder where all hosts see it",
        file=sys.stderr,
        flush=True,
    )
    copy = Path(folder) / os.path.basename(path)
    copy.write_bytes(source)
    return str(copy)


def _leader_value(fn: Callable[..., Any], *, num_proc: int, **settings: Any) -> Any:
    slots: AbstractContextManager[None] = nullcontext()
    if num_proc >= 0:
        from pyspark.sql import SparkSession

        spark = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
        num_proc = num_proc or slots_of(spark)
        settings["spark"] = spark
        slots = hold_slots(spark, num_proc)
    with slots:
        return run(fn, num_proc=num_proc, **settings)[0]
