from __future__ import annotations

import json

import pyarrow as pa
import pytest

from jobs.features import Moments
from jobs.state import DAY_SCHEMA, DayState, load_days, save_days
from sparkdl.errors import IntegrityError
from sparkdl.tables.table import Table

DAY = DayState(
    day="2026-03-02",
    fingerprint="f",
    rows_in=3,
    rows_out=1,
    quarantined=1,
    duplicates=1,
    reasons={"no zone": 1},
    moments={"minutes": Moments(rows=1, mean=2.5, variance=0.0)},
    features_version=1,
)


def test_days_come_back_as_they_were_saved(small):
    assert load_days(small) == {}
    save_days(small, [DAY])
    assert load_days(small) == {DAY.day: DAY}


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("reasons", "{"),
        ("reasons", '{"no zone": -1}'),
        ("moments", "[]"),
        ("moments", '{"minutes": {"rows": 1, "mean": 0.0}}'),
        ("moments", '{"minutes": {"rows": 1, "mean": 0.0, "variance": 0.0, "more": 1}}'),
        ("moments", "[" * 100_000),
    ],
)
def test_a_row_that_somebody_altered_is_a_typed_refusal_that_names_table_and_day(small, column, text):
    row = vars(DAY) | {"reasons": json.dumps(DAY.reasons), "moments": "{}", "processed_at": "now", column: text}
    Table(small.paths.table("etl_days")).append(pa.Table.from_pylist([row], schema=DAY_SCHEMA))
    with pytest.raises(IntegrityError, match=f"etl_days, {DAY.day} cannot be read: .*the ETL does the day again"):
        load_days(small)
