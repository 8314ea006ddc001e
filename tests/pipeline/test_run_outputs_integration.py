"""Quantiles, amounts and calibrated probabilities by a word each: the same numbers in report, table, loaded model."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import sparkdl
from sparkdl.errors import ConfigError, DataError
from sparkdl.models.registry import ModelRegistry
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.summary import summary_lines
from sparkdl.tables.table import Table

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)
ROWS = 3000


@pytest.fixture(scope="module")
def trips(tmp_path_factory):
    """Trips whose delay spreads the more the busier it is, and whose lateness is a coin that ``tags`` load."""
    random = np.random.default_rng(0)
    busy = random.random(ROWS)
    frame = pd.DataFrame({"trip": range(ROWS), "busy": busy, "noise": random.normal(size=ROWS)})
    frame["tags"] = [["rain"] * (n % 3) + ["snow"] * (n % 2) for n in range(ROWS)]
    frame["delay"] = 5 + 20 * busy * random.gamma(2, 1, ROWS)
    frame["cost"] = np.exp(3 * busy + random.normal(size=ROWS) / 4 + np.arange(ROWS) % 2).round(2)
    frame.loc[::500, "cost"] = -1.0  # a few refunds
    frame["late"] = np.where(random.random(ROWS) < 0.2 + 0.3 * busy, "yes", "no")
    folder = tmp_path_factory.mktemp("trips")
    frame.to_parquet(folder / "rows.parquet")
    return folder, frame


def pipeline(trips, root, label, *overrides):
    text = f"""
    name: trips
    root: {root}
    source: {{kind: parquet, path: {trips[0]}, key: trip}}
    features: {{"busy, noise": number, tags: ids}}
    label: {label}
    split: {{by: hash, train: 0.5, validate: 0.2, test: 0.2, score: 0.1}}
    model: {{arguments: {{width: 32, depth: 1, dropout: 0}}}}
    train: {{epochs: 4, batch_size: 64, learning_rate: 0.01, num_proc: 1, verbose: 0, random_seed: 1, baseline: off}}
    publish: {{gate: {{min_rows: 20, baseline: never}}}}
    """
    return loads(text, overrides)


@pytest.mark.slow
def test_quantiles_do_not_cross_and_cover_what_they_say(spark, trips, tmp_path):
    label = "{delay: {type: quantiles, levels: [0.05, 0.5, 0.95]}}"
    file = pipeline(trips, tmp_path / "p", label)
    done = execute(Run(Project(file), RunRequest(now=NOW)), spark)
    assert done.outcome == "promoted", done.message
    intervals = done.evaluated.intervals
    assert intervals.levels == (0.05, 0.5, 0.95)
    assert intervals.below == pytest.approx(intervals.levels, abs=0.06)
    assert intervals.coverage == pytest.approx(0.9, abs=0.06)
    assert done.evaluated.decision.gate.metric == "mae"
    assert done.evaluated.decision.beats_baseline
    assert "lie between the outer quantiles, 90.0% should" in dict(summary_lines(done))["intervals"]
    assert "share of labels below" in Path(done.places["report"]).read_text()

    table = Table(done.places["predictions"]).rows().to_pandas()
    assert (table.q5 <= table.q50).all()
    assert (table.q50 <= table.q95).all()
    assert (table.q50 == table.prediction).all()
    narrow, wide = (table.q95 - table.q5)[trips[1].busy[table.trip].to_numpy() < 0.3], table.q95 - table.q5
    assert narrow.mean() < 0.7 * wide.mean()  # wider where delays spread more
    loaded = sparkdl.load_model("trips@champion", ModelRegistry(f"{tmp_path}/p/trips/registry"))
    by_hand = np.stack(loaded.predict(trips[1].iloc[table.trip]).prediction)
    np.testing.assert_allclose(by_hand, table[["q5", "q50", "q95"]], atol=1e-4)
    source = Table(f"{tmp_path}/raw")
    source.append(pa.Table.from_pandas(trips[1].iloc[table.trip], preserve_index=False))
    sparkdl.score_table(source, loaded, f"{tmp_path}/scored", keep=["trip"])
    scored = Table(f"{tmp_path}/scored").rows().to_pandas().set_index("trip").loc[table.trip]
    np.testing.assert_allclose(np.stack(scored.prediction), by_hand, atol=1e-4)
    again = execute(Run(Project(file), RunRequest(now=NOW)))
    assert again.outcome == "nothing new"

    file = pipeline(trips, tmp_path / "p", label, "publish.metric=pinball")
    by_pinball = execute(Run(Project(file), RunRequest(now=NOW)), spark)
    decision = by_pinball.evaluated.decision
    assert decision.challenger.values["pinball"] == pytest.approx(intervals.pinball)
    assert decision.baseline.guesses["pinball"].startswith("always the quantiles ")
    assert decision.beats_baseline


@pytest.mark.slow
def test_amounts_are_learnt_by_their_logarithm_and_predicted_as_they_are(spark, trips, tmp_path):
    label = "{cost: {type: regression, loss: poisson}}"
    search = "search={method: grid, space: {train.learning_rate: [0.01, 0.0001]}}"
    file = pipeline(trips, tmp_path / "p", label, search)
    done = execute(Run(Project(file), RunRequest(now=NOW)), spark)
    assert done.outcome == "promoted", done.message
    assert done.evaluated.decision.beats_baseline
    rmse = done.evaluated.decision.challenger.values["rmse"]
    best, worst = sorted(trial.value for trial in done.trained.trials)
    assert best == pytest.approx(rmse, rel=0.5)  # of amounts, not of their logarithms
    assert worst > 1.2 * best

    table = Table(done.places["predictions"]).rows().to_pandas()
    assert table.prediction.between(0, 2 * trips[1].cost.max()).all()
    loaded = sparkdl.load_model("trips@champion", ModelRegistry(f"{tmp_path}/p/trips/registry"))
    rows = trips[1].iloc[table.trip]
    np.testing.assert_allclose(loaded.predict(rows).prediction, table.prediction, rtol=1e-4)
    assert table.prediction.mean() == pytest.approx(rows.cost.mean(), rel=0.2)  # their mean, not their median

    other = pipeline(trips, tmp_path / "p", "{cost: regression}", "train.start=champion", "train.epochs=2")
    with pytest.raises(ConfigError, match=r"was trained with other features or labels .*label cost"):
        execute(Run(Project(other), RunRequest(now=NOW)), spark)


def test_amounts_below_0_on_average_are_refused(spark, trips, tmp_path):
    file = pipeline(
        trips,
        tmp_path / "p",
        "{debt: {type: regression, loss: poisson}}",
        "transform.sql=SELECT *, -busy AS debt FROM source",
    )
    with pytest.raises(DataError, match=r"label 'debt' is -0\.\d+ on average .*: leave the loss out"):
        execute(Run(Project(file), RunRequest(now=NOW)), spark)


@pytest.mark.slow
def test_probabilities_are_calibrated_by_the_validation_rows_and_stay_so(spark, trips, tmp_path):
    overfitted = ("train.epochs=40", "model.arguments.width=128", "split.train=0.1", "train.decay=none",
                  "train.early_stopping_patience=0", "train.learning_rate=0.01")  # fmt: skip
    label = "{late: {type: binary, positive: yes, calibrate: temperature}}"
    done = execute(Run(Project(pipeline(trips, tmp_path / "p", label, *overfitted)), RunRequest(now=NOW)), spark)
    calibrated = done.evaluated.calibrated
    assert calibrated.temperature > 1.2  # it was too sure of itself
    assert calibrated.after < 0.8 * calibrated.before
    assert done.trained.temperatures == {"late": calibrated.temperature}
    assert dict(summary_lines(done))["calibration"] == calibrated.text()

    table = Table(done.places["predictions"]).rows().to_pandas().sort_values("trip")
    rows = trips[1].iloc[table.trip]
    registry = ModelRegistry(f"{tmp_path}/p/trips/registry")
    loaded = sparkdl.load_model("trips@champion", registry)
    probability = np.stack(loaded.predict(rows).probability)[:, 1]
    np.testing.assert_allclose(probability, table.probability, atol=1e-6)
    by_frame = loaded.transform(spark.createDataFrame(rows)).toPandas().sort_values("trip")
    np.testing.assert_allclose(np.stack(by_frame.probability)[:, 1], table.probability, atol=1e-6)


@pytest.mark.parametrize(
    ("label", "sentence"),
    [
        (
            "{type: quantiles, levels: [0.1, 1.5]}",
            "are no probabilities of quantiles: give numbers above 0 and below 1",
        ),
        ("{type: quantiles, levels: [0.9, 0.1]}", "do not ascend: give each level once, the lowest first"),
        ("{type: quantiles, levels: [0.5, 0.5]}", "do not ascend"),
        ("{type: regression, levels: [0.5]}", "belongs to type 'quantiles', and type is 'regression': leave it out"),
        (
            "{type: regression, calibrate: temperature}",
            "belongs to type 'binary' or 'multiclass', and type is 'regression'",
        ),
        (
            "{type: quantiles, calibrate: temperature}",
            "belongs to type 'binary' or 'multiclass', and type is 'quantiles'",
        ),
        ("{type: binary, calibrate: temperature, loss: 'a:b'}", "is for log_loss, and loss is 'a:b': leave one out"),
        ("{type: quantiles, loss: mse}", "is no loss of type 'quantiles': choose pinball, or module:function"),
    ],
)
def test_words_that_do_not_go_together_are_refused(trips, tmp_path, label, sentence):
    with pytest.raises(sparkdl.errors.ConfigError, match=sentence):
        pipeline(trips, tmp_path, f"{{delay: {label}}}")
