"""A process is known to have ended where its number counts, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sparkdl import processes


@pytest.fixture
def child():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as found:
        yield found


def test_a_process_ends_once_and_here(child):
    here, began = processes.place(), processes.started(child.pid)
    assert here
    assert not processes.ended(here, child.pid, began)
    child.communicate("\n")
    assert processes.ended(here, child.pid, began)
    assert not processes.ended("elsewhere", child.pid, began)


def test_another_process_with_its_number_is_another():
    mine = processes.started(os.getpid())
    assert processes.started(os.getpid()) == mine
    assert processes.ended(processes.place(), os.getpid(), mine + 1)


def test_where_the_kernel_tells_nothing_processes_are_told_apart_too(monkeypatch, child):
    def none(*_):
        raise FileNotFoundError("/proc")

    monkeypatch.setattr(processes.Path, "read_text", none)
    began = processes.started(child.pid)
    assert not processes.ended(processes.place(), child.pid, began)
    child.communicate("\n")
    assert processes.ended(processes.place(), child.pid, began)


def test_a_process_that_nobody_may_look_at_is_not_known_to_have_ended(monkeypatch):
    def refuse(number):
        raise processes.psutil.AccessDenied(number)

    monkeypatch.setattr(processes.psutil, "Process", refuse)
    assert not processes.ended(processes.place(), 2**22 + 1, 1)
