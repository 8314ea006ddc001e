"""Run a function on several ranks and get every rank's value back.

Enters: a function, as one writes it for Horovod, HorovodRunner or TorchDistributor. Leaves: its values in rank order.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from sparkdl.cluster import barrier, local
from sparkdl.cluster.rendezvous import Service
from sparkdl.config import LaunchConfig
from sparkdl.errors import ConfigError
from sparkdl.observe import Event
from sparkdl.world import World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["RunSettings", "run"]

T = TypeVar("T")
_BACKENDS = ("auto", "horovod", "torch")


class RunSettings(TypedDict, total=False):
    """Further keywords of ``run``.

    Attributes:
        start_timeout: until all ranks have started, seconds; 120 by default.
        timeout: until all ranks have returned, seconds; without one it waits for ever.
        log_to_driver: print what the ranks print, each line with its rank; True by default.
        on_event: called with every event that a rank emits through ``sparkdl.observe.emit``.
        spark: the session; by default the active one.
        config: all other launch settings; the keywords of ``run`` win over its fields.
    """

    start_timeout: float
    timeout: float | None
    log_to_driver: bool
    on_event: Callable[[Event], None] | None
    spark: SparkSession | None
    config: LaunchConfig | None


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_proc: int | None = None,
    backend: str = "auto",
    env: Mapping[str, str] | None = None,
    use_gpu: bool | None = None,
    **settings: Unpack[RunSettings],
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` on ``num_proc`` ranks; return every rank's value, in rank order.

    The function finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ... and Horovod's variables in its environment, and
    may call ``hvd.init()`` or ``torch.distributed.init_process_group()`` itself. Groups that it leaves open are closed.

    Args:
        fn: the function; cloudpickled, so closures and notebook cells are fine.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks; None takes all task slots of the cluster; below 0, ``-num_proc`` processes on the
            driver's host, without Spark.
        backend: whose rendezvous the driver hosts: ``"auto"`` every installed one's, ``"horovod"`` or ``"torch"``.
        env: variables for the ranks, on top of the launcher's.
        use_gpu: True gives each rank one GPU (or ``config.gpus_per_rank``), False none, None what Spark assigns.
        **settings: see ``RunSettings``.

    Raises:
        ConfigError: a parameter is unknown, or of a wrong value.
        PreflightError: the cluster cannot run the job.
        RankFailedError: a rank raised or died; the message names it, with its traceback and last 100 lines.
        LaunchTimeoutError: ranks did not start, or did not return, in time.

    Example:
        >>> run(lambda: int(os.environ["RANK"]), num_proc=2)
        [0, 1]
    """
    unknown = sorted(set(settings) - set(RunSettings.__annotations__))
    if unknown:
        raise ConfigError(f"run() has no keyword {', '.join(unknown)}: it has {', '.join(RunSettings.__annotations__)}")
    config = _config(env, use_gpu, settings)
    services = _services(backend)
    job = functools.partial(_call, fn, tuple(args), dict(kwargs or {}))
    on_event = settings.get("on_event")
    if num_proc is not None and num_proc < 0:
        return local.launch(job, num_proc=-num_proc, config=config, services=services, on_event=on_event)
    spark = settings.get("spark") or _active_session()
    ranks = num_proc or barrier.slots(spark, config)
    return barrier.launch(spark, job, num_proc=ranks, config=config, services=services, on_event=on_event)


def _config(env: Mapping[str, str] | None, use_gpu: bool | None, settings: RunSettings) -> LaunchConfig:
    from dataclasses import replace

    config = settings.get("config") or LaunchConfig()
    changes: dict[str, Any] = {}
    for keyword, name in (
        ("start_timeout", "start_timeout_seconds"),
        ("timeout", "timeout_seconds"),
        ("log_to_driver", "log_to_driver"),
    ):
        if keyword in settings:
            changes[name] = settings[keyword]  # type: ignore[literal-required]
    if env is not None:
        changes["env"] = {**config.env, **env}
    if use_gpu is not None:
        changes["gpus_per_rank"] = (config.gpus_per_rank or 1) if use_gpu else 0
    return replace(config, **changes)


def _services(backend: str) -> list[Service]:
    if backend not in _BACKENDS:
        raise ConfigError(f"backend={backend!r} is not one of {', '.join(_BACKENDS)}: choose one of these")
    services: list[Service] = []
    if backend in ("auto", "torch"):
        from sparkdl.collective.ddp import TorchRendezvous

        services.append(TorchRendezvous())
    if backend == "horovod" and find_spec("horovod") is None:
        raise ConfigError("backend='horovod', but horovod is not installed here: install it, or choose 'torch'")
    if backend in ("auto", "horovod") and find_spec("horovod") is not None:
        from sparkdl.collective.horovod import HorovodRendezvous

        services.append(HorovodRendezvous())
    return services


def _active_session() -> SparkSession:
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def _call(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], world: World) -> T:
    """Call a user's function on a rank, and close the groups it leaves open: the worker will be used again."""
    value = fn(*args, **kwargs)
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        horovod.shutdown()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    return value
