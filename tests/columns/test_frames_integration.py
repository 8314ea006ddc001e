"""Columns of any name reach a task as they are, many at once."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from sparkdl.columns.frames import map_columns, map_row, row_of, selected

ODD = ["a.b", "c`d", "e f", "${g}", "h", "H.h"]


def _told(batches):
    """One row a batch: what the task saw."""
    for batch in batches:
        text = repr([(name, batch.column(place).to_pylist()) for place, name in enumerate(batch.schema.names)])
        yield pa.RecordBatch.from_arrays([pa.array([text])], ["seen"])


@pytest.fixture(scope="module")
def frame(spark):
    columns = [(F.col("id") * 10 + place).alias(name) for place, name in enumerate(ODD)]
    return spark.range(1, 3, 1, 1).select(*columns)


@pytest.mark.parametrize("names", [["h", "a.b"], ["${g}", "c`d"], ["e f"]])
def test_columns_are_selected_under_their_names(frame, names):
    found = selected(frame, names)
    assert found.columns == names
    assert [list(row) for row in found.collect()] == [[row * 10 + ODD.index(name) for name in names] for row in (1, 2)]


def test_a_task_gets_all_columns_under_their_names(frame):
    (row,) = map_columns(frame, _told, "seen string").collect()
    assert row["seen"] == repr([(name, [10 + place, 20 + place]) for place, name in enumerate(ODD)])


@pytest.mark.parametrize("parts", [["h", "a.b"], ["${g}", "e f"]])
def test_some_columns_travel_as_an_array(frame, parts):
    (row,) = map_row(frame, row_of(["c`d"], {"two": parts}), _told, "seen string").collect()
    places = [ODD.index(name) for name in parts]
    expected = [("c`d", [11, 21]), ("two", [[10 + place for place in places], [20 + place for place in places]])]
    assert row["seen"] == repr(expected)
