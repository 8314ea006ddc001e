"""An interrupt waits for the end of what it must not cut in two, and is not lost."""

import os
import signal
import threading
import time

import pytest

from sparkdl.compat.interrupts import interrupts_wait, termination_interrupts


def test_an_interrupt_comes_when_the_block_is_done():
    before, done = signal.getsignal(signal.SIGINT), []

    def interrupted():
        with interrupts_wait():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_that_the_block_has_set_stays():
    before = signal.getsignal(signal.SIGINT)
    try:
        with interrupts_wait():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


def test_nothing_changes_in_other_threads_and_for_errors():
    found = []

    def other():
        with interrupts_wait():
            found.append(1)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [1]
    with pytest.raises(ValueError, match="own"), interrupts_wait():
        raise ValueError("own")


@pytest.fixture
def ctrl_c():
    """As a new process has it, whatever Spark of another test has made of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


SENT = "import signal\nsignal.raise_signal(signal.{})\nwent_on.append(True)\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(("file", "goes_on"), [("<frozen importlib._bootstrap>", [True]), ("own.py", [])])
def test_an_interrupt_waits_while_pythons_own_import_code_runs(ctrl_c, name, file, goes_on):
    before, went_on = signal.getsignal(signal.SIGTERM), []

    def interrupted():
        with termination_interrupts():
            exec(compile(SENT.format(name), file, "exec"), {"went_on": went_on})
            time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert went_on == goes_on
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_termination_takes_the_road_that_somebody_else_has_made_for_ctrl_c(ctrl_c):
    came = []
    with termination_interrupts():
        signal.signal(signal.SIGINT, lambda number, _: came.append(number))
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert came == [signal.SIGINT] * 2
