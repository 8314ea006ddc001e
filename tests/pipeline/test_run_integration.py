"""A pipeline over a table it never saw: it trains, publishes and scores, and does only what has changed."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import sparkdl
from sparkdl.errors import DataError
from sparkdl.models.registry import ModelRegistry
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.rows.parts import parts_of, rows_of, with_slots
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.status import status_of
from sparkdl.pipeline.steps.shards import ShardsStep, prepared_of
from sparkdl.pipeline.steps.train import TrainStep
from sparkdl.pipeline.summary import status_lines, summary_lines
from sparkdl.pipeline.windows import PARTS
from sparkdl.pipeline.work.boosting import boosted, tree_columns, tree_rows
from sparkdl.pipeline.work.evaluate import judged, judged_label
from sparkdl.tables.table import Table

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def cancer(spark, tmp_path_factory):
    """scikit-learn's breast cancer table as Parquet: 569 rows, 30 numbers, two classes."""
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer(as_frame=True).frame
    table.columns = [name.replace(" ", "_") for name in table.columns]
    table.insert(0, "patient", range(len(table)))
    folder = tmp_path_factory.mktemp("cancer")
    table["clinic"] = np.where(table.patient % 3 == 0, None, "north")
    table.to_parquet(folder / "rows.parquet")
    return folder, [name for name in table.columns if name not in ("patient", "target", "clinic")]


def text_of(cancer, root):
    folder, columns = cancer
    return f"""
    name: cancer
    root: {root}
    source: {{kind: parquet, path: {folder}, key: patient}}
    features:
      {", ".join(columns)}: number
    label: {{target: binary}}
    split: {{by: hash, train: 0.6, validate: 0.1, test: 0.15, score: 0.15}}
    train: {{epochs: 8, batch_size: 32, learning_rate: 0.003, num_proc: 2, verbose: 0}}
    publish: {{metric: auc, gate: {{floors: [auc >= 0.9], min_rows: 50}}}}
    report: {{slices: [clinic]}}
    """


def pipeline(cancer, root, *overrides):
    return loads(text_of(cancer, root), overrides)


