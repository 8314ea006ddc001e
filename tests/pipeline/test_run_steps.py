"""The walk of a run over its steps, and of a plan; no Spark."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from sparkdl.pipeline.file import loads
from sparkdl.pipeline.plan import plan_of
from sparkdl.pipeline.run import _make_what_is_stale
from sparkdl.pipeline.state.evaluator import Step
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import Receipt
from sparkdl.pipeline.state.run import Run, RunRequest


class Made(Step):
    """A step whose one key follows from what is learnt, and which may change that in place of making it."""

    learns = True

    def __init__(self, name, turns_to=None):
        self.name, self.turns_to = name, turns_to

    def wanted(self, run):
        return {run.learnt: run.learnt}

    def make(self, run, spark, stale):
        run.calls.append(f"make {self.name} {run.learnt}")
        if self.turns_to is not None and run.learnt != self.turns_to:
            run.learnt = self.turns_to
        else:
            receipt = Receipt(step=self.name, partition=run.learnt, key=run.learnt)
            run.receipts.setdefault(self.name, {})[run.learnt] = receipt
        return True

    def tell(self, run):
        run.calls.append(f"tell {self.name} {run.learnt}")


class Looking(Made):
    """A step that is stale again once the steps after it have made something."""

    looks = True

    def wanted(self, run):
        key = str(len(run.receipts.get("shards", {})))
        return {key: key}

    def make(self, run, spark, stale):
        (key,) = stale.keys
        run.calls.append(f"make {self.name}")
        run.receipts.setdefault(self.name, {})[key] = Receipt(step=self.name, partition=key, key=key)
        return True


def walk(steps, learnt="all", **receipts):
    known = {name: {key: Receipt(step=name, partition=key, key=key) for key in keys} for name, keys in receipts.items()}
    record = SimpleNamespace(steps=[])
    run = SimpleNamespace(learnt=learnt, calls=[], record=record, receipts=_Receipts(known), look_again=lambda: None)
    run.note = record.steps.append
    _make_what_is_stale(steps, run, None)
    return run


class _Receipts(dict):
    def of(self, step):
        return self.get(step, {})


def test_where_less_is_learnt_from_than_was_begun_with_each_step_tells_what_was_learnt_in_the_end():
    steps = [Made("features"), Made("shards", turns_to="labelled"), Made("train")]
    done = walk(steps)
    assert done.calls == [
        "make features all", "tell features all", "make shards all", "make features labelled", "tell features labelled",
        "make shards labelled", "tell shards labelled", "make train labelled", "tell train labelled",
    ]  # fmt: skip
    kept = walk(steps, features=["all", "labelled"])
    assert kept.calls[:4] == ["tell features all", "make shards all", "tell features labelled", "make shards labelled"]
    assert [(note.name, note.kept) for note in kept.record.steps] == [
        ("features", True), ("shards", False), ("shards", False), ("train", False),
    ]  # fmt: skip


def test_a_step_that_only_looks_does_so_once_a_run():
    done = walk([Looking("drift"), Made("shards")])
    assert done.calls == ["make drift", "tell drift all", "make shards all", "tell shards all"]
    assert walk([Looking("drift"), Made("shards")], shards=["all"], drift=["1"]).calls == [
        "tell drift all", "tell shards all",
    ]  # fmt: skip


@pytest.fixture
def too_few_days(tmp_path):
    """A function that makes a run of a source with one day, of which none would be left to learn from."""
    (tmp_path / "rows" / "day=2026-03-01").mkdir(parents=True)
    (tmp_path / "rows" / "day=2026-03-01" / "a.csv").write_text("id,x,y\n1,2,3\n")
    file = loads(f"""
    name: shop
    root: {tmp_path}
    source: {{kind: csv, path: {tmp_path}/rows, key: id, partition: day}}
    features: {{x: number}}
    label: {{y: regression}}
    split: {{by: time, train: 1 day, validate: 1 day, score: 1 day}}
    """)
    return lambda **asked: Run(Project(file), RunRequest(now=datetime(2026, 3, 20, tzinfo=UTC), **asked))


def test_a_plan_of_what_a_run_would_refuse_says_so_beside_what_is_due(too_few_days):
    plan = plan_of(too_few_days())
    assert "has no window with rows" in plan.stops
    assert (plan.due, plan.exit_code) == ({"2026-03-01": "new"}, 1)
    scoring = plan_of(too_few_days(train=False))
    assert scoring.stops.startswith("shop has no champion in ")
    assert (scoring.due, scoring.exit_code) == ({"2026-03-01": "new"}, 1)


def test_a_plan_of_ingestion_alone_asks_for_nothing_to_learn_from(too_few_days):
    plan = plan_of(too_few_days(until="ingest"))
    assert (plan.due, plan.stops, plan.steps, plan.exit_code) == ({"2026-03-01": "new"}, "", (), 0)
    assert "ingest" in plan.amounts
