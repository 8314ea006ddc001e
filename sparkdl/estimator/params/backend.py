"""The place where an estimator runs, as Horovod names it: a ``SparkBackend``, or a user's own ``Backend``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from sparkdl.config import BACKENDS
from sparkdl.errors import ConfigError


class Backend(Protocol):
    """What Horovod asks of a backend: it runs the ranks, wherever it likes.

    Each process finds its rank as torchrun, or Horovod's launcher, says it: RANK and WORLD_SIZE, or HOROVOD_RANK and
    HOROVOD_SIZE; one process needs neither.
    """

    def num_processes(self) -> int:
        """Return the number of ranks."""
        ...

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Sequence[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank; return the values in rank order."""
        ...


class SparkBackend:
    """Ranks in Spark's tasks, as Horovod's ``SparkBackend`` says it; the rendezvous is chosen automatically.

    Args:
        num_proc: number of ranks; None takes every slot of the cluster.
        env: variables for the ranks; CUDA_VISIBLE_DEVICES is left out, as Horovod does.
        options: those of ``sparkdl.run``: start_timeout, stdout, stderr, verbose, nics, prefix_output_with_timestamp,
            and use_mpi, use_gloo, extra_mpi_args, executable at the values that it takes. Streams are not saved with
            an estimator.

    Raises:
        ConfigError: an option is unknown, or of a value that is wrong or has no counterpart.
    """

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **options: Any) -> None:
        if num_proc is not None and (not isinstance(num_proc, int) or isinstance(num_proc, bool) or num_proc < 1):
            raise ConfigError(f"SparkBackend of num_proc={num_proc!r}: give a whole number of at least 1")
        if not isinstance(env, Mapping | None):
            raise ConfigError(f"env of a SparkBackend is a {type(env).__name__}: give a dict of variables")
        from sparkdl.runner import launch_config  # which a file of settings does not need

        names = [name for name in inspect.signature(launch_config).parameters if name not in ("config", "env")]
        unknown = sorted(options.keys() - set(names))
        if unknown:
            raise ConfigError(f"SparkBackend takes no {unknown[0]}: it takes num_proc, env, {', '.join(names)}")
        self._num_proc = num_proc
        self.env = {name: value for name, value in (env or {}).items() if name != "CUDA_VISIBLE_DEVICES"}
        self.options = options
        launch_config(env=self.env, **options)

    @property
    def start_timeout(self) -> float | None:
        """The seconds until all ranks have started; None where it was not given."""
        return self.options.get("start_timeout")

    def num_processes(self) -> int | None:
        """Return the number of ranks; None for every slot."""
        return self._num_proc

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank, see ``sparkdl.run``; ``env`` comes on top of the backend's own."""
        from sparkdl.runner import run

        return run(fn, args, kwargs, num_proc=self._num_proc, env={**self.env, **(env or {})}, **self.options)


def backend_of(name: str, backend: Any) -> SparkBackend | Backend:
    """Take ``backend``, the value of the parameter ``name``: ours, Horovod's own object, or one with its interface.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(backend, SparkBackend):
        return backend
    kind = type(backend)
    if not callable(getattr(backend, "num_processes", None)):
        raise ConfigError(
            f"{name}={backend!r} is a {kind.__name__}: give one of {BACKENDS}, a sparkdl.estimator.SparkBackend, or an "
            "object with Horovod's num_processes() and run(fn, args, kwargs, env)"
        )
    if kind.__module__.startswith("horovod.") and kind.__name__ == "SparkBackend":
        options = getattr(backend, "_kwargs", None) or {}
        return SparkBackend(backend.num_processes(), getattr(backend, "_env", None), **options)
    if callable(getattr(backend, "run", None)):
        count = backend.num_processes()
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"num_processes() of {name}, a {kind.__name__}, is {count!r}: return the number of ranks")
        custom_backend: Backend = backend
        return custom_backend
    started = getattr(backend, "start_timeout", None)
    return SparkBackend(backend.num_processes(), getattr(backend, "env", None), start_timeout=started)


def is_own(backend: Any) -> bool:
    """Whether the value of the parameter ``backend`` is a user's own ``Backend``, which runs the ranks itself."""
    return not isinstance(backend, str | SparkBackend)