def test_a_table_becomes_predictions_and_what_has_not_changed_is_not_done_again(spark, cancer, tmp_path):
    file = pipeline(cancer, tmp_path / "p")
    first = execute(Run(Project(file), RunRequest(now=NOW)), spark)
    assert (first.outcome, first.exit_code) == ("promoted", 0), first
    assert first.rows["read"] == first.rows["kept"] == 569
    assert first.evaluated.decision.challenger.values["auc"] > 0.97
    decision = first.evaluated.decision
    assert (decision.beats_baseline, decision.baseline.values["auc"], first.evaluated.part) == (True, 0.5, "test")
    share = first.trained.labels["target"].shares["1"]
    assert 0.5 < share < 0.75
    assert decision.baseline.guesses["auc"] == f"always the share of training {share:.4g}"
    trees = first.evaluated.boosted  # of the same held-out rows
    assert (trees.reason, trees.rows, trees.columns) == ("", first.rows["train"], 30)
    assert trees.trees.values["auc"] > 0.95
    assert trees.model.values == pytest.approx(decision.challenger.values)
    assert dict(summary_lines(first))["trees"] == trees.text("auc")
    assert f"LightGBM has auc {trees.trees.values['auc']:.4g}" in Path(first.places["report"]).read_text()
    assert first.trained.kept_epoch == first.trained.best_epoch
    assert first.trained.recipe == {"warmup_steps": 3, "decay": "cosine", "early_stopping_patience": 4}
    clean = Table(first.places["clean"]).read(spark)
    parts = {part: {row.patient for row in rows_of(clean, file.spec, part, ["all"]).collect()} for part in PARTS}
    assert [len(parts[part]) for part in ("train", "validate", "test")] == [
        first.rows[part] for part in ("train", "validate", "test")
    ]
    assert sum(map(len, parts.values())) == len(set().union(*parts.values())) == 569
    assert first.evaluated.decision.rows == len(parts["test"])  # and not of those that chose the epoch
    predictions = Table(first.places["predictions"]).rows().to_pandas()
    assert len(predictions) == first.predictions["all"]
    assert set(predictions["patient"]) == parts["score"]
    assert set(predictions["prediction"]) == {"0", "1"}
    assert set(predictions["model_version"]) == {1}
    assert set(predictions["run_id"]) == {first.run_id}
    assert predictions["patient"].is_unique

    registry = ModelRegistry(f"{tmp_path}/p/cancer/registry")
    version = registry.get("cancer", "champion")
    assert (version.lineage["source_table"], version.lineage["source_version"]) == (first.places["clean"], 0)
    assert len(version.lineage["shard_key"]) == 64
    loaded = sparkdl.load_model("cancer@champion", registry)  # what anybody does with it, who has raw columns
    raw = pd.read_parquet(cancer[0] / "rows.parquet").merge(predictions[["patient"]], on="patient")
    by_hand = loaded.predict(raw).merge(predictions, on="patient", suffixes=("", "_table"))
    np.testing.assert_allclose(np.stack(by_hand.probability)[:, 1], by_hand.probability_table, atol=1e-6)
    assert (by_hand.prediction == by_hand.prediction_table.astype(float)).all()
    assert len(loaded.history) == 8

    assert "Version 1 is the champion now, the first one" in Path(first.places["report"]).read_text()
    assert sum(one.rows for one in first.evaluated.challenger.calibration) == first.evaluated.decision.rows
    assert sum(map(sum, first.evaluated.challenger.confusion.weights)) == first.evaluated.decision.rows
    clinics = first.evaluated.slices["clinic"]
    assert set(clinics) == {"north", "(missing)"}
    assert sum(one.rows for one in clinics.values()) == first.evaluated.decision.rows

    assert version.metrics["baseline_auc"] == 0.5
    status = status_of(Run(Project(file), RunRequest(now=NOW)))
    assert status.due == ()  # the run has just told
    lines = dict(status_lines(status))
    assert f": auc {decision.challenger.values['auc']:.4g} (without a model 0.5), " in lines["champion"]
    assert lines["champion"].endswith(f"; on {decision.rows:,} held-out rows of the part test")
    assert lines["due"] == "no window"
    stricter = Run(Project(pipeline(cancer, tmp_path / "p", "train.epochs=9")), RunRequest(now=NOW))
    assert status_of(stricter).due == ()  # of the rows nothing has changed

    again = execute(Run(Project(file), RunRequest(now=NOW)))  # no session: nothing of Spark is asked
    assert (again.outcome, again.exit_code) == ("nothing new", 10)
    assert "report" not in again.places

    (tmp_path / "cancer.yaml").write_text(text_of(cancer, tmp_path / "p"))
    program = (
        "import sys, sparkdl.cli; code = sparkdl.cli.main(['run', sys.argv[1]]); "
        "print(code, [m for m in ('torch', 'pyspark', 'pandas') if m in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "cancer.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "10 []"

    other = execute(Run(Project(pipeline(cancer, tmp_path / "p", "train.epochs=9")), RunRequest(now=NOW)), spark)
    kept = {note.name: note.kept for note in other.steps}
    assert (kept["features"], kept["shards"], kept["train"]) == (True, True, False)
    assert other.outcome in ("promoted", "not promoted")
    assert len(registry.list("cancer")) == 2


def test_a_model_that_learned_nothing_is_no_first_champion_unless_the_file_says_so(
    spark, cancer, tmp_path, caplog, monkeypatch
):
    def broken(*arguments, **named):
        raise MemoryError("no room for trees")

    monkeypatch.setattr("lightgbm.train", broken)  # which is told, and ends no run
    dull = ("train.learning_rate=1e-12", "train.epochs=1", "publish={metric: log_loss, gate: {min_rows: 50}}")
    with caplog.at_level("WARNING", logger="sparkdl"):
        refused = execute(Run(Project(pipeline(cancer, tmp_path / "p", *dull)), RunRequest(now=NOW)), spark)
    assert (refused.outcome, refused.exit_code, refused.model["champion"]) == ("not promoted", 20, None)
    assert refused.evaluated.decision.outcome == "below_baseline"
    assert "beats the baseline: no" in refused.message
    assert "beats the baseline: no" in caplog.text
    assert "LightGBM is not beside the model, since it failed: MemoryError: no room for trees" in caplog.text
    assert refused.evaluated.boosted.reason == "it failed (MemoryError: no room for trees)"
    assert "LightGBM was left out: it failed (MemoryError" in Path(refused.places["report"]).read_text()
    assert not refused.predictions
    asked = (*dull[:2], "publish={metric: log_loss, gate: {min_rows: 50, baseline: never}}", "train.baseline=off")
    taken = execute(Run(Project(pipeline(cancer, tmp_path / "p", *asked)), RunRequest(now=NOW)), spark)
    assert (taken.outcome, taken.model["champion"]) == ("promoted", 1)
    assert {note.name: note.kept for note in taken.steps}["train"]
    assert taken.evaluated.boosted is None
    assert "beats the baseline: no" in taken.message


@pytest.mark.slow
def test_trees_stop_by_the_rows_that_judge_where_none_are_to_test(spark, cancer, tmp_path):
    file = pipeline(cancer, tmp_path / "p", "split={by: hash, train: 0.6, validate: 0.3, score: 0.1}", "train.epochs=1")
    run = Run(Project(file), RunRequest(now=NOW))
    record = execute(run, spark)
    assert record.evaluated.part == "validate"
    parts = parts_of(file.spec, run.windows())
    prepared = prepared_of(run, parts, spark)
    trained, label = TrainStep().kept(run, parts), judged_label(file.spec, prepared.labels)
    training, validation = (rows_of(run.clean(spark), file.spec, part, ["all"]) for part in ("train", "validate"))
    count = record.rows["validate"]
    columns = tree_columns(prepared.features, label)
    raw = columns.features.columns
    judging = judged(validation, file.spec, prepared.labels, trained, None, (), count, raw, columns.most_rows)
    assert judging.table.num_rows == count
    for stopping in (None, validation):
        tables = tree_rows(training, stopping, file.spec, prepared, label, columns)
        assert [table.num_rows for table in tables[1:]] == ([] if stopping is None else [count])
        trees = boosted(tables, judging, file.spec, prepared, columns, count, trained)
        assert trees.trees.values == pytest.approx(record.evaluated.boosted.trees.values)
        assert (trees.rounds, trees.rows) == (record.evaluated.boosted.rounds, record.rows["train"])


@pytest.mark.slow
def test_few_rows_without_a_key_stay_in_memory_until_the_run_ends(spark, cancer, tmp_path, monkeypatch):
    without_key = f"source={{kind: parquet, path: {cancer[0]}}}"
    run = Run(Project(pipeline(cancer, tmp_path / "p", without_key, "train.epochs=1")), RunRequest(now=NOW))
    seen = []

    def in_memory():
        return with_slots(run.clean(spark), run.spec).storageLevel.useMemory

    def failing(*given):
        seen.append(in_memory())
        raise DataError("cut short")

    with monkeypatch.context() as patched:
        patched.setattr(ShardsStep, "make", failing)
        with pytest.raises(DataError, match="cut short"):
            execute(run, spark)
    assert (seen, in_memory()) == ([True], False)
    execute(run, spark)
    assert not in_memory()

    rows = run.clean_to_divide(spark)
    assert rows is run.clean_to_divide(spark)
    assert in_memory()
    run.release()
    assert not in_memory()
    monkeypatch.setattr("sparkdl.pipeline.state.run._MOST_VALUES_KEPT", 1000)
    run.clean_to_divide(spark)
    assert not in_memory()


def test_what_is_refused_leaves_a_record_and_no_model(spark, cancer, tmp_path):
    file = pipeline(cancer, tmp_path / "p", "expect.none=patient < 0")
    with pytest.raises(DataError, match="all 569 rows of window all are refused"):
        execute(Run(Project(file), RunRequest(now=NOW)), spark)
    assert not ModelRegistry(f"{tmp_path}/p/cancer/registry").models()


def test_a_run_that_may_have_nothing_to_do_loads_neither_spark_nor_torch():
    program = "import sys, sparkdl.pipeline.run; print([m for m in ('torch', 'pyspark', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
