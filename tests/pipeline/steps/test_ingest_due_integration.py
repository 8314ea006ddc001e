"""Windows that a transform thins out, windows that the source has lost, columns that come and go."""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest

from sparkdl.errors import DataError, SchemaError
from sparkdl.features.spec import Number
from sparkdl.pipeline.file import PipelineFile
from sparkdl.pipeline.spec import Expectation, Label, PipelineSpec, Transform
from sparkdl.pipeline.spec.operation import Places
from sparkdl.pipeline.spec.source import ParquetSource, SqlSource
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.steps import ingest as ingestion
from sparkdl.tables.table import Table

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)


class Orders:
    """Parquet files of orders by day, in partition folders or with a time, and their pipeline."""

    def __init__(self, root, by):
        self.root, self.by, self.tables = root, by, str(root / "tables")

    def table(self, name):
        return Table(f"{self.tables}/{name}", engine="delta-rs")

    def day(self, day, rows=10, **more):
        """Deliver a day of March 2026; more columns have one value."""
        folder = self.root / "orders" / (f"day=2026-03-{day:02d}" if self.by == "partition" else f"{day:02d}")
        folder.mkdir(parents=True, exist_ok=True)
        frame = pd.DataFrame({"order": range(rows), "amount": 1.5, "y": 1.0, **more})
        if self.by == "time":
            frame["day"] = pd.Timestamp(2026, 3, day)
        frame.to_parquet(folder / "rows.parquet", coerce_timestamps="us")
        return folder

    def ingest(self, spark, again=None, transform=None, query=None, expect=None, now=NOW, **source):
        """Take in what is due of the files, or of a query of Spark's."""
        source |= {self.by: ("day",) if self.by == "key" else "day"}
        path = str(self.root / "orders")
        spec = PipelineSpec(
            source=SqlSource(query=query, **source) if query else ParquetSource(path=path, **source),
            transform=None if transform is None else Transform(sql=transform),
            expect=expect or {}, features={"y": Number()}, label={"y": Label(type="regression")},
            places=Places(tables=self.tables),
        )  # fmt: skip
        run = Run(Project(PipelineFile("pipeline.yaml", spec, {})), RunRequest(now=now, again=again))
        done = ingestion.ingest(spark, run)
        run.again = None
        ingestion.IngestStep().tell(run)
        self.told = {name: windows for name, windows in run.record.windows.items() if name != "ingested"}
        self.windows = run.windows()
        return done

    @property
    def clean(self):
        """Rows by window, as the table of clean rows has them."""
        return self.table("clean").rows().to_pandas().groupby("_window").size().to_dict()

    @property
    def files(self):
        """All that the tables of rows are made of."""
        tables = (Path(self.tables) / name for name in ("clean", "quarantine"))
        return sorted(str(path) for table in tables for path in table.rglob("*") if path.is_file())


@pytest.fixture(params=["partition", "time"])
def orders(tmp_path, request):
    return Orders(tmp_path, request.param)


@pytest.fixture
def by_folder(tmp_path):
    return Orders(tmp_path, "partition")


def test_a_first_run_reads_the_rows_once_and_the_next_one_knows_them_again(spark, tmp_path, monkeypatch):
    orders = Orders(tmp_path, "time")
    expect = {"paid": Expectation(check="amount > 0 AND NOT isnan(amount)")}
    orders.day(1, note="x" * 300)
    orders.day(2, amount=[None, float("nan"), *[1.5] * 8])
    with monkeypatch.context() as patch:
        patch.setattr(ingestion, "fingerprints", None)
        made = orders.ingest(spark, expect=expect)
    assert [(books.window, books.kept, books.quarantined) for books in made] == [
        ("2026-03-01", 10, 0), ("2026-03-02", 8, 2),
    ]  # fmt: skip
    assert not orders.ingest(spark, expect=expect), "refused rows are part of what is known of a window"
    orders.day(2, amount=[-1.0, float("nan"), *[1.5] * 8])
    assert [books.window for books in orders.ingest(spark, expect=expect)] == ["2026-03-02"]


def test_a_window_that_had_not_begun_in_a_first_run_is_taken_in_once_it_has(spark, tmp_path):
    orders = Orders(tmp_path, "time")
    for day in (19, 20, 21):
        orders.day(day)
    assert [books.window for books in orders.ingest(spark)] == ["2026-03-19", "2026-03-20"]
    assert orders.told == {"ahead": ["2026-03-21"]}
    later = datetime(2026, 3, 21, 12, tzinfo=UTC)
    assert [(books.window, books.kept) for books in orders.ingest(spark, now=later)] == [("2026-03-21", 10)]
    assert orders.ingest(spark, now=later) == []
    assert orders.told == {}


JOINED = "SELECT o.*, shops.town FROM {source} o JOIN shops_of_test shops ON o.shop = shops.shop"


