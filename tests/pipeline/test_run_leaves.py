"""Whatever the end of a run, it leaves a record, a row, a report if there is anything to tell, and tells who asks."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys

import pyarrow as pa
import pytest

from sparkdl.errors import SparkdlError
from sparkdl.pipeline.file import load
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.lease import LeaseTakenError, lease
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import replacing
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.steps.ingest import keep_source_windows, rules_of, window_key
from sparkdl.storage import Storage

TELL = "import json, sys; open(sys.argv[1], 'a').write(json.load(sys.stdin)['outcome'] + chr(10))"
WHEN = "[promoted, scored, stopped, not_promoted, nothing_new, refused, lost, failed]"


@pytest.fixture
def new_run(tmp_path):
    """A function that makes the next run, which tells ``told`` of its end."""
    (tmp_path / "wine.csv").write_text("alcohol,quality\n12.5,6\n")
    (tmp_path / "tell.py").write_text(TELL)
    command = f"{sys.executable} {tmp_path}/tell.py {tmp_path}/told"
    (tmp_path / "wine.yaml").write_text(
        "name: wine\nroot: data\nsource: {kind: csv, path: wine.csv}\nfeatures: {alcohol: number}\n"
        f"label: {{quality: regression}}\nnotify: {{command: {json.dumps(command)}, when: {WHEN}}}\n"
    )

    def made(*overrides, **asked):
        return Run(Project(load(tmp_path / "wine.yaml", overrides)), RunRequest(**asked))

    made.told = tmp_path / "told"
    return made


def rows(run):
    return {row["run_id"]: row for row in run.project.table("runs").rows().to_pylist()}


def test_a_run_that_is_refused_leaves_everything_and_its_own_error(new_run, caplog):
    one = new_run("source.path=gone.csv")
    with pytest.raises(SparkdlError) as refused:
        execute(one)
    record = RunRecord.load(Storage.of(one.record.places["record"]))
    assert (record.outcome, record.exit_code, record.error) == ("refused", 1, type(refused.value).__name__)
    assert record.model == {"champion": None}
    assert record.versions["python"]
    assert record.error in Storage.of(record.places["report"]).read_bytes().decode()
    row = rows(one)[record.run_id]
    assert (row["outcome"], row["report"]) == ("refused", record.places["report"])
    assert new_run.told.read_text().split() == ["refused"]
    assert not [entry for entry in caplog.records if entry.levelno >= logging.ERROR]


def test_ctrl_c_while_a_record_is_written_comes_when_it_is_there(new_run, monkeypatch):
    run, write = new_run("source.path=gone.csv"), RunRecord.write

    def interrupted(record, file):
        signal.raise_signal(signal.SIGINT)
        write(record, file)

    monkeypatch.setattr(RunRecord, "write", interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever Spark of another test has set
    try:
        with pytest.raises(KeyboardInterrupt):
            execute(run)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert RunRecord.load(Storage.of(run.record.places["record"])).outcome == "refused"
    assert rows(run)[run.run_id]["outcome"] == "refused"


def test_a_run_that_another_was_before_is_a_row_and_told_and_has_no_report(new_run):
    first, second = new_run(), new_run()
    with lease(first.project.runs.child("leases"), first.record.run_id), pytest.raises(LeaseTakenError):
        execute(second)
    assert (second.record.outcome, second.record.exit_code) == ("lost", 30)
    assert rows(second)[second.record.run_id]["exit_code"] == 30
    assert "report" not in second.record.places
    assert new_run.told.read_text().split() == ["lost"]


def test_a_run_that_finds_nothing_new_is_a_row_and_told_and_has_no_report(new_run):
    before = new_run()
    keep_source_windows(before, {"all": "f"})
    books = WindowReceipt(window="all", fingerprint="f", rules="", read=1, kept=1, quarantined=0, duplicates=0)
    with replacing(before.receipts, "ingest", ["all"]) as made:
        before.project.table("clean").append(pa.table({"quality": [6]}))
        made["all"] = (window_key(rules_of(before.project), "f"), books)
    for _ in range(2):
        one = new_run(until="ingest")
        execute(one)
        assert (one.record.outcome, one.record.exit_code) == ("nothing new", 10)
        assert "report" not in one.record.places
        assert rows(one)[one.record.run_id]["outcome"] == "nothing new"
    assert new_run.told.read_text().splitlines() == ["nothing new"] * 2
    told_by_another = new_run("notify.when=[failed]", until="ingest")
    execute(told_by_another)
    assert told_by_another.record.outcome == "nothing new", "whom a run tells decides nothing of it"


@pytest.mark.parametrize("broken", ["report", "runs", "notify"])
def test_what_goes_wrong_at_the_end_changes_nothing_of_the_run(new_run, caplog, broken):
    one = new_run("source.path=gone.csv", *(["notify.command=no-such-command"] if broken == "notify" else []))
    folder = one.project.runs.child(one.record.run_id).local_path()
    if broken == "report":
        (folder / "report.html").mkdir(parents=True)
    if broken == "runs":
        table = Storage.of(one.project.table("runs").uri).local_path()
        table.parent.mkdir(parents=True)
        table.write_text("no table")
    with pytest.raises(SparkdlError, match="gone"):
        execute(one)
    record = RunRecord.load(Storage.of(one.record.places["record"]))
    assert (record.outcome, record.exit_code) == ("refused", 1)
    assert ("report" in record.places) == (broken != "report")
    said = [entry.message for entry in caplog.records]
    expected = {"report": "report of this run was not written", "runs": "row of this run was not written"}
    assert len(said) == 1
    assert expected.get(broken, "notify.command could not be started") in said[0]
    if broken != "runs":
        assert rows(one)[record.run_id]["outcome"] == "refused"
    assert new_run.told.exists() == (broken != "notify")


def test_the_state_of_the_code_is_told_where_git_knows_it(new_run, tmp_path):
    before = new_run("source.path=gone.csv")
    with pytest.raises(SparkdlError):
        execute(before)
    assert "code" not in before.record.versions
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "wine.yaml"], ["commit", "-q", "-m", "wine"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    after = new_run("source.path=gone.csv")
    with pytest.raises(SparkdlError):
        execute(after)
    assert after.record.versions["code"] == commit[:12]
