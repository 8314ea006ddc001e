"""The examples from data to predictions: what they learn comes close to the best that can be reached."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from sparkdl.pipeline import Pipeline
from sparkdl.tables.table import Table

FOLDER = Path(__file__).resolve().parents[3] / "jobs" / "examples"


def run(name, spark, folder, *overrides, **recipe):
    """Make the data, run the file; return what the data's maker knows, the record, and the predictions."""
    truth = importlib.import_module(f"jobs.examples.{name}.make_data").make(folder, **recipe)
    given = [f"root={folder}", f"source.path={folder}/rows", "train.verbose=0", "train.num_proc=2", *overrides]
    done = Pipeline.load(FOLDER / name / f"{name}.yaml", given).run(spark)
    assert done.outcome == "promoted", done.message
    return truth, done, Table(done.places["predictions"]).rows().to_pandas()


@pytest.mark.slow
def test_digits_are_read_as_well_as_by_a_support_vector_machine(spark, tmp_path):
    truth, done, predictions = run("digits", spark, tmp_path, rows=1797)
    best = truth["reference"]["accuracy"]
    assert best > 0.985
    assert done.evaluated.decision.challenger.values["accuracy"] > best - 0.015
    unseen = (predictions.prediction.astype(int) == predictions.digit).mean()
    assert len(predictions) == pytest.approx(270, abs=60)
    assert unseen > best - 0.025


@pytest.mark.slow
def test_clicks_are_predicted_nearly_as_well_as_by_the_probabilities_they_were_drawn_with(spark, tmp_path):
    truth, done, predictions = run("clicks", spark, tmp_path, rows=60_000, days=8)
    best, reached = truth["days"]["2024-01-07"], done.evaluated.decision.challenger.values
    assert done.rows["quarantined"] == done.rows["read"] - sum(day["sound"] for day in truth["days"].values())
    assert reached["auc"] > best["auc"] - 0.04
    assert reached["log_loss"] < best["log_loss"] + 0.03
    assert abs(predictions.probability.mean() - predictions.label.mean()) < 0.03
    assert len(predictions) == truth["days"]["2024-01-08"]["sound"]


@pytest.mark.slow
def test_sparse_tables_end_alike_on_one_rank_and_on_two(spark, tmp_path):
    found = []
    for ranks in (1, 2):
        given = [f"train.num_proc={ranks}", f"train.batch_size={400 // ranks}", "train.epochs=6", "train.shuffle=false"]
        _, done, predictions = run(
            "clicks", spark, tmp_path / str(ranks), *given, "publish.gate.floors=[]", rows=4000, days=3
        )
        assert done.trained.ranks == ranks
        found.append(np.sort(predictions.probability))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-3)
    assert found[0].std() > 0.01


@pytest.mark.slow
def test_what_goes_with_a_basket_is_known_nearly_as_well_as_can_be(spark, tmp_path):
    truth, done, _ = run("baskets", spark, tmp_path, rows=200_000)
    reached = done.evaluated.decision.challenger.values
    assert reached["auc"] > truth["best"]["auc"] - 0.03
    assert reached["log_loss"] < truth["best"]["log_loss"] + 0.03


@pytest.mark.slow
def test_calibrated_towers_are_ranked_beside_popularity_and_als(spark, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER / "movielens")
    from jobs.examples.movielens.__main__ import make, recalls

    make(tmp_path, users=60)
    overrides = [f"root={tmp_path}", f"source.path={tmp_path}/rows", "train.verbose=0", "train.num_proc=1"]
    pipeline = Pipeline.load(FOLDER / "movielens" / "movielens.yaml", [*overrides, "publish.gate.floors=[]"])
    record = pipeline.run(spark)
    assert record.outcome == "promoted", record.message
    assert record.trained.temperatures["place"] != 1.0
    shares = recalls(spark, tmp_path / "rows" / "part-00000.parquet", pipeline.status().champion.uri)
    assert set(shares) == {"two towers", "popularity", "ALS"}
    assert all(0 <= share <= 1 for share in shares.values())
