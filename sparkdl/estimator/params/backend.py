"""SparkBackend: where an estimator runs, under Horovod's name for it.

Enters: Horovod's arguments, or Horovod's own object. Leaves: the number of ranks and what ``runner.run`` takes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from sparkdl.config import BACKENDS
from sparkdl.errors import ConfigError

__all__ = ["SparkBackend"]

_WITHOUT_EFFECT = ("verbose", "use_gloo")  # gloo is what ranks meet by in any case


class SparkBackend:
    """Where an estimator runs, as Horovod's ``SparkBackend`` says it; the rendezvous is chosen automatically.

    Args:
        num_proc: number of ranks; None takes every slot of the cluster.
        env: variables for the ranks.
        start_timeout: until all ranks have started, seconds.
        stdout: of the ranks; only ``sys.stdout``, where the driver prints their lines, is taken.
        stderr: of the ranks; only ``sys.stderr`` is taken.
        options: other options of ``horovod.spark.run``.

    Raises:
        ConfigError: an option has no counterpart, or a value is none that can be meant.
    """

    def __init__(
        self,
        num_proc: int | None = None,
        env: Mapping[str, str] | None = None,
        *,
        start_timeout: float | None = None,
        stdout: Any = None,
        stderr: Any = None,
        **options: Any,
    ) -> None:
        if stdout not in (None, sys.stdout) or stderr not in (None, sys.stderr):
            raise ConfigError("stdout and stderr of a SparkBackend can only be those of the driver: leave them out")
        refused = [name for name, value in options.items() if value and name not in _WITHOUT_EFFECT]
        if refused:
            raise ConfigError(
                f"SparkBackend takes no {refused[0]}: ranks need no network or log settings, leave it out"
            )
        if num_proc is not None and (not isinstance(num_proc, int) or isinstance(num_proc, bool) or num_proc < 1):
            raise ConfigError(f"SparkBackend of num_proc={num_proc!r}: give a whole number of at least 1")
        if not isinstance(env, Mapping | None):
            raise ConfigError(f"env of a SparkBackend is a {type(env).__name__}: give a dict of variables")
        self._num_proc = num_proc
        self.env = dict(env or {})
        self.start_timeout = start_timeout

    def num_processes(self) -> int | None:
        """Return the number of ranks; None for every slot."""
        return self._num_proc

    @staticmethod
    def of(name: str, given: Any) -> SparkBackend:
        """Take ``given``, the value of the parameter ``name``, for what it says: Horovod's own object, or one like it.

        Raises:
            ConfigError: it would run the ranks itself, which sparkdl does.
        """
        if isinstance(given, SparkBackend):
            return given
        kind = type(given)
        if not callable(getattr(given, "num_processes", None)):
            raise ConfigError(
                f"{name}={given!r} is a {kind.__name__}: give one of {BACKENDS}, or a sparkdl.estimator.SparkBackend"
            )
        if kind.__module__.startswith("horovod.") and kind.__name__ == "SparkBackend":
            options = dict(getattr(given, "_kwargs", None) or {})
            return SparkBackend(given.num_processes(), getattr(given, "_env", None), **options)
        if callable(getattr(given, "run", None)):
            raise ConfigError(
                f"{name} is a {kind.__module__}.{kind.__name__}, whose run() sparkdl would not call: give a "
                "sparkdl.estimator.SparkBackend(num_proc, env), or a collective's name"
            )
        return SparkBackend(
            given.num_processes(), getattr(given, "env", None), start_timeout=getattr(given, "start_timeout", None)
        )
