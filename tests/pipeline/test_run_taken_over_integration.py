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
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.lease import LeaseLostError
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import ReceiptTable
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.run import Run, RunRequest
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

    def new_run(self, until=None, again=None, overrides=()):
        return Run(Project(loads(self.text, overrides)), RunRequest(now=NOW, again=again, until=until))

    def table(self, name):
        return Table(f"{self.root}/shop/tables/{name}", engine="delta-rs")

    @property
    def registry(self):
        return ModelRegistry(f"{self.root}/shop/registry")

    def check_rows(self, days):
        """Every row of these days is in the clean rows, once, and the receipts vouch for it."""
        rows = self.table("clean").rows(["order"]).column("order").to_pylist()
        assert sorted(rows) == sorted(f"{day}-{n}" for day in range(1, days + 1) for n in range(ROWS))
        receipts = self.new_run().receipts.of("ingest")
        assert {name: receipt.read(WindowReceipt).kept for name, receipt in receipts.items() if receipt.key} == {
            f"2026-03-{day:02d}": ROWS for day in range(1, days + 1)
        }

    def left(self):
        """What a run that was taken over must not have changed."""
        rows = {}
        for name in ("receipts", "clean", "quarantine", "predictions"):
            table = self.table(name)
            rows[name] = sorted(map(str, table.rows().to_pylist())) if table.exists() else []
        place = Path(f"{self.root}/shop")
        files = {*place.glob("runs/steps/*/*.json"), *place.glob("shards/*/manifest.json")}
        versions = [(version.artifact, version.aliases) for version in self.registry.list("shop")]
        return rows, {str(file): file.stat().st_mtime_ns for file in files}, versions

    def files(self):
        """Data files that no version of the table of clean rows names, or ever named."""
        clean = self.table("clean")
        named = {file.path for version in range(clean.version() + 1) for file in clean.files(version)}
        there = {str(path.relative_to(clean.uri)) for path in Path(clean.uri).rglob("*.parquet")}
        return {path for path in there if "_delta_log" not in path} - named


def receipts_named(table, receipts):
    return f"receipts of {receipts[0].step}" + ("" if receipts[0].key else ", invalidated")


def rows_named(staged, *_):
    return FIRST if not Table(staged.plan.uri).exists() else f"rows of {staged.plan.uri.rpartition('/')[2]}"


FIRST = "rows of a table that there was not"
COMMITS = (
    (ReceiptTable, "write", receipts_named),
    (ReceiptTable, "keep", lambda table, step, *_: f"document of {step}"),
    (StagedWrite, "commit", rows_named),
    (Table, "append", lambda table, *_: "columns of predictions" if table.uri.endswith("/predictions") else ""),
    (Transaction, "commit", lambda transaction, *_: f"shards to {Path(transaction.root.uri).name.partition('-')[0]}"),
    (ModelRegistry, "publish", lambda *_: "version"),
    (ModelRegistry, "set_alias", lambda *_: "alias"),
)
"""What a run changes anything by that other runs see, each with what it is called here."""


@contextmanager
def before_each_commit(patched, happens):
    """Let something happen before each commit of a run, which is told what it is called."""

    def watched(method, called):
        def call(*given, **more):
            if called(*given):
                happens(called(*given))
            return method(*given, **more)

        return call

    with patched.context() as patch:
        for owner, name, called in COMMITS:
            patch.setattr(owner, name, watched(getattr(owner, name), called))
        yield


def silence(run):
    """Let the holder of a lease seem silent for long."""
    mine = run.lease
    beat = encode(replace(mine.holder, beat=mine.holder.beat - 1000))
    mine.folder.child(f"{mine.number:09d}.beat.json").write_atomic(beat)


def check_lost(run):
    record = RunRecord.load(Storage.of(run.record.places["record"]))
    assert (record.outcome, record.exit_code) == ("lost", 30)
    rows = {row["run_id"]: row for row in run.project.table("runs").rows().to_pylist()}
    assert rows[record.run_id]["exit_code"] == 30
    assert "lost its lease to run" in record.message
    assert len(record.message.splitlines()) == 1


