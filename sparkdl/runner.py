"""``sparkdl.run``: a function on several ranks, and every rank's value back in rank order."""

from __future__ import annotations

import functools
import inspect
import operator
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO, TypedDict, TypeVar, Unpack, cast

from sparkdl.collective.rendezvous.horovod_store import horovod_rendezvous
from sparkdl.columns.names import check_listed
from sparkdl.compat.first_process_group import before_first_group
from sparkdl.compat.spark_errors import task_errors
from sparkdl.config import BACKENDS, LaunchConfig, LoaderConfig
from sparkdl.errors import ConfigError, SchemaError, StorageError
from sparkdl.launch import local
from sparkdl.launch.driver import barrier
from sparkdl.launch.store import Service
from sparkdl.observe import Event, logger
from sparkdl.storage import Configuration, Storage, check_places
from sparkdl.storage.executors import on_one_machine
from sparkdl.world import World

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl.columns.layout import Layout
    from sparkdl.estimator.store import Store
    from sparkdl.strategies.choice import Choice

T = TypeVar("T")


class RunSettings(TypedDict, total=False):
    """Keywords of ``run`` that Horovod does not have.

    Attributes:
        timeout: until all ranks have returned, seconds; without one it waits for ever.
        log_to_driver: print what the ranks print, each line with its rank; True by default.
        on_event: called with every event that a rank emits through ``sparkdl.observe.emit``.
        spark: the session; by default the active one.
        config: all other launch settings; the keywords of ``run`` win over its fields.
    """

    timeout: float | None
    log_to_driver: bool
    on_event: Callable[[Event], None] | None
    spark: SparkSession | None
    config: LaunchConfig | None


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Collection[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    *,
    backend: str = "auto",
    use_gpu: bool | None = None,
    **settings: Unpack[RunSettings],
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` on ``num_proc`` ranks; return every rank's value, in rank order.

    The function is one as written for Horovod, HorovodRunner or TorchDistributor.

    The function finds RANK, WORLD_SIZE, MASTER_ADDR, ... and Horovod's variables in its environment, and may
    call ``hvd.init()`` or ``init_process_group()`` itself: both meet at the store of this run, which only its ranks can
    read (``init_method="tcp://..."`` opens torch's own, which accepts anybody). Groups that it leaves open are closed.

    On Spark Connect values, output and events come back as rows of the Spark job: values pass through the server's
    memory (``spark.driver.maxResultSize`` bounds them), output and events arrive when the job ends. A rank whose time
    is up is interrupted and named; one that nothing interrupts, or that is frozen, is ended 15 s later, not named.
    Where executors reach the client, ``config=LaunchConfig(driver_host=...)`` with its address makes values direct,
    output live, and names every rank.

    Args:
        fn: the function; cloudpickled, so closures and notebook cells are fine.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks; None takes all task slots of the cluster; below 0, ``-num_proc`` processes on the
            driver's host, without Spark.
        start_timeout: until all ranks have started, seconds; None takes HOROVOD_SPARK_START_TIMEOUT, or 120.
        use_mpi: Horovod's; only None and False are taken.
        use_gloo: Horovod's; Gloo is what ranks meet by in any case.
        extra_mpi_args: Horovod's; only None is taken.
        env: variables for the ranks, on top of the launcher's.
        stdout: an open text stream that gets what ranks write to theirs, each line as ``[rank]<stdout>:line``; None
            prints it on the driver as ``[rank 0] line``.
        stderr: the same for their standard error.
        verbose: 0 is silent; from 1 on the number of ranks is logged.
        nics: the one network interface that ranks talk over, such as ``["eth0"]``; None takes the one on the route to
            the other hosts.
        prefix_output_with_timestamp: begin each line of the output with the time at which it reached the driver.
        executable: Horovod's; only the Python of this process, which is the workers', is taken: PYSPARK_PYTHON names
            another.
        backend: for whom the ranks are prepared: ``"auto"`` every installed one, ``"horovod"`` or ``"torch"``.
        use_gpu: True gives each rank one GPU (or ``config.gpus_per_rank``), False none, None what Spark assigns.
        **settings: see ``RunSettings``.

    Raises:
        ConfigError: a parameter is unknown, or of a value that is wrong or has no counterpart.
        PreflightError: the cluster cannot run the job.
        RankFailedError: a rank raised or died; the message names it, its attributes hold traceback and last 100 lines.
        SparkdlError: a rank raised one of sparkdl's own errors; it is raised as what it is, with the rank as its cause.
        LaunchTimeoutError: ranks did not start, or did not return, in time.

    Example:
        >>> run(lambda: int(os.environ["RANK"]), num_proc=2)
        [0, 1]
    """
    unknown = sorted(set(settings) - set(RunSettings.__annotations__))
    if unknown:
        keywords = ", ".join([*[*inspect.signature(run).parameters][1:-1], *RunSettings.__annotations__])
        raise ConfigError(f"run() has no keyword {', '.join(unknown)}: it has {keywords}")
    _check_call(fn, args, kwargs, num_proc)
    config = launch_config(
        settings.get("config"),
        start_timeout=start_timeout,
        use_mpi=use_mpi,
        use_gloo=use_gloo,
        extra_mpi_args=extra_mpi_args,
        env=env,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose,
        nics=nics,
        prefix_output_with_timestamp=prefix_output_with_timestamp,
        executable=executable,
    )
    changes: dict[str, Any] = {}
    if "timeout" in settings:
        changes["timeout_seconds"] = settings["timeout"]
    if "log_to_driver" in settings:
        changes["log_to_driver"] = settings["log_to_driver"]
    if use_gpu is not None:
        changes["gpus_per_rank"] = (config.gpus_per_rank or 1) if use_gpu else 0
    config = replace(config, **changes)
    services, preload = _services(backend)
    options: dict[str, Any] = {"config": config, "services": services, "preload": preload}
    options["on_event"] = functools.partial(_take_event, settings.get("on_event"))
    job = functools.partial(_call, Configuration.here(), fn, tuple(args), dict(kwargs or {}))
    with task_errors():
        if num_proc is not None and num_proc < 0:
            return local.launch(job, num_proc=-num_proc, **options)
        spark = settings.get("spark") or _active_session()
        ranks = num_proc or barrier.slots(spark, config)
        if verbose:
            logger.info("running %d ranks%s", ranks, "" if num_proc else ", one in each slot of the cluster")
        return barrier.launch(spark, job, num_proc=ranks, **options)


def launch_config(
    config: LaunchConfig | None = None,
    *,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Collection[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> LaunchConfig:
    """Return ``config`` with what the options of ``horovod.spark.run`` say; they mean what ``run`` says of them.

    Raises:
        ConfigError: an option has a value that is wrong or has no counterpart.
    """
    flags = {"use_mpi": use_mpi, "use_gloo": use_gloo, "prefix_output_with_timestamp": prefix_output_with_timestamp}
    for name, flag in flags.items():
        if not isinstance(flag, bool | None):
            raise ConfigError(f"{name}={flag!r} is a {type(flag).__name__}: give True or False")
    if use_mpi:
        raise ConfigError("use_mpi=True: ranks meet by Gloo, or NCCL on GPUs, and nobody starts mpirun; leave it out")
    if extra_mpi_args:
        raise ConfigError(
            f"extra_mpi_args={extra_mpi_args!r} are for mpirun, which nobody starts: leave it out; env sets variables"
        )
    if not isinstance(verbose, int) or verbose < 0:
        raise ConfigError(f"verbose={verbose!r} is no level of output: give 0, 1 or 2")
    if executable not in (None, sys.executable, os.environ.get("PYSPARK_PYTHON")):
        raise ConfigError(
            f"executable={executable!r} is not {sys.executable}, which runs here, and ranks run in Spark's Python "
            "workers: set PYSPARK_PYTHON or spark.pyspark.python before the session starts, and leave it out"
        )
    if not isinstance(env, Mapping | None):
        raise ConfigError(f"env={env!r} is a {type(env).__name__}: give a dict of variables")
    if not isinstance(nics, str | Collection | None):
        raise ConfigError(f"nics={nics!r} is a {type(nics).__name__}: give the name of one interface, as in ['eth0']")
    if not isinstance(config, LaunchConfig | None):
        raise ConfigError(f"config={config!r} is a {type(config).__name__}: give a sparkdl.config.LaunchConfig")
    interfaces = {nics} if isinstance(nics, str) else set(nics or ())
    if len(interfaces) > 1:
        raise ConfigError(f"nics={sorted(interfaces)} names {len(interfaces)} interfaces, and ranks use one: name it")
    if start_timeout is None and config is None:
        start_timeout = start_timeout_of_environment()
    config = config or LaunchConfig()
    changes: dict[str, Any] = {
        "start_timeout_seconds": start_timeout,
        "env": {**config.env, **env} if env else None,
        "stdout": stdout,
        "stderr": stderr,
        "interface": next(iter(interfaces), None),
        "timestamps": prefix_output_with_timestamp or None,
    }
    return replace(config, **{name: value for name, value in changes.items() if value is not None})


def start_timeout_of_environment() -> float | None:
    """Return HOROVOD_SPARK_START_TIMEOUT, seconds; None where it is not set.

    Raises:
        ConfigError: it is no number.
    """
    text = os.environ.get("HOROVOD_SPARK_START_TIMEOUT")
    try:
        return float(text) if text else None
    except ValueError:
        raise ConfigError(
            f"HOROVOD_SPARK_START_TIMEOUT={text!r} is no number of seconds: correct or unset it"
        ) from None


class FrameSettings(RunSettings, total=False):
    """Further keywords of ``run_on_dataframe``.

    Attributes:
        args: positional arguments of the function behind the loader.
        kwargs: keyword arguments of the function.
        layout: how columns become tensors; numbers pack into ``"features"`` by default.
        shuffle: a new order of rows each epoch; True by default.
        seed: of that order; 0 by default.
        loader: how shards are read.
        start_timeout: as in ``run``, as are the following.
        env: as in ``run``.
        stdout: as in ``run``.
        stderr: as in ``run``.
        verbose: as in ``run``.
        nics: as in ``run``.
        prefix_output_with_timestamp: as in ``run``.
        backend: as in ``run``.
        use_gpu: as in ``run``.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    layout: Layout
    shuffle: bool
    seed: int
    loader: LoaderConfig
    start_timeout: float | None
    env: Mapping[str, str]
    stdout: TextIO | None
    stderr: TextIO | None
    verbose: int
    nics: str | Collection[str] | None
    prefix_output_with_timestamp: bool
    backend: str
    use_gpu: bool | None


def run_on_dataframe(
    fn: Callable[..., T],
    df: DataFrame,
    *,
    num_proc: int | None = None,
    batch_size: int = 32,
    columns: Sequence[str] | None = None,
    labels: Sequence[str] = (),
    store: str | Storage | Store | None = None,
    strategy: str | Choice | None = None,
    **settings: Unpack[FrameSettings],
) -> list[T]:
    """Run ``fn(loader, ...)`` on every rank, each with the batches of its own rows; return the values in rank order.

    The rows become shards first; the loader yields dicts of tensors, as many steps on every rank. The function may call
    ``hvd.init()`` or ``init_process_group()`` itself, or leave it.

    With ``strategy`` it is called as ``fn(loader, model, ...)``: ``model`` is an open ``sparkdl.SpreadModel`` that
    builds, steps and gathers a model which is spread so over the ranks. Ranks of one tensor group or pipeline get the
    same batches.

    Args:
        fn: the function; its first argument is its rank's ``batches.loader.ShardLoader``.
        df: the rows.
        num_proc: number of ranks; None takes every slot; below 0, ``-num_proc`` processes on the driver's host.
        batch_size: rows per step and rank, or group of ranks that read the same rows.
        columns: those to read, all by default; labels are read in any case.
        labels: columns that get tensors of their own.
        store: where the shards lie while the function runs; a temporary folder where workers see the driver's.
        strategy: how the function's model is spread over the ranks, as of ``TorchEstimator``: ``"fsdp"``, a ``Mesh``.
        **settings: see ``FrameSettings``.

    Raises:
        ConfigError: a keyword is unknown or has a wrong value, or the ranks or the backend do not fit the strategy.
        SchemaError: ``df`` is not Spark's, or a column is missing or cannot become a tensor.
        DataError: there are no rows.
        RankFailedError: a rank raised or died.
    """
    import uuid

    from sparkdl.estimator.store import open_store
    from sparkdl.shards.write import write_shards

    unknown = sorted(set(settings) - set(FrameSettings.__annotations__))
    if unknown:
        keywords = ", ".join(FrameSettings.__annotations__)
        raise ConfigError(f"run_on_dataframe() has no keyword {', '.join(unknown)}: it has {keywords}")
    options = dict(cast("Mapping[str, Any]", settings))
    args, kwargs = options.pop("args", ()), options.pop("kwargs", None)
    _check_call(fn, args, kwargs, num_proc)
    _check_rows(df, columns, labels, batch_size, options.get("shuffle", True))
    _check_shards(store, options.get("layout"))
    reading: dict[str, Any] = {name: options.pop(name) for name in ("shuffle", "seed") if name in options}
    reading["batch_size"] = operator.index(batch_size)
    call = (fn, tuple(args), dict(kwargs or {}), options.pop("loader", None))
    options.setdefault("spark", df.sparkSession)
    if strategy is not None:
        num_proc = num_proc or barrier.slots(df.sparkSession, options.get("config"))
        _check_strategy(strategy, abs(num_proc), options.get("backend", "auto"))
    home = open_store(store, shared_disk=on_one_machine(df.sparkSession))
    folder = home.shards(uuid.uuid4().hex)
    check_places({"store": folder}, df.sparkSession)
    try:
        write_shards(df, folder, columns=columns, labels=labels, layout=options.pop("layout", None))
        spread = None if strategy is None else (strategy, options.get("backend", "auto"))
        return run(_with_loader, (*call, folder, reading, spread), num_proc=num_proc, **options)
    finally:
        try:
            home.discard_shards(folder, pinned=False)
            home.close()
        except StorageError as error:  # the values are there, or an error that matters more
            logger.warning("intermediate shards were not removed: %s", error)


def _with_loader(
    fn: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: LoaderConfig | None,
    folder: Storage,
    reading: dict[str, Any],
    spread: tuple[str | Choice, str] | None,
) -> T:
    from sparkdl.batches.reading.loader import ShardedDataset

    dataset = ShardedDataset(folder, config=config)
    if spread is None:
        return fn(dataset.loader(world=World.from_env(), **reading), *args, **kwargs)
    from sparkdl.spread_model import SpreadModel

    strategy, backend = spread
    with SpreadModel(strategy, backend=backend) as model:
        return fn(dataset.loader(world=model.reader, **reading), model, *args, **kwargs)


def _check_strategy(strategy: str | Choice, ranks: int, backend: str) -> None:
    from sparkdl.strategies import STRATEGIES
    from sparkdl.strategies.choice import AUTO, Choice, choice_of, needs_torch_groups

    if not isinstance(strategy, str | Choice):
        raise ConfigError(
            f"strategy={strategy!r} is a {type(strategy).__name__}: give a name such as 'fsdp', or a sparkdl.Mesh"
        )
    if strategy == AUTO:
        raise ConfigError(
            "strategy='auto' measures the model, which the function makes: name a strategy, as `sparkdl size` ranks "
            "them, or use TorchEstimator"
        )
    if strategy not in STRATEGIES:
        (choice_of(strategy) if isinstance(strategy, str) else strategy).filled(ranks)
    if backend == "horovod" and needs_torch_groups(str(strategy)):
        raise ConfigError(
            f"strategy='{strategy}' spreads the model by torch.distributed, and backend='horovod' opens no group of "
            "it: choose backend='torch', or strategy='all_reduce'"
        )


def _check_call(fn: Any, args: Any, kwargs: Any, num_proc: Any) -> None:
    if not callable(fn):
        raise ConfigError(f"fn={fn!r} is a {type(fn).__name__}: give the function that every rank is to run")
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise ConfigError(f"args={args!r} is a {type(args).__name__}: give a tuple, for one argument args=(value,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ConfigError(f"kwargs={kwargs!r} is a {type(kwargs).__name__}: give a dict of keyword arguments")
    if num_proc is not None and (not isinstance(num_proc, int) or isinstance(num_proc, bool) or num_proc == 0):
        raise ConfigError(
            f"num_proc={num_proc!r} is no number of ranks: give one above 0, one below 0 for processes of this host, "
            f"or None for every slot"
        )


def _check_rows(df: Any, columns: Any, labels: Any, batch_size: Any, shuffle: Any) -> None:
    from pyspark.sql import DataFrame

    if not isinstance(df, DataFrame):
        kind = f"{type(df).__module__}.{type(df).__qualname__}"
        raise SchemaError(
            f"run_on_dataframe takes a Spark DataFrame, not a {kind}: make one with spark.createDataFrame(...)"
        )
    check_listed("columns", columns)
    check_listed("labels", labels)
    if not hasattr(batch_size, "__index__") or isinstance(batch_size, bool) or operator.index(batch_size) < 1:
        raise ConfigError(f"batch_size={batch_size!r} is no number of rows: give a whole number of at least 1")
    if not isinstance(shuffle, bool):
        raise ConfigError(f"shuffle={shuffle!r} is a {type(shuffle).__name__}: give True or False")


def _check_shards(store: Any, layout: Any) -> None:
    from sparkdl.columns.layout import Layout
    from sparkdl.estimator.store import Store

    if not isinstance(store, str | os.PathLike | Storage | Store | None):
        raise ConfigError(f"store={store!r} is a {type(store).__name__}: give a path, a URI or a Store")
    if not isinstance(layout, Layout | None):
        raise ConfigError(f"layout={layout!r} is a {type(layout).__name__}: give a sparkdl.columns.layout.Layout")


def _services(backend: str) -> tuple[list[Service], list[str]]:
    """Return what ranks enter beside the store of their run, and the modules they will import if they use them."""
    if backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}: choose one of these")
    services: list[Service] = []
    preload: list[str] = []
    if backend in ("auto", "torch"):
        preload += ["torch", "torch.distributed"]
    if backend == "horovod" and find_spec("horovod") is None:
        raise ConfigError("backend='horovod', but horovod is not installed here: install it, or choose 'torch'")
    if backend in ("auto", "horovod") and find_spec("horovod") is not None:
        services.append(horovod_rendezvous)
        preload.append("horovod.torch")
    return services, preload


def _take_event(on_event: Callable[[Event], None] | None, event: Event) -> None:
    """Print what a rank sent by ``log_to_driver``, and hand every event on."""
    if event.get("kind") == "driver_log":
        print(event["message"], flush=True)
    if on_event is not None:
        on_event(event)


def _active_session() -> SparkSession:
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def _call(
    storage: Configuration, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], world: World
) -> T:
    """Call a user's function on a rank, and close the groups it leaves open: the worker will be used again."""
    with ExitStack() as stack:
        stack.enter_context(storage.applied())
        stack.enter_context(before_first_group(functools.partial(_prepare_groups, stack)))
        value = fn(*args, **kwargs)
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        horovod.shutdown()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    return value


def _prepare_groups(stack: ExitStack) -> None:
    from sparkdl.collective.backends.torch_distributed import kept_groups, use_run_store

    use_run_store()
    stack.enter_context(kept_groups())
