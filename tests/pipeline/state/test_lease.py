"""One run at a time, and no lease outlives its holder."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from sparkdl import processes
from sparkdl.documents.typed import encode
from sparkdl.errors import StorageError
from sparkdl.pipeline.state.lease import Holder, LeaseTakenError, holder_of, lease
from sparkdl.storage import Storage


@pytest.fixture
def folder(tmp_path):
    return Storage.of(tmp_path / "pipeline" / "leases")


def elsewhere(**more):
    now = time.time()
    return replace(Holder(run_id="r1", host="far-away", process=7, since="2026-03-02T00:00:00+00:00", beat=now), **more)


def put(folder, holder, number=1):
    folder.child(f"{number:09d}.json").write_atomic(encode(holder))


def test_one_after_the_other(folder):
    with lease(folder, "a"):
        pass
    with lease(folder, "b") as holder:
        assert holder.run_id == "b"


def test_the_second_is_told_who_holds_it(folder):
    words = rf"run a \(process {os.getpid()} on .*\) is at work"
    with lease(folder, "a"), pytest.raises(LeaseTakenError, match=words), lease(folder, "b"):
        pass


def test_a_lease_is_given_back_when_the_work_fails(folder):
    with pytest.raises(RuntimeError), lease(folder, "a"):
        raise RuntimeError("work")
    with lease(folder, "b"):
        pass


def test_a_silent_holder_of_another_host_is_over_and_a_living_one_is_not(folder, caplog):
    put(folder, elsewhere())
    with pytest.raises(LeaseTakenError, match=r"run r1 \(process 7 on far-away"), lease(folder, "b"):
        pass
    put(folder, elsewhere(beat=time.time() - 301))
    with lease(folder, "b"):
        pass
    assert "gone without giving its lease back" in caplog.text


def test_a_heartbeat_keeps_an_old_lease(folder):
    put(folder, elsewhere(beat=time.time() - 4000))
    folder.child("000000001.beat.json").write_atomic(encode(elsewhere()))
    with pytest.raises(LeaseTakenError), lease(folder, "b"):
        pass


def test_a_damaged_lease_stops_nobody(folder):
    folder.child("000000001.json").write_atomic(b"{}")
    with lease(folder, "b"):
        pass


@pytest.mark.parametrize("name", ["000000001.beat.json", "000000001.json"])
def test_a_lease_that_cannot_be_read_now_is_not_taken_over(folder, name):
    put(folder, elsewhere(beat=time.time() - 4000))
    folder.child(name).delete()
    folder.child(name).child("file").write_atomic(b"")  # which is there, and gives an error when it is read
    with pytest.raises(StorageError, match=f"cannot read .*{name}"), lease(folder, "b"):
        pass
    assert not folder.child("000000002.json").exists()
    with pytest.raises(StorageError):
        holder_of(folder)


def hold(place, ready, go_on):
    with lease(Storage.of(place), "child"):
        ready.set()
        go_on.wait(30)


def contend(place, name, won, together, go_on):
    together.wait(60)
    try:
        with lease(Storage.of(place), name):
            won.put(name)
            go_on.wait(60)
    except LeaseTakenError:
        won.put(None)


def test_a_killed_process_of_this_host_holds_nothing(folder):
    context = multiprocessing.get_context("spawn")
    ready, go_on = context.Event(), context.Event()
    child = context.Process(target=hold, args=(folder.uri, ready, go_on))
    child.start()
    assert ready.wait(60)
    with pytest.raises(LeaseTakenError, match="run child"), lease(folder, "b"):
        pass
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    with lease(folder, "b"):
        pass


def test_of_many_who_try_at_once_one_wins(folder):
    context = multiprocessing.get_context("spawn")
    won, together, go_on = context.Queue(), context.Barrier(4), context.Event()
    arguments = (won, together, go_on)
    children = [context.Process(target=contend, args=(folder.uri, f"run{i}", *arguments)) for i in range(4)]
    for child in children:
        child.start()
    found = [won.get(timeout=60) for _ in children]
    go_on.set()
    for child in children:
        child.join()
    assert sum(name is not None for name in found) == 1


def test_a_process_of_another_container_with_this_hosts_name_is_not_looked_for_here():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    holder = Holder(
        run_id="r", host=socket.gethostname(), process=gone.pid, since="", beat=time.time(), place="elsewhere"
    )
    assert not holder.over(time.time(), 300.0)
    assert replace(holder, place=processes.place()).over(time.time(), 300.0)
    mine = replace(holder, place=processes.place(), process=os.getpid(), started=processes.started(os.getpid()))
    assert not mine.over(time.time(), 300.0)
    assert replace(mine, started=mine.started + 1).over(time.time(), 300.0)  # a dead process' number, given again
