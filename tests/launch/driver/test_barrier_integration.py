"""Ranks in a barrier stage of a real Spark session: values, environment, reuse, and every way to fail."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
from launch_helpers import hang, tell_when_at, until, until_gone, until_heard

from sparkdl import observe
from sparkdl.config import LaunchConfig
from sparkdl.errors import (
    CancelledError,
    CheckpointError,
    ConfigError,
    LaunchTimeoutError,
    PreflightError,
    RankFailedError,
    WorldSizeError,
)
from sparkdl.launch.driver import barrier
from sparkdl.launch.driver import supervisor as supervise
from sparkdl.runner import run

pytest.importorskip("pyspark")
QUICK = LaunchConfig(stop_grace_seconds=0.5, log_to_driver=False)


@pytest.fixture(autouse=True, scope="module")
def _a_first_launch(spark):
    """What Spark and Python start with the first launch of a process stays."""
    barrier.launch(spark, lambda world: None, num_proc=2, config=QUICK)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(spark):
    threads, listening = set(threading.enumerate()), listeners()
    yield
    left = [thread for thread in set(threading.enumerate()) - threads if thread.name.startswith("sparkdl")]
    assert not left
    assert listeners() <= listening
    # The tracker hears of a job's end a little later than the job's caller.
    until(lambda: not spark.sparkContext.statusTracker().getActiveJobsIds())


def listeners():
    return {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def test_every_rank_knows_its_place(spark):
    def look(world):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HOROVOD_RANK", "HOROVOD_CROSS_SIZE")
        return world.rank, world.local_size, world.num_nodes, [os.environ[name] for name in names]

    assert barrier.launch(spark, look, num_proc=2, config=QUICK) == [
        (0, 2, 1, ["0", "2", "0", "2", "0", "1"]),
        (1, 2, 1, ["1", "2", "1", "2", "1", "1"]),
    ]


def test_the_worker_is_used_again_with_a_clean_environment(spark):
    def litter(world):
        os.environ["LITTER"] = "1"
        os.environ["PATH"] = "/nowhere"
        os.chdir("/")
        sys.stdout = None
        return os.getpid()

    def inspect(world):
        return os.getpid(), os.environ.get("LITTER"), os.environ["PATH"], os.getcwd(), os.environ["MINE"]

    # Spark takes the worker that has been idle longest, and tests before this one may have left more than two.
    pids = {pid for _ in range(3) for pid in barrier.launch(spark, litter, num_proc=2, config=QUICK)}
    config = LaunchConfig(env={"MINE": "x"})
    for pid, litter_left, path, directory, mine in barrier.launch(spark, inspect, num_proc=2, config=config):
        assert pid in pids
        assert litter_left is None
        assert path != "/nowhere"
        assert directory != "/"
        assert mine == "x"


def test_threads_follow_spark_task_cpus_and_the_user_wins(spark):
    def threads():
        import torch

        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    assert run(threads, num_proc=2, spark=spark, log_to_driver=False) == [(1, "1")] * 2
    env = {"OMP_NUM_THREADS": "2"}
    assert run(threads, num_proc=2, spark=spark, env=env, log_to_driver=False) == [(2, "2")] * 2
    assert run(threads, num_proc=2, spark=spark, log_to_driver=False) == [(1, "1")] * 2


def test_the_pool_of_a_reused_worker_grows_to_what_the_user_asks_and_no_further(spark):
    def work():
        import torch

        before = len(os.listdir("/proc/self/task"))
        for _ in range(3):
            torch.ones(1 << 22).add_(1).sum()
        return os.getpid(), len(os.listdir("/proc/self/task")) - before

    def grown(threads):
        env = {"OMP_NUM_THREADS": str(threads)}
        return run(work, num_proc=2, spark=spark, env=env, log_to_driver=False)

    first = [*grown(1), *grown(1), *grown(1)]  # every idle worker, of which tests before this one may have left more
    second, third = grown(3), grown(1)
    assert {threads for _, threads in first} == {0}
    assert [threads for _, threads in second] == [2, 2]
    assert [threads for _, threads in third] == [0, 0]
    assert {pid for pid, _ in [*second, *third]} <= {pid for pid, _ in first}


def test_more_threads_than_cores_are_told(spark, caplog):
    env = {"OMP_NUM_THREADS": "64"}
    run(lambda: None, num_proc=2, spark=spark, env=env, log_to_driver=False)
    assert "want 128 threads, but it has" in caplog.text
    assert "lower num_proc, spark.task.cpus or OMP_NUM_THREADS" in caplog.text
    caplog.clear()
    run(lambda: None, num_proc=2, spark=spark, log_to_driver=False)
    assert "threads, but it has" not in caplog.text


def test_what_only_cloudpickle_carries_goes_both_ways(spark):
    offset = 10

    class Scale:
        def __init__(self, by):
            self.by = by

        def __call__(self, x):
            return self.by * x + offset

    def work(scale, also):
        rank = int(os.environ["RANK"])
        return scale, lambda x: scale(x) + also(rank), Scale(rank), Scale

    for rank, (scale, inner, made, kind) in enumerate(
        run(work, (Scale(2),), {"also": lambda x: -x}, num_proc=2, spark=spark, log_to_driver=False)
    ):
        assert (scale(1), inner(1), made(1)) == (12, 12 - rank, rank + 10)
        assert type(made) is kind is Scale, "a class comes back as itself"


@pytest.mark.slow
def test_values_beyond_two_gigabytes_come_back_whole_through_tasks(spark):
    def much(world):
        import numpy

        text = b"x" * ((1 << 31) + 17) if world.rank == 0 else b""
        return numpy.full((1 << 28) + 3, world.rank + 1, numpy.float64) if world.rank else text

    text, array = barrier.launch(spark, much, num_proc=2, config=QUICK)
    assert len(text) == (1 << 31) + 17
    assert array.nbytes > 1 << 31
    assert (array == 2.0).all()


def test_what_cannot_be_sent_is_refused_before_a_job_starts(spark):
    for thing in (threading.Lock(), socket.socket(), spark, (n for n in "generator")):
        with pytest.raises(ConfigError, match=r"cannot be sent to the ranks .* inside the function"):
            run(lambda x: None, (thing,), num_proc=2, spark=spark)
    assert run(lambda: 1, num_proc=2, spark=spark, log_to_driver=False) == [1, 1]


def test_a_worker_with_another_version_is_refused_by_name(spark, monkeypatch):
    here = supervise.facts()
    monkeypatch.setattr(supervise, "facts", lambda: {**here, "torch": "1.0"})
    with pytest.raises(PreflightError, match=r"torch is [\d.+a-z]+ on \S+ but 1\.0 on the driver"):
        run(lambda: None, num_proc=2, spark=spark, config=QUICK)


def test_a_function_opens_torch_and_horovod_groups_itself(spark):
    def train(factor, plus=0):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.ones(1) * factor
        dist.all_reduce(total)
        results = [total.item() + plus]
        try:
            import horovod.torch as hvd
        except ImportError:
            return results
        for _ in range(2):
            hvd.init()
            results.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
            hvd.shutdown()
        hvd.init()
        return [*results[:1], *set(results[1:])]

    for _ in range(2):  # The second time in the same workers, which were left with both groups open.
        for values in run(train, (3.0,), {"plus": 1}, num_proc=2, spark=spark, log_to_driver=False):
            assert values in ([7.0, 2.0], [7.0])


def test_output_comes_while_the_function_runs(spark, tmp_path):
    seen = []

    class Console:
        def write(self, text):
            seen.extend(text.splitlines())
            for rank in (0, 1):
                if {f"[rank {rank}] early", f"[rank {rank}] from below"} <= set(seen):
                    (tmp_path / str(rank)).touch()

        def flush(self):
            pass

    def speak(world):
        print("early")
        os.write(2, b"from below\n")
        until((tmp_path / str(world.rank)).exists)

    before, sys.stdout = sys.stdout, Console()
    try:
        barrier.launch(spark, speak, num_proc=2, config=LaunchConfig(timeout_seconds=120))
    finally:
        sys.stdout = before


def test_a_rank_that_raises_is_named_and_the_hanging_one_ended(spark):
    pids = []

    def fail():
        import torch
        import torch.distributed as dist

        observe.emit("pid", pid=os.getpid())
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if os.environ["RANK"] == "1":
            print("the last words")
            raise ValueError("no good")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankFailedError, match="rank 1 failed: ValueError: no good") as caught:
        run(fail, num_proc=2, spark=spark, config=QUICK, on_event=lambda event: pids.append(event.get("pid", 0)))
    assert caught.value.log_tail[-1] == "the last words"
    assert "in fail" in caught.value.rank_traceback
    assert isinstance(caught.value.__cause__, ValueError)
    assert len(pids) == 2
    until_gone(pids)


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_rank_that_dies_is_named_although_its_peer_complains_first(spark, how, heard):
    def die():
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if os.environ["RANK"] == "0":
            print("about to die")
            until_heard(heard, 0, "log")
            os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankFailedError, match=r"rank 0 failed: the process .* died") as caught:
        run(die, num_proc=2, spark=spark, config=QUICK)
    assert caught.value.log_tail == ("about to die",)


def test_memory_that_runs_out_is_a_failure_like_any_other(spark):
    def eat(world):
        import numpy

        return numpy.ones(1 << 50) if world.rank == 1 else hang()

    with pytest.raises(RankFailedError, match=r"rank 1 failed: .*MemoryError"):
        barrier.launch(spark, eat, num_proc=2, config=QUICK)


@pytest.mark.slow
def test_a_rank_that_freezes_is_named_and_ended(spark, heard):
    pids = {}

    def freeze():
        import torch
        import torch.distributed as dist

        observe.emit("pid", pid=os.getpid())
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if os.environ["RANK"] == "1":
            os.write(1, b"freezing\n")
            until_heard(heard, 1, "log")
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))

    config = LaunchConfig(silence_seconds=8.0, stop_grace_seconds=0.3, log_to_driver=False)
    with pytest.raises(RankFailedError, match=r"rank 1 failed: .* gave no sign of life for 8 s") as caught:
        run(
            freeze,
            num_proc=2,
            spark=spark,
            config=config,
            on_event=lambda event: pids.update({event["rank"]: event["pid"]}),
        )
    assert caught.value.log_tail[-1] == "freezing"
    until_gone([pids[1]])
    assert run(lambda: 1, num_proc=2, spark=spark, config=QUICK) == [1, 1]


@pytest.mark.slow
def test_parameters_of_other_shapes_name_the_ranks_that_differ(spark):
    def train():
        import torch

        from sparkdl.collective import open_collective
        from sparkdl.world import World

        world = World.from_env()
        model = torch.nn.Linear(3, 4 + world.rank)
        print("built")
        collective = open_collective(world, backend="torch")
        collective.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(CheckpointError, match=r"weight is \(4, 3\).*rank 1 has weight \(5, 3\)") as caught:
        run(train, num_proc=2, spark=spark, config=QUICK)
    failure = caught.value.__cause__
    assert isinstance(failure, RankFailedError)
    assert failure.log_tail[-1] == "built"
    assert "in train" in failure.rank_traceback


def test_a_port_of_the_users_own_that_is_taken_is_told_as_it_is(spark):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        def join():
            import datetime

            import torch.distributed as dist

            method, rank = f"tcp://127.0.0.1:{port}", int(os.environ["RANK"])
            ten = datetime.timedelta(seconds=10)
            dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=ten)

        with pytest.raises(RankFailedError, match=rf"(?i)rank 0 failed: .*{port}.*address already in use"):
            run(join, num_proc=2, spark=spark, config=QUICK)


def test_a_value_that_cannot_be_pickled_is_named(spark):
    with pytest.raises(RankFailedError, match=r"_thread\.lock, cannot be pickled .* return plain data"):
        barrier.launch(spark, lambda world: threading.Lock(), num_proc=2, config=QUICK)


def test_a_function_that_hangs_is_ended_at_its_timeout(spark, clock, heard):
    pids = {}
    config = LaunchConfig(timeout_seconds=500.0, stop_grace_seconds=0.5, log_to_driver=False)

    def stay(world):
        observe.emit("pid", pid=os.getpid())
        if world.rank == 1:
            observe.emit("child", pid=subprocess.Popen(["sleep", "300"]).pid)
            print("so far")
            until_heard(heard, 0, "result")
            until_heard(heard, 1, "log")
            tell_when_at("time.sleep(1)")
            hang()

    def on_event(event):
        if event["kind"] == "there":
            clock.jump(600)
        else:
            pids[event["kind"], event["rank"]] = event["pid"]

    with pytest.raises(LaunchTimeoutError, match="rank 1 of 2 did not return within 500 s") as caught:
        barrier.launch(spark, stay, num_proc=2, config=config, on_event=on_event)
    assert len(pids) == 3
    assert caught.value.rank == 1
    assert caught.value.log_tail[0] == "so far"
    assert caught.value.rank_traceback.splitlines()[0].endswith("in stay")
    assert "time.sleep(1)" in caught.value.rank_traceback
    until_gone([pids["pid", 1], pids["child", 1]])


def test_a_stage_of_another_size_is_refused(spark, monkeypatch):
    original = barrier._frame
    monkeypatch.setattr(barrier, "_frame", lambda session, num_proc, *rest: original(session, 1, *rest))
    with pytest.raises(WorldSizeError, match="sees 1 ranks, but num_proc=2"):
        barrier.launch(spark, lambda world: None, num_proc=2, config=QUICK)


def test_more_ranks_than_slots_are_refused_at_once(spark):
    with pytest.raises(PreflightError, match=r"num_proc=3 .* 2 task slots: .* local\[3\]"):
        barrier.launch(spark, lambda world: None, num_proc=3, config=QUICK)
    assert run(lambda: 1, spark=spark, log_to_driver=False) == [1, 1]  # num_proc=None takes all slots


def test_slots_that_stay_busy_end_in_a_timeout(spark):
    config = LaunchConfig(start_timeout_seconds=2.0, stop_grace_seconds=0.5, log_to_driver=False)

    def busy(batches):
        for batch in batches:
            time.sleep(600)
            yield batch

    from pyspark import InheritableThread

    def occupy():
        spark.sparkContext.addJobTag("busy")
        with pytest.raises(Exception, match=r"(?i)cancel"):
            spark.range(0, 2, 1, 2).mapInArrow(busy, "id long").collect()

    other = InheritableThread(target=occupy, session=spark)
    other.start()
    until(spark.sparkContext.statusTracker().getActiveJobsIds)
    try:
        with pytest.raises(LaunchTimeoutError, match="0 of 2 ranks started within 2 s"):
            barrier.launch(spark, lambda world: None, num_proc=2, config=config)
    finally:
        spark.sparkContext.cancelJobsWithTag("busy")
        other.join()


def test_a_cancelled_job_group_ends_every_rank(spark):
    pids = []
    spark.sparkContext.setJobGroup("mine", "")

    def heard(event):
        pids.append(event["pid"])
        if len(pids) == 2:
            spark.sparkContext.cancelJobGroup("mine")

    def stay(world):
        observe.emit("pid", pid=os.getpid())
        hang()

    try:
        with pytest.raises(CancelledError):
            barrier.launch(spark, stay, num_proc=2, config=QUICK, on_event=heard)
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
    assert len(pids) == 2
    until_gone(pids)


def test_ctrl_c_on_the_driver_ends_every_rank(spark):
    pids = []

    def heard(event):
        pids.append(event["pid"])
        if len(pids) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    def stay(world):
        observe.emit("pid", pid=os.getpid())
        hang()

    with pytest.raises(KeyboardInterrupt):
        barrier.launch(spark, stay, num_proc=2, config=QUICK, on_event=heard)
    assert len(pids) == 2
    until_gone(pids)


def test_the_driver_listens_on_one_interface_only_while_ranks_run(spark):
    before = listeners()
    during = []

    barrier.launch(
        spark,
        lambda world: observe.emit("now"),
        num_proc=2,
        config=QUICK,
        on_event=lambda _: during.extend(listeners() - before),
    )
    assert during
    assert {address.ip for address in during} == {"127.0.0.1"}


def test_a_service_that_cannot_bind_stops_the_launch_before_it_starts(spark):
    with pytest.raises(Exception, match=r"192\.0\.2\.1"):
        run(lambda: None, num_proc=2, spark=spark, config=LaunchConfig(driver_host="192.0.2.1"))


def test_a_port_that_is_taken_disturbs_nobody(spark):
    with socket.create_server(("127.0.0.1", 29500)):
        assert run(functools.partial(int, "4"), num_proc=2, spark=spark, log_to_driver=False) == [4, 4]


def test_a_session_that_was_stopped_is_told_as_one():
    class Stopped:
        class conf:
            get = staticmethod(lambda name, default=None: default)

        class sparkContext:
            _jsc = None

    with pytest.raises(PreflightError, match="this Spark session has been stopped"):
        run(lambda: 1, num_proc=2, spark=Stopped())
