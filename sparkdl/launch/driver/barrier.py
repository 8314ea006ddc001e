"""Ranks as the tasks of one Spark barrier stage, in the Python workers that Spark keeps warm."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdl.compat.garbage import freeze_once
from sparkdl.compat.quick_ack import promptly
from sparkdl.compat.spark_master import is_connect, is_local
from sparkdl.compat.worker_python import use_drivers_python
from sparkdl.config import LaunchConfig
from sparkdl.errors import ConfigError, LaunchTimeoutError, PreflightError
from sparkdl.launch.driver.channel import Channel, Report
from sparkdl.launch.driver.cluster import as_cluster_error, bind_address, cluster_facts
from sparkdl.launch.driver.preflight import job_problems
from sparkdl.launch.driver.stage_rows import ROW_SCHEMA, GatherJob, StartWatch, failure_in, run_gathered_rank, values_of
from sparkdl.launch.driver.supervisor import Supervisor
from sparkdl.launch.preload import likely
from sparkdl.launch.rank.link import ConnectionInfo
from sparkdl.launch.rank.rank import RETIRED, Slot, facts, run_rank
from sparkdl.launch.store import Service
from sparkdl.launch.wire import dump_function
from sparkdl.observe import Event, logger
from sparkdl.world import World

if TYPE_CHECKING:
    import pyarrow
    from pyspark import BarrierTaskContext
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, SparkSession

_SECOND_LOOK_SECONDS = 1.0
_UNHEARD_SECONDS = 15.0  # the ranks' clocks start after their rendezvous and first imports


def launch(
    spark: SparkSession,
    fn: Callable[[World], Any],
    *,
    num_proc: int,
    config: LaunchConfig | None = None,
    services: Sequence[Service] = (),
    preload: Sequence[str] = (),
    on_event: Callable[[Event], None] | None = None,
) -> list[Any]:
    """Run ``fn(world)`` in the ``num_proc`` tasks of a barrier stage.

    The stage is ``DataFrame.mapInArrow(..., barrier=True)`` over a frame of ``num_proc`` partitions: no RDD. Nothing is
    agreed on by barrier calls, which cost a second each; the driver's channel carries registration, the launch plan,
    logs and values.

    Args:
        spark: a session with at least ``num_proc`` free slots.
        fn: what every rank runs; cloudpickled, so closures and lambdas are fine.
        num_proc: number of ranks.
        config: launch settings; None takes the defaults.
        services: what each rank enters while its function runs.
        preload: modules that the ranks import while they wait for each other, where ``fn`` seems to use them.
        on_event: called on this thread with every event that a rank emits.

    Returns:
        The values of ``fn``, in rank order.

    Raises:
        RankFailedError: a rank raised or died; names the first one at fault, with its last 100 lines of output.
        LaunchTimeoutError: ranks did not start, or did not return, in time.
        PreflightError: the cluster cannot run the job.
        ConfigError: ``fn`` refers to something that cannot leave this process.
        WorldSizeError: the stage has another number of tasks than was asked for.
        KeyboardInterrupt: Ctrl-C on the driver, after every rank was ended.
    """
    config = config or LaunchConfig()
    profile = _profile(spark, config)
    _preflight(spark, num_proc, config, profile)
    function = dump_function(fn)
    # A module may read its variables when it is imported: with variables of the user's, no import comes before them.
    early = () if config.env else (*likely(preload, function[0]), *config.preload)
    if config.gather_rendezvous or (config.gather_rendezvous is None and is_connect(spark) and not config.driver_host):
        if config.timestamps:
            raise ConfigError(
                "prefix_output_with_timestamp=True on Spark Connect, where the output arrives when the job ends: leave "
                "it out, or give config=LaunchConfig(driver_host=...), where executors reach this process"
            )
        job = GatherJob(
            num_proc=num_proc,
            function=[bytearray(part) for part in function],
            services=services,
            preload=early,
            versions=facts(),
            config=replace(config, stdout=None, stderr=None),
            tell_streams_apart=config.tells_streams_apart,
        )
        return values_of(_launch_gathered(spark, job, profile), num_proc, config, on_event)
    bind_host = bind_address(spark, config)
    channel = Channel(
        bind_host, num_proc, config.silence_seconds, preload=early, services=services, interface=config.interface
    )
    with channel, _start(spark, channel, profile) as running:
        return Supervisor(channel, running, config, on_event).run(function)


def _start(spark: SparkSession, channel: Channel, profile: ResourceProfile | None) -> _Job:
    """Start the stage whose tasks report to ``channel``."""
    info, keep_output = channel.connection_info, not is_local(spark)

    def task(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        return run_task(info, batches, keep_output)

    def ended(job: _Job) -> None:
        channel.put(Report(kind="ended", message={"error": job.error}))

    return _Job(spark, _frame(spark, info.num_proc, task, "rank int", profile).collect, ended)


def check(spark: SparkSession, num_proc: int, config: LaunchConfig | None = None) -> None:
    """Refuse what ``launch`` would refuse, before work is put into what the ranks shall read.

    Raises:
        PreflightError: the cluster cannot run ``num_proc`` ranks.
    """
    config = config or LaunchConfig()
    _preflight(spark, num_proc, config, _profile(spark, config))


def slots(spark: SparkSession, config: LaunchConfig | None = None) -> int:
    """Return how many ranks the cluster can run at once.

    Raises:
        PreflightError: the session does not tell.
    """
    cluster = cluster_facts(spark, _java(spark, _profile(spark, config or LaunchConfig())))
    if cluster.slots is None:
        raise PreflightError("this Spark Connect session does not tell how many slots it has: pass num_proc")
    return cluster.slots


def _preflight(spark: SparkSession, num_proc: int, config: LaunchConfig, profile: Any) -> None:
    """Refuse what cannot run; wait, within the start timeout, while executors are being started or replaced."""
    use_drivers_python(spark)
    started, timeout = time.monotonic(), config.start_timeout_seconds
    replacing, waiting = False, False
    while True:
        cluster = cluster_facts(spark, _java(spark, profile), timeout)
        granted = float(config.gpus_per_rank or 0) if profile is not None else cluster.task_gpus
        cluster = replace(cluster, task_gpus=granted)
        problems = job_problems(num_proc, config.gpus_per_rank, cluster)
        if not problems:
            return
        waited = time.monotonic() - started
        replacing = replacing or (cluster.slots or 0) + cluster.lost_slots >= num_proc
        # Spark says that an executor is gone a moment after its slots are.
        may_grow = cluster.may_grow or replacing or (not is_local(spark) and waited < _SECOND_LOOK_SECONDS)
        lacks_slots_alone = not job_problems(num_proc, config.gpus_per_rank, replace(cluster, slots=None))
        if not (may_grow and lacks_slots_alone) or waited > timeout:
            raise PreflightError(problems[0])
        if not waiting and waited > _SECOND_LOOK_SECONDS:
            waiting = True
            logger.warning("waiting for executors, at most %g s: %s", timeout, problems[0])
        time.sleep(0.1)


def _profile(spark: SparkSession, config: LaunchConfig) -> ResourceProfile | None:
    """Return a stage-level profile where the ranks ask for other resources than the application's tasks do."""
    cpus, gpus = config.cpus_per_rank, config.gpus_per_rank
    default_cpus = int(str(spark.conf.get("spark.task.cpus", "1")))
    default_gpus = float(str(spark.conf.get("spark.task.resource.gpu.amount", "0")))
    same = (cpus is None or cpus == default_cpus) and (not gpus or gpus == default_gpus)
    if same or is_local(spark):  # A local master knows no profiles; the pre-flight check says what that means.
        return None
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    tasks = TaskResourceRequests().cpus(cpus or default_cpus)
    if gpus or (gpus is None and default_gpus):
        tasks = tasks.resource("gpu", float(gpus or default_gpus))
    return ResourceProfileBuilder().require(tasks).build


