"""Outcomes of rows, what each counts for, and their hashes, with real Spark."""

from __future__ import annotations

import pytest

from sparkdl.errors import DataError
from sparkdl.pipeline.rows.expect import BROKEN, OUTCOME, Outcomes, check_shares, content_hash, validated
from sparkdl.pipeline.sources.window_column import newest_first
from sparkdl.pipeline.spec import Expectation

CHECKS = {
    "paid": Expectation(check="amount > 0"),
    "known": Expectation(check="amount IS NOT NULL", action="fail", above=0.5),
    "small": Expectation(check="amount < 100", action="warn"),
    "even": Expectation(check="id % 2 = 0", action="fail", above=0.5),
}


def test_a_row_is_refused_for_its_first_reason_and_counts_for_all_that_fail_a_run(spark):
    rows = spark.sql(
        "SELECT * FROM VALUES (0, 5, 'd', NULL), (1, 5, 'd', NULL), (2, NULL, 'd', NULL), (3, 500, 'none', NULL), "
        "(4, NULL, 'd', 'x'), (0, 1000, 'd', NULL) AS t(id, amount, _window, _malformed)"
    )
    found = (
        validated(rows, CHECKS, ("id",), newest_first(rows, "amount")).select("id", "amount", OUTCOME, BROKEN).collect()
    )
    assert {(row.id, row.amount): (row[OUTCOME], sorted(row[BROKEN])) for row in found} == {
        (0, 1000): ("", ["small"]),
        (0, 5): ("duplicate", []),
        (1, 5): ("even", ["even"]),
        (2, None): ("paid", ["known", "small"]),
        (3, 500): ("no time that can be read", ["even", "small"]),
        (4, None): ("malformed in its file", ["known", "small"]),
    }


@pytest.mark.parametrize("percent", range(101))
def test_a_share_is_borne_up_to_its_very_edge(percent):
    within = {"d": Outcomes(rows={"": 100}, broken={"even": percent})}
    check_shares(within, {"even": Expectation(check="id % 2 = 0", action="fail", above=percent / 100)})
    beyond = {"d": Outcomes(rows={"": 100}, broken={"even": percent + 1})}
    with pytest.raises(DataError, match=rf"broken by {percent + 1} of the 100 rows .* above its {percent}\.00%"):
        check_shares(beyond, {"even": Expectation(check="id % 2 = 0", action="fail", above=percent / 100)})


AT = "timestamp'2026-03-01 00:00:00.00000{}'"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("3, CAST(NULL AS INT)", "CAST(NULL AS INT), 3"),
        ("array(1, 2), array(3)", "array(1), array(2, 3)"),
        ("array(1, NULL)", "array(NULL, 1)"),
        ("array(1, NULL)", "array(1)"),
        ("array(-7461, NULL, 1)", "array(-7461, 1, NULL)"),
        ("array(DATE'2026-03-01', NULL)", "array(NULL, DATE'2026-03-01')"),
        ("array(), 1", "CAST(NULL AS array<void>), 1"),
        ("array(1, 0), 1", "array(NULL, 0), CAST(NULL AS INT)"),
        ("array(array(1), array(2, 3))", "array(array(1, 2), array(3))"),
        ("array(array(1, NULL))", "array(array(NULL, 1))"),
        ("array(struct(1, CAST(NULL AS INT)))", "array(struct(CAST(NULL AS INT), 1))"),
        ("struct(1, CAST(NULL AS INT))", "struct(CAST(NULL AS INT), 1)"),
        ("struct(CAST(NULL AS INT))", "CAST(NULL AS struct<col1: INT>)"),
        ("struct(array('a', 'b'), array('c'))", "struct(array('a'), array('b', 'c'))"),
        ("map('a', struct(1, NULL))", "map('a', struct(NULL, 1))"),
        (f"map('a', {AT.format(1)})", f"map('a', {AT.format(2)})"),
        ("map('a', map('b', 1))", "map('a', map('c', 1))"),
        ("array(parse_json('1'))", "array(parse_json('null'))"),
    ],
)
def test_rows_that_differ_have_different_hashes(spark, one, other):
    both = spark.sql(f"SELECT {one} UNION ALL SELECT {other}")
    found = {row[0] for row in both.toDF(*map(str, range(len(both.columns)))).transform(hashed).collect()}
    assert len(found) == 2


def hashed(rows):
    return rows.select(content_hash(rows))


def test_equal_rows_have_equal_hashes_whether_nulls_are_allowed_or_not(spark):
    row = "1 a, array(1, 2) b, named_struct('d.e', array('x')) c, map('k', array(1.5D)) d"
    wider = f"{row} UNION ALL SELECT NULL, array(1, NULL), NULL, map('k', array(CAST(NULL AS DOUBLE)))"
    assert hashed(spark.sql(f"SELECT {row}")).collect()[0] in hashed(spark.sql(f"SELECT {wider}")).collect()
