"""Tables written by real Spark stages and read back by Spark and by delta-rs."""

from __future__ import annotations

import datetime as dt
import json
import threading
from decimal import Decimal

import pyarrow as pa
import pytest

from sparkdl.errors import ConfigError, DataError, SchemaError, StorageError
from sparkdl.tables.delta import open_table
from sparkdl.tables.parquet import HIVE_NULL
from sparkdl.tables.table import AppTransaction, Table

DAYS = [dt.date(2024, 1, day) for day in (1, 2, 3)]


def days_frame(spark, days=DAYS, rows=10, start=0):
    data = [(start + i, float(i), f"r{i}", day) for day in days for i in range(rows)]
    return spark.createDataFrame(data, "id long, x double, name string, day date")


def rows_of(frame):
    return sorted(map(tuple, frame.collect()), key=str)


@pytest.fixture
def table(tmp_path):
    return Table(str(tmp_path / "features"))


def test_every_type_comes_back_as_spark_wrote_it(spark, table):
    ddl = (
        "b boolean, i8 tinyint, i16 smallint, i32 int, i64 bigint, f float, d double, m decimal(12,3), s string, "
        "raw binary, day date, t timestamp, n timestamp_ntz, l array<int>, v map<string,double>, "
        "r struct<a:int,t:timestamp>"
    )
    when = dt.datetime(2024, 3, 1, 12, 30, 0, 123456)
    rows = [
        *[(True, 1, 2, 3, 4, 1.5, float("nan"), Decimal("1.234"), "é" * 50, b"\0x", DAYS[0], when, when)],
        (None,) * 13,
    ]
    nested = [([1, None], {"a": 1.0}, (1, when)), (None, None, None)]
    frame = spark.createDataFrame([(*row, *more) for row, more in zip(rows, nested, strict=True)], ddl)
    table.write(frame)
    again = table.read(spark)
    assert again.schema == frame.schema
    assert str(rows_of(again)) == str(rows_of(frame))  # as text, where NaN equals NaN


def test_columns_with_dots_and_backticks_in_their_names_come_back(spark, table):
    names = ["a.b", "in `mm`", "größe, x", "day"]
    frame = spark.createDataFrame(
        [(1, 2.5, "x", DAYS[0]), (2, None, "y", DAYS[1])], "a long, b double, c string, d date"
    )
    assert table.write(frame.toDF(*names), partition_by=["day"]).rows == 2
    assert table.columns() == names
    assert rows_of(table.read(spark)) == rows_of(frame)


def test_a_rerun_of_a_day_replaces_that_day_and_nothing_else(spark, table):
    table.write(days_frame(spark), partition_by=["day"])
    before = {day: table.rows(where=f"day = '{day}'").num_rows for day in DAYS}
    result = table.write(days_frame(spark, DAYS[1:2], rows=3, start=100), "replace")
    assert result.partitions == ({"day": "2024-01-02"},)
    assert [before[day] for day in DAYS] == [10, 10, 10]
    counts = {row.day: row["count"] for row in table.read(spark).groupBy("day").count().collect()}
    assert counts == {DAYS[0]: 10, DAYS[1]: 3, DAYS[2]: 10}
    assert table.read(spark, version=0).count() == 30


def test_a_named_day_without_rows_becomes_empty(spark, table):
    table.write(days_frame(spark), partition_by=["day"])
    table.write(days_frame(spark, []), "replace", partitions=[{"day": DAYS[0]}])
    assert {row.day for row in table.read(spark).select("day").distinct().collect()} == set(DAYS[1:])


def test_rows_outside_the_named_partitions_are_refused_and_nothing_is_left(spark, table, tmp_path):
    table.write(days_frame(spark), partition_by=["day"])
    files = sorted(tmp_path.rglob("*.parquet"))
    with pytest.raises(DataError, match="2024-01-03"):
        table.write(days_frame(spark), "replace", partitions=[{"day": DAYS[0]}, {"day": DAYS[1]}])
    assert table.version() == 0
    assert sorted(tmp_path.rglob("*.parquet")) == files


def test_the_same_transaction_commits_once(spark, table):
    mark = AppTransaction(application="etl/features", version=7)
    assert table.write(days_frame(spark), transaction=mark).committed
    again = table.write(days_frame(spark), transaction=mark)
    assert not again.committed
    assert table.read(spark).count() == 30
    assert table.transaction_version("etl/features") == 7
    later = AppTransaction(application="etl/features", version=8)
    assert table.write(days_frame(spark), transaction=later).committed


def test_an_empty_frame_makes_an_empty_table_with_its_columns(spark, table):
    empty = days_frame(spark, [])
    assert table.write(empty, partition_by=["day"]).rows == 0
    frame = table.read(spark)
    assert frame.schema == empty.schema
    assert frame.count() == 0
    assert not table.write(empty).committed
    assert table.write(days_frame(spark)).version == 1
    assert table.write(empty, "overwrite").version == 2
    assert table.read(spark).count() == 0


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ("id as id, x, name, day, 1 as extra", "'extra'"),
        ("id, x, day", "'name'"),
        ("cast(id as string) id, x, name, day", "'id' has the type string.*it is long"),
    ],
)
def test_columns_that_differ_are_refused_by_name(spark, table, columns, named):
    table.write(days_frame(spark))
    with pytest.raises(SchemaError, match=named):
        table.write(days_frame(spark).selectExpr(*columns.split(",")))
    assert table.version() == 0


