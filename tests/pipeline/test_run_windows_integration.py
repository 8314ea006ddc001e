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
from sparkdl.pipeline.run import run
from sparkdl.pipeline.state.context import Context
from sparkdl.tables.table import Table

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)


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

    def run(self, spark, *overrides):
        text = f"""
        name: shop
        root: {self.root}
        source: {{kind: parquet, path: {self.days}, key: order, time: at}}
        features: {{x: number}}
        label: {{y: regression}}
        split: {{by: time, train: 3 days, validate: 1 day, score: 1 day}}
        model: {{arguments: {{width: 8, depth: 1, dropout: 0}}}}
        train: {{epochs: 2, batch_size: 16, learning_rate: 0.01, num_proc: 1, verbose: 0}}
        publish: {{gate: {{min_rows: 20, rule: not_worse, margin: 100}}}}
        """
        return run(Context(loads(text, overrides), NOW), spark)

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
