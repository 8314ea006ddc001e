"""Words of a SQL condition that were meant to be columns, told before Spark starts; what is right is never refused."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sparkdl.errors import PipelineFileError
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.file.conditions import misspelt

COLUMNS = ["amount", "day", "customer id", "tags", "address", "hours_open", "is_valid"]


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("amuont >= 0", [("amuont", "amount")]),
        ("Amount >= 0 AND `custmer id` IS NOT NULL", [("custmer id", "customer id")]),
        ("abs(amounts) > 1 OR adress.city = 'amuont'", [("amounts", "amount")]),
    ],
)
def test_a_word_that_is_nearly_a_column_is_told_with_it(condition, said):
    assert list(misspelt(condition, COLUMNS)) == said


@pytest.mark.parametrize(
    "condition",
    [
        "day >= DATE '2026-01-01' - INTERVAL 3 DAYS AND hour(day) < 5",
        "exists(tags, tag -> tag = 'x')",
        "amount BETWEEN 1e3 AND 2 OR address.amounts > 0",
        'day = "dayy" -- amuont\n AND amount > 0',
        "CAST(amount AS AMOUNTS) > 0 AND amounts(1) = 2",
        "unrelated_name > 0",
        "amount > 0 /* amuont */",
        "amount < (SELECT max_amount FROM limits)",
    ],
)
def test_sql_that_may_be_right_is_left_to_spark(condition):
    assert list(misspelt(condition, COLUMNS)) == []


def test_an_expectation_that_reads_no_column_is_told_with_its_line():
    text = "source: {kind: csv, path: x}\nlabel: {y: binary}\nfeatures: {x: number}\nexpect:\n  sound: amuont > 0\n"
    columns = {"x": pa.int8(), "y": pa.bool_(), "amount": pa.int64()}
    with pytest.raises(PipelineFileError) as caught:
        loads(text).check_columns(columns)
    assert caught.value.problems == (
        "pipeline.yaml:5: expect.sound.check='amuont > 0' reads 'amuont', which is no column of the source: "
        "write amount",
    )
    loads(f"{text}transform: {{sql: SELECT * FROM source}}").check_columns(columns)
