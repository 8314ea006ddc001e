"""An interrupt waits for the end of what it must not cut in two, and is not lost."""

import os
import signal
import threading

import pytest

from sparkdl.compat.interrupts import interrupts_wait


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