def _java(spark: SparkSession, profile: ResourceProfile | None) -> Any:
    return None if profile is None or is_connect(spark) else profile._java_resource_profile


def _frame(spark: SparkSession, num_proc: int, task: Any, schema: str, profile: ResourceProfile | None) -> DataFrame:
    frame = spark.range(0, num_proc, 1, numPartitions=num_proc)
    return frame.mapInArrow(task, schema, barrier=True, profile=profile)


def _slot(keep_output: bool) -> tuple[Slot, BarrierTaskContext]:
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    hosts = [info.address.rpartition(":")[0] or info.address for info in context.getTaskInfos()]
    gpus = context.resources().get("gpu")
    slot = Slot(
        number=context.partitionId(),
        host=hosts[context.partitionId()],
        found_size=len(hosts),
        peers=tuple(hosts),
        gpus=tuple(gpus.addresses) if gpus else (),
        cpus=context.cpus(),
        keep_output=keep_output,
    )
    return slot, context


def run_task(
    info: ConnectionInfo, batches: Iterator[pyarrow.RecordBatch], keep_output: bool
) -> Iterator[pyarrow.RecordBatch]:
    """Be the rank of this barrier task; yields no rows, for everything has gone through the channel.

    A task that raises has Spark print a traceback for each rank before the driver's one sentence: a rank that failed
    ends its task like the others. It leaves its input unread, though, which makes Spark end this process with it, as it
    does where the function has asked for it.
    """
    if run_rank(info, _slot(keep_output)[0]) and not RETIRED.is_set():
        for _ in promptly(batches):
            pass
        freeze_once()
    return iter(())


