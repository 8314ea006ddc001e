"""Days that are unlike those before: a run warns, ends before it trains or scores, or trains on the newest days."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd
import pytest

from sparkdl.errors import DataError
from sparkdl.models.registry import ModelRegistry
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.plan import plan_of
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.status import status_of
from sparkdl.pipeline.summary import status_lines, summary_lines
from sparkdl.tables.table import Table

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)


class Sales:
    """A source that grows by days, and its pipeline."""

    def __init__(self, root):
        self.root, self.days, self.now = root, root / "sold", NOW
        self.days.mkdir()
        for day in range(1, 6):
            self.day(day)

    def day(self, day, shift=0.0, rows=60, name="rows"):
        x = np.random.default_rng(day).normal(shift, 1, rows)
        frame = pd.DataFrame({"sale": [f"{day}-{name}-{n}" for n in range(rows)], "x": x, "y": 2 * x + 1})
        frame["at"] = pd.Timestamp(2026, 3, day, 10, tz="UTC")
        frame.to_parquet(self.days / f"{day:02d}-{name}.parquet", coerce_timestamps="us")

    def new_run(self, *overrides):
        text = f"""
        name: sales
        root: {self.root}
        source: {{kind: parquet, path: {self.days}, key: sale, time: at}}
        features: {{x: number}}
        label: {{y: regression}}
        split: {{by: time, train: 3 days, validate: 1 day, score: 1 day}}
        model: {{arguments: {{width: 8, depth: 1, dropout: 0}}}}
        train: {{epochs: 1, batch_size: 16, learning_rate: 0.01, num_proc: 1, verbose: 0}}
        publish: {{gate: {{min_rows: 20, baseline: never, rule: not_worse, margin: 100}}}}
        """
        self.now += timedelta(minutes=1)  # records sort by time
        return Run(Project(loads(text, overrides)), RunRequest(now=self.now))

    @property
    def predicted(self):
        return Table(f"{self.root}/sales/tables/predictions").rows().to_pandas()

    @property
    def champion(self):
        return ModelRegistry(f"{self.root}/sales/registry").get("sales", "champion").version


@pytest.fixture
def sales(tmp_path):
    return Sales(tmp_path)


def looked_at(done):
    return [note.kept for note in done.steps if note.name == "drift"]


@pytest.mark.slow
def test_a_day_that_drifts_ends_a_run_before_training_and_scoring_or_is_warned_of(spark, sales):
    first = execute(sales.new_run(), spark)
    assert (first.outcome, first.drift.reason) == ("promoted", "there is no champion yet to compare with")
    sales.day(6, shift=2.0)
    [step] = [step for step in plan_of(sales.new_run("drift.action=fail")).steps if step.name == "drift"]
    assert (step.state, step.why) == (
        "done again",
        "2 windows are not compared with version 1 yet, and fail may follow",
    )

    refused = sales.new_run("drift.action=fail")
    said = (
        r"drift from version 1, window 2026-03-06: x: psi of \d.* is above 0.25 \(chance alone: 0.* nothing was trained"
    )
    with pytest.raises(DataError, match=said):
        execute(refused, spark)
    record = refused.record
    assert (record.outcome, record.exit_code, record.drift.action) == ("refused", 1, "fail")
    assert record.drift.windows["2026-03-06"].features["x"].measures["psi"].alarm
    assert looked_at(record) == [False]
    assert record.drift.looked_at == ("2026-03-04", "2026-03-05", "2026-03-06")
    assert (sales.champion, set(sales.predicted._window)) == (1, {"2026-03-05"})
    [step] = [step for step in plan_of(sales.new_run("drift.action=fail")).steps if step.name == "drift"]
    assert step.why.startswith("fail: window 2026-03-06: x: psi of ")

    done = execute(sales.new_run(), spark)
    assert (done.outcome, done.drift.action, done.drift.windows) == ("promoted", "warn", record.drift.windows)
    assert looked_at(done) == []
    assert dict(summary_lines(done))["drift"].startswith("warn: window 2026-03-06: x: psi of ")
    assert execute(sales.new_run()).outcome == "nothing new"
    assert dict(status_lines(status_of(sales.new_run())))["drift"].startswith("warn: window 2026-03-06")

    assert execute(sales.new_run("score.keep=[x]"), spark).outcome == "scored"
    assert execute(sales.new_run("score.keep=[x]")).outcome == "nothing new"
    again = RunRequest(now=sales.now, again=("2026-03-06", "2026-03-06"))
    [step] = [step for step in plan_of(Run(sales.new_run().project, again)).steps if step.name == "drift"]
    assert step.why == "1 window is not compared with version 2 yet"
    assert not plan_of(sales.new_run("score.keep=[x]", "drift.psi=0.9")).nothing_new
    other = execute(sales.new_run("score.keep=[x]", "drift.psi=0.9"), spark)
    assert (other.outcome, other.exit_code, other.drift.looked_at[-1]) == ("stopped", 0, "2026-03-06")
    assert other.message.endswith("drift, from which neither a model nor predictions followed")
    assert execute(sales.new_run("score.keep=[x]", "drift.psi=0.9")).outcome == "nothing new"


@pytest.mark.slow
def test_a_training_that_drift_asks_for_holds_the_newest_days_back_no_more(spark, sales):
    assert execute(sales.new_run(), spark).outcome == "promoted"
    sales.day(6, shift=2.0)
    done = execute(sales.new_run("drift.action=retrain"), spark)
    assert (done.outcome, done.drift.action) == ("promoted", "retrain")
    assert (done.windows["train"], done.windows["validate"], done.windows["score"]) == (
        ["2026-03-03", "2026-03-04", "2026-03-05"], ["2026-03-06"], ["2026-03-06"],
    )  # fmt: skip
    assert done.drift.reason.endswith("; trained again, with all rows up to 2026-03-06")
    assert execute(sales.new_run("drift.action=retrain")).outcome == "nothing new"

    # The day that drifts stands in the champion's validation now, and drifts still: there is no newer row to train on.
    assert execute(sales.new_run("drift.action=retrain", "train.timeout=600")).outcome == "nothing new"
    again = execute(sales.new_run("drift.action=retrain", "score.keep=[x]"), spark)
    assert (again.outcome, again.drift.action) == ("scored", "retrain")
    assert again.drift.reason.endswith(
        "; nothing can change, since a model was trained on all rows up to 2026-03-06 already"
    )
    assert {note.name: note.kept for note in again.steps}["train"]


@pytest.mark.slow
def test_days_that_a_training_after_drift_has_seen_do_not_judge_its_model(spark, sales):
    longer = "split={by: time, train: 2 days, validate: 1 day, score: 2 days}"
    assert execute(sales.new_run(longer), spark).outcome == "promoted"
    sales.day(6, shift=2.0)
    assert execute(sales.new_run(longer, "drift.action=retrain"), spark).windows["train"][-1] == "2026-03-05"
    sales.day(7, shift=2.0)
    done = execute(sales.new_run(longer), spark)
    assert done.windows["validate"] == ["2026-03-05"]
    said = "version 2 was trained on 2026-03-05: no row judges both, and it stays the champion"
    assert (done.outcome, done.exit_code, done.message) == ("not promoted", 20, said)
    sales.day(8, shift=2.0)
    sales.day(9, shift=2.0)
    assert execute(sales.new_run(longer), spark).outcome == "promoted"  # by the seventh, which version 2 never saw
