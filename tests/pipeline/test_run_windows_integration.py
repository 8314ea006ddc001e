"""Day after day: only what is new is taken in and scored, the training window slides, a rollback is respected."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from sparkdl.errors import SparkdlError
from sparkdl.models.registry import ModelRegistry
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.plan import plan_of
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.steps import STEPS
from sparkdl.tables.table import Table

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)
LEARNING = [step.name for step in STEPS if step.learns and step.listed]


class Shop:
    """A source that grows by days, and its pipeline."""

    def __init__(self, root):
        self.root, self.days = root, root / "orders"
        self.days.mkdir()

    def day(self, day, name="rows", first=0, rows=40):
        random = np.random.default_rng(day * 100 + first)
        x = random.normal(size=rows)
        frame = pd.DataFrame({"order": [f"{day}-{n}" for n in range(first, first + rows)], "x": x, "y": 2 * x + 1})
        frame["at"] = pd.Timestamp(2026, 3, day, 10, tz="UTC")
        frame.to_parquet(self.days / f"{day:02d}-{name}.parquet", coerce_timestamps="us")

    def new_run(self, *overrides):
        text = f"""
        name: shop
        root: {self.root}
        source: {{kind: parquet, path: {self.days}, key: order, time: at}}
        features: {{x: number}}
        label: {{y: regression}}
        split: {{by: time, train: 3 days, validate: 1 day, score: 1 day}}
        model: {{arguments: {{width: 8, depth: 1, dropout: 0}}}}
        train: {{epochs: 2, batch_size: 16, learning_rate: 0.01, num_proc: 1, verbose: 0}}
        publish: {{gate: {{min_rows: 20, baseline: never, rule: not_worse, margin: 100}}}}
        """
        return Run(Project(loads(text, overrides)), RunRequest(now=NOW))

    def run(self, spark, *overrides):
        return execute(self.new_run(*overrides), spark)

    @property
    def predictions(self):
        return Table(f"{self.root}/shop/tables/predictions").rows().to_pandas()

    @property
    def registry(self):
        return ModelRegistry(f"{self.root}/shop/registry")


@pytest.fixture
def shop(tmp_path):
    made = Shop(tmp_path)
    for day in range(1, 6):
        made.day(day)
    return made


def scored(done):
    return {name: rows for name, rows in done.predictions.items() if rows}


def kept(done):
    return {note.name: note.kept for note in done.steps}


@pytest.mark.slow
def test_a_new_day_is_taken_in_and_scored_alone_and_a_rollback_scores_with_the_older_model_once(spark, shop):
    first = shop.run(spark)
    assert first.windows["train"] == ["2026-03-01", "2026-03-02", "2026-03-03"]
    assert (first.outcome, scored(first)) == ("promoted", {"2026-03-05": 40})

    shop.day(6)
    second = shop.run(spark)
    assert second.windows["ingested"] == ["2026-03-06"]
    assert second.windows["train"] == ["2026-03-02", "2026-03-03", "2026-03-04"]
    assert (second.outcome, scored(second)) == ("promoted", {"2026-03-06": 40})
    assert shop.predictions["order"].is_unique
    assert dict(shop.predictions.groupby("_window").model_version.max()) == {"2026-03-05": 1, "2026-03-06": 2}

    shop.registry.rollback("shop", "champion")
    third = shop.run(spark)
    assert (third.outcome, scored(third)) == ("scored", {"2026-03-06": 40}), third.message
    assert kept(third)["train"]
    assert kept(third)["publish"]
    assert shop.registry.get("shop", "champion").version == 1
    assert dict(shop.predictions.groupby("_window").model_version.max()) == {"2026-03-05": 1, "2026-03-06": 1}
    assert shop.run(None).outcome == "nothing new"

    shop.registry.set_alias("shop", "champion", 2, expected=1, reason="on second thoughts")
    fourth = shop.run(spark)  # version 2 predicted this window once, and version 1 overwrote that
    assert (fourth.outcome, scored(fourth)) == ("scored", {"2026-03-06": 40})
    assert set(shop.predictions[shop.predictions._window == "2026-03-06"].model_version) == {2}


@pytest.mark.slow
def test_a_late_row_does_its_window_again_and_nothing_else(spark, shop):
    shop.day(6)
    first = shop.run(spark, "score.window=all")
    assert len(scored(first)) == 6
    shop.day(1, "late", first=40, rows=1)  # no part of the training window any more
    late = shop.run(spark, "score.window=all")
    assert late.windows["ingested"] == ["2026-03-01"]
    assert (late.outcome, scored(late)) == ("scored", {"2026-03-01": 41})
    assert kept(late)["train"]
    assert shop.predictions["order"].is_unique
    assert len(shop.predictions) == 241


@pytest.mark.slow
def test_days_that_no_run_came_for_are_scored_and_a_late_row_has_its_day_scored_again(spark, shop):
    assert scored(shop.run(spark)) == {"2026-03-05": 40}
    for day in (6, 7, 8):
        shop.day(day)
    assert scored(shop.run(spark)) == dict.fromkeys(("2026-03-06", "2026-03-07", "2026-03-08"), 40)
    shop.day(6, "late", first=40, rows=1)
    shop.day(4, "late", first=40, rows=1)  # this day was never predicted
    late = shop.run(spark)
    assert scored(late) == {"2026-03-06": 41, "2026-03-08": 40}, late.message
    assert late.windows["score"] == ["2026-03-06", "2026-03-08"]
    assert shop.predictions["order"].is_unique
    assert len(shop.predictions) == 161
    assert shop.run(None).outcome == "nothing new"


@pytest.mark.slow
def test_where_no_rows_validate_learning_waits_and_the_champion_predicts(spark, shop):
    shop.run(spark)
    shop.day(7)  # nothing on the sixth, which would validate
    done = shop.run(spark)
    assert (done.outcome, done.exit_code, scored(done)) == ("scored", 0, {"2026-03-07": 40})
    said = "learning waits: split.validate has no window with rows"
    assert said in done.message
    planned = plan_of(shop.new_run("score.keep=[x]"))
    learning = [step for step in planned.steps if step.name in LEARNING]
    assert {(step.state, step.why[:14]) for step in learning} == {("waits", "split.validate")}
    shop.day(8)
    assert scored(shop.run(spark)) == {"2026-03-08": 40}


@pytest.mark.slow
def test_a_champion_that_fails_where_rows_are_scored_is_replaced(spark, shop):
    def widened(numbers):
        for path in shop.days.iterdir():
            frame = pd.read_parquet(path)
            frame["v"] = [list(each) for each in np.random.default_rng(0).normal(size=(len(frame), numbers))]
            frame.to_parquet(path, coerce_timestamps="us")

    widened(2)
    assert shop.run(spark, "features={v: vector}").outcome == "promoted"
    widened(3)  # the type of the column is the same
    done = shop.run(spark, "features={v: vector}")
    assert (done.outcome, done.evaluated.decision.outcome) == ("promoted", "champion_unusable"), done.message
    assert "the champion cannot predict these rows (" in done.message
    assert scored(done) == {"2026-03-05": 40}


@pytest.mark.slow
def test_a_run_that_was_killed_once_the_alias_had_moved_ends_as_it_would_have(spark, shop):
    shop.run(spark)
    shop.day(6)
    before = shop.run(spark)
    assert before.model["version"] == shop.registry.get("shop", "champion").version == 2
    steps = shop.root / "shop" / "runs" / "steps"
    newest = max((steps / "publish").glob("*.json"), key=lambda file: file.stat().st_mtime)
    newest.unlink()  # what a killed run has not written
    after = shop.run(spark)
    assert (after.outcome, after.exit_code, after.message) == ("promoted", 0, before.message)
    assert kept(after)["evaluate"]
    assert newest.exists()
    edited = shop.run(spark, "publish.gate.min_rows=21")
    assert (edited.outcome, edited.evaluated.decision.outcome) == ("promoted", "not_worse"), edited.message
    stricter = shop.run(spark, "publish.gate.min_rows=1000")
    said = (
        "it is the champion already, and would not be promoted: there are 40 held-out rows, and the gate asks for 1,000"
    )
    assert (stricter.outcome, stricter.message) == ("promoted", said)
    assert [each.version for each in shop.registry.list("shop")] == [1, 2]


@pytest.mark.slow
def test_a_training_that_starts_from_the_champion_keeps_its_features_and_goes_on_from_its_weights(spark, shop):
    from sparkdl.models.bundle import load_bundle, read_bundle

    first = shop.run(spark, "train.start=champion")
    assert first.outcome == "promoted"
    idle = shop.run(None, "train.start=champion")
    assert idle.outcome == "nothing new"
    shop.day(6)
    second = shop.run(spark, "train.start=champion", "train.learning_rate=1e-12")
    assert second.outcome == "promoted", second.message
    one, two = (shop.registry.get("shop", version).uri for version in (1, 2))
    made = [{**read_bundle(uri).preprocessing, "training": None} for uri in (one, two)]
    assert made[0] == made[1]
    assert [shop.registry.lineage("shop", version).parent for version in (1, 2)] == [None, 1]
    before, after = (load_bundle(uri).model.state_dict() for uri in (one, two))
    for name, values in before.items():
        np.testing.assert_allclose(values, after[name], atol=1e-6)


@pytest.mark.slow
def test_a_champion_that_cannot_read_the_new_schema_is_replaced(spark, shop):
    assert shop.run(spark).outcome == "promoted"
    for day in range(1, 7):
        path = shop.days / f"{day:02d}-rows.parquet"
        if not path.exists():
            shop.day(day)
        pd.read_parquet(path).rename(columns={"x": "z"}).to_parquet(path, coerce_timestamps="us")
    done = shop.run(spark, "features={z: number}")
    assert (done.outcome, done.evaluated.decision.outcome) == ("promoted", "champion_unusable"), done.message


@pytest.mark.slow
def test_a_column_may_be_kept_later_and_no_longer_and_nobody_elses_table_changes(spark, shop):
    shop.run(spark)
    shop.day(6)
    assert scored(shop.run(spark, "score.keep=[x]")) == {"2026-03-06": 40}
    found = shop.predictions.set_index("_window")["x"]
    assert found["2026-03-05"].isna().all()
    assert found["2026-03-06"].notna().all()
    shop.day(7)
    assert scored(shop.run(spark)) == {"2026-03-07": 40}
    assert shop.predictions.groupby("_window")["x"].count().to_dict() == {
        "2026-03-05": 0, "2026-03-06": 40, "2026-03-07": 0,
    }  # fmt: skip
    theirs = Table(f"{shop.root}/theirs")
    theirs.append(pa.table({"order": ["a"]}))
    with pytest.raises(SparkdlError):
        shop.run(spark, f"score.target={theirs.uri}")
    assert theirs.columns() == ["order"]
