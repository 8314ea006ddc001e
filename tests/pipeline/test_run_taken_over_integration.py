"""A run whose lease was taken over while it stood still commits nothing more: not a row of the later run is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from sparkdl.documents.typed import encode
from sparkdl.models.registry import ModelRegistry
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.rows.ledger import Ledger, Tables
from sparkdl.pipeline.run import run
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.lease import LeaseLostError
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.steps import Steps
from sparkdl.shards.transaction import Transaction
from sparkdl.storage import Storage
from sparkdl.tables.staged import StagedWrite
from sparkdl.tables.table import Table

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)
ROWS = 40


class Shop:
    """A source that grows by days, as Parquet files or a Delta table, and its pipeline."""

    def __init__(self, root, kind):
        self.root, self.kind, self.orders = root, kind, root / "orders"
        self.last = 0
        for _ in range(4):
            self.next_day()

    def next_day(self):
        self.last += 1
        x = [n / 7 - 3 for n in range(ROWS)]
        rows = pd.DataFrame({"order": [f"{self.last}-{n}" for n in range(ROWS)], "x": x, "y": [2 * v + 1 for v in x]})
        rows["at"] = pd.Timestamp(2026, 3, self.last, 10, tz="UTC")
        if self.kind == "delta":
            write_deltalake(str(self.orders), pa.Table.from_pandas(rows), mode="append")
        else:
            self.orders.mkdir(exist_ok=True)
            rows.to_parquet(self.orders / f"{self.last:02d}.parquet", coerce_timestamps="us")

    @property
    def text(self):
        place = "table" if self.kind == "delta" else "path"
        return f"""
        name: shop
        root: {self.root}
        source: {{kind: {self.kind}, {place}: {self.orders}, key: order, time: at}}
        features: {{x: number}}
        label: {{y: regression}}
        split: {{by: time, train: 2 days, validate: 1 day, score: 1 day}}
        model: {{arguments: {{width: 8, depth: 1, dropout: 0}}}}
        train: {{epochs: 2, batch_size: 16, learning_rate: 0.01, num_proc: 1, verbose: 0}}
        publish: {{gate: {{min_rows: 20, rule: not_worse, margin: 100}}}}
        """

    def context(self, until=None, again=None):
        return Context(loads(self.text), NOW, again, until)

    @property
    def tables(self):
        return Tables(folder=f"{self.root}/shop/tables")

    @property
    def registry(self):
        return ModelRegistry(f"{self.root}/shop/registry")

    def check_rows(self, days):
        """Every row of these days is in the clean rows, once, and the books vouch for it."""
        rows = self.tables.table("clean").rows(["order"]).column("order").to_pylist()
        assert sorted(rows) == sorted(f"{day}-{n}" for day in range(1, days + 1) for n in range(ROWS))
        books = self.tables.windows()
        assert {name: each.kept for name, each in books.items() if each.rules} == {
            f"2026-03-{day:02d}": ROWS for day in range(1, days + 1)
        }

    def files(self):
        """Data files that no version of the table of clean rows names, or ever named."""
        clean = self.tables.table("clean")
        named = {file.path for version in range(clean.version() + 1) for file in clean.files(version)}
        there = {str(path.relative_to(clean.uri)) for path in Path(clean.uri).rglob("*.parquet")}
        return {path for path in there if "_delta_log" not in path} - named


@contextmanager
def before(patched, owner, name, number, happens):
    """Let something happen before the n-th call of a method."""
    called, method = [], getattr(owner, name)

    def call(*given, **more):
        called.append(1)
        if len(called) == number:
            happens()
        return method(*given, **more)

    with patched.context() as patch:
        patch.setattr(owner, name, call)
        yield
    assert len(called) >= number, f"{name} was called {len(called)} times"


def silence(context):
    """Let the holder of a lease seem silent for long."""
    mine = context.lease
    beat = encode(replace(mine.holder, beat=mine.holder.beat - 1000))
    mine.folder.child(f"{mine.number:09d}.beat.json").write_atomic(beat)


def check_lost(context):
    record = RunRecord.load(Storage.of(context.record.places["record"]))
    assert (record.outcome, record.exit_code) == ("lost", 30)
    rows = {row["run_id"]: row for row in context.tables.table("runs").rows().to_pylist()}
    assert rows[record.run_id]["exit_code"] == 30
    assert "lost its lease to run" in record.message
    assert len(record.message.splitlines()) == 1


INGESTING = {
    "books struck out": (Ledger, "write", 1),
    "quarantine": (StagedWrite, "commit", 1),
    "clean rows": (StagedWrite, "commit", 2),
    "books": (Ledger, "write", 2),
}


@pytest.mark.parametrize("kind", ["parquet", "delta"])
@pytest.mark.parametrize("commit", INGESTING)
def test_no_row_is_lost_where_a_later_run_ingests_before_a_commit_of_an_earlier_one(
    spark, tmp_path, monkeypatch, kind, commit
):
    shop = Shop(tmp_path, kind)
    run(shop.context("ingest"), spark)
    first = shop.context("ingest", ("2026-03-01", "2026-03-04"))

    def taken_over():
        silence(first)
        shop.next_day()
        assert run(shop.context("ingest"), spark).exit_code == 0
        shop.check_rows(5)

    owner, name, number = INGESTING[commit]
    with before(monkeypatch, owner, name, number, taken_over), pytest.raises(LeaseLostError):
        run(first, spark)
    check_lost(first)
    shop.check_rows(5)
    assert not shop.files(), "nothing half-written is left"
    assert run(shop.context("ingest"), None).outcome == "nothing new"


@pytest.mark.slow
def test_at_each_later_commit_a_run_that_was_taken_over_leaves_nothing(spark, tmp_path, monkeypatch):
    shop = Shop(tmp_path, "parquet")
    commits = {
        "shards": (Transaction, "commit", 1),
        "result of a step": (Steps, "put", 1),
        "publication": (ModelRegistry, "publish", 1),
        "alias": (ModelRegistry, "set_alias", 1),
        "receipts of scoring, invalidated": (Steps, "replace", 1),
        "receipts of scoring": (Steps, "replace", 2),
        "predictions": (Table, "write", 1),
        "receipt of the run": (Steps, "replace", 3),
    }
    for commit, (owner, name, number) in commits.items():
        first = shop.context()

        def taken_over(first=first):
            silence(first)
            second = shop.context()
            with second_lease(second):
                pass

        with before(monkeypatch, owner, name, number, taken_over), pytest.raises(LeaseLostError):
            run(first, spark)
        check_lost(first)
        versions = shop.registry.list("shop")
        later = list(commits).index(commit) - list(commits).index("alias")
        assert len(versions) == (later >= 0), commit
        assert bool(versions and versions[0].aliases) == (later > 0), commit
        table = shop.tables.table("predictions")
        by = set(table.rows().column("run_id").to_pylist()) if table.exists() else set()
        assert (first.record.run_id in by) == (commit in ("receipts of scoring", "receipt of the run")), commit
        if commit == "shards":
            assert not list(Path(f"{shop.root}/shop/shards").rglob("manifest.json"))
    done = run(shop.context(), spark)
    assert done.outcome in ("promoted", "scored", "nothing new"), done.message
    assert len(shop.tables.table("predictions").rows()) == ROWS
    assert run(shop.context(), None).outcome == "nothing new"


@contextmanager
def second_lease(context):
    """A second run up to the moment where it has taken over, and has done nothing yet."""
    from sparkdl.pipeline.state.lease import lease

    with lease(context.runs.child("leases"), context.record.run_id) as mine:
        assert mine.claims_due
        context.hold(mine)
        yield


OWN = """
import os, pathlib, time

