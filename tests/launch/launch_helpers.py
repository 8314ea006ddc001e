"""What tests of launches share: a clock of the driver that jumps, ranks that wait for events, ends that are awaited.

No test here waits for a time to pass: what should come to pass is awaited, however busy the machine is, and what never
comes ends at the limit that every test has.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from pathlib import Path

import cloudpickle
import psutil

from sparkdl import observe

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def until(condition):
    """Wait until ``condition()`` holds."""
    while not condition():
        time.sleep(0.02)


def hang():
    """In a rank: stay, whatever the driver says."""
    while True:
        try:
            time.sleep(1)
        except KeyboardInterrupt:
            print("not listening")


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until_gone(pids):
    """Wait until none of these processes runs."""
    until(lambda: not any(map(is_alive, pids)))


def until_heard(folder, rank, *kinds):
    """In a rank: wait until the driver has had a report of each kind from ``rank``; ``folder`` is that of ``heard``."""
    until(lambda: all((Path(folder) / f"{rank}-{kind}").exists() for kind in kinds))


def tell_when_at(words):
    """In a rank: emit the event ``there`` once this thread stands at a line that begins with ``words``."""
    thread = threading.get_ident()

    def is_there():
        return any(entry.line.startswith(words) for entry in traceback.extract_stack(sys._current_frames()[thread]))

    def watch():
        until(is_there)
        observe.emit("there")

    threading.Thread(target=watch, daemon=True).start()


class Clock:
    """The driver's clock, which goes on by itself and can be set forward."""

    def __init__(self):
        self._ahead = 0.0

    def monotonic(self):
        return time.monotonic() + self._ahead

    def jump(self, seconds):
        self._ahead += seconds
