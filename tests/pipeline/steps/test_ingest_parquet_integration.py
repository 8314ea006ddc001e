"""Parquet files that tasks read themselves become the same rows, refusals, counts and hashes as through Spark."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from sparkdl.errors import DataError
from sparkdl.features.spec import Number
from sparkdl.pipeline.file import PipelineFile
from sparkdl.pipeline.rows.parquet_rows import parquet_rows
from sparkdl.pipeline.sources import source_of
from sparkdl.pipeline.spec import Expectation, Label, PipelineSpec
from sparkdl.pipeline.spec.operation import Places
from sparkdl.pipeline.spec.source import ParquetSource
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.steps import ingest as ingestion
from sparkdl.tables.table import Table

NOW = datetime(2026, 3, 5, 12, tzinfo=UTC)
ROWS = 60
SCHEMA = pa.schema(
    {
        "order id": pa.int64(), "y": pa.int64(), "x": pa.float64(), "small": pa.float32(), "tiny": pa.int8(),
        "price": pa.decimal128(20, 4), "at": pa.timestamp("us", "UTC"), "wall": pa.timestamp("us"),
        "on": pa.date32(), "text": pa.string(), "yes": pa.bool_(),
    }
)  # fmt: skip
ODD = {
    "x": [0.0, -0.0, math.nan, math.inf, -math.inf, None, 1.5],
    "small": [None, 0.1, -0.0, math.nan],
    "tiny": [-128, 127, None, 0],
    "price": [Decimal("-1.5000"), None, Decimal("9999999999999999.9999")],
    "at": [datetime(2026, 3, 1, 5, tzinfo=UTC), None, datetime(1, 1, 1, tzinfo=UTC)],
    "wall": [datetime(2026, 3, 1, 5), None, datetime(9999, 12, 31, 23, 59, 59)],
    "on": [date(2026, 3, 1), None, date(1, 1, 1)],
    "text": ["", None, "ä\u0000\n\"", "x" * 300, "NaN"],
    "yes": [True, None, False],
}  # fmt: skip


def odd_rows(first=0):
    columns = {"order id": [*range(first, first + ROWS - 1), None], "y": [place % 2 for place in range(ROWS)]}
    columns |= {name: [values[place % len(values)] for place in range(ROWS)] for name, values in ODD.items()}
    return pa.table(columns, SCHEMA)


EXPECT = {
    "has an id": Expectation(check="`order id` IS NOT NULL"),
    "x is there": Expectation(check="x IS NOT NULL AND NOT isnan(x)", action="warn", above=1),
    "not too large": Expectation(check="x <= 100", action="fail", above=1),
    "tiny in range": Expectation(check="`tiny` BETWEEN -128 AND 100"),
}


def spec_of(folder, **source):
    source = {"key": ("order id",), **source}
    return PipelineSpec(
        source=ParquetSource(path=str(folder), **source),
        features={"x": Number()},
        label={"y": Label(type="binary")},
        expect=EXPECT,
    )


def new_run(spec, tables):
    spec = msgspec.structs.replace(spec, places=Places(tables=tables))
    return Run(Project(PipelineFile("pipeline.yaml", spec, {})), RunRequest(now=NOW))


def ingest(spark, spec, tables):
    run = new_run(spec, tables)
    run.run_id = "run"
    return run, ingestion.ingest(spark, run)


def windows_of(spec, tables):
    """The windows that a run after these has read."""
    return new_run(spec, tables).windows()


def told(tables, done):
    """What the tables hold, order aside, and the books."""
    content = {}
    for name in ("clean", "quarantine"):
        table = Table(f"{tables}/{name}", engine="delta-rs")
        content[name] = sorted(map(repr, table.rows().to_pylist()))
        content[f"{name} columns"] = table.schema_json()
    return content, msgspec.to_builtins(done)


@pytest.fixture(
    params=[
        {},
        {"partition": "day"},
        {"time": "at", "every": "hour"},
        {"time": "wall"},
        pytest.param({"time": "wall", "every": "hour"}, marks=pytest.mark.slow),
        pytest.param({"time": "on"}, marks=pytest.mark.slow),
    ],
    ids=lambda source: " ".join(source.values()) or "whole",
)
def folder(request, tmp_path):
    """Files in one folder, or by day, one of them in two parts; and what tells the windows."""
    root = tmp_path / "orders"
    for number, day in enumerate(("2026-03-01", "2026-03-02", "2026-03-02")):
        place = root / f"day={day}" if "partition" in request.param else root
        place.mkdir(parents=True, exist_ok=True)
        pq.write_table(odd_rows(number * ROWS), place / f"part {number}.parquet", row_group_size=25)
    return root, request.param


def test_rows_refusals_counts_and_hashes_are_those_of_the_way_through_spark(spark, tmp_path, monkeypatch, folder):
    root, source = folder
    spec = spec_of(root, **source)
    assert parquet_rows(spark, spec, source_of(spec.source), source_of(spec.source).snapshot()) is not None
    direct = str(tmp_path / "direct")
    _, done = ingest(spark, spec, direct)
    assert done
    assert ingest(spark, spec, direct)[1] == [], "what was read is what is found again"
    monkeypatch.setattr(ingestion, "parquet_rows", lambda *_: None)
    through = str(tmp_path / "through")
    _, expected = ingest(spark, spec, through)
    assert told(direct, done) == told(through, expected)
    assert ingest(spark, spec, direct)[1] == [], "the way through Spark finds nothing new either"


def test_a_session_with_another_time_zone_refuses_rows_with_the_same_words(spark, tmp_path, monkeypatch, folder):
    root, source = folder
    spec, zone = spec_of(root, **source), spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    try:
        direct, through = (str(tmp_path / name) for name in ("direct", "through"))
        _, done = ingest(spark, spec, direct)
        monkeypatch.setattr(ingestion, "parquet_rows", lambda *_: None)
        _, expected = ingest(spark, spec, through)
        assert told(direct, done) == told(through, expected)
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


def test_rows_with_one_key_are_left_to_spark(spark, tmp_path, monkeypatch, folder):
    root, source = folder
    place = next(root.rglob("part 1.parquet")).parent
    pq.write_table(odd_rows(ROWS), place / "again.parquet")
    spec = spec_of(root, **source)
    direct = str(tmp_path / "direct")
    _, done = ingest(spark, spec, direct)
    later = 20 if source.get("time") == "wall" else 1  # those of the year 9999; and those without an id are no copies
    assert sum(books.duplicates for books in done) == ROWS - later
    monkeypatch.setattr(ingestion, "parquet_rows", lambda *_: None)
    through = str(tmp_path / "through")
    _, expected = ingest(spark, spec, through)
    assert told(direct, done) == told(through, expected)


def test_a_file_with_other_rows_than_its_footer_told_is_refused(spark, tmp_path, monkeypatch, folder):
    root, source = folder
    spec = spec_of(root, **source)
    found = ingestion.parquet_rows

    def with_stale_footers(*arguments):
        files = found(*arguments)
        path, counts = next(iter(files.windows.items()))
        name, rows = next(iter(counts.items()))
        return replace(files, windows={**files.windows, path: {**counts, name: rows + 1}})

    monkeypatch.setattr(ingestion, "parquet_rows", with_stale_footers)
    tables = str(tmp_path / "tables")
    with pytest.raises(DataError, match="rows when it was looked at"):
        ingest(spark, spec, tables)
    assert not windows_of(spec, tables)


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_times_as_pandas_writes_them_are_those_that_spark_makes_of_them(spark, tmp_path, monkeypatch, zone):
    root = tmp_path / "orders"
    root.mkdir()
    moments = pa.array([1_772_323_199_999_999_999, -1, None, 1_772_323_200_000_000_000, 0, 999] * 10)
    rows = odd_rows().drop_columns(["at"]).append_column("at", moments.cast(pa.timestamp("ns", zone)))
    pq.write_table(rows, root / "a.parquet")
    tables = [str(tmp_path / name) for name in ("direct", "through", "untimed", "untimed through")]
    for spec, (direct, through) in zip(
        [spec_of(root, time="at"), spec_of(root)], [tables[:2], tables[2:]], strict=True
    ):
        assert not left_to_spark(spark, spec)
        _, done = ingest(spark, spec, direct)
        with monkeypatch.context() as patch:
            patch.setattr(ingestion, "parquet_rows", lambda *_: None)
            _, expected = ingest(spark, spec, through)
        assert told(direct, done) == told(through, expected)
    assert {"1969-12-31", "1970-01-01", "2026-02-28", "2026-03-01", "none"} == {
        *windows_of(spec_of(root, time="at"), tables[0])
    }


def test_of_rows_that_tell_their_windows_those_are_read_again_that_changed(spark, tmp_path, monkeypatch):
    root, tables = tmp_path / "orders", str(tmp_path / "tables")
    root.mkdir()
    spec = spec_of(root, time="on")

    def days(number, *values):
        rows = odd_rows(number * ROWS).drop_columns(["on"])
        on = pa.array([values[place % len(values)] for place in range(ROWS)])
        pq.write_table(rows.append_column("on", on), root / f"{number}.parquet")

    days(0, date(2026, 3, 1), date(2026, 3, 2))
    days(1, date(2026, 3, 2), date(2026, 3, 3))
    assert [books.window for books in ingest(spark, spec, tables)[1]] == ["2026-03-01", "2026-03-02", "2026-03-03"]
    days(2, date(2026, 3, 3), date(2026, 3, 4))
    _, done = ingest(spark, spec, tables)
    assert [(books.window, books.read) for books in done] == [("2026-03-03", 60), ("2026-03-04", 30)]
    monkeypatch.setattr(ingestion, "parquet_rows", lambda *_: None)
    assert ingest(spark, spec, tables)[1] == []
    through = str(tmp_path / "through")
    ingest(spark, spec, through)
    assert told(tables, [])[0] == told(through, [])[0]


@pytest.mark.parametrize(
    ("files", "rows", "days", "few"),
    [
        (1, 4_000, 300, True),
        (1, 120_000, 20, True),
        (1, 220_000, 60, False),
        (40, 3_000, 1, True),
        (3, 90_000, 60, False),
    ],
)
def test_rows_whose_windows_would_become_many_files_are_left_to_spark(spark, tmp_path, files, rows, days, few):
    ids = pa.array(range(rows))
    for file in range(files):
        on = pa.array([row % days + (file if days == 1 else 0) for row in range(rows)], pa.int32()).cast(pa.date32())
        table = pa.table({"order id": ids, "y": ids, "x": ids.cast(pa.float64()), "tiny": ids, "on": on})
        pq.write_table(table, tmp_path / f"{file:02}.parquet")
    spec = spec_of(tmp_path, time="on")
    source = source_of(spec.source)
    found = parquet_rows(spark, spec, source, source.snapshot())
    assert found is not None
    assert len(found.rows) == max(days, files if days == 1 else 0)
    assert found.can_judge([*found.rows], []) == few


def left_to_spark(spark: SparkSession, spec):
    source = source_of(spec.source)
    return parquet_rows(spark, spec, source, source.snapshot()) is None


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("nested", pa.array([[1], None], pa.list_(pa.int64()))),
        ("bytes", pa.array([b"1", None])),
        ("labelled", pa.array(["a", "b"]).dictionary_encode()),
        ("unsigned", pa.array([1, 2], pa.uint32())),
        ("milliseconds", pa.array([1, 2], pa.timestamp("ms"))),
        ("Y", pa.array([1, 2])),
        ("_malformed", pa.array(["a", "b"])),
    ],
)
def test_files_with_odd_columns_are_left_to_spark(spark, tmp_path, name, values):
    table = pa.table({"order id": [1, 2], "y": [0, 1], "x": [0.5, 1.5], "tiny": [1, 2], name: values})
    pq.write_table(table, tmp_path / "rows.parquet")
    assert left_to_spark(spark, spec_of(tmp_path / "rows.parquet"))
    assert not left_to_spark(spark, spec_of_plain(tmp_path, table.drop_columns([name])))


def spec_of_plain(folder, table):
    pq.write_table(table, folder / "plain.parquet")
    return spec_of(folder / "plain.parquet")


def test_settings_and_layouts_that_only_spark_follows_are_left_to_it(spark, tmp_path):
    root = tmp_path / "orders"
    root.mkdir()
    pq.write_table(odd_rows(), root / "a.parquet")
    assert not left_to_spark(spark, spec_of(root))
    assert left_to_spark(spark, spec_of(root, options={"pathGlobFilter": "b*"}))
    assert left_to_spark(spark, spec_of(root, time="text"))
    assert left_to_spark(spark, spec_of(root, key=("gone",)))
    name = "spark.sql.parquet.inferTimestampNTZ.enabled"
    spark.conf.set(name, "false")
    try:
        assert left_to_spark(spark, spec_of(root))
    finally:
        spark.conf.unset(name)
    pq.write_table(odd_rows().drop_columns(["text"]), root / "b.parquet")
    assert left_to_spark(spark, spec_of(root)), "files with other columns"


def test_files_of_legacy_calendars_are_left_to_spark(spark, tmp_path):
    spark.conf.set("spark.sql.parquet.datetimeRebaseModeInWrite", "LEGACY")
    try:
        rows = spark.sql("SELECT 1L AS `order id`, 1L AS y, 0.5D AS x, 1Y AS tiny, date'1200-01-01' AS day")
        rows.coalesce(1).write.parquet(str(tmp_path / "old"))
        rows.drop("day").coalesce(1).write.parquet(str(tmp_path / "timeless"))
    finally:
        spark.conf.unset("spark.sql.parquet.datetimeRebaseModeInWrite")
    assert left_to_spark(spark, spec_of(tmp_path / "old"))