def wait(rows):
    place = pathlib.Path(os.environ.get("WAITS", "/nowhere"))
    if place.is_dir():
        (place / "inside").touch()
        while not (place / "go").exists():
            time.sleep(0.1)
    return rows
"""


def start(place, command, log, **environment):
    """The command line in a group of processes of its own."""
    program = "import sys; from sparkdl.cli import main; sys.exit(main())"
    with (place / log).open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-c", program, *command], cwd=place, stdout=file, stderr=file, start_new_session=True,
            env={**os.environ, **environment},
        )  # fmt: skip


def until(process, happened, log):
    deadline = time.monotonic() + 200
    while not happened():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@pytest.fixture
def shop_of_its_own(tmp_path):
    """A Delta source of four days and a file whose transform waits where it is told to."""
    shop = Shop(tmp_path, "delta")
    (tmp_path / "own_waiting.py").write_text(OWN)
    (tmp_path / "waits").mkdir()
    more = '{master: "local[2]", conf: {spark.driver.memory: 1g}}'
    shop.file = tmp_path / "shop.yaml"
    shop.file.write_text(f"{shop.text}\n        transform: {{function: 'own_waiting:wait'}}\n        spark: {more}\n")
    return shop


@pytest.mark.slow
def test_a_run_that_was_suspended_past_its_lease_loses_no_row_of_the_one_that_took_over(shop_of_its_own):
    shop, place = shop_of_its_own, shop_of_its_own.root
    words = ["run", str(shop.file), "--until", "ingest"]
    backfill = [*words, "--backfill", "2026-03-01..2026-03-04"]
    first = start(place, backfill, "first.log", WAITS=str(place / "waits"))
    try:
        until(first, (place / "waits" / "inside").exists, place / "first.log")
        os.killpg(first.pid, signal.SIGSTOP)
        beat = next(
            file for name in ("000000001.beat.json", "000000001.json")
            if (file := place / "shop" / "runs" / "leases" / name).exists()
        )  # fmt: skip
        holder = json.loads(beat.read_text())
        beat.write_text(json.dumps({**holder, "beat": holder["beat"] - 320}))  # it stands still for as long
        shop.next_day()
        second = start(place, words, "second.log")
        assert second.wait(300) == 0, (place / "second.log").read_text()
        shop.check_rows(5)
        (place / "waits" / "go").touch()
        os.killpg(first.pid, signal.SIGCONT)
        assert first.wait(300) == 30, (place / "first.log").read_text()
    finally:
        for signalled in (signal.SIGCONT, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(first.pid, signalled)
        first.wait()
    shop.check_rows(5)
    said = [line for line in (place / "first.log").read_text().splitlines() if "lost its lease" in line]
    assert len(said) == 1, said
    third = start(place, words, "third.log")
    assert third.wait(300) == 10, (place / "third.log").read_text()


@pytest.mark.slow
def test_a_run_whose_group_of_processes_is_terminated_leaves_its_row(shop_of_its_own):
    shop, place = shop_of_its_own, shop_of_its_own.root
    words = ["run", str(shop.file), "--until", "ingest"]
    process = start(place, words, "log", WAITS=str(place / "waits"))
    try:
        until(process, (place / "waits" / "inside").exists, place / "log")
        os.killpg(process.pid, signal.SIGTERM)  # Java, too
        code = process.wait(100)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    rows = shop.tables.table("runs").rows().to_pylist()
    assert [(row["outcome"], row["exit_code"]) for row in rows] == [("failed", 130)], (place / "log").read_text()
    assert code == 130
