"""What of a source is due, told from receipts alone."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from sparkdl.documents.typed import encode
from sparkdl.errors import DataError
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.sources.base import SourceSnapshot
from sparkdl.pipeline.state.evaluator import stale_of
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import AssumedReceipts, Receipt
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.steps.ingest import IngestStep, deleted_windows, rules_of, window_key
from sparkdl.pipeline.windows import NO_TIME, WHOLE, ahead

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
    made.snapshot = SourceSnapshot(state="now", windows=dict.fromkeys(HOURS, "hash"))
    made.project.table("clean").append(pa.table({"id": [1]}))
    key, counts = window_key(rules_of(made.project), "hash"), {"read": 1, "kept": 1, "quarantined": 0, "duplicates": 0}
    facts = {name: WindowReceipt(window=name, fingerprint="hash", rules="", **counts) for name in HOURS}
    made.receipts.write(
        [Receipt(step="ingest", partition=name, key=key, facts=encode(facts[name]).decode()) for name in HOURS]
    )
    return made


def test_what_is_known_of_all_windows_is_not_gone_through_for_each_of_them(run, monkeypatch):
    asked, windows = [], Run.windows
    monkeypatch.setattr(Run, "windows", lambda self: asked.append(1) or windows(self))
    assert not stale_of(IngestStep(), run)
    assert len(asked) < 10


def test_windows_of_a_table_of_clean_rows_that_is_gone_are_due_but_those_without_rows(run):
    receipt = run.receipts.of("ingest")[HOURS[3]]
    empty = WindowReceipt(window=HOURS[3], fingerprint="hash", rules="", read=1, kept=0, quarantined=1, duplicates=0)
    run.receipts.write([Receipt(step="ingest", partition=HOURS[3], key=receipt.key, facts=encode(empty).decode())])
    shutil.rmtree(run.project.table("clean").uri)
    gone = stale_of(IngestStep(), run)
    assert [*gone.fresh] == [HOURS[3]]
    assert set(gone.reasons(run).values()) == {"its clean rows are gone, or a run that replaced them was cut short"}


NOW = datetime(2026, 3, 10, 12, tzinfo=UTC)
DAYS = [f"2026-03-{day:02d}" for day in range(1, 11)]


@pytest.fixture
def due_of(tmp_path):
    """A function from what a source holds, and what each window was done for, to the windows that are due, in order."""

    def due_of(found, done, *, now, again=None, held=(), remove=False):
        file = loads(f"""
            name: shop
            root: {tmp_path}
            source: {{kind: sql, query: SELECT 1, time: at, deleted_windows: {"remove" if remove else "keep"}}}
            features: {{x: number}}
            label: {{y: regression}}
        """)
        run = Run(Project(file), RunRequest(now=now, again=again))
        run.snapshot, run.receipts = SourceSnapshot(state="now", windows=found), AssumedReceipts(run.receipts)
        receipts, rules = [], rules_of(run.project)
        for name in {*done, *held}:
            rows, fingerprint = int(name in held), done.get(name, "gone")
            books = WindowReceipt(
                window=name, fingerprint=fingerprint, rules="", read=rows, kept=0, quarantined=rows, duplicates=0
            )
            key = window_key(rules, fingerprint)
            receipts.append(Receipt(step="ingest", partition=name, key=key, facts=encode(books).decode()))
        run.receipts.write(receipts)
        stale = stale_of(IngestStep(), run)
        gone = {*held} - {*found} - {*stale.keys}
        assert deleted_windows(run) == sorted(gone)
        return list(stale.keys)

    return due_of


def test_what_is_new_or_changed_is_due_and_nothing_else(due_of):
    done = {day: "a" for day in DAYS[:-1] if day != "2026-03-04"}
    found = {**dict.fromkeys(DAYS, "a"), "2026-03-02": "b"}
    assert due_of(found, done, now=NOW) == ["2026-03-02", "2026-03-04", "2026-03-10"]


def test_a_date_to_come_is_left_alone_until_it_comes(due_of):
    found = {"2026-03-09": "a", "2026-03-11": "a", "2099-01-01": "a"}
    assert due_of(found, {}, now=NOW) == ["2026-03-09"]
    assert ahead(found, NOW) == ["2026-03-11", "2099-01-01"]
    assert due_of(found, {"2026-03-09": "a"}, now=datetime(2026, 3, 11, tzinfo=UTC)) == ["2026-03-11"]


def test_backfill_names_windows_again(due_of):
    same = dict.fromkeys(DAYS, "a")
    assert due_of(same, same, now=NOW) == []
    assert due_of(same, same, now=NOW, again=("2026-03-03", "2026-03-04")) == ["2026-03-03", "2026-03-04"]
    with pytest.raises(DataError, match="no window of the source, which has 10 windows 2026-03-01 to 2026-03-10"):
        due_of(same, same, now=NOW, again=("2026-04-01", "2026-04-02"))


def test_a_window_that_the_source_no_longer_holds_is_due_where_that_is_asked_for(due_of):
    found, done = dict.fromkeys(DAYS[1:], "a"), dict.fromkeys(DAYS, "a")
    assert due_of(found, done, now=NOW, held=DAYS) == []
    assert due_of(found, done, now=NOW, held=DAYS, remove=True) == DAYS[:1]
    assert due_of(found, done, now=NOW, held=DAYS, again=(DAYS[0], DAYS[0])) == DAYS[:1]
    assert due_of(found, done, now=NOW, held=DAYS, again=(DAYS[0], DAYS[1])) == DAYS[:2]
    assert due_of(found, done, now=NOW, held=DAYS[1:], remove=True) == []  # emptied before


@pytest.mark.parametrize("lost", [NO_TIME, WHOLE, "2026-03-05"])
def test_a_window_whose_rows_can_only_be_in_others_now_is_due(due_of, lost):
    found = {"2026-03-04T23": "a", "2026-03-05T00": "a"}
    assert due_of(found, found, now=NOW, held=[lost, *found]) == [lost]
    assert due_of(found, found, now=NOW, held=["2026-03-06", *found]) == []
    assert due_of({"2026-03-05": "a"}, {"2026-03-05": "a"}, now=NOW, held=[*found]) == ["2026-03-05T00"]
    assert due_of({WHOLE: "a"}, {WHOLE: "a"}, now=NOW, held=[lost, WHOLE]) == [name for name in [lost] if name != WHOLE]


@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize("again", [None, (DAYS[0], DAYS[-1])])
def test_a_source_that_holds_nothing_any_more_is_refused_and_removes_nothing(due_of, remove, again):
    with pytest.raises(DataError, match="holds no rows, and the clean rows are of 10 windows 2026-03-01 to 2026-03-10"):
        due_of({}, {}, now=NOW, held=DAYS, remove=remove, again=again)
    assert due_of({}, {}, now=NOW) == []


@pytest.mark.parametrize("found", [{"2099-01-01": "a"}, {NO_TIME: "a"}, {NO_TIME: "a", "2099-01-01": "a"}])
def test_rows_of_no_window_that_has_begun_do_not_empty_all_others(due_of, found):
    with pytest.raises(DataError, match="holds no rows of any window that has begun"):
        due_of(found, found, now=NOW, held=DAYS, remove=True)
    assert due_of(found, found, now=NOW, held=DAYS) == []


def test_a_source_without_time_is_one_window(due_of):
    assert due_of({WHOLE: "a"}, {}, now=NOW) == [WHOLE]
    assert due_of({WHOLE: "a"}, {WHOLE: "a"}, now=NOW) == []