def run_gathered(
    job: GatherJob, batches: Iterator[pyarrow.RecordBatch], keep_output: bool
) -> Iterator[pyarrow.RecordBatch]:
    """Be the rank of this barrier task; what it has to say are its rows."""
    for _ in promptly(batches):
        pass
    yield from run_gathered_rank(job, *_slot(keep_output))


def _launch_gathered(
    spark: SparkSession,
    job: GatherJob,
    profile: ResourceProfile | None,
) -> pyarrow.Table:
    keep_output = not is_local(spark)

    def task(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        return run_gathered(job, batches, keep_output)

    num_proc, config = job.num_proc, job.config
    frame = _frame(spark, num_proc, task, ROW_SCHEMA, profile)
    watch = StartWatch(num_proc)
    connect: Any = spark if is_connect(spark) else None
    if connect is not None:
        connect.registerProgressHandler(watch)
    try:
        with _Job(spark, frame.toArrow, lambda _: None) as running:
            return running.wait(watch if connect is not None else None, config)
    finally:
        if connect is not None:
            connect.removeProgressHandler(watch)


class _Job:
    """The Spark job that hosts the ranks, on a thread of its own; a context manager that leaves none behind."""

    def __init__(self, spark: SparkSession, collect: Callable[[], Any], ended: Callable[[_Job], None]) -> None:
        from pyspark import InheritableThread

        self._spark, self._collect, self._ended = spark, collect, ended
        self._tag = f"sparkdl-{uuid.uuid4().hex}"
        self._rows: Any = None
        self.error: BaseException | None = None
        # The thread inherits the caller's job group, pool and tags: whoever cancels those, cancels the ranks.
        self._thread = InheritableThread(target=self._run, session=spark)
        self._thread.daemon = True
        self._thread.start()

    def _run(self) -> None:
        try:
            # A classic session's own tags are known only to the thread that set them: take the context's there.
            if is_connect(self._spark):
                self._spark.addTag(self._tag)
            else:
                self._spark.sparkContext.addJobTag(self._tag)
            self._rows = self._collect()
        except BaseException as error:
            self.error = failure_in(str(error)) or as_cluster_error(error)
        self._ended(self)

    def wait(self, watch: StartWatch | None, config: LaunchConfig) -> Any:
        """Wait for the job; return its rows.

        Raises:
            LaunchTimeoutError: the tasks did not start, or did not end, in time.
            ClusterError: what ended the job.
        """
        began = started = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.1)
            now = time.monotonic()
            if watch is not None and not watch.started:
                started = now
                if now - began > config.start_timeout_seconds:
                    raise LaunchTimeoutError(
                        f"the ranks did not start within {config.start_timeout_seconds:g} s: free slots on the "
                        f"cluster, lower num_proc, or raise start_timeout"
                    )
            # The ranks look at the clock themselves, and say where they are; unless nothing interrupts them.
            if config.timeout_seconds is not None and now - started > config.timeout_seconds + _UNHEARD_SECONDS:
                raise LaunchTimeoutError(
                    f"the ranks did not return within {config.timeout_seconds:g} s, could not be interrupted, and were "
                    f"ended: raise timeout, or name driver_host, so that they can be asked where they are"
                )
        if self.error is not None:
            raise self.error
        return self._rows

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._thread.join(timeout=30)
        self.cancel()

    def cancel(self) -> None:
        """Cancel the job, and wait until Spark has let it go."""
        if self._thread.is_alive():
            if is_connect(self._spark):
                self._spark.interruptTag(self._tag)
            else:
                self._spark.sparkContext.cancelJobsWithTag(self._tag)
            self._thread.join(timeout=10)

    def post_mortem(self, slot: int) -> str:
        """Say what Spark tells of a worker that died: with its fault handler on, where it crashed."""
        self._thread.join(timeout=2)
        text = "" if self.error is None else str(self.error.__cause__ or self.error)
        crash = text.find("Fatal Python error")
        if crash >= 0:
            return text[crash : crash + 4000].partition("\tat ")[0].strip()
        return "it exited, crashed, was killed, or ran out of memory (a crash leaves its stack in the executor's log)"
