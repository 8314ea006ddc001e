import threading
import time

import pytest

from sparkdl.errors import LaunchTimeoutError
from sparkdl.launch.driver.slots import SlotGate, gate_of


def test_never_more_slots_are_held_than_there_are():
    gate, held, most = SlotGate(), [0], [0]
    lock = threading.Lock()

    def use(count):
        with gate.hold(count, total=4):
            with lock:
                held[0] += count
                most[0] = max(most[0], held[0])
            time.sleep(0.005)
            with lock:
                held[0] -= count

    threads = [threading.Thread(target=use, args=(1 + n % 4,)) for n in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 2 <= most[0] <= 4


def test_first_come_first_served_so_that_a_large_fit_is_not_overtaken_for_ever():
    gate, order, large_waits = SlotGate(), [], threading.Event()

    def large():
        large_waits.set()
        with gate.hold(2, total=2):
            order.append("large")

    def small():
        with gate.hold(1, total=2):
            order.append("small")

    with gate.hold(1, total=2):
        first = threading.Thread(target=large)
        first.start()
        large_waits.wait()
        while not gate._queue:
            time.sleep(0.001)
        second = threading.Thread(target=small)
        second.start()
        second.join(0.05)
        assert order == []
    first.join()
    second.join()
    assert order == ["large", "small"]


def test_waiting_has_an_end_that_says_who_holds_what():
    gate = SlotGate()
    with gate.hold(2, total=2), pytest.raises(LaunchTimeoutError, match="2 are"), gate.hold(1, total=2, timeout=0.01):
        pass
    with gate.hold(2, total=2, timeout=1):
        pass


def test_fits_of_one_application_share_one_gate():
    assert gate_of("app-1") is gate_of("app-1")
    assert gate_of("app-1") is not gate_of("app-2")