def test_rows_that_a_join_loses_are_counted_and_a_window_that_it_empties_waits_for_its_other_side(spark, orders):
    orders.day(1, shop="a")
    orders.day(2, shop=["a"] * 7 + ["b"] * 3)
    spark.sql("SELECT 'a' AS shop, 'Bonn' AS town WHERE 1 = 0").createOrReplaceTempView("shops_of_test")
    with pytest.raises(DataError, match="window 2026-03-01 has 10 rows in the source, and the transform leaves none"):
        orders.ingest(spark, transform=JOINED)
    assert orders.files == []
    spark.sql("SELECT 'a' AS shop, 'Bonn' AS town").createOrReplaceTempView("shops_of_test")
    done = orders.ingest(spark, transform=JOINED)
    assert [(each.window, each.source_rows, each.read, each.kept) for each in done] == [
        ("2026-03-01", 10, 10, 10), ("2026-03-02", 10, 7, 7)]  # fmt: skip
    assert orders.windows == {each.window: each for each in done}
    assert orders.ingest(spark, transform=JOINED) == []


def test_rows_are_counted_as_the_source_has_them_whatever_the_transform_reads_of_them(spark, by_folder):
    by_folder.day(1, rows=1000)
    [books] = by_folder.ingest(spark, transform="SELECT * FROM {source} LIMIT 20")
    assert (books.source_rows, books.read) == (1000, 20)
    [books] = by_folder.ingest(spark, transform="SELECT o.* FROM {source} o CROSS JOIN range(2)")
    assert (books.source_rows, books.read) == (1000, 2000)
    [books] = by_folder.ingest(spark)
    assert (books.source_rows, books.read) == (1000, 1000)


def test_a_deleted_window_stays_until_it_is_asked_to_go_and_comes_back_with_its_rows(spark, orders, caplog):
    for day in (1, 2, 3):
        orders.day(day)
    orders.ingest(spark)
    shutil.rmtree(orders.day(2))
    assert orders.ingest(spark) == []
    assert [entry.message for entry in caplog.records if "no longer holds" in entry.message] == [
        "window 2026-03-02 of the clean rows that the source no longer holds: --backfill 2026-03-02..2026-03-02 or "
        "source.deleted_windows=remove takes them out"
    ]
    assert orders.told == {"deleted": ["2026-03-02"]}
    assert orders.clean == {"2026-03-01": 10, "2026-03-02": 10, "2026-03-03": 10}

    [books] = orders.ingest(spark, deleted_windows="remove")
    assert (books.window, books.source_rows, books.read, books.kept, books.content) == ("2026-03-02", 0, 0, 0, "")
    assert orders.told == {"removed": ["2026-03-02"]}
    assert orders.clean == {"2026-03-01": 10, "2026-03-03": 10}
    assert orders.ingest(spark, deleted_windows="remove") == []
    assert orders.ingest(spark) == []
    assert orders.told == {}

    orders.day(2, rows=4)
    assert [each.window for each in orders.ingest(spark)] == ["2026-03-02"]
    assert orders.clean == {"2026-03-01": 10, "2026-03-02": 4, "2026-03-03": 10}


def test_a_backfill_takes_a_deleted_window_out_and_does_those_beside_it_again(spark, by_folder):
    for day in (1, 2, 3):
        by_folder.day(day)
    by_folder.ingest(spark)
    shutil.rmtree(by_folder.day(2))
    assert [each.window for each in by_folder.ingest(spark, again=("2026-03-02", "2026-03-02"))] == ["2026-03-02"]
    assert by_folder.clean == {"2026-03-01": 10, "2026-03-03": 10}
    shutil.rmtree(by_folder.day(1))
    done = by_folder.ingest(spark, again=("2026-03-01", "2026-03-09"))
    assert [(each.window, each.kept) for each in done] == [("2026-03-01", 0), ("2026-03-03", 10)]
    assert by_folder.clean == {"2026-03-03": 10}


def test_a_row_whose_date_is_corrected_leaves_the_quarantine_and_on_demand_its_old_window(spark, tmp_path):
    orders, query = Orders(tmp_path, "time"), "SELECT * FROM VALUES (1, {}), (2, '2026-03-18') AS t(y, day)"
    for wrong in ("'2016-03-19'", "'soon'"):
        orders.ingest(spark, query=query.format(wrong))
    assert orders.clean == {"2016-03-19": 1, "2026-03-18": 1}
    assert orders.table("quarantine").rows().num_rows == 1
    done = orders.ingest(spark, query=query.format("'2026-03-19'"), deleted_windows="remove")
    assert [(each.window, each.read) for each in done] == [
        ("2016-03-19", 0), ("2026-03-18", 1), ("2026-03-19", 1), ("none", 0)]  # fmt: skip
    assert orders.clean == {"2026-03-18": 1, "2026-03-19": 1}
    assert orders.table("quarantine").rows().num_rows == 0


def test_a_table_that_was_truncated_is_refused_and_what_was_written_of_it_stays(spark, tmp_path):
    orders, query = Orders(tmp_path, "time"), "SELECT id AS y, date'2026-03-18' AS day FROM range({})"
    orders.ingest(spark, query=query.format(3))
    files = orders.files
    for how in ("keep", "remove"):
        with pytest.raises(DataError, match="the source holds no rows, and the clean rows are of window 2026-03-18"):
            orders.ingest(spark, query=query.format(0), deleted_windows=how)
    assert orders.files == files


