"""Ctrl-C while Java works: the jobs end, the interrupt is one, and the session goes on."""

import os
import signal
import threading
import time

import pytest

from sparkdl.compat.interrupts import interrupts_between_calls


@pytest.fixture
def ctrl_c(spark):
    """Pyspark's handler, as a session that this thread has started sets it."""
    before = signal.getsignal(signal.SIGINT)
    from pyspark.core.context import SparkContext

    def handle(*_):
        raise AssertionError("pyspark's own handler was called")

    handle.__module__ = SparkContext.__module__
    signal.signal(signal.SIGINT, handle)
    yield handle
    signal.signal(signal.SIGINT, before)


def asleep(rows):
    for row in rows:
        time.sleep(60)
        yield row


def test_an_interrupt_cancels_the_job_comes_after_javas_answer_and_leaves_the_session_whole(spark, ctrl_c, caplog):
    begun, timer = time.monotonic(), threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt), interrupts_between_calls(spark):
        spark.range(0, 1, 1, 1).rdd.mapPartitions(asleep).count()
    assert time.monotonic() - begun < 30
    assert signal.getsignal(signal.SIGINT) is ctrl_c
    assert spark.range(3).count() == 3
    assert not [record for record in caplog.records if record.name == "root"]  # where py4j prints its tracebacks


IN_A_CALL = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise ValueError('of a call that was cut')\n"


def test_an_error_that_an_interrupt_became_is_an_interrupt_and_any_other_stays(spark, ctrl_c):
    code = compile(IN_A_CALL, f"site-packages{os.sep}py4j{os.sep}gateway.py", "exec")
    with pytest.raises(KeyboardInterrupt) as interrupted, interrupts_between_calls(spark):
        exec(code, {})
    assert isinstance(interrupted.value.__cause__, ValueError)
    with pytest.raises(ValueError, match="own"), interrupts_between_calls(spark):
        raise ValueError("own")
    time.sleep(0.1)  # no reminder comes late


def test_outside_of_a_call_it_comes_at_once_and_a_late_reminder_does_not_cut_what_follows(spark, ctrl_c):
    cleaned_up = []

    def interrupted():
        with interrupts_between_calls(spark):
            try:
                os.kill(os.getpid(), signal.SIGINT)
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
                cleaned_up.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert cleaned_up == [True]
