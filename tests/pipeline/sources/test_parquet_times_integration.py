"""Times in Parquet files that others wrote: nanoseconds, as pandas has them, and INT96, as Spark had them for long."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.errors import SchemaError
from sparkdl.pipeline.init.table import ParquetRows
from sparkdl.pipeline.sources import source_of
from sparkdl.pipeline.sources.read import read_rows
from sparkdl.pipeline.spec.source import ParquetSource

COUNTS = [0, 1, 999, 1_000, -1, -1_000, -1_001, 1_772_323_200_123_456_789, -(1 << 63), (1 << 63) - 1, None]
MICROSECONDS = [None if count is None else count // 1000 for count in COUNTS]


@pytest.fixture(params=["UTC", "Pacific/Kiritimati"])
def zone(spark, request):
    spark.conf.set("spark.sql.session.timeZone", request.param)
    yield request.param
    spark.conf.set("spark.sql.session.timeZone", "UTC")


def rows_of(spark, path, **section):
    source = source_of(ParquetSource(path=str(path), **section))
    snapshot = source.snapshot()
    return read_rows(spark, source, snapshot), source.columns(snapshot).types


def moments(zone=None):
    start = datetime(1970, 1, 1, tzinfo=zone)
    return [None if count is None else start + timedelta(microseconds=count) for count in MICROSECONDS]


def written(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"row": list(range(len(COUNTS))), **columns}), path)


@pytest.mark.parametrize("vectorized", ["true", "false"])
def test_nanoseconds_are_read_as_the_microseconds_that_they_lie_in(spark, tmp_path, zone, vectorized):
    naive, aware = pa.array(COUNTS, pa.timestamp("ns")), pa.array(COUNTS, pa.timestamp("ns", "Europe/Vienna"))
    written(tmp_path / "rows.parquet", **{"o'clock `x` ${HOME}": naive, "seen": aware})
    spark.conf.set("spark.sql.parquet.enableVectorizedReader", vectorized)
    try:
        frame, types = rows_of(spark, tmp_path / "rows.parquet")
        table = frame.toArrow().sort_by("row")
    finally:
        spark.conf.unset("spark.sql.parquet.enableVectorizedReader")
    assert dict(frame.dtypes) | {"o'clock `x` ${HOME}": "timestamp_ntz", "seen": "timestamp"} == dict(frame.dtypes)
    assert table["o'clock `x` ${HOME}"].to_pylist() == moments()
    assert table["seen"].to_pylist() == moments(UTC)
    assert types["o'clock `x` ${HOME}"] == pa.timestamp("us")
    assert types["seen"] == pa.timestamp("us", "Europe/Vienna")
    assert spark.conf.get("spark.sql.legacy.parquet.nanosAsLong") == "false"


def test_times_without_a_zone_are_moments_where_spark_is_told_so(spark, tmp_path):
    written(tmp_path / "rows.parquet", at=pa.array(COUNTS, pa.timestamp("ns")))
    spark.conf.set("spark.sql.parquet.inferTimestampNTZ.enabled", "false")
    try:
        frame, _ = rows_of(spark, tmp_path / "rows.parquet")
    finally:
        spark.conf.unset("spark.sql.parquet.inferTimestampNTZ.enabled")
    assert frame.toArrow().sort_by("row")["at"].to_pylist() == moments(UTC)


def test_days_in_folders_and_columns_that_came_later(spark, tmp_path):
    written(tmp_path / "rows/day=2026-03-01/a.parquet")
    written(tmp_path / "rows/day=2026-03-02/a.parquet", at=pa.array(COUNTS, pa.timestamp("ns")))
    frame, types = rows_of(spark, tmp_path / "rows", partition="day")
    assert types["at"] == pa.timestamp("us")
    assert frame.where("day = '2026-03-02'").toArrow().sort_by("row")["at"].to_pylist() == moments()
    assert frame.where("at IS NULL").count() == len(COUNTS) + 1


@pytest.mark.parametrize("other", [pa.timestamp("us"), pa.int64(), pa.timestamp("ns", "UTC")])
def test_nanoseconds_in_one_file_and_something_else_in_another_are_refused(spark, tmp_path, other):
    written(tmp_path / "rows/a.parquet", at=pa.array(COUNTS, pa.timestamp("ns")))
    written(tmp_path / "rows/b.parquet", at=pa.array(COUNTS, pa.int64()).cast(other))
    source = source_of(ParquetSource(path=str(tmp_path / "rows")))
    for ask in (source.columns, lambda snapshot: read_rows(spark, source, snapshot)):
        with pytest.raises(SchemaError, match=r"'at' is timestamp\[ns\] in .*a.parquet and .* in .*b.parquet"):
            ask(source.snapshot())


def test_a_list_of_nanoseconds_is_refused(tmp_path):
    written(tmp_path / "rows.parquet", ats=pa.array([[count] for count in COUNTS], pa.list_(pa.timestamp("ns"))))
    source = source_of(ParquetSource(path=str(tmp_path / "rows.parquet")))
    with pytest.raises(SchemaError, match=r"'ats' of .* does not read: write it in microseconds"):
        source.columns(source.snapshot())


@pytest.fixture
def old_times(spark, tmp_path):
    spark.conf.set("spark.sql.parquet.outputTimestampType", "INT96")
    try:
        spark.sql("SELECT id, timestamp'2026-03-01 00:00:00Z' + make_dt_interval(CAST(id AS INT)) AS at FROM range(9)"
                  " UNION ALL SELECT 9, timestamp'9999-12-31 23:59:59.999999Z'")\
            .coalesce(1).write.parquet(str(tmp_path / "old"))  # fmt: skip
    finally:
        spark.conf.unset("spark.sql.parquet.outputTimestampType")
    (file,) = (tmp_path / "old").glob("*.parquet")
    assert pq.read_metadata(file).schema.column(1).physical_type == "INT96"
    return tmp_path / "old"


def test_times_as_spark_had_them_for_long(spark, old_times):
    frame, types = rows_of(spark, old_times, time="at")
    assert types["at"] == pa.timestamp("us", "UTC")
    last = frame.orderBy("id").toArrow()["at"].to_pylist()
    assert last[0] == datetime(2026, 3, 1, tzinfo=UTC)
    assert last[9] == datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)


def test_init_looks_at_both(tmp_path, old_times):
    rows = ParquetRows("parquet", str(old_times), [str(file) for file in old_times.glob("*.parquet")])
    assert max(rows.sample().rows["at"].to_pylist()) == datetime(9999, 12, 31, 23, 59, 59, 999_999)
    written(tmp_path / "rows.parquet", at=pa.array(COUNTS, pa.timestamp("ns")))
    rows = ParquetRows("parquet", str(tmp_path / "rows.parquet"), [str(tmp_path / "rows.parquet")])
    assert rows.sample().rows["at"].to_pylist() == moments()
    assert sum(rows.hours("at").values()) == len(COUNTS) - 1