def test_column_order_does_not_matter_and_overwrite_may_change_the_columns(spark, table):
    table.write(days_frame(spark), partition_by=["day"])
    table.write(days_frame(spark).select("name", "day", "id", "x"))
    assert table.read(spark).columns == ["id", "x", "name", "day"]
    table.write(days_frame(spark).withColumnRenamed("x", "y"), "overwrite", overwrite_schema=True)
    assert table.read(spark).columns == ["id", "y", "name", "day"]
    assert table.read(spark).count() == 30
    assert table.read(spark, version=1).columns == ["id", "x", "name", "day"]


def test_odd_partition_values_survive_the_path(spark, table):
    values = ["a b", "a/b", "x=y", "50%", "é", "{q}[1]*?", "a:b", None, "'", "#", "001", HIVE_NULL]
    frame = spark.createDataFrame([(i, value) for i, value in enumerate(values)], "id int, key string")
    table.write(frame, partition_by=["key"])
    assert rows_of(table.read(spark)) == rows_of(frame)
    assert {row["key"] for row in table.rows().to_pylist()} == set(values)
    for value in (None, "a/b", "50%"):
        table.write(frame.where(frame.key.eqNullSafe(value)), "replace")
        assert rows_of(table.read(spark)) == rows_of(frame)


def test_two_writers_of_the_same_new_day_leave_one_of_their_versions(spark, table):
    table.write(days_frame(spark, DAYS[:1]), partition_by=["day"])
    frames = [days_frame(spark, DAYS[2:], rows=5, start=start) for start in (0, 1000)]
    threads = [threading.Thread(target=table.write, args=(frame, "replace")) for frame in frames]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    third = table.read(spark).where("day = '2024-01-03'").collect()
    assert len(third) == 5
    assert len({row.id >= 1000 for row in third}) == 1
    assert table.version() == 2


def test_a_failing_task_leaves_nothing(spark, table, tmp_path):
    table.write(days_frame(spark))
    files = sorted(tmp_path.rglob("*.parquet"))
    broken = days_frame(spark).selectExpr("id", "if(id = 7, raise_error('no'), x) x", "name", "day")
    with pytest.raises(Exception, match="no"):
        table.write(broken)
    assert table.version() == 0
    assert sorted(tmp_path.rglob("*.parquet")) == files


def test_an_unwritable_place_is_a_storage_error(spark, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/below"):
        Table(str(tmp_path / "file" / "below")).write(days_frame(spark))


def test_statistics_let_readers_skip_files_and_never_wrongly(spark, table):
    nan = float("nan")
    frame = spark.createDataFrame(
        [(i, nan if i == 3 else float(i), "a" * 40 + str(i), [nan, 1.0]) for i in range(9)],
        "i int, x double, s string, l array<double>",
    )
    table.write(frame.coalesce(1))
    added = pa.table(open_table(table.uri, None).get_add_actions(flatten=True)).to_pylist()[0]
    assert (added["min.i"], added["max.i"], added["null_count.x"], added["num_records"]) == (0, 8, 0, 9)
    assert added["max.s"] > "a" * 40 + "8" > added["min.s"]
    assert table.rows(where="i = 4").num_rows == 1
    assert table.rows(where="s = '" + "a" * 40 + "8'").num_rows == 1
    assert table.read(spark).where("x > 100").count() == 1  # NaN, which is greater than any number
    assert table.rows(where="x > 100").num_rows == 1
    table.append(pa.table({"i": pa.array([9], pa.int32()), "x": [1.0], "s": ["b"], "l": [[1.0]]}))
    table.compact()
    assert table.history(1)[0]["operation"] == "OPTIMIZE"
    assert table.read(spark).where("x > 100").count() == 1
    nulls = frame.selectExpr("i", "if(i < 2, null, x) x", "s", "l")
    table.write(nulls.coalesce(1), "overwrite")
    assert pa.table(open_table(table.uri, None).get_add_actions(flatten=True)).column("null_count.x").to_pylist() == [2]


def test_vectors_are_refused_with_the_way_out(spark, table):
    from pyspark.ml.linalg import Vectors

    with pytest.raises(SchemaError, match="vector_to_array"):
        table.write(spark.createDataFrame([(Vectors.dense(1.0),)], ["v"]))
    assert not table.exists()


def test_settings_that_contradict_each_other_are_refused(spark, table):
    frame = days_frame(spark)
    with pytest.raises(ConfigError, match="mode='upsert'"):
        table.write(frame, "upsert")
    with pytest.raises(ConfigError, match="partition columns"):
        table.write(frame, "replace")
    with pytest.raises(SchemaError, match="'x' has the type double"):
        table.write(frame, partition_by=["x"])
    table.write(frame, partition_by=["day"])
    with pytest.raises(ConfigError, match="partition_by"):
        table.write(frame, partition_by=["name"])
    with pytest.raises(ConfigError, match="hour"):
        table.write(frame, "replace", partitions=[{"hour": 1}])
    assert json.loads(table.schema_json())["fields"][0]["name"] == "id"
