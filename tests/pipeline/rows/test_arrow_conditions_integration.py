"""Arrow answers a condition as Spark's SQL does, or leaves it to Spark."""

import math

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from sparkdl.pipeline.rows.arrow_conditions import arrow_condition

NUMBERS = [None, 0, 1, -1, 5, 7, 127, -128]
DOUBLES = [None, 0.0, -0.0, math.nan, math.inf, -math.inf, 0.5, -3.9225460375768777, 0.1, 1e-320, 5.0, 2.0**53]
ROWS = pa.table(
    {
        "x": pa.array([value for value in DOUBLES for _ in NUMBERS], pa.float64()),
        "n": pa.array(NUMBERS * len(DOUBLES), pa.int64()),
        "tiny": pa.array(NUMBERS * len(DOUBLES), pa.int8()),
        "f": pa.array([value for value in DOUBLES for _ in NUMBERS], pa.float32()),
        "a `b": pa.array([None, "", "NaN", "x"] * (len(DOUBLES) * len(NUMBERS) // 4), pa.string()),
        "order": pa.array(range(len(DOUBLES) * len(NUMBERS))),
    }
)
NUMERIC = ["-3.9225460375768777", "0", "5", ".1", "0.5", "1e2", "-0.0", "+7.", "9007199254740992", "200"]
SAME = [
    "x IS NOT NULL",
    "`a ``b` is  not null AND n is not null",
    "NOT isnan(x)",
    "not ISNAN ( f )",
    "n > -1 and NOT isnan(`x`) AND tiny<=5",
    "x BETWEEN -3.9225460375768777 AND 0.1",
    "n BETWEEN 0 AND 5",
    "n BETWEEN 5 AND 0 AND x IS NOT NULL",
    "`x` IS NULL OR NOT (isnan(`x`) OR abs(`x`) = double('inf'))",
    *(f"x {operator} {number}" for operator in ("<", "<=", "=", ">", ">=", "<>", "!=") for number in NUMERIC),
    *(f"n{operator}{number}" for operator in ("<", "<=", "=", ">", ">=", "<>", "!=") for number in ("5", "-1", "0")),
    *(f"tiny {operator} 200" for operator in ("<", "=", ">=")),
]


def test_what_arrow_answers_is_what_spark_answers(spark):
    frame = spark.createDataFrame(ROWS)
    asked = [F.coalesce(F.expr(sql), F.lit(False)).alias(f"c{place}") for place, sql in enumerate(SAME)]
    expected = frame.select("order", *asked).orderBy("order").toArrow()
    [batch] = ROWS.combine_chunks().to_batches()
    for place, sql in enumerate(SAME):
        condition = arrow_condition(sql, ROWS.schema)
        assert condition is not None, sql
        met = [not broken for broken in condition.broken(batch).to_pylist()]
        assert met == expected.column(f"c{place}").to_pylist(), sql


@pytest.mark.parametrize(
    "sql",
    [
        "x > 5L", "x > 5 OR n > 1", "x > 5 + 1", "x == 5", "x > n", "X IS NOT NULL", "gone IS NOT NULL", "x IS NULL",
        "f > 0.1", "n > 0.5", "n > 1e2", "`a ``b` > 5", "NOT isnan(n)", "x BETWEEN 1 AND n", "x > 5 AND", "NOT x > 5",
        "x > 5D", "isnan(x)", "x IS NOT NULL = true", "(x > 5)", "x > 5 -- no", "", "AND", "x NOT BETWEEN 1 AND 2",
        "n > 99999999999999999999", "`x` IS NULL OR NOT (isnan(`x`) OR abs(`n`) = double('inf'))",
    ],
)  # fmt: skip
def test_other_conditions_are_left_to_spark(sql):
    assert arrow_condition(sql, ROWS.schema) is None


def test_no_row_is_no_trouble():
    condition = arrow_condition("x > 5", ROWS.schema)
    assert condition is not None
    assert condition.broken(pa.RecordBatch.from_pylist([], schema=ROWS.schema)).to_pylist() == []
