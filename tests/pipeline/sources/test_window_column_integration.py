"""The window of a row and of a folder's name: one and the same, and none for what is no day or hour."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from sparkdl.pipeline.sources.window_column import window_column, window_of
from sparkdl.pipeline.spec.source import SqlSource
from sparkdl.pipeline.windows import NO_TIME, ahead

TEXTS = {
    "2026-03-01T23": ("2026-03-01", "2026-03-01T23"),
    "  2026-03-01 05:59:59.5Z ": ("2026-03-01", "2026-03-01T05"),
    "2026-03-01T05xyz": ("2026-03-01", "2026-03-01T05"),
    "2024-02-29 00": ("2024-02-29", "2024-02-29T00"),
    "2026-03-01": ("2026-03-01", NO_TIME),
    "2026-3-1 05:00": ("2026-03-01", "2026-03-01T05"),
    "2026-10-9": ("2026-10-09", NO_TIME),
    "2026-3-x": (NO_TIME, NO_TIME),
    "2026-03-01T24:00:00": ("2026-03-01", NO_TIME),
    "2026-03-01T25": ("2026-03-01", NO_TIME),
    "2026-03-01T5:00:00": ("2026-03-01", NO_TIME),
    "2026-03-01\n05": ("2026-03-01", NO_TIME),
    "2026-02-30T05": (NO_TIME, NO_TIME),
    "2026-13-01T05": (NO_TIME, NO_TIME),
    "2026-00-10T05": (NO_TIME, NO_TIME),
    "0000-01-01T05": (NO_TIME, NO_TIME),
    "2026-03- 1T05": (NO_TIME, NO_TIME),
    "\t2026-03-01T05": (NO_TIME, NO_TIME),
    "20260301": (NO_TIME, NO_TIME),
    "\u0662026-03-01T05": (NO_TIME, NO_TIME),
    "none": (NO_TIME, NO_TIME),
    "": (NO_TIME, NO_TIME),
}


@pytest.mark.parametrize("every", ["day", "hour"])
def test_a_text_that_is_no_day_or_hour_is_in_no_window(spark, every):
    source = SqlSource(query="SELECT 1", time="at", every=every)
    frame = spark.createDataFrame([(text,) for text in TEXTS], "at STRING")
    wanted = {text: windows[every == "hour"] for text, windows in TEXTS.items()}
    assert {row[0]: row[1] for row in frame.select("at", window_column(frame, source)).collect()} == wanted
    assert {text: window_of(text, source) for text in TEXTS} == wanted
    assert ahead(wanted.values(), datetime(2026, 11, 1, tzinfo=UTC)) == []  # every name is a window's


@pytest.mark.parametrize("column", ["timestamp_ntz'0000-03-01 05:00:00'", "timestamp'0000-03-01 05:00:00'"])
@pytest.mark.parametrize("every", ["day", "hour"])
def test_a_moment_before_the_first_year_is_in_no_window(spark, column, every):
    frame = spark.sql(f"SELECT {column} AS at")
    source = SqlSource(query="SELECT 1", time="at", every=every)
    assert frame.select(window_column(frame, source)).first()[0] == NO_TIME
