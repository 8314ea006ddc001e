"""What was lost is made again, though nothing else has changed; what a run does is told, whatever it leads to."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sparkdl.errors import SchemaError
from sparkdl.models.bundle import read_bundle
from sparkdl.models.registry import ModelRegistry
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.plan import plan_of
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import ReceiptTable
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.tables.table import Table


class Shop:
    """A small table, and its pipeline."""

    def __init__(self, root):
        self.root = root
        x = np.random.default_rng(0).normal(size=200)
        frame = pd.DataFrame({"id": range(200), "kind": np.where(x > 0, "a", "b"), "x": x, "y": 2 * x + 1})
        frame.to_parquet(root / "rows.parquet")

    def new_run(self, *overrides):
        text = f"""
        name: shop
        root: {self.root}
        source: {{kind: parquet, path: {self.root}/rows.parquet, key: id}}
        features: {{x: number}}
        label: {{y: regression}}
        split: {{by: hash, train: 0.6, validate: 0.2, score: 0.2}}
        model: {{arguments: {{width: 8, depth: 1, dropout: 0}}}}
        train: {{epochs: 1, batch_size: 32, learning_rate: 0.01, num_proc: 1, verbose: 0}}
        publish: {{gate: {{min_rows: 10, baseline: never, rule: not_worse, margin: 100}}}}
        """
        return Run(Project(loads(text, overrides)), RunRequest(now=datetime(2026, 3, 20, 12, tzinfo=UTC)))

    def run(self, spark, *overrides):
        return execute(self.new_run(*overrides), spark)

    @property
    def registry(self):
        return ModelRegistry(f"{self.root}/shop/registry")

    @property
    def predicted_by(self):
        return set(Table(f"{self.root}/shop/tables/predictions").rows().to_pandas()["model_version"])


@pytest.fixture
def shop(tmp_path):
    return Shop(tmp_path)


def done(record):
    return {note.name for note in record.steps if not note.kept} - {"run", "live"}


@pytest.mark.slow
def test_predictions_and_models_that_were_lost_are_made_again(spark, shop):
    first = shop.run(spark)
    assert first.outcome == "promoted"
    shutil.rmtree(shop.root / "shop" / "tables" / "predictions")
    assert not plan_of(shop.new_run()).nothing_new
    again = shop.run(spark)
    assert (again.outcome, again.predictions, done(again)) == ("scored", first.predictions, {"score"})
    assert shop.run(None).outcome == "nothing new"  # no session: nothing of Spark is asked

    shutil.rmtree(shop.root / "shop" / "registry")
    planned = {step.name: step.state for step in plan_of(shop.new_run()).steps}
    assert (planned["train"], planned["publish"]) == ("kept", "done again")
    again = shop.run(spark)
    assert (again.outcome, again.model["champion"], done(again)) == ("promoted", 1, {"publish"})
    assert shop.run(None).outcome == "nothing new"

    sliced = shop.run(spark, "report.slices=[kind]")
    assert (sliced.outcome, sliced.exit_code, done(sliced)) == ("stopped", 0, {"evaluate"})
    assert sliced.message == "did evaluate, from which neither a model nor predictions followed"
    page = Path(sliced.places["report"]).read_text()
    assert "The run did what was due" in page
    assert set(sliced.evaluated.slices["kind"]) == {"a", "b"}


@pytest.mark.slow
def test_predictions_of_a_run_that_was_killed_are_made_again_by_who_is_champion_then(spark, shop, monkeypatch):
    shop.run(spark)
    write, cut = ReceiptTable.write, shop.new_run("train.epochs=2")

    def killed(self, receipts):
        if any(receipt.step == "score" and receipt.key for receipt in receipts):
            raise KeyboardInterrupt
        write(self, receipts)

    with monkeypatch.context() as patched:
        patched.setattr(ReceiptTable, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            execute(cut, spark)
    assert (cut.record.outcome, cut.record.promoted, shop.predicted_by) == ("failed", True, {2})
    said = Path(cut.record.places["report"]).read_text()
    assert "The champion is version 2, which this run promoted." in said
    shop.registry.rollback("shop", "champion")
    after = shop.run(spark, "train.epochs=2")
    assert (after.outcome, after.model["champion"], shop.predicted_by) == ("scored", 1, {1})
    assert shop.run(None, "train.epochs=2").outcome == "nothing new"


@pytest.mark.slow
def test_predictions_have_the_number_that_a_registry_gives_anew_after_it_was_lost(spark, shop):
    shop.run(spark)
    assert (shop.run(spark, "train.epochs=2").model["champion"], shop.predicted_by) == (2, {2})
    shutil.rmtree(shop.root / "shop" / "registry")
    again = shop.run(spark, "train.epochs=2")
    assert (again.outcome, again.model["champion"]) == ("promoted", 1)
    assert done(again) == {"evaluate", "publish", "score"}  # the rival of its first verdict is gone
    assert shop.predicted_by == {1}
    assert shop.run(None, "train.epochs=2").outcome == "nothing new"


@pytest.mark.slow
def test_a_model_whose_predictions_the_table_cannot_hold_is_not_published(spark, shop):
    shop.run(spark)
    classes = "label={kind: {type: binary, positive: b}}"
    with pytest.raises(SchemaError, match=r"'prediction' is string now, and double in .*name another table"):
        shop.run(spark, classes)
    assert [version.version for version in shop.registry.list("shop")] == [1]
    elsewhere = shop.run(spark, classes, f"score.target={shop.root}/classes")
    assert (elsewhere.outcome, elsewhere.model["champion"]) == ("promoted", 2)
    assert done(elsewhere) == {"publish", "score"}


@pytest.mark.slow
def test_shards_are_cut_anew_where_the_champion_that_they_were_cut_for_is_gone(spark, shop):
    features, start = "features={kind: category, x: number}", "train.start=champion"
    shop.run(spark, features)
    rows = pd.read_parquet(shop.root / "rows.parquet").assign(kind=lambda rows: np.where(rows["id"] % 9, "b", "a"))
    rows.to_parquet(shop.root / "rows.parquet")  # ids of categories go by how frequent they are
    interrupted = shop.new_run(features, start)
    execute(Run(interrupted.project, RunRequest(now=interrupted.request.now, until="shards")), spark)
    assert shop.run(spark, features).model["champion"] == 2
    bundle = shop.registry.get("shop", 1).uri
    shop.registry.delete("shop", 1)
    assert plan_of(shop.new_run(features, start)).steps[1].state == "kept"
    shutil.rmtree(bundle)
    assert plan_of(shop.new_run(features, start)).steps[1].state == "done again"
    after = shop.run(spark, features, start, "train.epochs=2")
    assert {"features", "shards", "train"} <= done(after)
    second, third = (read_bundle(shop.registry.get("shop", version).uri).preprocessing for version in (2, 3))
    assert second["features"] == third["features"]
