"""A pipeline of a year of hours: what a run, a plan and "nothing new" look at grows as the windows do, not faster."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import ClassVar

import pyarrow as pa
import pytest

from sparkdl.documents.typed import encode
from sparkdl.models.registry import ModelVersion
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.plan import plan_of
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.sources.base import SourceSnapshot
from sparkdl.pipeline.state import receipts as state_receipts
from sparkdl.pipeline.state.evaluator import nothing_new, stale_of
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import Receipt, ReceiptTable
from sparkdl.pipeline.state.results import Live, Scored
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.steps import score, steps_asked_for
from sparkdl.pipeline.steps.drift import Looked
from sparkdl.pipeline.steps.ingest import rules_of
from sparkdl.tables.table import Table

YEAR = [f"{datetime(2025, 1, 1) + timedelta(hours=n):%Y-%m-%dT%H}" for n in range(8760)]
NOW = datetime(2026, 1, 1, tzinfo=UTC)
A_MONTH = 720
PER_WINDOW = 500
"""Receipts and windows looked at, for each window: more than a walk takes, and far less than all others."""


class Counted(dict):
    """Receipts or windows, which count how often one is looked at."""

    looked: ClassVar[Counter[str]] = Counter()

    def __iter__(self):
        self.looked["receipts"] += len(self)
        return super().__iter__()

    def __getitem__(self, name):
        self.looked["receipts"] += 1
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.looked["receipts"] += 1
        return super().get(name, default)

    def keys(self):
        self.looked["receipts"] += len(self)
        return super().keys()

    def values(self):
        self.looked["receipts"] += len(self)
        return super().values()

    def items(self):
        self.looked["receipts"] += len(self)
        return super().items()


@pytest.fixture
def looked(monkeypatch):
    """How many hashes were made, and how many receipts and windows were looked at."""
    of, hashed, counted = ReceiptTable.of, state_receipts.sha256_hex, dict[str, tuple[dict, Counted]]()

    def counting(self, step):
        receipts = of(self, step)
        if step not in counted or counted[step][0] is not receipts:  # another mapping once any is written
            counted[step] = receipts, Counted(receipts)
        return counted[step][1]

    def hashing(data):
        Counted.looked["hashes"] += 1
        return hashed(data)

    def counting_results_of(function):
        return lambda *given, **named: Counted(function(*given, **named))

    Counted.looked.clear()
    monkeypatch.setattr(Run, "windows", counting_results_of(Run.windows))
    monkeypatch.setattr(Run, "content", counting_results_of(Run.content))
    monkeypatch.setattr(score, "scored_windows", counting_results_of(score.scored_windows))
    monkeypatch.setattr(ReceiptTable, "of", counting)
    monkeypatch.setattr(state_receipts, "sha256_hex", hashing)
    return Counted.looked


@pytest.fixture(params=[pytest.param(2190, id="a quarter"), pytest.param(8760, id="a year", marks=pytest.mark.slow)])
def hours(request):
    return YEAR[-request.param :]


@pytest.fixture
def new_run(tmp_path, hours):
    """A function that makes a run of a pipeline with a champion that has scored all these hours."""
    champion = ModelVersion(
        name="shop", version=1, uri="nowhere", artifact="a", metrics={}, parameters={}, lineage={}, published=NOW,
        publication="",
    )  # fmt: skip

    def made(*overrides, held=hours, **asked):
        text = f"""
        name: shop
        root: {tmp_path}
        source: {{kind: parquet, path: {tmp_path}/rows, key: id, partition: hour, every: hour}}
        features: {{x: number}}
        label: {{y: regression}}
        split: {{by: time, train: all, validate: 1 day, score: 1 day}}
        """
        run = Run(Project(loads(text, overrides)), RunRequest(now=NOW, **asked))
        run.snapshot = SourceSnapshot(state="now", windows=Counted(dict.fromkeys(held, "rows")))
        run.look_again = lambda: None
        run._champion = [champion]
        return run

    facts = {"drift": lambda name: Looked(drift=None), "live": lambda name: Live(label="y", metric="rmse")}
    run = made(train=False)
    target = Table(str(run.project.spec.score.target)).uri
    for table in (run.project.table("clean"), Table(target)):
        table.append(pa.table({"x": [1.0]}))
    facts["ingest"] = lambda name: WindowReceipt(
        window=name, fingerprint="rows", rules=rules_of(run.project), read=1, kept=1, quarantined=0, duplicates=0,
        content=f"of {name}", unlabelled=f"of {name}",
    )  # fmt: skip
    facts["score"] = lambda name: Scored(
        window=name.partition(" ")[0], target=target, content=f"of {name.partition(' ')[0]}", rows=1, version=1
    )
    for step in sorted(steps_asked_for(train=False), key=lambda step: step.name == "live"):  # which reads score's
        keys = step.wanted(run)
        if step.name == "score":  # of all of them, hour after hour
            keys = {f"{hour} in {target}": "an earlier key" for hour in hours} | keys
        receipts = []
        for name, key in keys.items():
            text = encode(facts[step.name](name)).decode()
            receipts.append(Receipt(step=step.name, partition=name, key=key, facts=text))
        run.receipts.write(receipts)
    return made


@pytest.mark.parametrize("month", [pytest.param(False, marks=pytest.mark.slow), True], ids=["all", "a month of them"])
def test_that_nothing_is_new_is_told_by_looking_at_each_window_a_few_times(new_run, looked, hours, month):
    run = new_run(train=False, held=hours[-A_MONTH:] if month else hours)
    assert nothing_new(steps_asked_for(train=False), run)
    assert not any(stale_of(step, run) for step in steps_asked_for(train=False))
    assert 0 < looked["receipts"] < PER_WINDOW * len(hours)
    assert 0 < looked["hashes"] < 10 * len(hours)


@pytest.mark.parametrize("overrides", [(), ("expect={positive: x > 0}",)], ids=["learning alone", "every window"])
def test_a_plan_looks_at_each_window_a_few_times(new_run, looked, hours, overrides):
    plan = plan_of(new_run(*overrides))
    assert len(plan.due) == (len(hours) if overrides else 0)
    assert {step.name: step.state for step in plan.steps}["train"] == "done again"
    assert 0 < looked["receipts"] < PER_WINDOW * len(hours)
    assert 0 < looked["hashes"] < 10 * len(hours)


@pytest.mark.slow
def test_a_plan_where_scored_windows_are_due_again_is_told_whether_or_not_a_run_learns(new_run, hours):
    for train in (True, False):
        plan = plan_of(new_run("expect={positive: x > 0}", train=train))
        assert (len(plan.due), plan.stops) == (len(hours), "")
        states = {step.name: step.state for step in plan.steps}
        assert (states["drift"], states["score"]) == ("done again", "done again")