def test_days_that_are_told_by_the_hour_now_are_no_windows_beside_their_hours(spark, tmp_path):
    orders, query = (
        Orders(tmp_path, "time"),
        "SELECT id AS y, timestamp_seconds(1773792000 + id * 3600) AS day FROM range(3)",
    )
    orders.ingest(spark, query=query)
    assert orders.clean == {"2026-03-18": 3}
    orders.ingest(spark, query=query, every="hour")
    assert orders.clean == {"2026-03-18T00": 1, "2026-03-18T01": 1, "2026-03-18T02": 1}


def test_days_that_are_told_by_no_time_any_more_are_no_windows_beside_all_rows(spark, tmp_path):
    orders, query = Orders(tmp_path, "time"), "SELECT id AS y, date_add(date'2026-03-18', int(id)) AS day FROM range(2)"
    orders.ingest(spark, query=query)
    assert orders.clean == {"2026-03-18": 1, "2026-03-19": 1}
    orders.by = "key"
    orders.ingest(spark, query=query)
    assert orders.clean == {"all": 2}


@pytest.fixture
def in_berlin(spark):
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    yield
    spark.conf.set("spark.sql.session.timeZone", "UTC")


@pytest.mark.parametrize("every", ["hour", "day"])
def test_folders_of_moments_are_the_windows_that_they_are_called(spark, tmp_path, in_berlin, every):
    orders, step = (
        Orders(tmp_path, "partition"),
        "make_dt_interval(0, id)" if every == "hour" else "make_dt_interval(id)",
    )
    rows = spark.sql(f"SELECT id AS y, timestamp'2026-03-01 00:00:00' + {step} AS day FROM range(3)")
    rows.write.partitionBy("day").parquet(str(tmp_path / "orders"))
    names = [f"2026-03-01T0{n}" if every == "hour" else f"2026-03-0{n + 1}" for n in range(3)]
    assert [(each.window, each.kept) for each in orders.ingest(spark, every=every)] == [(n, 1) for n in names]
    assert orders.clean == dict.fromkeys(names, 1)


def test_days_of_one_digit_are_days(spark, by_folder):
    for day in (8, 9, 10):
        by_folder.day(day).rename(by_folder.root / "orders" / f"day=2026-3-{day}")
    assert [each.window for each in by_folder.ingest(spark)] == ["2026-03-08", "2026-03-09", "2026-03-10"]
    assert by_folder.clean == {"2026-03-08": 10, "2026-03-09": 10, "2026-03-10": 10}


def test_a_column_that_comes_or_goes_refuses_no_run_and_is_null_where_it_was_not(spark, by_folder):
    by_folder.day(1)
    first = by_folder.ingest(spark)
    by_folder.day(2, rows=2, z="new")
    assert [each.window for each in by_folder.ingest(spark)] == ["2026-03-02"]
    assert by_folder.windows["2026-03-01"] == first[0]
    by_folder.day(3, rows=3)
    assert [each.window for each in by_folder.ingest(spark)] == ["2026-03-03"]
    rows = by_folder.table("clean").read(spark)
    found = rows.groupBy("_window").agg({"z": "count", "*": "count"}).orderBy("_window").collect()
    assert [(row["_window"], row["count(1)"], row["count(z)"]) for row in found] == [
        ("2026-03-01", 10, 0), ("2026-03-02", 2, 2), ("2026-03-03", 3, 0)]  # fmt: skip


def test_deleted_windows_keep_the_columns_that_the_source_has_no_more(spark, orders):
    orders.day(1, old=1)
    orders.ingest(spark)
    shutil.rmtree(orders.day(1))
    orders.day(2, new=2)
    assert [each.window for each in orders.ingest(spark)] == ["2026-03-02"]
    rows = orders.table("clean").rows(["_window", "old", "new"]).to_pylist()
    assert {(row["_window"], row["old"], row["new"]) for row in rows} == {
        ("2026-03-01", 1, None), ("2026-03-02", None, 2)}  # fmt: skip


def test_a_column_of_another_type_is_refused_with_the_windows_to_do_again_and_then_taken(spark, by_folder):
    by_folder.day(1)
    by_folder.ingest(spark)
    files = by_folder.files
    shutil.rmtree(by_folder.day(1))
    by_folder.day(2, amount="much")
    with pytest.raises(SchemaError) as refused:
        by_folder.ingest(spark)
    assert re.fullmatch(
        r"column 'amount' is string now, and double in the Delta table \S+/clean: do all windows again with --backfill "
        r"2026-03-01\.\.2026-03-02, or change the source back",
        str(refused.value),
    )
    assert by_folder.files == files
    by_folder.ingest(spark, again=("2026-03-01", "2026-03-02"))
    assert by_folder.clean == {"2026-03-02": 10}
    assert set(by_folder.table("clean").rows(["amount"])["amount"].to_pylist()) == {"much"}
