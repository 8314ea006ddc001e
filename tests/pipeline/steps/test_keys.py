"""Which windows a run scores, which of them judge a champion, and whom a model is compared with."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from sparkdl.documents.typed import encode
from sparkdl.metrics.rows import Rows
from sparkdl.models.bundle import save_bundle
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.judging.drift import Drift
from sparkdl.pipeline.judging.gate import Gate, decide
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.state.evaluator import nothing_new, stale_of
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import Receipt, content_key, replacing
from sparkdl.pipeline.state.results import Published, Scored, Trained
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.steps import STEPS, evaluate, features, publish, score, shards, train
from sparkdl.pipeline.steps.drift import DriftStep, Looked, thresholds_key
from sparkdl.pipeline.steps.evaluate import judged_against, publish_inputs
from sparkdl.pipeline.steps.features import FeaturesStep
from sparkdl.pipeline.steps.ingest import rules_of
from sparkdl.pipeline.steps.learning import learn_from_all, parts_to_learn
from sparkdl.pipeline.steps.score import windows_to_score
from sparkdl.pipeline.steps.shards import ShardsStep
from sparkdl.pipeline.steps.train import TrainStep, trial_key
from sparkdl.pipeline.windows import Parts
from sparkdl.tables.table import Table

D1, D2, D3, D4, D5, D6 = (f"2026-03-0{day}" for day in range(1, 7))
PARTS = Parts(train=(D1, D2, D3), validate=(D4,), score=(D5, D6))


@pytest.fixture
def new_run(tmp_path):
    def make(*overrides, **asked):
        text = f"""
        name: shop
        root: {tmp_path}
        source: {{kind: parquet, path: {tmp_path}/orders, time: at}}
        features: {{x: number}}
        label: {{y: regression}}
        split: {{by: time, train: 3 days, validate: 1 day, score: 2 days}}
        """
        return Run(Project(loads(text, overrides)), RunRequest(**asked))

    return make


CONTENT = {name: f"rows of {name}" for name in (D1, D2, D3, D4, D5, D6)}


def ingested(run, content, labels=""):
    """A run that finds these rows in the windows, and labels with them."""
    receipts = []
    for name, rows in content.items():
        books = WindowReceipt(
            window=name, fingerprint="", rules="", read=1, kept=int(rows != ""), quarantined=int(rows == ""),
            duplicates=0, content=rows + labels, unlabelled=rows,
        )  # fmt: skip
        receipts.append(Receipt(step="ingest", partition=name, key="k", facts=encode(books).decode()))
    run.receipts.write(receipts)
    return run


def scored(run, content, cut_short=()):
    """A run that finds predictions of these rows."""
    target = Table(str(run.project.spec.score.target)).uri
    with replacing(run.receipts, "score", []) as made:
        for name, rows in content.items():
            made[f"{name} in {target}"] = ("k", Scored(window=name, target=target, content=rows, rows=1, version=1))
    if cut_short:
        with (
            pytest.raises(KeyboardInterrupt),
            replacing(run.receipts, "score", [f"{n} in {target}" for n in cut_short]),
        ):
            raise KeyboardInterrupt
    return run


def test_days_that_no_run_scored_and_rows_that_came_late_are_owed(new_run):
    def owed(*overrides, **changed):
        run = ingested(
            new_run(*overrides), CONTENT | {"none": "lost"} | {D[name]: rows for name, rows in changed.items()}
        )
        return windows_to_score(run, PARTS)

    D = {"d2": D2, "d4": D4}
    assert owed() == (D5, D6)
    # a run of the third day; none came on the fourth
    scored(new_run(), {D2: "rows of before", D3: CONTENT[D3]})
    assert owed() == (D2, D4, D5, D6)
    assert owed(d2="rows of before") == (D4, D5, D6)
    assert owed(d2="") == (D2, D4, D5, D6)  # its rows are gone
    assert owed(d2="", d4="") == (D2, D5, D6)  # nobody predicted the fourth
    assert owed("score.window=validate", d2="rows of before") == (D4,)  # newer ones are not asked for
    scored(new_run(), {}, cut_short=[D3])
    assert owed(d2="rows of before") == (D3, D4, D5, D6)
    assert owed("score.target=elsewhere") == (D5, D6), "another table owes nothing yet"


def test_a_label_that_is_kept_is_scored_again_once_it_has_come_and_keeping_it_rescores_nothing_old(new_run, published):
    run = new_run()
    run.registry.set_alias("shop", "champion", published(run, "one").version, expected=None)

    def scoring(labels, *overrides):
        run = ingested(new_run(*overrides), CONTENT, labels)
        return score.ScoreStep().wanted(run), windows_to_score(run, PARTS)

    assert scoring("") == scoring(" with labels")
    waiting, come = (scoring(labels, "score.keep=[y]")[0] for labels in ("", " with labels"))
    assert waiting.keys() == come.keys()
    assert not set(waiting.values()) & set(come.values())
    scored(new_run(), CONTENT)
    assert scoring(" with labels", "score.keep=[y]")[1] == (D5, D6)
    scored(new_run(), {name: f"{rows} with labels" for name, rows in CONTENT.items()})
    assert scoring(" with labels", "score.keep=[y]")[1] == scoring(" with labels")[1] == (D5, D6)
    assert scoring(" with other labels", "score.keep=[y]")[1] == (D1, D2, D3, D4, D5, D6)


def test_without_windows_in_time_nothing_is_owed_but_what_is_gone(new_run):
    content = {D1: "a", D2: "", D3: "c"}
    parts = Parts(train=(D1, D3), validate=(D1, D3), score=(D1, D3))
    for number, overrides in enumerate(
        (["score.window=all"], ["split={by: hash, train: 0.8, validate: 0.1, score: 0.1}"])
    ):
        overrides.append(f"score.target=table{number}")
        run = ingested(new_run(*overrides), content)
        assert windows_to_score(run, parts) == (D1, D3)
        assert windows_to_score(scored(run, {D1: "a", D2: "b"}), parts) == (D1, D2, D3)
        assert windows_to_score(scored(run, content), parts) == (D1, D3)


def test_a_trial_is_done_again_for_a_metric_that_it_did_not_compute_and_a_training_is_not(new_run):
    def inputs(trial, *overrides):
        search = ("search.space={train.epochs: [1, 2]}", "split.test=1 day")
        return trial_key(new_run(*search, *overrides).project, "shards", trial)

    trial = {"train.epochs": 2}
    assert inputs(trial) == inputs(trial, "publish.metric=rmse") != inputs(trial, "publish.metric=mae")
    assert inputs(trial, "train.metrics=[rmse]") == inputs(trial)
    assert inputs({}) == inputs({}, "publish.metric=mae")


@pytest.mark.parametrize("label", ["y: multiclass", "y: multiclass, z: multiclass"])
def test_several_classes_are_trained_anew_where_accuracy_judges_them_no_more_and_other_labels_are_not(new_run, label):
    def keys(*overrides):
        run = ingested(new_run(f"label={{{label}}}", "train.metrics=[accuracy]", *overrides), CONTENT)
        return TrainStep().key(run, PARTS), trial_key(run.project, "shards", {"train.epochs": 2})

    for one, other in zip(keys(), keys("publish.metric=log_loss"), strict=True):
        assert one != other
    assert keys("publish.metric=log_loss")[0] == keys("publish.metric=f1")[0]
    if "z" in label:
        assert keys()[0] == keys("publish.label=y")[0] != keys("publish.label=z")[0]


@pytest.fixture
def published(tmp_path):
    def publish(run, training):
        bundle = save_bundle(nn.Linear(1, 1), str(tmp_path / training))
        return run.registry.publish("shop", bundle.uri, publication=training)

    return publish


def test_a_model_that_is_the_champion_already_is_compared_with_the_one_before_it(new_run, published):
    run = new_run()

    def against(training, run=run):
        run.look_again()
        return judged_against(run, {"train": training})

    assert against("one") is None
    assert published(run, "one").version == 1
    run.registry.set_alias("shop", "champion", 1, expected=None)
    assert against("one") is None  # nobody was champion before it
    assert against("two") == 1
    published(run, "two")
    run.registry.set_alias("shop", "champion", 2, expected=1)  # and here a run was killed
    assert against("two") == 1
    made = Published(version=2, promoted=True, reason="", against=1)
    run.receipts.keep("publish", content_key("publish", {"train": "two"}), made)
    published(run, "three")
    run.registry.set_alias("shop", "champion", 3, expected=2)
    assert against("two") == 1
    assert against("four") == 3
    run.registry.delete("shop", 1)
    run.registry.set_alias("shop", "champion", 2, expected=3)
    run.look_again()
    assert judged_against(run, {"train": "two", "publish": "edited"}) == 3


def test_a_champion_that_a_stricter_gate_refuses_stays_and_says_so(new_run, tmp_path):
    run, labels = ingested(new_run(), CONTENT), np.arange(40.0)
    bundle = save_bundle(nn.Linear(1, 1), str(tmp_path / "bundle"))
    trained = Trained(
        bundle=bundle.uri, content_hash="", history=(), metrics={}, epochs=1, best_epoch=None, steps=1, rows=1, ranks=1,
        backend="none",
    )  # fmt: skip

    def published(*floors):
        decision = decide(Gate(metric="rmse", floors=floors), Rows.of("regression", labels, labels + 1))
        run.look_again()
        return publish._published(run, PARTS, decision, trained)

    assert published().promoted
    stricter = published("rmse <= 0.5")
    said = (
        "it is the champion already, and would not be promoted: the challenger's rmse of 1 misses the floor rmse <= 0.5"
    )
    assert (stricter.version, stricter.promoted, stricter.reason) == (1, True, said)


BY_HASH = "split={by: hash, train: 0.6, validate: 0.2, score: 0.2}"
GROUPED = "split={by: hash, train: 0.6, validate: 0.2, score: 0.2, group: [shop]}"


def keys_of(run):
    """The keys of the steps that cut rows into parts, of equal rows."""
    ingested(run, dict.fromkeys((D1, D2, D3, D4, D5, D6), "rows"))
    publish = publish_inputs(run, PARTS)
    return {
        "features": FeaturesStep().key(run, PARTS),
        "shards": ShardsStep().key(run, PARTS),
        "publish": content_key("publish", {**publish, "train": "train"}),
    }


def test_another_key_cuts_the_rows_anew_where_it_is_hashed_and_judges_anew(new_run):
    one, other = (keys_of(new_run(BY_HASH, f"source.key={key}")) for key in ("order", "receipt"))
    assert {name for name in one if one[name] != other[name]} == {"features", "shards", "publish"}
    one, other = (keys_of(new_run(GROUPED, f"source.key={key}")) for key in ("order", "receipt"))
    assert {name for name in one if one[name] != other[name]} == {"publish"}
    one, other = (keys_of(new_run(f"source.key={key}")) for key in ("order", "receipt"))
    assert {name for name in one if one[name] != other[name]} == {"publish"}


def test_predictions_are_made_anew_where_they_are_to_have_another_key(new_run, tmp_path):
    registry = new_run().registry
    registry.publish("shop", save_bundle(nn.Linear(1, 1), str(tmp_path / "bundle")).uri)
    registry.set_alias("shop", "champion", 1, expected=None)
    made = set()
    for more in ([], ["score.window=all"]):
        for key in ("order", "receipt"):
            run = ingested(new_run(f"source.key={key}", *more), CONTENT)
            wanted = score.ScoreStep().wanted(run)
            made |= {key for partition, key in wanted.items() if partition.startswith(D6)}
    assert len(made) == 4


def test_what_follows_from_a_window_that_nobody_has_read_is_stale_by_no_key_yet(new_run, monkeypatch):
    search = "search={method: random, trials: 2, space: {model.width: [8, 16]}}"
    run = ingested(new_run(search, "split.test=1 day"), CONTENT)
    assert all(stale_of(step, run).keys for step in STEPS if step.learns)
    monkeypatch.setattr(run, "content", lambda **_: CONTENT | {D1: None})
    for step in STEPS:
        if step.learns:
            assert list(stale_of(step, run).keys.values()) == [None], step.name


@pytest.mark.parametrize("module", [features, shards, train, evaluate, score])
def test_what_a_step_was_built_anew_for_is_made_again(new_run, published, monkeypatch, module):
    run = ingested(new_run(), CONTENT)
    run.registry.set_alias("shop", "champion", published(run, "one").version, expected=None)

    def wanted():
        return {step.name: step.wanted(run) for step in STEPS if step.name not in ("ingest", "live", "drift", "trial")}

    before = wanted()
    assert before == wanted()
    monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    assert before != wanted()


def test_other_rules_of_rows_are_other_rules(new_run, monkeypatch):
    before = rules_of(new_run().project)
    monkeypatch.setattr("sparkdl.pipeline.steps.ingest.VERSION", 99)
    assert rules_of(new_run().project) != before == before


def test_settings_of_spark_that_decide_values_are_rules_and_others_are_not(new_run):
    def rules(**conf):
        settings = ", ".join(f"{name.replace('_', '.')}: {value}" for name, value in conf.items())
        return rules_of(new_run(f"spark.conf={{{settings}}}").project)

    assert rules() == rules(spark_sql_shuffle_partitions=3) == rules_of(new_run().project)
    made = [
        rules(spark_sql_session_timeZone="America/New_York"),
        rules(spark_sql_session_timeZone="UTC"),
        rules(spark_sql_ansi_enabled="false"),
        rules(spark_sql_timestampType="TIMESTAMP_NTZ"),
        rules(spark_sql_legacy_timeParserPolicy="LEGACY"),
    ]
    assert len({*made, rules()}) == len(made) + 1


def test_the_label_that_judges_is_told_by_its_name_also_where_it_is_the_first_one(new_run):
    one, other = (
        keys_of(new_run(f"label={{{labels}}}"))
        for labels in ("y: regression, z: regression", "z: regression, y: regression")
    )
    assert one["publish"] != other["publish"]
    assert one["shards"] == other["shards"]
    assert keys_of(new_run("label={y: regression, z: regression}", "publish.label=y")) == one


def test_who_must_beat_the_baseline_decides_a_publication_only_where_it_is_not_as_before(new_run):
    """A key of before there was a choice holds, or a model that was rolled back would be judged anew."""
    gates = []
    for word in ("first", "always", "never"):
        run = ingested(new_run(f"publish.gate.baseline={word}"), CONTENT)
        gates.append(publish_inputs(run, PARTS)["publish"]["gate"])
    assert "baseline" not in gates[0]
    assert [gate["baseline"] for gate in gates[1:]] == ["always", "never"]


def test_drift_that_is_known_asks_for_a_run_once_the_file_asks_for_a_training_or_a_refusal(new_run, published):
    run = ingested(new_run(), CONTENT)
    run.registry.set_alias("shop", "champion", published(run, "one").version, expected=None)
    with replacing(run.receipts, "drift", []) as made:
        alarm = Drift(reason="it drifts", alarm=True, judged=True, rows=1, features={})
        for name, key in DriftStep().wanted(run).items():
            made[name] = (key, Looked(drift=alarm))

    def asks(action, **asked):
        return DriftStep().asks_for_a_run(new_run(f"drift.action={action}", **asked))

    assert [asks(action) for action in ("warn", "retrain", "fail")] == [False, True, True]
    assert not asks("retrain", train=False)
    learn_from_all(run)
    assert [asks(action) for action in ("warn", "retrain", "fail")] == [False, False, True]
    assert not DriftStep().asks_for_a_run(new_run("drift.action=fail", "drift.psi=0.9")), "not compared by that yet"


def test_a_training_that_drift_asks_for_is_planned_also_where_a_window_that_is_due_tells_no_rows(new_run, monkeypatch):
    run = ingested(new_run("drift.action=retrain"), CONTENT)
    monkeypatch.setattr(run, "content", lambda **_: CONTENT | {D1: None})
    assert parts_to_learn(run)[0].train == (D1, D2, D3)
    learn_from_all(run)
    assert parts_to_learn(run)[0].train == (D3, D4, D5)


def test_other_thresholds_ask_for_a_run_until_the_champion_is_compared_by_them(new_run, published):
    run = ingested(new_run(), CONTENT)
    versions = [published(run, name) for name in ("one", "two")]
    run.registry.set_alias("shop", "champion", 1, expected=None)

    def asks(*overrides):
        other = new_run(*overrides)
        return DriftStep().asks_for_a_run(other), nothing_new([DriftStep()], other)

    def compare(*overrides, version=versions[0]):
        other = new_run(*overrides)
        with replacing(other.receipts, "drift", []) as made:
            for name, key in DriftStep().wanted(other).items():
                made[name] = (
                    key,
                    Looked(drift=None, artifact=version.artifact, thresholds=thresholds_key(other.project)),
                )

    assert asks() == (False, True), "not compared at all yet"
    compare()
    assert asks() == asks("drift.action=fail") == asks("drift={after: 2, of: 3}") == (False, True)
    assert asks("drift.psi=0.9") == asks("drift.ignore=[x]") == (True, False)
    compare("drift.psi=0.9")
    assert asks("drift.psi=0.9") == (False, True)
    assert asks() == (True, False)
    compare("drift.psi=0.9", version=versions[1])  # with a champion of before
    assert asks() == (False, True)
