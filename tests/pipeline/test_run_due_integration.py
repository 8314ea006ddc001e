"""What a run finds due as its source and the clock move on; runs end after ingestion, which decides it."""

from __future__ import annotations

import itertools
import shutil
from datetime import UTC, datetime

import pandas as pd
import pytest

from sparkdl.errors import DataError
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.report import report_html
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import ReceiptTable
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.status import status_of
from sparkdl.pipeline.summary import status_lines, summary_lines
from sparkdl.tables.staged import StagedWrite
from sparkdl.tables.table import Table


class Shop:
    """A source by day or by time, and its pipeline."""

    def __init__(self, root, source):
        self.root, self.source = root, source

    def new_run(self, now, again=None, edit="", **settings):
        source = ", ".join(f"{name}: {value}" for name, value in {**self.source, **settings}.items())
        text = f"""
        name: shop
        root: {self.root}
        source: {{{source}}}
        features: {{x: number}}
        label: {{y: regression}}
        {f'transform: {{sql: "SELECT *{edit} FROM {{source}}"}}' if edit else ""}
        """
        return Run(Project(loads(text)), RunRequest(now=now, again=again, until="ingest"))

    @property
    def clean(self):
        return Table(f"{self.root}/shop/tables/clean").rows().to_pandas()


def noon(day):
    return datetime(2026, 3, day, 12, tzinfo=UTC)


def orders(*days, rows=3, **more):
    """As many orders of each day, as pandas rows."""
    found = [
        {"order": f"{day}-{n}", "at": pd.Timestamp(2026, 3, day, n, tz="UTC"), "x": float(n), "y": 2.0 * n, **more}
        for day in days
        for n in range(rows)
    ]
    return pd.DataFrame(found)


def test_rows_dated_ahead_are_taken_in_when_their_day_comes_though_no_file_has_changed(spark, tmp_path):
    orders(18, 19, 20).to_parquet(tmp_path / "rows.parquet", coerce_timestamps="us")
    shop = Shop(tmp_path, {"kind": "parquet", "path": tmp_path / "rows.parquet", "time": "at"})
    first = execute(shop.new_run(noon(18)), spark)
    assert first.windows["ingested"] == ["2026-03-18"]
    assert execute(shop.new_run(noon(18))).outcome == "nothing new"  # no session: nothing of Spark is asked
    assert execute(shop.new_run(noon(19)), spark).windows["ingested"] == ["2026-03-19"]
    assert execute(shop.new_run(noon(19))).outcome == "nothing new"
    assert execute(shop.new_run(noon(20)), spark).windows["ingested"] == ["2026-03-20"]
    assert len(shop.clean) == 9


@pytest.mark.parametrize(
    ("by", "cut"),
    [("time", "clean"), *(pytest.param(by, "receipts", marks=pytest.mark.slow) for by in ("time", "partition"))],
)
def test_an_edit_that_is_taken_back_after_its_run_was_cut_short_leaves_no_row(spark, tmp_path, monkeypatch, by, cut):
    (tmp_path / "orders" / "day=2026-03-18").mkdir(parents=True)
    orders(18).to_parquet(tmp_path / "orders" / "day=2026-03-18" / "rows.parquet", coerce_timestamps="us")
    named = {"time": "at"} if by == "time" else {"partition": "day"}
    shop, edit = Shop(tmp_path, {"kind": "parquet", "path": tmp_path / "orders", **named}), ", x * 1000 AS big"
    execute(shop.new_run(noon(18)), spark)
    with monkeypatch.context() as patched:
        commit, write, number = StagedWrite.commit, ReceiptTable.write, itertools.count()

        def commit_or_end(*own):
            if cut == "clean" and next(number) == 1:
                raise KeyboardInterrupt
            return commit(*own)

        def write_or_end(table, receipts):
            if any(receipt.step == "ingest" and receipt.key for receipt in receipts):
                raise KeyboardInterrupt
            write(table, receipts)

        patched.setattr(StagedWrite, "commit", commit_or_end)
        patched.setattr(ReceiptTable, "write", write_or_end)
        with pytest.raises(KeyboardInterrupt):
            execute(shop.new_run(noon(18), edit=edit), spark)
    assert execute(shop.new_run(noon(18)), spark).windows["ingested"] == ["2026-03-18"]
    assert "big" not in shop.clean.columns
    assert execute(shop.new_run(noon(18))).outcome == "nothing new"


