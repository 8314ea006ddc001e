"""How local ranks end: by signals, crashes, a lost driver, Ctrl-C; and values beyond 2 GB."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launch_helpers import hang, tell_when_at, until, until_gone, until_heard

from sparkdl import observe
from sparkdl.config import LaunchConfig
from sparkdl.errors import ClusterError, ConfigError, LaunchTimeoutError, PreflightError, RankFailedError
from sparkdl.launch import local
from sparkdl.runner import run

QUICK = LaunchConfig(stop_grace_seconds=0.3, log_to_driver=False)


def own_processes():
    """All below this one, but for those of the Spark of other tests, which forks workers when it likes."""
    me, found = psutil.Process(), set()
    for child in me.children():
        if child.name() != "java":
            found |= {child.pid, *(each.pid for each in child.children(recursive=True))}
    return found


@pytest.fixture(autouse=True)
def _no_process_is_left():
    before = own_processes()
    yield
    assert own_processes() <= before


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os._exit(3), "exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL, which is also .* memory runs out"),
        (lambda: ctypes.string_at(0), r"killed by SIGSEGV\n(.*\n)*.*Segmentation fault\n(.*\n)*.* in die\n"),
    ],
)
def test_a_rank_that_dies_is_named_with_how_it_ended(end, words, heard):
    def die(world):
        if world.rank == 1:
            print("about to die")
            until_heard(heard, 1, "log", "beat")
            end()
        hang()

    with pytest.raises(RankFailedError, match=f"rank 1 failed: the process .* {words}") as caught:
        local.launch(die, num_proc=2, config=QUICK)
    assert caught.value.log_tail == ("about to die",)
    assert re.search(r"s before, it held \d+ MiB, and .* GiB were free there", caught.value.cause)


def test_a_function_that_hangs_is_ended_at_its_timeout():
    config = LaunchConfig(timeout_seconds=0.5, stop_grace_seconds=0.3, log_to_driver=False)
    with pytest.raises(LaunchTimeoutError, match=r"ranks 0, 1 of 2 did not return within 0\.5 s"):
        local.launch(lambda world: hang(), num_proc=2, config=config)


def test_memory_that_runs_out_is_told_with_traceback_and_lines():
    def eat(world):
        if world.rank == 0:
            hang()
        process, before = psutil.Process(), resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (process.memory_info().vms + (64 << 20), before[1]))
        try:
            print("hungry")
            pieces = []
            while True:  # To the very last byte not even Python itself could still note where it happened.
                pieces.append(bytearray(1 << 20))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    with pytest.raises(RankFailedError, match=r"rank 1 failed: MemoryError") as caught:
        local.launch(eat, num_proc=2, config=QUICK)
    assert "in eat" in caught.value.rank_traceback
    assert caught.value.log_tail == ("hungry",)


def test_memory_that_runs_out_to_the_last_byte_is_told_with_the_place():
    def eat(world):
        if world.rank == 0:
            hang()
        process, before = psutil.Process(), resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (process.memory_info().vms + (64 << 20), before[1]))
        pieces, size = [], 1 << 20
        print("hungry")
        while size:
            try:
                pieces.append(bytearray(size))
            except MemoryError:
                size //= 2
        pieces += [object() for _ in range(1 << 60)]

    with pytest.raises(RankFailedError, match=r"rank 1 failed: MemoryError") as caught:
        local.launch(eat, num_proc=2, config=QUICK)
    assert "in eat" in caught.value.rank_traceback
    assert caught.value.log_tail == ("hungry",)


@pytest.fixture
def small_container():
    """A control group of 300 MiB, where this user may make one."""
    old, new = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    folder, limit = (old, "memory.limit_in_bytes") if old.is_dir() else (new, "memory.max")
    folder = folder / f"sparkdl-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(300 << 20))
        (folder / "cgroup.procs").write_text("")
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip("this user may not make control groups")
    yield folder

    def is_removed():  # not while a process of it is still on its way out
        with contextlib.suppress(OSError):
            folder.rmdir()
        return not folder.is_dir()

    until(is_removed)


def test_a_rank_that_the_kernel_kills_for_want_of_memory_is_named_with_the_reason(small_container, heard):
    def eat(world):
        if world.rank == 0:
            hang()
        (small_container / "cgroup.procs").write_text(str(os.getpid()))
        print("hungry")
        until_heard(heard, 1, "log")
        pieces = []
        while True:
            pieces.append(b"x" * (4 << 20))
            time.sleep(0.02)

    with pytest.raises(RankFailedError, match=r"rank 1 failed: the process .* killed by SIGKILL") as caught:
        local.launch(eat, num_proc=2, config=QUICK)
    assert "killed a process there for want of memory" in caught.value.cause
    assert "in eat" in caught.value.rank_traceback
    assert caught.value.log_tail == ("hungry",)


@pytest.mark.parametrize("returns", [True, False])
def test_what_a_rank_has_started_ends_with_it(returns, clock):
    children = []

    def start(world):
        observe.emit("child", pid=subprocess.Popen(["sleep", "300"]).pid)
        return None if returns else hang()

    def heard(event):
        children.append(event["pid"])
        if len(children) == 2 and not returns:
            clock.jump(600)

    config = LaunchConfig(timeout_seconds=500, stop_grace_seconds=0.3, log_to_driver=False)
    with contextlib.nullcontext() if returns else pytest.raises(LaunchTimeoutError):
        local.launch(start, num_proc=2, config=config, on_event=heard)
    assert len(children) == 2
    until_gone(children)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"fn": 5}, "fn=5 is a int: give the function"),
        ({"args": "ab"}, r"args='ab' is a str: give a tuple, for one argument args=\(value,\)"),
        ({"args": 7}, "args=7 is a int: give a tuple"),
        ({"kwargs": [1]}, r"kwargs=\[1\] is a list: give a dict"),
        ({"num_proc": 0}, "num_proc=0 is no number of ranks"),
        ({"num_proc": True}, "num_proc=True is no number of ranks"),
        ({"num_proc": 2.0}, "num_proc=2.0 is no number of ranks"),
        ({"env": ["A=1"]}, r"env=\['A=1'\] is a list: give a dict"),
        ({"env": {"A": 1}}, "values that are not strings"),
        ({"env": {"A=B": "x", "": "x", "C": "a\0b", "D": "="}}, r"env has \['A=B', '', 'C'\], which no environment"),
        ({"timeout": "5"}, "timeout_seconds='5' is a str: give a number"),
        ({"start_timeout": "5"}, "start_timeout_seconds='5' is a str: give a number"),
        ({"backend": "mpi"}, "backend='mpi' is not one of"),
        ({"colour": 1}, "no keyword colour: it has args, kwargs, num_proc, start_timeout, "),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(wrong, words):
    with pytest.raises(ConfigError, match=words):
        run(**{"fn": lambda: None, "num_proc": -2, **wrong})


def test_of_ranks_that_hang_the_one_the_others_wait_for_is_named(clock):
    there = []

    def train():
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        tell_when_at("time.sleep(600)" if dist.get_rank() == 1 else "dist.all_reduce(torch.ones(2))")
        if dist.get_rank() == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(2))

    def heard(event):
        there.append(event["rank"])
        if len(there) == 2:
            clock.jump(600)

    config = LaunchConfig(timeout_seconds=500, stop_grace_seconds=0.3, log_to_driver=False)
    with pytest.raises(LaunchTimeoutError, match=r"ranks 0, 1 of 2 .* what rank 1 waits for") as caught:
        run(train, num_proc=-2, config=config, on_event=heard)
    assert "time.sleep(600)" in pickle.loads(pickle.dumps(caught.value)).rank_traceback


def test_finally_blocks_run_when_a_run_is_ended(tmp_path):
    def tidy(world):
        if world.rank == 1:
            until((tmp_path / "inside").exists)
            raise ValueError("stop")
        try:
            (tmp_path / "inside").touch()
            time.sleep(600)
        finally:
            (tmp_path / "tidy").write_text("done")

    with pytest.raises(RankFailedError, match="ValueError: stop"):
        local.launch(tidy, num_proc=2, config=LaunchConfig(stop_grace_seconds=60, log_to_driver=False))
    assert (tmp_path / "tidy").read_text() == "done"


def test_ctrl_c_ends_every_rank():
    heard = []

    def on_event(event):
        heard.append(event)
        if len(heard) == 2:
            signal.raise_signal(signal.SIGINT)

    def stay(world):
        observe.emit("here")
        hang()

    with pytest.raises(KeyboardInterrupt):
        local.launch(stay, num_proc=2, config=QUICK, on_event=on_event)


def test_ranks_leave_when_the_driver_is_killed(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        "import os, time\n"
        "from sparkdl.launch import local\n"
        "def stay(world):\n"
        "    print('pid', os.getpid())\n"
        "    while True:\n"
        "        try: time.sleep(1)\n"
        "        except BaseException: pass\n"
        "local.launch(stay, num_proc=2)\n"
    )
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    pids = [int(re.search(r"pid (\d+)", driver.stdout.readline())[1]) for _ in range(2)]
    assert all(psutil.pid_exists(pid) for pid in pids)
    driver.kill()
    driver.wait()
    driver.stdout.close()
    until_gone(pids)


def test_a_value_that_the_driver_cannot_rebuild_is_named():
    def foreign(world):
        import types

        module = types.ModuleType("only_here")
        exec("class Thing: pass", module.__dict__)
        module.Thing.__module__ = "only_here"
        sys.modules["only_here"] = module
        return module.Thing()

    with pytest.raises(RankFailedError, match="rank 0 failed: its value cannot be rebuilt on the driver"):
        local.launch(foreign, num_proc=1, config=QUICK)


def test_more_gpus_than_the_host_has_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(PreflightError, match="3 ranks with 1 GPUs each need 3, but this host has 2"):
        run(lambda: None, num_proc=-3, use_gpu=True)


def test_gpus_are_dealt_by_position(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    config = LaunchConfig(gpus_per_rank=2, log_to_driver=False)

    def look(world):
        return world.device, os.environ["CUDA_VISIBLE_DEVICES"], os.environ["SPARKDL_DEVICES"]

    assert local.launch(look, num_proc=2, config=config) == [
        ("cuda:0", "4,6,5,7", "cuda:0,cuda:2"),
        ("cuda:1", "4,6,5,7", "cuda:1,cuda:3"),
    ]


def test_runs_below_zero_need_no_spark_and_both_backends_work():
    def train():
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item(), "pyspark" in sys.modules

    assert run(train, num_proc=-2, log_to_driver=False) == [(2.0, False)] * 2


@pytest.mark.slow
def test_ranks_load_what_they_seem_to_need_while_they_wait_unless_variables_come_first():
    def needs_torch(world):
        loaded = "torch" in sys.modules

        return loaded, os.environ["OPENBLAS_NUM_THREADS"]

    cores = str(len(os.sched_getaffinity(0)))
    names = ("torch", "no_such")
    assert local.launch(needs_torch, num_proc=1, preload=names, config=QUICK) == [(True, cores)]
    assert local.launch(lambda world: "torch" in sys.modules, num_proc=1, preload=names, config=QUICK) == [True]
    named = LaunchConfig(preload=("colorsys",), log_to_driver=False)
    assert local.launch(lambda world: "colorsys" in sys.modules, num_proc=1, config=named) == [True]
    assert local.launch(lambda world: "colorsys" in sys.modules, num_proc=1, config=QUICK) == [False]
    config = LaunchConfig(env={"TORCH_LOGS": ""}, preload=("torch",), log_to_driver=False)
    assert local.launch(needs_torch, num_proc=1, preload=names, config=config) == [(False, cores)]


def test_a_function_that_needs_no_torch_loads_none():
    code = (
        "import sys\n"
        "from sparkdl.runner import run\n"
        "look = lambda: [name for name in list(sys.modules) if name[:4] in ('torc', 'horo', 'pysp')]\n"
        "print(run(look, num_proc=-2), look())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[[], []] []\n", done.stderr


def test_classes_and_functions_of_a_script_or_notebook_go_both_ways(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from dataclasses import dataclass\n"
        "from enum import Enum\n"
        "from sparkdl.runner import run\n"
        "class Color(Enum):\n"
        "    RED = 1\n"
        "@dataclass\n"
        "class Point:\n"
        "    x: int\n"
        "    color: Color\n"
        "    def twice(self): return helper(self.x)\n"
        "def helper(x): return 2 * x\n"
        "def work(point): return Point(point.twice(), Color.RED), helper\n"
        "for point, function in run(work, (Point(3, Color.RED),), num_proc=-2):\n"
        "    print(type(point) is Point, point, point.color is Color.RED, function(5))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.stdout == "True Point(x=6, color=<Color.RED: 1>) True 10\n" * 2, done.stderr


def test_a_service_that_does_not_start_leaves_no_process():
    def broken(store):
        raise ClusterError("no")

    with pytest.raises(RankFailedError, match="ClusterError: no"):
        local.launch(lambda world: None, num_proc=2, services=[broken], config=QUICK)


@pytest.mark.slow
def test_values_beyond_two_gigabytes_come_back_whole():
    def much(world):
        import numpy

        text = b"x" * ((1 << 31) + 17) if world.rank == 0 else b""
        return numpy.full((1 << 28) + 3, world.rank + 1, numpy.float64) if world.rank else text

    text, array = local.launch(much, num_proc=2, config=QUICK)
    assert len(text) == (1 << 31) + 17
    assert array.nbytes > 1 << 31
    assert (array == 2.0).all()
