"""Windows that are due become clean rows, each row accounted for, and nothing else is touched."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from deltalake import write_deltalake
from pyspark.sql import functions as F

from sparkdl.errors import ConfigError, DataError, PipelineFileError, SchemaError
from sparkdl.pipeline.file import PipelineFile
from sparkdl.pipeline.sources import source_of
from sparkdl.pipeline.spec import Expectation, Label, PipelineSpec, Transform
from sparkdl.pipeline.spec.operation import Places
from sparkdl.pipeline.spec.source import CsvSource, DeltaSource, FunctionSource, JsonSource, ParquetSource, SqlSource
from sparkdl.pipeline.state.evaluator import stale_of
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.steps import ingest as ingestion
from sparkdl.tables.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tables"))

from delta_log import HIDDEN, actions, commit, hide_rows, protocol

NOW = datetime(2026, 3, 5, 12, tzinfo=UTC)


def spec_of(source, **more):
    """A pipeline over ``source`` whose features and label play no part in ingestion."""
    from sparkdl.features.spec import Number

    return PipelineSpec(source=source, features={"amount": Number()}, label={"order_id": Label(type="binary")}, **more)


def new_run(spec, tables, now=NOW, again=None):
    spec = msgspec.structs.replace(spec, places=Places(tables=tables))
    return Run(Project(PipelineFile("pipeline.yaml", spec, {})), RunRequest(now=now, again=again))


def ingest(spark, spec, tables, run_id, now, again=None):
    run = new_run(spec, tables, now, again)
    run.run_id = run_id
    return ingestion.ingest(spark, run)


def due_windows(spec, tables):
    """What the next run would ingest, told without Spark."""
    due = stale_of(ingestion.IngestStep(), new_run(spec, tables))
    assert due.known
    return list(due.keys)


@pytest.fixture
def tables(tmp_path):
    return str(tmp_path / "tables")


def table_in(tables, name):
    return Table(f"{tables}/{name}", engine="delta-rs")


@pytest.fixture
def orders(spark, tmp_path):
    """Three days of orders, 20 rows a day, as Parquet; returns the folder and a function that writes a day."""
    folder = tmp_path / "orders"

    def write(day, rows=20, start=0, amount="CAST(id AS DOUBLE)", name="part"):
        frame = spark.range(start, start + rows).selectExpr(
            f"concat('{day}-', id) AS order_id", f"timestamp'{day} 10:00:00' + make_dt_interval(0, 0, id) AS bought_at",
            f"{amount} AS amount", "id % 2 AS y",
        )  # fmt: skip
        frame.coalesce(1).write.mode("append").parquet(str(folder / f"{name}-{day}"))

    for day in ("2026-03-01", "2026-03-02", "2026-03-03"):
        write(day)
    return folder, write


def clean_rows(tables):
    return sorted(table_in(tables, "clean").rows().to_pylist(), key=lambda row: str(row["order_id"]))


def test_every_row_is_kept_or_quarantined_or_a_duplicate(spark, orders, tables):
    folder, write = orders
    write("2026-03-02", rows=3, start=2, name="again")  # the same keys once more
    write("2026-03-02", rows=2, start=40, amount="CAST(NULL AS DOUBLE)", name="null")
    write("2026-03-02", rows=1, start=50, amount="-1.0D", name="bad")
    source = ParquetSource(path=str(folder), key=("order_id",), time="bought_at")
    spec = spec_of(source, expect={"paid": Expectation(check="amount >= 0")})
    made = ingest(spark, spec, tables, "run", NOW)
    assert [books.window for books in made] == ["2026-03-01", "2026-03-02", "2026-03-03"]
    second = made[1]
    assert (second.read, second.kept, second.quarantined, second.duplicates) == (26, 20, 3, 3)
    assert second.outcomes == {"paid": 3}
    rows = clean_rows(tables)
    assert len(rows) == 60
    assert {row["_window"] for row in rows} == {"2026-03-01", "2026-03-02", "2026-03-03"}
    refused = table_in(tables, "quarantine").rows().to_pylist()
    assert sorted(json.loads(row["row"])["order_id"] for row in refused) == [
        "2026-03-02-40", "2026-03-02-41", "2026-03-02-50"]  # fmt: skip
    assert {row["reason"] for row in refused} == {"paid"}
    assert new_run(spec, tables).windows() == {books.window: books for books in made}


def test_only_what_is_new_or_changed_is_done(spark, orders, tables):
    folder, write = orders
    spec = spec_of(ParquetSource(path=str(folder), key=("order_id",), time="bought_at"))
    first = ingest(spark, spec, tables, "one", NOW)
    assert ingest(spark, spec, tables, "two", NOW) == []
    write("2026-03-01", rows=1, start=90, name="late")
    write("2026-03-04")
    write("2099-01-01")
    again = ingest(spark, spec, tables, "three", NOW)
    assert [books.window for books in again] == ["2026-03-01", "2026-03-04"]
    assert again[0].kept == 21
    known = new_run(spec, tables).windows()
    assert known["2026-03-02"] == first[1]
    assert len(clean_rows(tables)) == 81


@pytest.mark.parametrize(("changed", "same"), [("id", False), ("y", True)])
def test_a_label_that_comes_changes_the_rows_and_not_what_predictions_follow_from(
    spark, tables, tmp_path, changed, same
):
    kept = []
    for name, rows in (
        ("one", "id, int(null) AS y"),
        ("two", "id + 1 AS id, int(null) AS y" if changed == "id" else "id, 7 AS y"),
    ):
        frame = spark.range(9).selectExpr(*rows.split(", "), "date'2026-03-01' AS at", "double(id) AS amount")
        frame.coalesce(1).write.parquet(str(tmp_path / name))
        spec = spec_of(ParquetSource(path=str(tmp_path / name), time="at"))
        spec = msgspec.structs.replace(spec, label={"y": Label(type="binary")})
        kept += ingest(spark, spec, str(tmp_path / f"tables {name}"), "run", NOW)
    before, after = kept
    assert before.content != after.content
    assert (before.unlabelled == after.unlabelled) == same


def test_content_is_the_same_for_the_same_rows_however_they_lie(spark, orders, tables, tmp_path):
    folder, _ = orders
    spec = spec_of(ParquetSource(path=str(folder), key=("order_id",), time="bought_at"))
    first = ingest(spark, spec, tables, "one", NOW)
    spark.read.parquet(*map(str, folder.iterdir())).repartition(3).write.parquet(str(tmp_path / "other"))
    moved = spec_of(ParquetSource(path=str(tmp_path / "other"), key=("order_id",), time="bought_at"))
    again = ingest(spark, moved, str(tmp_path / "t2"), "two", NOW)
    assert [books.content for books in again] == [books.content for books in first]
    assert [books.fingerprint for books in again] == [books.fingerprint for books in first]


def test_backfill_and_new_rules_do_windows_again(spark, orders, tables):
    spec = spec_of(ParquetSource(path=str(orders[0]), key=("order_id",), time="bought_at"))
    ingest(spark, spec, tables, "one", NOW)
    done = ingest(spark, spec, tables, "two", NOW, again=("2026-03-02", "2026-03-02"))
    assert [books.window for books in done] == ["2026-03-02"]
    stricter = spec_of(spec.source, expect={"small": Expectation(check="amount < 10")})
    assert [books.kept for books in ingest(spark, stricter, tables, "three", NOW)] == [10, 10, 10]
    warned = spec_of(spec.source, expect={**stricter.expect, "tiny": Expectation(check="amount < 9", action="warn")})
    assert ingest(spark, warned, tables, "four", NOW) == []  # a warning changes no row


@pytest.mark.parametrize("zone", ["UTC", "America/Los_Angeles", pytest.param("Asia/Tokyo", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("column", "windows"),
    [
        ("timestamp'2026-03-02 23:30:00+00:00'", ["2026-03-02", "2026-03-02T23"]),
        ("timestamp_ntz'2026-03-02 23:30:00'", ["2026-03-02", "2026-03-02T23"]),
        ("date'2026-03-02'", ["2026-03-02", None]),
        ("'2026-03-02 23:59:59'", ["2026-03-02", "2026-03-02T23"]),
        ("'2026-02-31 23:59:59'", ["none", "none"]),
        ("CAST(NULL AS timestamp)", ["none", "none"]),
        ("'soon'", ["none", "none"]),
    ],
)
def test_a_window_does_not_depend_on_the_sessions_time_zone(spark, zone, column, windows):
    from sparkdl.pipeline.sources.window_column import window_column

    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        frame = spark.sql(f"SELECT {column} AS at")
        for every, wanted in zip(("day", "hour"), windows, strict=True):
            source = SqlSource(query="SELECT 1", time="at", every=every)
            if wanted is None:
                with pytest.raises(SchemaError, match="is a date: windows of one hour need a timestamp"):
                    window_column(frame, source)
            else:
                assert frame.select(window_column(frame, source)).first()[0] == wanted
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def test_rows_without_a_time_are_refused_and_the_others_go_on(spark, tables):
    query = "SELECT id AS order_id, IF(id < 2, NULL, timestamp'2026-03-01 00:00:00') AS at, 1.0 AS amount FROM range(5)"
    made = ingest(spark, spec_of(SqlSource(query=query, time="at")), tables, "run", NOW)
    assert {books.window: (books.kept, books.quarantined) for books in made} == {
        "2026-03-01": (3, 0),
        "none": (0, 2),
    }
    assert {row["reason"] for row in table_in(tables, "quarantine").rows().to_pylist()} == {"no time that can be read"}


def test_a_source_without_time_is_one_window(spark, tables):
    source = SqlSource(query="SELECT id AS order_id, id * 1.0 AS amount FROM range(7)")
    assert [books.window for books in ingest(spark, spec_of(source), tables, "run", NOW)] == ["all"]
    assert ingest(spark, spec_of(source), tables, "run", NOW) == []


@pytest.mark.parametrize("form", ["csv", "json"])
def test_garbled_rows_of_text_files_are_quarantined_as_they_are(spark, tables, tmp_path, form):
    good = {
        "csv": "o1,2026-03-01,1.5\no2,2026-03-01,2.5\n",
        "json": '{"order_id":"o1","at":"2026-03-01","amount":1.5}\n',
    }
    bad = {"csv": "o3,2026-03-01,much\n", "json": '{"order_id":"o3","at":"2026-03-01","amount":\n'}
    head = {"csv": "order_id,at,amount\n", "json": ""}
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / f"rows.{form}").write_text(head[form] + good[form] + bad[form])
    kind = {"csv": CsvSource, "json": JsonSource}[form]
    source = kind(path=str(tmp_path / "raw"), schema="order_id STRING, at DATE, amount DOUBLE", time="at")
    made = ingest(spark, spec_of(source), tables, "run", NOW)
    assert sum(books.kept for books in made) == len(good[form].splitlines())
    refused = table_in(tables, "quarantine").rows().to_pylist()
    assert [row["row"] for row in refused] == [bad[form].strip()]


def test_the_first_file_of_all_lies_in_its_partition_as_those_after_it(spark, tables, tmp_path):
    (tmp_path / "rows" / "day=2026-03-01").mkdir(parents=True)
    (tmp_path / "rows" / "day=2026-03-01" / "a.csv").write_text("order_id,amount,y\n1,2.5,0\n")
    spec = spec_of(CsvSource(path=str(tmp_path / "rows"), key=("order_id",), partition="day"))
    assert [books.window for books in ingest(spark, spec, tables, "r1", NOW)] == ["2026-03-01"]


def test_partition_folders_tell_what_is_due_without_spark(spark, tables, tmp_path):
    folder = tmp_path / "raw"
    frame = spark.range(6).selectExpr(
        "id AS order_id", "id * 1.0D AS amount", "date_add(date'2026-03-01', CAST(id % 3 AS INT)) AS day"
    )
    frame.write.partitionBy("day").parquet(str(folder))
    source = ParquetSource(path=str(folder), key=("order_id",), partition="day")
    spec = spec_of(source)
    assert due_windows(spec, tables) == ["2026-03-01", "2026-03-02", "2026-03-03"]
    ingest(spark, spec, tables, "one", NOW)
    assert due_windows(spec, tables) == []
    frame.where("day = '2026-03-02'").selectExpr("order_id + 10 AS order_id", "amount", "day").write.mode(
        "append"
    ).partitionBy("day").parquet(str(folder))
    assert due_windows(spec, tables) == ["2026-03-02"]
    assert [books.kept for books in ingest(spark, spec, tables, "two", NOW)] == [4]


def test_a_delta_table_tells_what_is_due_by_its_log(spark, tables, tmp_path):
    table = Table(str(tmp_path / "orders"))
    frame = spark.range(6).selectExpr(
        "id AS order_id", "id * 1.0D AS amount", "date_add(date'2026-03-01', CAST(id % 3 AS INT)) AS day"
    )
    table.write(frame, partition_by=["day"])
    spec = spec_of(DeltaSource(table=table.uri, key=("order_id",), partition="day"))
    ingest(spark, spec, tables, "one", NOW)
    look = source_of(spec.source).snapshot()
    assert due_windows(spec, tables) == []
    table.write(frame.where("day = '2026-03-03'").withColumn("order_id", frame.order_id + 10))
    assert due_windows(spec, tables) == ["2026-03-03"]
    assert source_of(spec.source).snapshot().state != look.state
    table.compact()
    compacted = ingest(spark, spec, tables, "two", NOW)
    assert {books.window: books.kept for books in compacted}["2026-03-03"] == 4


@pytest.mark.parametrize("when", [{"partition": "day"}, pytest.param({"time": "day"}, marks=pytest.mark.slow)])
def test_rows_that_a_deletion_vector_takes_from_a_table_go(spark, tables, tmp_path, when):
    place = str(tmp_path / "orders")
    rows = spark.range(80).selectExpr("id AS order_id", "1.0D AS amount", "IF(id < 40, '2026-03-01', '2026-03-02') day")
    write_deltalake(place, rows.toArrow(), partition_by=["day"])
    commit(place, 1, protocol(["deletionVectors"], []))
    spec = spec_of(DeltaSource(table=place, key=("order_id",), **when))
    ingest(spark, spec, tables, "one", NOW)
    added = [action["add"] for action in actions(place) if "add" in action]
    hide_rows(place, 2, next(add for add in added if add["partitionValues"]["day"] == "2026-03-01"))
    assert [books.window for books in ingest(spark, spec, tables, "two", NOW)] == ["2026-03-01"]
    assert sorted(row["order_id"] for row in clean_rows(tables)) == [n for n in range(80) if n not in HIDDEN]
    assert ingest(spark, spec, tables, "three", NOW) == []


@pytest.mark.parametrize("columns", ["3 AS a, CAST(NULL AS INT) AS b", "array(1, 2) AS a, array(3) AS b"])
def test_a_feed_whose_columns_were_swapped_is_due_when_it_is_corrected(spark, tables, columns):
    rows = f"(SELECT id, 1.0D AS amount, {columns} FROM range(3))"
    feed = f"CREATE OR REPLACE TEMPORARY VIEW feed AS SELECT {{}} FROM {rows}"
    spec = spec_of(SqlSource(query="SELECT id AS order_id, amount, a, b FROM feed"))
    spark.sql(feed.format("id, amount, a, b"))
    (first,) = ingest(spark, spec, tables, "one", NOW)
    assert ingest(spark, spec, tables, "two", NOW) == []
    other = "b AS a, a AS b" if "NULL" in columns else "slice(a, 1, 1) AS a, array(a[1], b[0]) AS b"
    spark.sql(feed.format(f"id, amount, {other}"))
    (second,) = ingest(spark, spec, tables, "three", NOW)
    assert second.content != first.content


def test_a_condition_that_fails_a_run_counts_rows_that_are_refused_for_something_else(spark, tables, tmp_path):
    lines = [f"{number},2026-03-01,{1.0 if number > 1 else ''}" for number in range(10)]
    lines += ["9,2026-03-01,", "20,2026-03-01,much", "21,soon,"]  # a duplicate, malformed, without a time
    (tmp_path / "rows.csv").write_text("\n".join(["order_id,at,amount", *lines]))
    schema = "order_id BIGINT, at STRING, amount DOUBLE"
    source = CsvSource(path=str(tmp_path / "rows.csv"), schema=schema, key=("order_id",), time="at")
    expect = {
        "paid": Expectation(check="amount > 0"),
        "known": Expectation(check="amount IS NOT NULL", action="fail", above=0.3),
    }
    with pytest.raises(DataError, match=r"'known' .* is broken by 4 of the 12 rows of window 2026-03-01, above its 30"):
        ingest(spark, spec_of(source, expect=expect), tables, "one", NOW)
    assert not [path for path in Path(tables).rglob("*") if path.is_file()]
    expect["known"] = Expectation(check="amount IS NOT NULL", action="fail", above=0.34)
    made = ingest(spark, spec_of(source, expect=expect), tables, "two", NOW)
    assert [(books.window, books.kept, books.duplicates, books.outcomes) for books in made] == [
        ("2026-03-01", 8, 1, {"paid": 2, "malformed in its file": 1}),
        ("none", 0, 0, {"no time that can be read": 1}),
    ]


def moved(rows):
    return rows.withColumn("order_id", rows.order_id + 1)


def crossed(rows, *, by):
    return rows.withColumn("at", rows.at + by)


def no_frame(rows):
    return 3


def broken(rows):
    return rows.nothing_of_that_name


def orders_of(spark, window, *, rows):
    return spark.range(rows).selectExpr("id AS order_id", "date'2026-03-01' AS at", "1.0D AS amount")


HERE = "tests.pipeline.steps.test_ingest_integration"


@pytest.mark.parametrize(
    "transform",
    [
        Transform(function=f"{HERE}:moved"),
        Transform(sql="SELECT order_id + 1 AS order_id, at, amount FROM {source}"),
        Transform(sql="select order_id + 1 as order_id, at, amount from source where at rlike '^[0-9]{4}' -- all"),
        Transform(sql="WITH a AS (SELECT order_id + 1 AS n, * FROM `source`) SELECT n AS order_id, at, amount FROM a"),
    ],
)
def test_a_transform_is_a_function_or_sql(spark, tables, transform):
    source = FunctionSource(function=f"{HERE}:orders_of", arguments={"rows": 3}, time="at", key=("order_id",))
    ingest(spark, spec_of(source, transform=transform), tables, "run", NOW)
    assert [row["order_id"] for row in clean_rows(tables)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        (
            {"transform": Transform(sql="SELECT order_id, amount FROM {source}")},
            SchemaError,
            "the transform drops 'at'",
        ),
        ({"transform": Transform(function=f"{HERE}:no_frame")}, ConfigError, "returned a int: return a DataFrame"),
        ({"transform": Transform(function=f"{HERE}:absent")}, ConfigError, "has no 'absent'"),
        ({"transform": Transform(function=f"{HERE}:broken")}, ConfigError, r"transform\.function=.*:broken failed: "),
        (
            {"expect": {"paid": Expectation(check="amout > 0")}},
            ConfigError,
            r"expect\.paid.*'amout > 0' reads 'amout', which is no column",
        ),
        ({"expect": {"paid": Expectation(check="amount >")}}, ConfigError, r"expect\.paid"),
        ({"expect": {"paid": Expectation(check="amount")}}, ConfigError, "is a double: write a condition"),
        (
            {"expect": {"paid": Expectation(check="amount > 5")}},
            DataError,
            "all 3 rows of window 2026-03-01 are refused",
        ),
        (
            {"expect": {"low": Expectation(check="order_id < 1", action="fail", above=0.5)}},
            DataError,
            r"'low' \(order_id < 1\) is broken by 2 of the 3 rows of window 2026-03-01, above its 50.00%",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(spark, tables, more, error, words):
    source = FunctionSource(function=f"{HERE}:orders_of", arguments={"rows": 3}, time="at", key=("order_id",))
    with pytest.raises(error, match=words):
        ingest(spark, spec_of(source, **more), tables, "run", NOW)
    assert not [path for path in Path(tables).rglob("*") if path.is_file()]


def test_a_transform_cannot_move_rows_into_windows_that_are_not_due(spark, tables):
    source = FunctionSource(function=f"{HERE}:orders_of", arguments={"rows": 3}, time="at")
    transform = Transform(sql="SELECT order_id, date_add(at, 1) AS at, amount FROM {source}")
    with pytest.raises(DataError, match="the transform moved 3 rows into the window 2026-03-02"):
        ingest(spark, spec_of(source, transform=transform), tables, "run", NOW)


def texts_of(spark, window, *, path):
    return spark.read.schema("order_id BIGINT, at DATE, amount DOUBLE").csv(path)


def test_rows_that_spark_alone_knows_are_those_that_their_hash_is_of(spark, tables, tmp_path, monkeypatch):
    file = tmp_path / "rows.csv"
    file.write_text("1,2026-03-01,1.5\n2,2026-03-01,2.5\n")
    spec = spec_of(FunctionSource(function=f"{HERE}:texts_of", arguments={"path": str(file)}, time="at"))
    validate_rows = ingestion.validate_rows

    def changed_meanwhile(*given):
        file.write_text("1,2026-03-01,1.5\n2,2026-03-01,9.5\n")
        return validate_rows(*given)

    monkeypatch.setattr(ingestion, "validate_rows", changed_meanwhile)
    with pytest.raises(DataError, match="window 2026-03-01 had 2 rows when it was looked at, and 2 rows, or others"):
        ingest(spark, spec, tables, "run", NOW)
    monkeypatch.undo()
    [books] = ingest(spark, spec, tables, "run", NOW)
    assert (books.read, books.kept) == (2, 2)
    assert ingest(spark, spec, tables, "run", NOW) == []


def asked_for(spark, window, *, wrong=0):
    """Four days of a row an hour; as a window of time is asked for, those of it, but the first of ``wrong`` hours."""
    rows = spark.range(96).selectExpr(
        "id AS order_id", "timestamp'2026-03-01 00:00:00Z' + make_dt_interval(0, id) AS at", "1.0D AS amount"
    )
    ASKED.append(window)
    if window is None:
        return rows
    return rows.where((rows["at"] >= window.start + timedelta(hours=wrong)) & (rows["at"] < window.end))


ASKED = []


THROUGH_SQL = Transform(sql="SELECT * FROM {source}")


@pytest.mark.parametrize(
    ("transform", "time"),
    [
        (None, {"time": "at"}),
        (THROUGH_SQL, {"partition": "at"}),
        pytest.param(None, {"partition": "at"}, marks=pytest.mark.slow),
        pytest.param(THROUGH_SQL, {"time": "at"}, marks=pytest.mark.slow),
    ],
)
def test_a_function_is_asked_for_all_rows_and_for_those_of_the_windows_that_are_due(spark, tables, transform, time):
    spec = spec_of(FunctionSource(function=f"{HERE}:asked_for", key=("order_id",), **time), transform=transform)
    ASKED.clear()
    assert [books.kept for books in ingest(spark, spec, tables, "one", NOW)] == [24] * 4
    day = [datetime(2026, 3, number, tzinfo=UTC) for number in range(1, 6)]
    assert [None, (day[0], day[4])] == ASKED
    ASKED.clear()
    assert ingest(spark, spec, tables, "two", NOW) == []
    assert ASKED == [None]
    ASKED.clear()
    again = ingest(spark, spec, tables, "three", NOW, again=("2026-03-02", "2026-03-03"))
    assert [(books.window, books.kept) for books in again] == [("2026-03-02", 24), ("2026-03-03", 24)]
    assert [None, (day[1], day[3])] == ASKED
    assert (ASKED[1].start, ASKED[1].end) == (day[1], day[3])
    assert len(clean_rows(tables)) == 96


@pytest.mark.parametrize("transform", [None, THROUGH_SQL])
def test_a_function_that_returns_other_rows_for_a_window_is_refused(spark, tables, transform):
    source = FunctionSource(function=f"{HERE}:asked_for", arguments={"wrong": 1}, key=("order_id",), time="at")
    with pytest.raises(DataError, match=r"window 2026-03-01.* with a window and without"):
        ingest(spark, spec_of(source, transform=transform), tables, "one", NOW)
    assert not [path for path in Path(tables).rglob("*") if path.is_file()]


def test_a_function_is_asked_for_all_where_rows_without_a_time_are_due(spark, tables):
    ASKED.clear()
    source = FunctionSource(function=f"{HERE}:partly_timed", key=("order_id",), time="at")
    assert [books.window for books in ingest(spark, spec_of(source), tables, "one", NOW)] == ["2026-03-01", "none"]
    assert ASKED == [None]


def partly_timed(spark, window):
    rows = asked_for(spark, window)
    return rows.where("order_id < 9").withColumn("at", F.when(rows.order_id > 4, rows["at"]))


@pytest.mark.parametrize("key", [("order_id", "shop"), ("nothing",)])
def test_a_key_that_is_not_there_is_named(spark, tables, key):
    source = FunctionSource(function=f"{HERE}:orders_of", arguments={"rows": 3}, time="at", key=key)
    with pytest.raises(
        PipelineFileError, match=rf"source\.key\[\d\]='{key[-1]}' is no column of the source"
    ) as refused:
        ingest(spark, spec_of(source), tables, "run", NOW)
    assert "_window" not in str(refused.value)


def test_of_rows_with_one_key_a_sound_one_stays_and_rows_without_a_key_are_no_duplicates(spark, tables):
    rows = [("'a'", 1, -1), ("'a'", 0, 2), ("'b'", 1, 4), ("'b'", 2, 3), ("NULL", 2, 5), ("NULL", 2, 5)]
    values = ", ".join(f"({key}, timestamp'2026-03-01 0{hour}:00:00', {amount}.0D)" for key, hour, amount in rows)
    values += ", ('b', timestamp'2026-03-02 01:00:00', 6.0D)"
    query = f"SELECT * FROM VALUES {values} AS t(order_id, at, amount)"
    spec = spec_of(
        SqlSource(query=query, time="at", key=("order_id",)), expect={"paid": Expectation(check="amount > 0")}
    )
    first, second = ingest(spark, spec, tables, "run", NOW)
    assert (first.read, first.kept, first.duplicates, first.quarantined) == (6, 4, 2, 0)
    assert (second.read, second.kept, second.duplicates) == (1, 1, 0)  # a key may come again in another window
    assert sorted(row["amount"] for row in clean_rows(tables)) == [2.0, 3.0, 5.0, 5.0, 6.0]


def test_an_edited_transform_may_change_the_columns_of_the_clean_rows(spark, tables):
    source = FunctionSource(function=f"{HERE}:orders_of", arguments={"rows": 3}, time="at", key=("order_id",))
    ingest(spark, spec_of(source), tables, "one", NOW)
    more = Transform(sql="SELECT *, amount * 2 AS twice FROM {source}")
    ingest(spark, spec_of(source, transform=more), tables, "two", NOW)
    assert [row["twice"] for row in clean_rows(tables)] == [2.0, 2.0, 2.0]
    assert table_in(tables, "clean").columns() == ["_window", "order_id", "at", "amount", "twice"]


def test_a_change_in_any_column_of_the_source_is_seen(spark, tables):
    query = "SELECT 1 AS order_id, 2.0D AS amount, {} AS _note"
    first = ingest(spark, spec_of(SqlSource(query=query.format("'a'"))), tables, "one", NOW)
    second = ingest(spark, spec_of(SqlSource(query=query.format("'b'"))), tables, "two", NOW)
    assert first[0].content != second[0].content


def test_columns_that_change_their_names_are_other_content(spark, tables):
    rows, found = SqlSource(query="SELECT id AS order_id, 1.0D AS amount, id AS x, -id AS z FROM range(3)"), []
    for names in ("x AS u, z AS v", "x AS v, z AS u", "x AS u, z AS v"):
        transform = Transform(sql=f"SELECT order_id, amount, {names} FROM {{source}}")
        (books,) = ingest(spark, spec_of(rows, transform=transform), tables, "run", NOW)
        found.append(books.content)
    assert found[0] == found[2] != found[1]


def test_a_renamed_column_makes_every_window_due(spark, tables):
    query = "SELECT id AS order_id, 1.0D AS amount, id AS {} FROM range(3)"
    first = ingest(spark, spec_of(SqlSource(query=query.format("shop"))), tables, "one", NOW)
    second = ingest(spark, spec_of(SqlSource(query=query.format("store"))), tables, "two", NOW)
    assert table_in(tables, "clean").columns() == ["_window", "order_id", "amount", "store"]
    assert second[0].fingerprint != first[0].fingerprint


def test_books_do_not_depend_on_how_rows_are_gathered(spark, orders, tables, tmp_path, monkeypatch):
    folder, write = orders
    write("2026-03-02", rows=5, start=3, name="again")
    write("2026-03-02", rows=1, start=60, amount="-1.0D", name="bad")
    checks = {"paid": Expectation(check="amount >= 0"), "large": Expectation(check="amount > 4", action="warn")}
    spec = spec_of(ParquetSource(path=str(folder), key=("order_id",), time="bought_at"), expect=checks)
    run = new_run(spec, tables)
    run.run_id = "one"
    first = ingestion.ingest(spark, run)
    monkeypatch.setattr("sparkdl.pipeline.steps.ingest._ROWS_PER_FILE", 7)
    others = str(tmp_path / "small")
    spark.conf.set("spark.sql.adaptive.coalescePartitions.enabled", "false")  # which would join parts so small
    try:
        second = ingest(spark, spec, others, "one", NOW)
    finally:
        spark.conf.unset("spark.sql.adaptive.coalescePartitions.enabled")
    assert second == first
    assert run.record.warned == {"large": 15}
    assert clean_rows(others) == clean_rows(tables)
    files = [file.partition["_window"] for file in table_in(others, "clean").files()]
    assert len(files) > len(set(files)) == 3  # several of a window, and no more than there are parts
    assert len(table_in(tables, "clean").files()) == 3


def test_rows_of_partition_folders_are_not_moved(spark, tables, tmp_path):
    (tmp_path / "raw").mkdir()
    for day in ("2026-03-01", "2026-03-02"):
        folder = tmp_path / "raw" / f"day={day}"
        folder.mkdir()
        (folder / "rows.csv").write_text("1,1.5\n2,0.5\n3,\n4\n")
    source = CsvSource(
        path=str(tmp_path / "raw"), schema="order_id BIGINT, amount DOUBLE", partition="day", options={"header": False}
    )
    made = ingest(spark, spec_of(source, expect={"paid": Expectation(check="amount > 0")}), tables, "run", NOW)
    assert [(books.read, books.kept, books.outcomes) for books in made] == [
        (4, 2, {"paid": 1, "malformed in its file": 1})] * 2  # fmt: skip
    refused = table_in(tables, "quarantine").rows().to_pylist()
    assert sorted(row["row"] for row in refused if row["reason"] != "paid") == ["4", "4"]
    assert {json.loads(row["row"])["order_id"] for row in refused if row["reason"] == "paid"} == {3}
    assert len(table_in(tables, "clean").files()) == 2


@pytest.mark.parametrize("name", ["_outcome", "_broken", "_salt", "_slot"])
def test_columns_that_the_pipeline_adds_are_refused_in_the_source(spark, tables, name):
    query = f"SELECT 1 AS order_id, 2.0D AS amount, 3 AS {name}"
    with pytest.raises(SchemaError, match=f"the rows have a column {name}, which the pipeline adds"):
        ingest(spark, spec_of(SqlSource(query=query)), tables, "run", NOW)


def test_columns_of_any_other_name_are_kept_as_they_are(spark, tables):
    query = "SELECT 1 AS order_id, 2.0D AS amount, 'x' AS _hash, 'y' AS _row, 5 AS `a.b`, 6 AS `c``d`, 7 AS `_c`"
    ingest(spark, spec_of(SqlSource(query=query)), tables, "run", NOW)
    (row,) = clean_rows(tables)
    assert (row["_hash"], row["_row"], row["a.b"], row["c`d"], row["_c"]) == ("x", "y", 5, 6, 7)


def test_a_run_that_fails_while_it_writes_leaves_no_file(spark, tables):
    source = SqlSource(query="SELECT id AS order_id, IF(id = 3, raise_error('lost'), 1.0D) AS amount FROM range(5)")
    with pytest.raises(Exception, match="lost"):
        ingest(spark, spec_of(source), tables, "run", NOW)
    assert not [path for path in Path(tables).rglob("*") if path.is_file()]
