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
from sparkdl.pipeline.state.lease import Clock, Holder, LeaseLostError, LeaseTakenError, holder_of, lease
from sparkdl.storage import Storage


@pytest.fixture
def folder(tmp_path):
    return Storage.of(tmp_path / "pipeline" / "leases")


def elsewhere(**more):
    return replace(Holder(run_id="r1", host="far-away", process=7, since="2026-03-02T00:00:00+00:00", beat=7e9), **more)


class Machine:
    """A clock that stands still but for waits; what it is told of happens while they last."""

    def __init__(self, happens=None):
        self.seconds, self.happens = 100.0, happens or (lambda seconds: None)

    def wait(self, seconds):
        self.seconds += seconds
        self.happens(self.seconds - 100)

    def clock(self):
        return Clock(lambda: self.seconds, self.wait)


def here(folder, clock=None):
    """This process, as it holds a lease of another pipeline."""
    with lease(folder.parent().child("others"), "a", clock=clock or Clock()) as mine:
        return mine.holder


def put(folder, holder, number=1):
    folder.child(f"{number:09d}.json").write_atomic(encode(holder))


def test_one_after_the_other(folder):
    with lease(folder, "a"):
        pass
    with lease(folder, "b") as mine:
        assert mine.holder.run_id == "b"


def test_the_second_is_told_who_holds_it(folder):
    words = rf"run a \(process {os.getpid()} on .*\) is at work"
    with lease(folder, "a"), pytest.raises(LeaseTakenError, match=words), lease(folder, "b"):
        pass


def test_a_lease_is_given_back_when_the_work_fails(folder):
    with pytest.raises(RuntimeError), lease(folder, "a"):
        raise RuntimeError("work")
    with lease(folder, "b"):
        pass


@pytest.mark.parametrize("beat", [0.0, 5.0, 1e12])
def test_a_holder_of_another_host_is_over_once_its_beat_has_not_changed_for_long_whatever_its_clock_says(
    folder, caplog, beat
):
    put(folder, elsewhere(beat=beat))
    machine = Machine()
    with lease(folder, "b", clock=machine.clock()) as mine:
        assert machine.seconds - 100 > 300
        assert (mine.number, mine.claims_due) == (2, True)
    assert "gone without giving its lease back" in caplog.text


@pytest.mark.parametrize("step", [15.0, -15.0])
def test_a_holder_of_another_host_whose_beat_changes_keeps_its_lease(folder, step):
    def beats(seconds):
        number = int(seconds // 15)
        folder.child("000000001.beat.json").write_atomic(encode(elsewhere(beat=1000 + number * step)))

    put(folder, elsewhere(beat=1000.0))
    machine = Machine(beats)
    with pytest.raises(LeaseTakenError, match=r"run r1 \(process 7 on far-away"):
        lease(folder, "b", clock=machine.clock()).__enter__()
    assert machine.seconds - 100 <= 20
    assert not folder.child("000000002.json").exists()


def test_a_holder_of_another_host_that_ends_while_it_is_watched_is_followed_at_once(folder):
    put(folder, elsewhere())
    machine = Machine(
        lambda seconds: folder.child("000000001.beat.json").write_atomic(encode(elsewhere(released=True)))
    )
    with lease(folder, "b", clock=machine.clock()) as mine:
        assert machine.seconds - 100 <= 5
        assert not mine.claims_due


def test_a_process_of_this_host_that_lives_and_has_not_beaten_for_long_is_over(folder):
    put(folder, here(folder, Clock(lambda: 1000.0)))
    machine = Machine()
    machine.seconds = 1299.0
    with pytest.raises(LeaseTakenError):
        lease(folder, "b", clock=machine.clock()).__enter__()
    assert machine.seconds == 1299.0, "nothing to wait for: it lives here"
    machine.seconds = 1301.0
    with lease(folder, "b", clock=machine.clock()) as mine:
        assert mine.number == 2


@pytest.mark.parametrize(
    ("theirs", "mine", "waits"),
    [
        ("container_e17_1410901177871_0001_01_000001", "container_e17_1410901177871_0001_02_000001", False),
        ("container_1410901177871_0001_01_000001", "container_1410901177871_0001_10_000003", False),
        ("container_1410901177871_0001_02_000001", "container_1410901177871_0001_02_000002", True),
        ("container_1410901177871_0001_01_000001", "container_1410901177871_0002_02_000001", True),
        ("", "container_1410901177871_0001_02_000001", True),
        ("", "", True),
    ],
)
def test_a_later_attempt_of_a_yarn_application_takes_over_from_its_first_at_once(
    folder, monkeypatch, theirs, mine, waits
):
    monkeypatch.setenv("CONTAINER_ID", theirs)
    put(folder, replace(here(folder), host="another", place="another"))
    monkeypatch.setenv("CONTAINER_ID", mine)
    machine = Machine()
    with lease(folder, "b", clock=machine.clock()) as taken:
        assert (machine.seconds > 400) == waits
        assert taken.claims_due


def test_epochs_grow_in_one_domain_and_a_lease_that_was_taken_over_is_lost(folder):
    with lease(folder, "a") as first:
        first.check()
        put(folder, elsewhere(domain=first.holder.domain), 2)
        with pytest.raises(LeaseLostError, match=r"run a lost its lease to run r1 \(process 7 on far-away"):
            first.check()
    with lease(folder, "c", clock=Machine().clock()) as third:
        assert third.number == 3
        assert third.holder.domain == first.holder.domain
        old, new = first.fence.transaction(), third.fence.transaction()
        assert old.application == new.application
        assert old.version < new.version < third.fence.transaction().version


def test_claims_that_a_run_did_not_come_to_are_left_to_the_next_one(folder):
    put(folder, elsewhere())
    for _ in range(2):
        with lease(folder, "b", clock=Machine().clock()) as mine:
            assert mine.claims_due
    with lease(folder, "c") as mine:
        mine.claims_due = False
    with lease(folder, "d") as mine:
        assert not mine.claims_due


def test_whatever_fails_in_a_run_that_was_taken_over_is_told_as_that(folder):
    def work(folder, happens):
        with lease(folder, "a"):
            happens()
            raise StorageError("a file that the other run has removed")

    with pytest.raises(LeaseLostError, match="run a lost its lease to run r1") as lost:
        work(folder, lambda: put(folder, elsewhere(), 2))
    assert "removed" in str(lost.value.__cause__)
    other = folder.sibling("other")
    with pytest.raises(LeaseLostError, match="who deleted the folder"):
        work(other, lambda: other.child("000000001.json").delete())
    with pytest.raises(StorageError, match="removed"):
        work(other, lambda: None)


def test_a_damaged_lease_stops_nobody(folder):
    folder.child("000000001.json").write_atomic(b"{}")
    with lease(folder, "b"):
        pass


@pytest.mark.parametrize("name", ["000000001.beat.json", "000000001.json"])
def test_a_lease_that_cannot_be_read_now_is_not_taken_over(folder, name):
    put(folder, elsewhere())
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
        run_id="r", host=socket.gethostname(), process=gone.pid, since="", beat=time.monotonic(), place="elsewhere"
    )
    assert not holder.over(time.monotonic())
    assert replace(holder, place=processes.place()).over(time.monotonic())
    mine = replace(holder, place=processes.place(), process=os.getpid(), started=processes.started(os.getpid()))
    assert not mine.over(time.monotonic())
    assert replace(mine, started=mine.started + 1).over(time.monotonic())  # a dead process' number, given again
