"""Ranks as processes of this machine: values, order, output, events, environment; no Spark anywhere."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from sparkdl import observe
from sparkdl.config import LaunchConfig
from sparkdl.errors import RankFailedError
from sparkdl.launch import local

QUICK = LaunchConfig(stop_grace_seconds=0.5, start_timeout_seconds=60)


def test_values_come_back_in_rank_order():
    assert local.launch(lambda world: (world.rank, world.size), num_proc=3, config=QUICK) == [(0, 3), (1, 3), (2, 3)]


def test_output_of_python_and_of_children_is_printed_with_its_rank(capfd):
    def speak(world):
        print("from python")
        print("from stderr", file=sys.stderr)
        os.system("echo from a child")

    local.launch(speak, num_proc=2, config=QUICK)
    printed = capfd.readouterr().out.splitlines()
    for rank in (0, 1):
        for words in ("from python", "from stderr", "from a child"):
            assert f"[rank {rank}] {words}" in printed


def test_output_that_the_drivers_encoding_lacks_is_escaped(tmp_path):
    with (tmp_path / "out").open("w", encoding="latin-1") as out:
        config = LaunchConfig(stop_grace_seconds=0.5, start_timeout_seconds=60, stdout=out)
        assert local.launch(lambda world: print("caf\u00e9 \u2603"), num_proc=1, config=config) == [None]
    assert (tmp_path / "out").read_text(encoding="latin-1") == "[0]<stdout>:caf\\xe9 \\u2603\n"


def test_a_list_of_threads_reaches_the_ranks_as_it_is():
    config = LaunchConfig(stop_grace_seconds=0.5, start_timeout_seconds=60, env={"OMP_NUM_THREADS": "1,1"})
    assert local.launch(lambda world: os.environ["OMP_NUM_THREADS"], num_proc=1, config=config) == ["1,1"]


def test_the_error_behind_long_lines_of_emojis_is_the_ranks_own(capfd):
    def fail(world):
        for _ in range(100):
            print("\U0001f600" * 4000)
        raise ValueError("mine")

    with pytest.raises(RankFailedError, match=r"^rank 0 failed: ValueError: mine$") as failure:
        local.launch(fail, num_proc=1, config=QUICK)
    assert len(failure.value.log_tail) == 100


def test_events_reach_the_driver_with_their_rank():
    events = []
    local.launch(
        lambda world: observe.emit("loss", value=world.rank * 0.5), num_proc=2, config=QUICK, on_event=events.append
    )
    assert sorted((event["kind"], event["rank"], event["value"]) for event in events) == [
        ("loss", 0, 0.0),
        ("loss", 1, 0.5),
    ]


def test_the_failing_rank_is_named_with_its_traceback_and_lines():
    def fail(world):
        import time

        if world.rank == 1:
            print("the last words")
            raise ValueError("no good")
        time.sleep(60)

    with pytest.raises(RankFailedError, match="ValueError: no good") as caught:
        local.launch(fail, num_proc=2, config=QUICK)
    assert caught.value.rank == 1
    assert "in fail" in caught.value.rank_traceback
    assert caught.value.log_tail[-1] == "the last words"
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before
