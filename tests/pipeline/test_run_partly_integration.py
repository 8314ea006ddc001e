"""Parts of a run: up to a step, from which the next run goes on, or ingestion and the champion's predictions alone."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pandas as pd
import pytest

from sparkdl.errors import ConfigError
from sparkdl.models.registry import ModelRegistry
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.plan import plan_of
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.state.runs import records
from sparkdl.pipeline.steps import STEPS

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)
LEARNING = [step.name for step in STEPS if step.learns and step.listed]


class Orders:
    """A source that grows by days, and its pipeline."""

    def __init__(self, root):
        self.root, self.days = root, root / "delivered"
        self.days.mkdir()

    def day(self, day):
        random = np.random.default_rng(day)
        x = random.normal(size=40)
        frame = pd.DataFrame({"order": [f"{day}-{n}" for n in range(40)], "x": x, "y": 2 * x + 1})
        frame["at"] = pd.Timestamp(2026, 3, day, 10, tz="UTC")
        frame.to_parquet(self.days / f"{day:02d}.parquet", coerce_timestamps="us")

    def new_run(self, **asked):
        text = f"""
        name: orders
        root: {self.root}
        source: {{kind: parquet, path: {self.days}, key: order, time: at}}
        features: {{x: number}}
        label: {{y: regression}}
        split: {{by: time, train: 2 days, validate: 1 day, score: 1 day}}
        model: {{arguments: {{width: 8, depth: 1, dropout: 0}}}}
        train: {{epochs: 1, batch_size: 16, learning_rate: 0.01, num_proc: 1, verbose: 0}}
        publish: {{gate: {{min_rows: 20, baseline: never, rule: not_worse, margin: 100}}}}
        """
        return Run(Project(loads(text)), RunRequest(now=NOW, **asked))

    def run(self, spark, **asked):
        return execute(self.new_run(**asked), spark)


@pytest.fixture
def orders(tmp_path):
    made = Orders(tmp_path)
    for day in range(1, 5):
        made.day(day)
    return made


def steps(done):
    """Those from clean rows to predictions."""
    return {note.name: note.kept for note in done.steps if note.name in (*LEARNING, "score")}


def test_a_run_ends_after_the_step_that_was_asked_for_and_the_next_goes_on_from_there(spark, orders):
    taken = orders.run(spark, until="ingest")
    assert (taken.outcome, taken.exit_code, taken.message) == ("stopped", 0, "stopped after ingest, as asked")
    assert (steps(taken), taken.rows["read"]) == ({}, 160)
    assert next(records(orders.new_run().project.runs)).until == "ingest"

    cut = orders.run(spark, until="shards")
    assert (cut.outcome, steps(cut)) == ("stopped", {"features": False, "shards": False})
    assert cut.windows["ingested"] == []
    assert cut.rows["train"] == 80
    assert [step.name for step in plan_of(orders.new_run(until="shards")).steps] == ["drift", "features", "shards"]
    again = orders.run(None, until="shards")  # no session: nothing of Spark is asked
    assert (again.outcome, again.exit_code) == ("nothing new", 10)

    whole = orders.run(spark)
    assert (whole.outcome, whole.until) == ("promoted", None)
    assert steps(whole) == {
        "features": True, "shards": True, "train": False, "evaluate": False, "publish": False, "score": False,
    }  # fmt: skip
    assert orders.run(None, until="evaluate").outcome == "nothing new"
    assert orders.run(None).outcome == "nothing new"


@pytest.mark.slow
def test_a_run_until_publication_says_what_the_gate_said_and_predicts_nothing(spark, orders):
    done = orders.run(spark, until="publish")
    assert (done.outcome, done.exit_code) == ("promoted", 0)
    assert done.message.endswith("stopped after publish, as asked")
    assert (done.predictions, done.model["champion"]) == ({}, 1)
    assert orders.run(spark).outcome == "scored"


@pytest.mark.slow
def test_a_run_without_training_lets_the_champion_predict_what_is_new_and_learns_nothing(spark, orders):
    with pytest.raises(ConfigError, match=r"orders has no champion in .*: run it once with training"):
        orders.run(None, train=False)
    assert next(records(orders.new_run().project.runs)).outcome == "refused"
    assert "has no champion" in plan_of(orders.new_run(train=False)).stops

    assert orders.run(spark).outcome == "promoted"
    orders.day(5)
    assert [step.name for step in plan_of(orders.new_run(train=False)).steps] == ["drift", "score"]
    done = orders.run(spark, train=False)
    assert (done.outcome, done.predictions) == ("scored", {"2026-03-05": 40})
    assert (steps(done), done.trained, done.train) == ({"score": False}, None, False)
    assert orders.run(None, train=False).outcome == "nothing new"
    assert len(ModelRegistry(f"{orders.root}/orders/registry").list("orders")) == 1

    whole = orders.run(spark)
    assert whole.windows["ingested"] == []
    assert (whole.outcome, whole.model["version"]) == ("promoted", 2)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"until": "shard"}, "until=shard is no step: write shards"),
        ({"until": "lunch"}, "choose one of ingest, drift, features"),
        ({"until": "train", "train": False}, "until=train is a step of learning, and this run learns nothing"),
    ],
)
def test_a_part_that_there_is_not_is_refused(orders, asked, said):
    for ask in (plan_of, execute):
        with pytest.raises(ConfigError, match=said):
            ask(orders.new_run(**asked))
    assert list(records(orders.new_run().project.runs)) == []
