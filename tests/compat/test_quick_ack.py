"""The kernel acknowledges what Spark sends a worker as it comes, instead of 40 ms later."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sparkdl.compat.quick_ack import promptly

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux delays acknowledgements so, and has the cure"
)

# A worker with one connection on loopback, as the daemon leaves it, on which acknowledgements are delayed again.
WORKER = """
import os, socket
from sparkdl.compat.quick_ack import promptly

listener = socket.create_server(("127.0.0.1", 0))
ends = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
listener.close()

def delay():
    for end in ends:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)

def is_prompt():
    return max(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) for end in ends)

delay()
seen = [is_prompt()]
fds = len(os.listdir("/proc/self/fd"))
for batch in promptly([1, 2]):
    seen.append(is_prompt())
    delay()
print(seen, len(os.listdir("/proc/self/fd")) - fds)
"""


def run_worker(**env):
    done = subprocess.run(
        [sys.executable, "-c", WORKER], capture_output=True, text=True, check=True, env={**os.environ, **env}
    )
    return done.stdout.strip()


def test_each_batch_is_waited_for_without_delayed_acknowledgements():
    assert run_worker(PYTHON_WORKER_FACTORY_SECRET="secret") == "[0, 1, 1] 0"


def test_nothing_but_a_spark_worker_is_touched(monkeypatch):
    monkeypatch.delenv("PYTHON_WORKER_FACTORY_SECRET", raising=False)
    assert run_worker() == "[0, 0, 0] 0"


def test_batches_pass_unchanged_and_one_at_a_time():
    taken = []

    def source():
        for n in range(3):
            taken.append(n)
            yield n

    batches = promptly(source())
    assert next(batches) == 0
    assert taken == [0]
    assert list(batches) == [1, 2]


def test_an_error_of_the_source_is_the_reader_s():
    def source():
        yield 1
        raise OSError("the JVM is gone")

    batches = promptly(source())
    assert next(batches) == 1
    with pytest.raises(OSError, match="the JVM is gone"):
        next(batches)
