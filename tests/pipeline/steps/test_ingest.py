"""What of a source is due, told from receipts alone."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from sparkdl.documents.typed import encode
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.sources.base import SourceSnapshot
from sparkdl.pipeline.state.evaluator import stale_of
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import Receipt
from sparkdl.pipeline.state.run import Run, RunRequest, State
from sparkdl.pipeline.steps.ingest import IngestStep, rules_of, window_key

HOURS = [f"{datetime(2026, 1, 1) + timedelta(hours=n):%Y-%m-%dT%H}" for n in range(100)]


@pytest.fixture
def run(tmp_path):
    """A pipeline that has ingested a hundred hours of a source that is as it was."""
    file = loads(f"""
        name: shop
        root: {tmp_path}
        source: {{kind: parquet, path: {tmp_path}/rows, key: id, partition: hour, every: hour}}
        features: {{x: number}}
        label: {{y: regression}}
    """)
    made = Run(Project(file), RunRequest(now=datetime(2026, 3, 20, tzinfo=UTC)))
    made.state.snapshot = SourceSnapshot(state="now", windows=dict.fromkeys(HOURS, "hash"))
    made.project.tables.table("clean").append(pa.table({"id": [1]}))
    key, counts = window_key(rules_of(made.project), "hash"), {"read": 1, "kept": 1, "quarantined": 0, "duplicates": 0}
    facts = {name: WindowReceipt(window=name, fingerprint="hash", rules="", **counts) for name in HOURS}
    made.state.receipts.write(
        [Receipt(step="ingest", partition=name, key=key, facts=encode(facts[name]).decode()) for name in HOURS]
    )
    return made


def test_what_is_known_of_all_windows_is_not_gone_through_for_each_of_them(run, monkeypatch):
    asked, windows = [], State.windows
    monkeypatch.setattr(State, "windows", lambda self: asked.append(1) or windows(self))
    assert not stale_of(IngestStep(), run)
    assert len(asked) < 10


def test_windows_of_a_table_of_clean_rows_that_is_gone_are_due_but_those_without_rows(run):
    receipt = run.state.receipts.of("ingest")[HOURS[3]]
    empty = WindowReceipt(window=HOURS[3], fingerprint="hash", rules="", read=1, kept=0, quarantined=1, duplicates=0)
    run.state.receipts.write(
        [Receipt(step="ingest", partition=HOURS[3], key=receipt.key, facts=encode(empty).decode())]
    )
    shutil.rmtree(run.project.tables.table("clean").uri)
    gone = stale_of(IngestStep(), run)
    assert [*gone.fresh] == [HOURS[3]]
    assert set(gone.reasons(run).values()) == {"its clean rows are gone, or a run that replaced them was cut short"}
