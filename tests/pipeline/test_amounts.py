"""What a plan says of rows, bytes and seconds: from logs, footers, receipts and earlier runs, and nothing made up."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from sparkdl.pipeline.amounts import Amount, amounts_of, with_seconds
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.plan import plan_of
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.sources import source_of
from sparkdl.pipeline.sources.base import Size
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import StepNote
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.results import Trained, Trial
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.summary import plan_lines, summary_lines
from sparkdl.pipeline.windows import Parts

DAYS = ("2026-03-01", "2026-03-02", "2026-03-03", "2026-03-04")
TEXT = """\
name: wine
root: {root}
source: {{kind: {kind}, {place}: {root}/rows, partition: day}}
features: {{alcohol: number}}
label: {{quality: regression}}
split: {{by: time, train: 2 days, validate: 1 day, score: 1 day}}
train: {{epochs: 3}}
"""


def spec(*overrides, kind="parquet", place="path", root="/data"):
    return loads(TEXT.format(kind=kind, place=place, root=root), overrides).spec


def books(window, kept):
    return WindowReceipt(window=window, fingerprint="f", rules="r", read=kept, kept=kept, quarantined=0, duplicates=0)


def record(seconds, rows, predictions=None, trained=None, run_id="earlier"):
    made = RunRecord(pipeline="wine", run_id=run_id, started="2026-03-01T00:00:00+00:00", rows=rows, trained=trained)
    made.steps = [StepNote(name=name, key="", kept=False, seconds=each) for name, each in seconds.items()]
    made.predictions = predictions or {}
    return made


def trained(rows, trials=()):
    return Trained(
        bundle="b", content_hash="c", history=(), metrics={}, epochs=1, best_epoch=None, steps=1, rows=rows, ranks=1,
        backend="torch", trials=trials,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_rows_of_due_windows_come_from_footers_or_the_log(tmp_path, kind):
    for number, day in enumerate(DAYS, 1):
        rows = pa.table({"alcohol": [float(number)] * number, "quality": [1.0] * number})
        if kind == "parquet":
            (tmp_path / "rows" / f"day={day}").mkdir(parents=True)
            pq.write_table(rows, tmp_path / "rows" / f"day={day}" / "a.parquet")
        else:
            rows = rows.append_column("day", pa.array([day] * number))
            write_deltalake(str(tmp_path / "rows"), rows, mode="append", partition_by=["day"])
    made = spec(kind=kind, place="table" if kind == "delta" else "path", root=tmp_path)
    look = source_of(made.source).snapshot()
    assert sorted(look.sizes) == list(look.windows)
    found = amounts_of(made, look.sizes, DAYS[2:], {}, None)["ingest"]
    size = sum(one.stat().st_size for day in DAYS[2:] for one in (tmp_path / "rows" / f"day={day}").glob("*.parquet"))
    assert found == Amount(rows=7, bytes=size)


def test_rows_of_a_step_are_those_of_its_windows_kept_before_or_at_most_those_of_the_source():
    known = {name: books(name, 100) for name in DAYS}
    parts = Parts(train=DAYS[:2], validate=DAYS[2:3], score=DAYS[3:])
    sizes = {name: Size(bytes=10, rows=110) for name in DAYS}
    table = spec(kind="delta", place="table")  # whose log tells rows
    found = amounts_of(table, sizes, DAYS[3:], known, parts)
    assert found["ingest"] == Amount(rows=110, bytes=10)
    assert found["features"] == found["train"] == Amount(rows=200)
    assert (found["shards"].rows, found["evaluate"].rows) == (300, 100)
    assert found["score"] == Amount(rows=110, told="at most")
    assert (
        amounts_of(spec("score.window=all", kind="delta", place="table"), sizes, DAYS[3:], known, parts)["score"].rows
        == 410
    )
    assert amounts_of(spec(), {}, None, known, parts)["train"] == Amount(rows=200, told="as last ingested")
    shares = spec("source={kind: delta, table: rows, key: id}", "split={by: hash, train: 0.6, validate: 0.1, score: 0}")
    every = Parts(train=("all",), validate=("all",), score=("all",))
    found = amounts_of(shares, {"all": Size(bytes=10, rows=1000)}, ["all"], {}, every)
    assert found["train"] == Amount(rows=600, told="at most")
    assert found["shards"].rows == 700


def test_what_nothing_tells_is_not_made_up():
    parts = Parts(train=DAYS[:2], validate=DAYS[2:3], score=DAYS[3:])
    sizes = {name: Size(bytes=10, files={"/nowhere.parquet": (10, None)}) for name in DAYS}
    found = amounts_of(spec(), sizes, DAYS, {}, parts)
    assert found["ingest"] == Amount(bytes=40)
    assert found["train"].rows is None
    column = spec("split={by: column, column: fold, train: [a], validate: [b], score: [c]}")
    assert amounts_of(column, {}, [], {name: books(name, 9) for name in DAYS}, parts)["train"].rows is None
    assert with_seconds(spec(), {"train": Amount()}, [record({"train": 9.0}, {})]) == {"train": Amount()}


def test_seconds_are_those_of_the_newest_run_that_did_the_step_in_proportion_to_its_rows():
    amounts = {name: Amount(rows=200) for name in ("ingest", "features", "train", "score")}
    newest = record({"ingest": 4.0}, {"read": 100}, run_id="newest")
    older = record(
        {"ingest": 9.0, "features": 1.0, "train": 6.0, "score": 5.0}, {"read": 10, "train": 100},
        {"2026-03-01": 20, "2026-03-02": 30}, trained(rows=300), run_id="older",
    )  # fmt: skip
    found = with_seconds(spec(), amounts, [newest, older])
    assert {name: (one.seconds, one.by) for name, one in found.items()} == {
        "ingest": (8.0, "newest"), "features": (2.0, "older"), "train": (12.0, "older"), "score": (20.0, "older"),
    }  # fmt: skip
    space = spec("search.space={train.epochs: [1, 2], train.learning_rate: [0.1, 0.2]}", "split.test=1 day")
    assert with_seconds(space, amounts, [older])["train"].seconds == 6.0 * 200 * (1 + 1 + 2 + 2) / 300
    searched = trained(300, (Trial(settings={}, value=1.0, epochs=3), Trial(settings={}, value=2.0, epochs=1)))
    search = record({"train": 1.0}, {"train": 100}, trained=searched)
    search.steps[:0] = [StepNote(name="trial", key=key, kept=False, seconds=3.5) for key in "ab"]
    found = with_seconds(spec(), amounts, [search])
    assert found["train"].seconds == 8.0 * 200 * 3 / 400
    partly = record({"train": 1.0}, {"train": 100}, trained=searched, run_id="newer")
    partly.steps[:0] = [StepNote(name="trial", key=key, kept=key == "a", seconds=3.5) for key in "ab"]
    assert with_seconds(spec(), amounts, [partly, search])["train"].by == "earlier"
    search.seconds = 10.0
    assert dict(summary_lines(search))["time"] == "trial 7.0 s · train 1.0 s · Spark's start and the rest 2.0 s"


def test_a_first_training_of_the_default_network_takes_what_its_steps_take():
    chosen = ["train.epochs=10", "train.batch_size=256", "train.num_proc=2"]
    amounts = {"train": Amount(rows=51_200), "score": Amount(rows=10)}
    found = with_seconds(spec(*chosen), amounts, [])
    assert found["train"].seconds == pytest.approx(10 * 100 * (0.005 + 256 * 16e-6))
    assert (found["train"].by, found["score"].seconds) == ("", None)
    assert with_seconds(spec(*chosen, "model.factory=mine:network"), amounts, [])["train"].seconds is None


def test_a_plan_prints_them_and_says_that_there_is_no_earlier_run(tmp_path):
    for day in DAYS:
        (tmp_path / "rows" / f"day={day}").mkdir(parents=True)
        pq.write_table(pa.table({"alcohol": [1.0], "quality": [1.0]}), tmp_path / "rows" / f"day={day}" / "a.parquet")
    run = Run(Project(loads(TEXT.format(kind="parquet", place="path", root=tmp_path))))
    lines = dict(plan_lines(plan_of(run)))
    assert lines["ingest"].endswith("KiB)")
    assert "(4 rows, " in lines["ingest"]
    assert lines["features"].endswith("(at most 2 rows)")
    assert lines["train"].endswith("(at most 2 rows, about 0.0 s)")
    assert lines["cost"].startswith("about 0.0 s by the steps of the default network at full length; nothing to go by")
    own = loads(TEXT.format(kind="parquet", place="path", root=tmp_path), overrides=["model.factory=torch.nn:Identity"])
    assert dict(plan_lines(plan_of(Run(Project(own)))))["cost"] == "no earlier run to go by"
    seconds = {"ingest": 2.0, "features": 1.0, "shards": 1.0, "evaluate": 0.5}
    record(seconds, {"read": 2, "train": 1, "validate": 1}).write(
        run.project.runs.child("20260301T000000-a/record.json")
    )
    lines = dict(plan_lines(plan_of(run)))
    assert lines["ingest"].endswith("KiB, about 4.0 s)")
    assert lines["cost"] == (
        "about 8.0 s by the rows and times of run earlier and the steps of the default network at full length; nothing "
        "to go by for score; starting Spark comes on top"
    )
    assert "train" not in dict(plan_lines(plan_of(Run(run.project, RunRequest(until="ingest")))))
