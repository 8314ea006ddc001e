"""What is written of a refused row."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa

from sparkdl.pipeline.rows.validate import _as_json


def test_a_refused_row_is_written_with_all_that_json_cannot_say():
    rows = pa.RecordBatch.from_pydict(
        {
            "_window": pa.array(["2026-03-01"]),
            "whole": pa.array([2**62]),
            "not a number": pa.array([float("nan")]),
            "list": pa.array([[float("inf"), None]]),
            "price": pa.array([Decimal("1.50")]),
            "bytes": pa.array([b"\xff\x00"]),
            "day": pa.array([date(2026, 3, 1)]),
            "at": pa.array([datetime(2026, 3, 1, 5, tzinfo=UTC)], pa.timestamp("us", "UTC")),
            "far": pa.array([2**59], pa.timestamp("us")),
            "lists": pa.array([[{"at": 2**59}]], pa.list_(pa.struct({"at": pa.timestamp("us", "UTC")}))),
            "map": pa.array([[(7, {"a.b": None})]], pa.map_(pa.int32(), pa.struct({"a.b": pa.string()}))),
            "gone": pa.array([None], pa.string()),
        }
    )
    [text] = _as_json(rows)
    assert '"price":1.50' in text
    found = json.loads(text, parse_float=Decimal)
    assert found.pop("far").startswith("20237-"), "a time that Python has none for"
    assert found.pop("lists")[0]["at"].startswith("20237-")
    assert found == {
        "whole": 2**62,
        "not a number": "NaN",
        "list": ["Infinity", None],
        "price": Decimal("1.50"),
        "bytes": "/wA=",
        "day": "2026-03-01",
        "at": "2026-03-01T05:00:00Z",
        "map": {"7": {"a.b": None}},
        "gone": None,
    }
