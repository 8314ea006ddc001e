"""Ranks as the tasks of one Spark barrier stage, in the Python workers that Spark keeps warm.

Enters: a Spark session and a function of a ``World``. Leaves: the values it returned, in rank order.

The stage is ``DataFrame.mapInArrow(..., barrier=True)`` over a frame of ``num_proc`` partitions: no RDD. Nothing is
agreed on by barrier calls, which cost a second each; the driver's channel carries registration, order, logs, values.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sparkdl.cluster.channel import Channel, Report
from sparkdl.cluster.link import Ticket
from sparkdl.cluster.rank import Slot, attend
from sparkdl.cluster.rendezvous import Service, address_of, hosted
from sparkdl.cluster.supervise import Supervisor
from sparkdl.config import LaunchConfig
from sparkdl.observe import Event
from sparkdl.world import World

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["launch"]


def launch(
    spark: SparkSession,
    fn: Callable[[World], Any],
    *,
    num_proc: int,
    config: LaunchConfig | None = None,
    services: Sequence[Service] = (),
    on_event: Callable[[Event], None] | None = None,
) -> list[Any]:
    """Run ``fn(world)`` in the ``num_proc`` tasks of a barrier stage.

    Args:
        spark: a session with at least ``num_proc`` free slots.
        fn: what every rank runs; cloudpickled, so closures and lambdas are fine.
        num_proc: number of ranks.
        config: launch settings; None takes the defaults.
        services: servers to hold on the driver while the ranks run.
        on_event: called on this thread with every event that a rank emits.

    Returns:
        The values of ``fn``, in rank order.

    Raises:
        RankFailedError: a rank raised or died; names the first one at fault, with its last 100 lines of output.
        LaunchTimeoutError: ranks did not start, or did not return, in time.
        PreflightError: the cluster cannot run the job.
        WorldSizeError: the stage has another number of tasks than was asked for.
        KeyboardInterrupt: Ctrl-C on the driver, after every rank was ended.
    """
    config = config or LaunchConfig()
    master = str(spark.conf.get("spark.master", ""))
    local = master == "local" or master.startswith("local[")
    driver = config.driver_host or ("127.0.0.1" if local else spark.conf.get("spark.driver.host"))
    bind_host = address_of(str(driver))
    with hosted(services, bind_host, num_proc) as variables, Channel(bind_host, num_proc) as channel:
        frame = _ranks(spark, channel.ticket, num_proc, keep_output=not local)
        with _Job(spark, frame, channel) as job:
            return Supervisor(channel, job, config, variables, on_event).run(fn)


def _ranks(spark: SparkSession, ticket: Ticket, num_proc: int, *, keep_output: bool) -> DataFrame:
    def task(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        from sparkdl.cluster.barrier import run_task

        return run_task(ticket, batches, keep_output)

    frame = spark.range(0, num_proc, 1, numPartitions=num_proc)
    return frame.mapInArrow(task, "slot int", barrier=True)


def run_task(
    ticket: Ticket, batches: Iterator[pyarrow.RecordBatch], keep_output: bool
) -> Iterator[pyarrow.RecordBatch]:
    """Be the rank of this barrier task; yields no rows, for everything has gone through the channel."""
    from pyspark import BarrierTaskContext

    for _ in batches:
        pass
    context = BarrierTaskContext.get()
    hosts = [info.address.rpartition(":")[0] or info.address for info in context.getTaskInfos()]
    gpus = context.resources().get("gpu")
    slot = Slot(
        number=context.partitionId(),
        host=hosts[context.partitionId()],
        found_size=len(hosts),
        gpus=tuple(gpus.addresses) if gpus else (),
        cpus=context.cpus(),
        keep_output=keep_output,
    )
    attend(ticket, slot)
    return iter(())


class _Job:
    """The Spark job that hosts the ranks, on a thread of its own; a context manager that leaves none behind."""

    def __init__(self, spark: SparkSession, frame: DataFrame, channel: Channel) -> None:
        from pyspark import InheritableThread

        self._spark, self._frame, self._channel = spark, frame, channel
        self._tag = f"sparkdl-{uuid.uuid4().hex}"
        # The thread inherits the caller's job group, pool and tags: whoever cancels those, cancels the ranks.
        self._thread = InheritableThread(target=self._collect, session=spark)
        self._thread.daemon = True
        self._thread.start()

    def _collect(self) -> None:
        error: BaseException | None = None
        try:
            self._spark.addTag(self._tag)
            self._frame.collect()
        except BaseException as caught:
            error = caught
        self._channel.put(Report(kind="ended", message={"error": error}))

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(timeout=10)
        self.cancel()

    def cancel(self) -> None:
        """Cancel the job, and wait until Spark has let it go."""
        if self._thread.is_alive():
            self._spark.interruptTag(self._tag)
            self._thread.join(timeout=10)

    def post_mortem(self, slot: int) -> str:
        """Spark does not tell how a worker ended."""
        return ""
