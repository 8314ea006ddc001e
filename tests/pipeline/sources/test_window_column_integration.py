"""The window of a row and of a folder's name: one and the same, and none for what is no day or hour."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from sparkdl.pipeline.sources.window_column import newest_first, window_column, window_names, window_of
from sparkdl.pipeline.spec.source import SqlSource
from sparkdl.pipeline.windows import NO_TIME, ahead

TEXTS = {
    "2026-03-01T23": ("2026-03-01", "2026-03-01T23"),
    "  2026-03-01 05:59:59.5Z ": ("2026-03-01", "2026-03-01T05"),
    "2026-03-01T05xyz": ("2026-03-01", "2026-03-01T05"),
    "2026-03-02T23:30:00-05:00": ("2026-03-03", "2026-03-03T04"),
    "2026-03-03T04:30:00Z": ("2026-03-03", "2026-03-03T04"),
    " 2026-3-2 23:30:00.123456789-0530": ("2026-03-03", "2026-03-03T05"),
    "2026-03-01 01:10+02": ("2026-02-28", "2026-02-28T23"),
    "2026-03-01 01:10:00 +0200": ("2026-02-28", "2026-02-28T23"),
    "2026-03-01T23:30-05:00": ("2026-03-02", "2026-03-02T04"),
    "2026-03-01T24:30:00-05:00": ("2026-03-01", NO_TIME),
    "2026-03-01T01:10:00+14:00": ("2026-02-28", "2026-02-28T11"),
    "2026-03-02T23:30:00-05:00\n": ("2026-03-02", "2026-03-02T23"),
    "2026-03-02T23:30:00 Europe/Paris": ("2026-03-02", "2026-03-02T23"),
    "2026-03-02T23:30-05:00 or so": ("2026-03-02", "2026-03-02T23"),
    "2026-03-01-05:00": ("2026-03-01", NO_TIME),
    "2026-02-30T05:00:00Z": (NO_TIME, NO_TIME),
    "0000-03-01T05:00:00Z": (NO_TIME, NO_TIME),
    "0001-01-01T00:30:00+05:00": (NO_TIME, NO_TIME),
    "9999-12-31T23:30:00-05:00": (NO_TIME, NO_TIME),
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


EDGES = (-62_135_596_800_000_000, 253_402_300_800_000_000)
"""The year 1, and the end of 9999, in microseconds."""
MOMENTS = [
    *(edge + step for edge in (0, 1_772_323_200_000_000, *EDGES) for step in (-3_600_000_001, -1, 0, 1, 3_599_999_999)),
    -62_167_219_200_000_000, 2**62, -(2**62), None,
]  # fmt: skip


@pytest.mark.parametrize("every", ["day", "hour"])
@pytest.mark.parametrize("kind", ["timestamp", "timestamp_ntz", "date"])
def test_arrow_tells_the_windows_of_times_as_spark_does(spark, kind, every):
    if kind == "date" and every == "hour":
        return
    source = SqlSource(query="SELECT 1", time="at", every=every)
    moments = spark.createDataFrame([(moment,) for moment in MOMENTS], "micros LONG").selectExpr(
        "micros", f"CAST(timestamp_micros(micros) AS {kind}) AS at"
    )
    told = {row[0]: row[1] for row in moments.select("micros", window_column(moments, source)).collect()}
    micros = pa.array(MOMENTS, pa.int64())
    types = {"timestamp": pa.timestamp("us", "UTC"), "timestamp_ntz": pa.timestamp("us"), "date": pa.date32()}
    days = pa.array([None if moment is None else moment // 86_400_000_000 for moment in MOMENTS], pa.int32())
    values = days if kind == "date" else micros
    assert dict(zip(MOMENTS, window_names(values.cast(types[kind]), every).to_pylist(), strict=True)) == told


def test_a_text_with_an_offset_is_one_moment_whatever_the_session_takes_times_for(spark):
    source = SqlSource(query="SELECT 1", time="at", every="hour")
    frame = spark.createDataFrame([("2026-03-02T23:30:00-05:00",), ("2026-03-02T23:30:00",)], "at STRING")
    settings = {"spark.sql.session.timeZone": "Asia/Kolkata", "spark.sql.timestampType": "TIMESTAMP_NTZ"}
    before = {name: spark.conf.get(name) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        assert [row[0] for row in frame.select(window_column(frame, source)).collect()] == [
            "2026-03-03T04",
            "2026-03-02T23",
        ]
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)


@pytest.mark.parametrize("column", ["timestamp_ntz'0000-03-01 05:00:00'", "timestamp'0000-03-01 05:00:00'"])
@pytest.mark.parametrize("every", ["day", "hour"])
def test_a_moment_before_the_first_year_is_in_no_window(spark, column, every):
    frame = spark.sql(f"SELECT {column} AS at")
    source = SqlSource(query="SELECT 1", time="at", every=every)
    assert frame.select(window_column(frame, source)).first()[0] == NO_TIME


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_the_newest_of_texts_is_the_latest_moment_whatever_its_offset(spark, zone):
    ordered = [  # as letters, the first of these is the smallest
        "2026-03-01T08:30:00-08:00",
        "2026-03-01 16:29:59.5",
        "2026-03-01T17:15:00+01:00",
        "2026-03-01T16:14Z",
        "2026-3-1 16:00:00",
        "soon",
        "later",
        "2026-03-01",
        None,
    ]
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        frame = spark.createDataFrame([(text,) for text in sorted(ordered, key=str)], "at string")
        assert [row.at for row in frame.orderBy(*newest_first(frame, "at")).collect()] == ordered
        dates = frame.selectExpr("try_cast(at AS timestamp) AS at").where("at IS NOT NULL")
        assert [row.at for row in dates.orderBy(*newest_first(dates, "at")).collect()] == sorted(
            (row.at for row in dates.collect()), reverse=True
        )
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
