"""Labels that come a day after their rows: the rows are predicted, learn later, and show how good that was."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd
import pytest

from sparkdl.metrics.measure import measure
from sparkdl.metrics.rows import Rows
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.summary import summary_lines
from sparkdl.tables.table import Table

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)
D2, D3, D4, D5, D6 = (f"2026-03-{day:02d}" for day in range(2, 7))


class Trips:
    """A source that grows by days, whose labels come later, and its pipeline."""

    def __init__(self, root):
        self.root, self.days, self.now = root, root / "driven", NOW
        self.days.mkdir()

    def day(self, day, labels=True, missing=0, rows=40, shift=0.0):
        x = np.random.default_rng(day).normal(shift, 1, rows)
        y = pd.Series(2 * x + 1).where((np.arange(rows) >= missing) & labels)
        frame = pd.DataFrame({"trip": [f"{day}-{n}" for n in range(rows)], "x": x, "y": y})
        frame["at"] = pd.Timestamp(2026, 3, day, 10, tz="UTC")
        frame.to_parquet(self.days / f"{day:02d}.parquet", coerce_timestamps="us")
        return frame

    def new_run(self, *overrides):
        self.now += timedelta(minutes=1)  # records sort by time
        text = f"""
        name: trips
        root: {self.root}
        source: {{kind: parquet, path: {self.days}, key: trip, time: at}}
        features: {{x: number}}
        label: {{y: regression}}
        split: {{by: time, train: 2 days, validate: 1 day, score: 1 day}}
        model: {{arguments: {{width: 8, depth: 1, dropout: 0}}}}
        train: {{epochs: 1, batch_size: 16, learning_rate: 0.01, num_proc: 1, verbose: 0}}
        publish: {{gate: {{min_rows: 20, baseline: never, rule: not_worse, margin: 100}}}}
        """
        return Run(Project(loads(text, overrides)), RunRequest(now=self.now))

    @property
    def predicted(self):
        return Table(f"{self.root}/trips/tables/predictions").rows().to_pandas()


@pytest.fixture
def trips(tmp_path):
    return Trips(tmp_path)


def done_steps(record):
    return [note.name for note in record.steps if not note.kept]


@pytest.mark.slow
def test_rows_without_a_label_are_predicted_learn_nothing_and_are_compared_once_it_is_there(spark, trips):
    for day, missing in ((1, 0), (2, 5), (3, 3)):
        trips.day(day, missing=missing)
    trips.day(4, labels=False)
    first = execute(trips.new_run(), spark)
    assert (first.outcome, first.predictions, first.live.windows) == ("promoted", {D4: 40}, ())
    assert (first.rows["train"], first.unlabelled["train"]) == (75, 5)
    assert (first.rows["validate"], first.unlabelled["validate"], first.evaluated.decision.rows) == (37, 3, 37)
    assert "8 of all held-out and training rows have no label yet" in dict(summary_lines(first))["training"]

    made = trips.predicted
    truth = trips.day(4).merge(made, on="trip")
    trips.day(5, labels=False)
    second = execute(trips.new_run(), spark)
    assert (second.outcome, second.predictions) == ("promoted", {D5: 40})
    [error] = second.live.windows
    assert (error.window, error.version, error.waiting, error.trained_on) == (D4, 1, 0, False)
    expected = measure(Rows.of("regression", truth.y.astype(np.float32), truth.prediction))
    assert error.measured.values == pytest.approx(expected.values)
    mean = first.trained.labels["y"].mean
    assert error.baseline == pytest.approx(np.sqrt(np.mean((truth.y - mean) ** 2)), rel=1e-6)
    told = f"rmse {error.measured.values['rmse']:.4g} (without a model {error.baseline:.4g}) of y on 40 rows"
    assert dict(summary_lines(second))["live"].startswith(told)

    trips.day(6, labels=False)
    third = execute(trips.new_run(), spark)  # the labels of the day that is to validate did not come
    assert (third.outcome, third.exit_code, third.predictions) == ("scored", 0, {D6: 40})
    assert "learning waits: none of the 40 rows to validate has a label yet: wait for labels" in third.message
    assert third.live.windows[0] == error
    assert (third.live.windows[1].waiting, third.live.windows[1].measured) == (40, None)
    assert set(trips.predicted._window) == {D4, D5, D6}


@pytest.mark.slow
def test_without_any_label_there_is_no_first_model_and_without_a_key_no_live_error(spark, trips):
    from sparkdl.errors import DataError

    for day in range(1, 5):
        trips.day(day, labels=day < 3)
    with pytest.raises(DataError, match="none of the 40 rows to validate has a label yet"):
        execute(trips.new_run(), spark)
    trips.day(3)
    text = ["source.key=[]"]
    assert execute(trips.new_run(*text), spark).outcome == "promoted"
    trips.day(4)
    trips.day(5)
    again = execute(trips.new_run(*text), spark)
    assert again.live.reason == "without source.key no label can be joined to its prediction"
    assert again.live.windows == ()


@pytest.mark.slow
def test_a_training_that_drift_asks_for_leaves_days_without_labels_alone(spark, trips):
    for day in range(1, 5):
        trips.day(day)
    assert execute(trips.new_run(), spark).outcome == "promoted"
    trips.day(5, labels=False, shift=5.0)
    done = execute(trips.new_run("drift.action=retrain"), spark)
    assert (done.outcome, done.drift.action) == ("promoted", "retrain")
    assert (done.windows["train"], done.windows["validate"], done.windows["score"]) == ([D2, D3], [D4], [D5])
    assert done.drift.reason.endswith(f"; trained again, with all rows up to {D4}")
    assert "waits" not in done.message


@pytest.mark.slow
def test_a_metric_that_validation_rows_of_one_class_have_not_ends_no_run(spark, tmp_path):
    part = np.repeat(["train", "validate", "score"], [60, 30, 10])
    x = np.random.default_rng(0).normal(size=100)
    bought = (x > 0) & (part != "validate")
    pd.DataFrame({"id": range(100), "x": x, "bought": bought.astype(int), "part": part}).to_parquet(
        tmp_path / "rows.parquet"
    )
    text = f"""
    name: shop
    root: {tmp_path}
    source: {{kind: parquet, path: {tmp_path}/rows.parquet, key: id}}
    features: {{x: number}}
    label: {{bought: binary}}
    split: {{by: column, column: part, train: [train], validate: [validate], score: [score]}}
    train: {{epochs: 1, num_proc: 1, metrics: [auc], verbose: 0}}
    publish: {{metric: log_loss, gate: {{min_rows: 20, baseline: never}}}}
    """
    done = execute(Run(Project(loads(text)), RunRequest(now=NOW)), spark)
    assert done.outcome == "promoted", done.message
    assert "val_auc" not in done.trained.metrics
