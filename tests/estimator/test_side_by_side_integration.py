"""Work that runs side by side in one session: what comes back, and what becomes of the others when one fails."""

from __future__ import annotations

import functools
import threading
import time

import pytest

from sparkdl.errors import DataError
from sparkdl.estimator.side_by_side import run_side_by_side


@pytest.mark.parametrize("width", [1, 2])
def test_values_come_back_in_the_order_of_the_tasks(spark, width):
    both_begun = threading.Barrier(width)

    def count(rows):
        both_begun.wait(60)
        return spark.range(rows).count()

    assert run_side_by_side([functools.partial(count, rows) for rows in (7, 3)], spark, width) == [7, 3]


def test_the_first_error_in_the_order_of_the_tasks_is_raised_once_the_others_have_ended(spark):
    counts, second_failed = [], threading.Event()

    def fail_late():
        second_failed.wait(60)
        raise DataError("the first")

    def fail_early():
        second_failed.set()
        raise DataError("the second")

    def count():
        counts.append(spark.range(5).count())

    with pytest.raises(DataError, match="the first"):
        run_side_by_side([fail_late, fail_early, count], spark, 3)
    assert counts == [5]


def test_no_task_begins_once_one_has_failed(spark):
    begun = []

    def take_long():
        time.sleep(1)

    def fail():
        raise DataError("the second")

    with pytest.raises(DataError, match="the second"):
        run_side_by_side([take_long, fail, *[lambda: begun.append(1)] * 50], spark, 2)
    assert begun == []
