"""Freed memory stays for the next step inside the block, and goes back to the system behind it."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest

from sparkdl.compat import heap
from sparkdl.compat.heap import kept_heap

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc alone has it")

# In a process of its own, without libraries, whose small blocks would lie at the end of the heap and keep it.
STEPS = """
import ctypes, json, resource
from sparkdl.compat.heap import kept_heap

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks = [libc.malloc(8_000_000) for _ in range(12)]
        for block in blocks:
            libc.memset(block, 1, 8_000_000)
        for block in blocks:
            libc.free(block)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

faults_of_a_step()
outside, before = faults_of_a_step(), resident()
with kept_heap():
    faults_of_a_step()
    inside, within = faults_of_a_step(), resident()
print(json.dumps({"outside": outside, "inside": inside, "held": within - before, "left": resident() - before}))
"""


def test_freed_memory_is_kept_inside_and_given_back_behind():
    run = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    pages = json.loads(run.stdout)
    assert pages["outside"] > 1_000  # 96 MB of 4 KiB pages, most of them cleared anew
    assert pages["inside"] < 10
    assert pages["held"] > 10 << 20
    assert pages["left"] < 2 << 20


def test_what_the_block_raises_comes_out_of_it():
    with pytest.raises(ValueError, match="of the block"), kept_heap():
        raise ValueError("of the block")


def test_without_glibc_the_block_runs_as_it_is(monkeypatch):
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())
    ran = []
    with kept_heap():
        ran.append(1)
    assert ran


def test_bounds_of_the_environment_stay(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    called = []
    monkeypatch.setattr(
        heap.ctypes, "CDLL", lambda name: type("Libc", (), {"mallopt": called.append, "malloc_trim": called.append})
    )
    with kept_heap():
        pass
    assert not called