@pytest.mark.parametrize("by", ["time", pytest.param("partition", marks=pytest.mark.slow)])
def test_clean_rows_that_are_gone_are_taken_in_again(spark, tmp_path, caplog, by):
    named = {"time": "at"} if by == "time" else {"partition": "day"}
    shop = Shop(tmp_path, {"kind": "parquet", "path": tmp_path / "orders", **named})
    for day in (17, 18, 19):
        (tmp_path / "orders" / f"day=2026-03-{day}").mkdir(parents=True)
        orders(day).to_parquet(tmp_path / "orders" / f"day=2026-03-{day}" / "rows.parquet", coerce_timestamps="us")
    execute(shop.new_run(noon(18)), spark)
    shutil.rmtree(tmp_path / "shop" / "tables" / "clean")
    assert execute(shop.new_run(noon(19)), spark).windows["ingested"] == ["2026-03-17", "2026-03-18", "2026-03-19"]
    assert "tables/clean are gone: all windows are taken in again" in caplog.text
    assert len(shop.clean) == 9
    assert execute(shop.new_run(noon(19))).outcome == "nothing new"

    shutil.rmtree(tmp_path / "shop" / "tables" / "clean")
    shutil.rmtree(tmp_path / "orders" / "day=2026-03-17")
    with pytest.raises(DataError, match=r"tables/clean are gone, and the source no longer holds 2026-03-17 of them"):
        execute(shop.new_run(noon(19)), spark)
    execute(shop.new_run(noon(19), deleted_windows="remove"), spark)
    assert len(shop.clean) == 6


def test_a_run_says_which_windows_the_source_no_longer_holds_and_one_that_removes_them_ends_well(spark, tmp_path):
    shop = Shop(tmp_path, {"kind": "parquet", "path": tmp_path / "orders", "partition": "day"})
    for day in (17, 18, 19):
        (tmp_path / "orders" / f"day=2026-03-{day}").mkdir(parents=True)
        orders(day).to_parquet(tmp_path / "orders" / f"day=2026-03-{day}" / "rows.parquet", coerce_timestamps="us")
    execute(shop.new_run(noon(19)), spark)
    shutil.rmtree(tmp_path / "orders" / "day=2026-03-18")
    kept = execute(shop.new_run(noon(19)), spark)
    assert kept.windows["deleted"] == ["2026-03-18"]
    assert dict(summary_lines(kept))["deleted"].startswith("window 2026-03-18 of the clean rows that the source no")
    assert execute(shop.new_run(noon(19))).outcome == "nothing new"
    assert status_of(shop.new_run(noon(19))).due == ()

    done = execute(shop.new_run(noon(19), deleted_windows="remove"), spark)
    assert (done.outcome, done.windows["removed"]) == ("stopped", ["2026-03-18"])
    assert "Deleted in the source: window 2026-03-18 removed from the clean rows." in report_html(done)
    assert execute(shop.new_run(noon(19), deleted_windows="remove")).outcome == "nothing new"
    assert set(shop.clean["_window"]) == {"2026-03-17", "2026-03-19"}
    assert [books.window for books in status_of(shop.new_run(noon(19))).done] == ["2026-03-17", "2026-03-19"]


def test_status_tells_what_is_due_of_a_source_whose_rows_alone_know_their_windows(spark, tmp_path):
    (tmp_path / "rows").mkdir()
    orders(17, 18, 20).to_parquet(tmp_path / "rows" / "a.parquet", coerce_timestamps="us")
    shop = Shop(tmp_path, {"kind": "parquet", "path": tmp_path / "rows", "key": "order", "time": "at"})

    def due(now, **more):
        return dict(status_lines(status_of(shop.new_run(now, **more))))["due"]

    assert due(noon(19)) == "only Spark can tell: the source shows no windows before it is read"
    done = execute(shop.new_run(noon(19)), spark)
    assert done.windows["ahead"] == ["2026-03-20"]
    assert due(noon(19)) == "no window"
    assert due(noon(20)) == "window 2026-03-20"  # which has begun
    assert due(noon(19), edit=", 1 AS more") == "2 windows 2026-03-17 to 2026-03-18"
    assert "its settings differ or a run was cut short since" in due(noon(19), every="hour")
    orders(19).to_parquet(tmp_path / "rows" / "b.parquet", coerce_timestamps="us")
    changed = due(noon(19))
    assert changed.startswith("only Spark can tell: the source has changed since run 2026")
    query = Shop(tmp_path / "q", {"kind": "sql", "query": "'SELECT 1 AS x, 2.0 AS y'"})
    execute(query.new_run(noon(21)), spark)
    assert (
        "the source shows nothing before it is read; run 20260321"
        in dict(status_lines(status_of(query.new_run(noon(21)))))["due"]
    )