INGESTING = (
    "receipts of source, invalidated",
    "receipts of source",
    "receipts of ingest, invalidated",
    "rows of quarantine",
    "rows of clean",
    "receipts of ingest",
)
QUICK = {("delta", "rows of clean"), ("parquet", "receipts of ingest")}


@pytest.mark.parametrize(
    ("kind", "commit"),
    [
        pytest.param(kind, commit, marks=() if (kind, commit) in QUICK else pytest.mark.slow)
        for kind in ("parquet", "delta")
        for commit in INGESTING
    ],
)
def test_no_row_is_lost_where_a_later_run_ingests_before_a_commit_of_an_earlier_one(
    spark, tmp_path, monkeypatch, kind, commit
):
    shop = Shop(tmp_path, kind)
    execute(shop.new_run("ingest"), spark)
    shop.next_day()
    first, happened = shop.new_run("ingest", ("2026-03-01", "2026-03-04")), []

    def taken_over(name):
        happened.append(name)
        if happened == [*INGESTING[: INGESTING.index(commit)], commit]:
            silence(first)
            shop.next_day()
            assert execute(shop.new_run("ingest"), spark).exit_code == 0
            shop.check_rows(6)

    with before_each_commit(monkeypatch, taken_over), pytest.raises(LeaseLostError):
        execute(first, spark)
    assert commit in happened
    check_lost(first)
    shop.check_rows(6)
    assert not shop.files(), "nothing half-written is left"
    assert execute(shop.new_run("ingest"), None).outcome == "nothing new"


LATER = (
    "document of features",
    "receipts of features",
    "shards to train",
    "shards to validate",
    "document of shards",
    "receipts of shards",
    "document of train",
    "receipts of train",
    "document of evaluate",
    "receipts of evaluate",
    "version",
    "alias",
    "document of publish",
    "receipts of drift",
    "receipts of publish",
    FIRST,
    "receipts of score",
    "receipts of live",
    "columns of predictions",
    "receipts of score, invalidated",
    "rows of predictions",
    "receipts of live, invalidated",
)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_at_each_later_commit_a_run_that_was_taken_over_leaves_nothing(spark, tmp_path, monkeypatch):
    shop, seen = Shop(tmp_path, "parquet"), list(INGESTING)
    execute(shop.new_run("ingest"), spark)
    for overrides in ((), ("score.keep=[x]",)):  # a first model and its predictions; other predictions
        lost = True
        while lost:
            first, left = shop.new_run(overrides=overrides), []

            def taken_over(name, first=first, left=left, overrides=overrides):
                if name not in seen and not left:
                    seen.append(name)
                    silence(first)
                    with second_lease(shop.new_run(overrides=overrides)):
                        pass
                    left.append(shop.left())

            with before_each_commit(monkeypatch, taken_over):
                try:
                    done, lost = execute(first, spark), False
                except LeaseLostError:
                    check_lost(first)
                    after = shop.left()
                    if seen[-1] == FIRST:  # nobody could claim it: its rows have no receipt, and are replaced
                        after[0]["predictions"] = left[0][0]["predictions"]
                    assert [after] == left, seen[-1]
        assert not left, f"{seen[-1]} was committed by a run that was taken over"
        assert done.outcome in ("promoted", "scored", "nothing new"), done.message
        assert len(shop.table("predictions").rows()) == ROWS
        assert [(version.version, version.aliases) for version in shop.registry.list("shop")] == [(1, ("champion",))]
        assert execute(shop.new_run(overrides=overrides), None).outcome == "nothing new"
    assert sorted(seen) == sorted((*INGESTING, *LATER)), "which comes first depends on where runs before were lost"


@contextmanager
def second_lease(run):
    """A second run up to the moment where it has taken over, and has done nothing yet."""
    from sparkdl.pipeline.state.lease import lease

    with lease(run.project.runs.child("leases"), run.record.run_id) as mine:
        assert mine.claims_due
        run.hold(mine)
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
    rows = shop.table("runs").rows().to_pylist()
    assert [(row["outcome"], row["exit_code"]) for row in rows] == [("failed", 130)], (place / "log").read_text()
    assert code == 130
