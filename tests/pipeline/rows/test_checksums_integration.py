"""What entered a pass, against what left it, with real Spark."""

import pytest

from sparkdl.errors import DataError
from sparkdl.pipeline.rows.checksums import RowChecksum


@pytest.fixture
def rows(spark):
    return spark.range(40).selectExpr("id", "CASE WHEN id < 30 THEN '2026-03-01' ELSE 'none' END AS _window")


@pytest.fixture
def entered(rows):
    seen = RowChecksum()
    observed = seen.observe(rows)
    assert observed.repartition("_window").count() == 40
    return seen


def test_what_left_as_it_entered_passes_without_another_reading(entered):
    entered.check({"2026-03-01": 30, "none": 10}, rows=None)


@pytest.mark.parametrize("left", [{"2026-03-01": 30, "none": 9}, {"2026-03-01": 29, "none": 11}, {"2026-03-01": 40}])
def test_lost_gained_and_moved_rows_are_named_with_both_counts(entered, rows, left):
    with pytest.raises(DataError, match=r"^window 2026-03-01 had \d+ rows when|^window none had \d+ rows when"):
        entered.check(left, rows)


def test_rows_that_spark_counted_twice_are_counted_again(spark, rows):
    seen = RowChecksum()
    assert seen.observe(rows.union(rows)).count() == 80
    seen.check({"2026-03-01": 30, "none": 10}, rows)


def test_no_rows_at_all_are_no_difference(spark, rows):
    seen = RowChecksum()
    assert seen.observe(rows.where("id < 0")).count() == 0
    seen.check({}, rows.where("id < 0"))
