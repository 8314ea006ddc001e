"""Which windows a run scores, which of them judge a champion, and whom a model is compared with."""

from __future__ import annotations

import pytest
from torch import nn

from sparkdl.documents.typed import encode
from sparkdl.models.bundle import save_bundle
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.judging.drift import Drift
from sparkdl.pipeline.rows.parts import Parts
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.receipts import Receipt, content_key, replacing
from sparkdl.pipeline.state.results import Published, Scored
from sparkdl.pipeline.steps import STEPS, evaluate, features, score, shards, train
from sparkdl.pipeline.steps.drift import DriftStep, Looked
from sparkdl.pipeline.steps.evaluate import judged_against, publish_inputs
from sparkdl.pipeline.steps.features import features_key
from sparkdl.pipeline.steps.ingest import rules_of
from sparkdl.pipeline.steps.learning import learn_from_all
from sparkdl.pipeline.steps.score import windows_to_score
from sparkdl.pipeline.steps.shards import shards_key
from sparkdl.pipeline.steps.train import trial_key
from sparkdl.tables.table import Table

D1, D2, D3, D4, D5, D6 = (f"2026-03-0{day}" for day in range(1, 7))
PARTS = Parts(train=(D1, D2, D3), validate=(D4,), score=(D5, D6))


@pytest.fixture
def context_of(tmp_path):
    def make(*overrides, **asked):
        text = f"""
        name: shop
        root: {tmp_path}
        source: {{kind: parquet, path: {tmp_path}/orders, time: at}}
        features: {{x: number}}
        label: {{y: regression}}
        split: {{by: time, train: 3 days, validate: 1 day, score: 2 days}}
        """
        return Context(loads(text, overrides), **asked)

    return make


CONTENT = {name: f"rows of {name}" for name in (D1, D2, D3, D4, D5, D6)}


def ingested(context, content):
    """The context of a run that finds these rows in the windows."""
    receipts = []
    for name, rows in content.items():
        books = WindowReceipt(
            window=name, fingerprint="", rules="", read=1, kept=int(rows != ""), quarantined=int(rows == ""),
            duplicates=0, content=rows, unlabelled=rows,
        )  # fmt: skip
        receipts.append(Receipt(step="ingest", partition=name, key="k", facts=encode(books).decode()))
    context.receipts.write(receipts)
    return context


def scored(context, content, cut_short=()):
    """The context of a run that finds predictions of these rows."""
    target = Table(str(context.spec.score.target)).uri
    with replacing(context.receipts, "score", []) as made:
        for name, rows in content.items():
            made[f"{name} in {target}"] = ("k", Scored(window=name, target=target, content=rows, rows=1, version=1))
    if cut_short:
        with (
            pytest.raises(KeyboardInterrupt),
            replacing(context.receipts, "score", [f"{n} in {target}" for n in cut_short]),
        ):
            raise KeyboardInterrupt
    return context


def test_days_that_no_run_scored_and_rows_that_came_late_are_owed(context_of):
    def owed(*overrides, **changed):
        context = ingested(
            context_of(*overrides), CONTENT | {"none": "lost"} | {D[name]: rows for name, rows in changed.items()}
        )
        return windows_to_score(context, PARTS)

    D = {"d2": D2, "d4": D4}
    assert owed() == (D5, D6)
    # a run of the third day; none came on the fourth
    scored(context_of(), {D2: "rows of before", D3: CONTENT[D3]})
    assert owed() == (D2, D4, D5, D6)
    assert owed(d2="rows of before") == (D4, D5, D6)
    assert owed(d2="") == (D2, D4, D5, D6)  # its rows are gone
    assert owed(d2="", d4="") == (D2, D5, D6)  # nobody predicted the fourth
    assert owed("score.window=validate", d2="rows of before") == (D4,)  # newer ones are not asked for
    scored(context_of(), {}, cut_short=[D3])
    assert owed(d2="rows of before") == (D3, D4, D5, D6)
    assert owed("score.target=elsewhere") == (D5, D6), "another table owes nothing yet"


def test_without_windows_in_time_nothing_is_owed_but_what_is_gone(context_of):
    content = {D1: "a", D2: "", D3: "c"}
    parts = Parts(train=(D1, D3), validate=(D1, D3), score=(D1, D3))
    for number, overrides in enumerate(
        (["score.window=all"], ["split={by: hash, train: 0.8, validate: 0.1, score: 0.1}"])
    ):
        overrides.append(f"score.target=table{number}")
        context = ingested(context_of(*overrides), content)
        assert windows_to_score(context, parts) == (D1, D3)
        assert windows_to_score(scored(context, {D1: "a", D2: "b"}), parts) == (D1, D2, D3)
        assert windows_to_score(scored(context, content), parts) == (D1, D3)


def test_a_trial_is_done_again_for_a_metric_that_it_did_not_compute_and_a_training_is_not(context_of):
    def inputs(trial, *overrides):
        search = ("search.space={train.epochs: [1, 2]}", "split.test=1 day")
        return trial_key(context_of(*search, *overrides), "shards", trial)

    trial = {"train.epochs": 2}
    assert inputs(trial) == inputs(trial, "publish.metric=rmse") != inputs(trial, "publish.metric=mae")
    assert inputs(trial, "train.metrics=[rmse]") == inputs(trial)
    assert inputs({}) == inputs({}, "publish.metric=mae")


@pytest.fixture
def published(tmp_path):
    def publish(context, training):
        bundle = save_bundle(nn.Linear(1, 1), str(tmp_path / training))
        return context.registry.publish("shop", bundle.uri, publication=training)

    return publish


def test_a_model_that_is_the_champion_already_is_compared_with_the_one_before_it(context_of, published):
    context = context_of()

    def against(training, context=context):
        context.look_again()
        return judged_against(context, {"train": training})

    assert against("one") is None
    assert published(context, "one").version == 1
    context.registry.set_alias("shop", "champion", 1, expected=None)
    assert against("one") is None  # nobody was champion before it
    assert against("two") == 1
    published(context, "two")
    context.registry.set_alias("shop", "champion", 2, expected=1)  # and here a run was killed
    assert against("two") == 1
    made = Published(version=2, promoted=True, reason="", against=1)
    context.receipts.keep("publish", content_key("publish", {"train": "two"}), made)
    published(context, "three")
    context.registry.set_alias("shop", "champion", 3, expected=2)
    assert against("two") == 1
    assert against("four") == 3
    context.registry.delete("shop", 1)
    context.registry.set_alias("shop", "champion", 2, expected=3)
    context.look_again()
    assert judged_against(context, {"train": "two", "publish": "edited"}) == 3


BY_HASH = "split={by: hash, train: 0.6, validate: 0.2, score: 0.2}"
GROUPED = "split={by: hash, train: 0.6, validate: 0.2, score: 0.2, group: [shop]}"


def keys_of(context):
    """The keys of the steps that cut rows into parts, of equal rows."""
    ingested(context, dict.fromkeys((D1, D2, D3, D4, D5, D6), "rows"))
    publish = publish_inputs(context, PARTS)
    return {
        "features": features_key(context, PARTS),
        "shards": shards_key(context, PARTS),
        "publish": content_key("publish", {**publish, "train": "train"}),
    }


def test_another_key_cuts_the_rows_anew_where_it_is_hashed_and_judges_anew(context_of):
    one, other = (keys_of(context_of(BY_HASH, f"source.key={key}")) for key in ("order", "receipt"))
    assert {name for name in one if one[name] != other[name]} == {"features", "shards", "publish"}
    one, other = (keys_of(context_of(GROUPED, f"source.key={key}")) for key in ("order", "receipt"))
    assert {name for name in one if one[name] != other[name]} == {"publish"}
    one, other = (keys_of(context_of(f"source.key={key}")) for key in ("order", "receipt"))
    assert {name for name in one if one[name] != other[name]} == {"publish"}


def test_predictions_are_made_anew_where_they_are_to_have_another_key(context_of, tmp_path):
    registry = context_of().registry
    registry.publish("shop", save_bundle(nn.Linear(1, 1), str(tmp_path / "bundle")).uri)
    registry.set_alias("shop", "champion", 1, expected=None)
    made = set()
    for more in ([], ["score.window=all"]):
        for key in ("order", "receipt"):
            context = ingested(context_of(f"source.key={key}", *more), CONTENT)
            wanted = score.ScoreStep().wanted(context)
            made |= {key for partition, key in wanted.items() if partition.startswith(D6)}
    assert len(made) == 4


@pytest.mark.parametrize("module", [features, shards, train, evaluate, score])
def test_what_a_step_was_built_anew_for_is_made_again(context_of, published, monkeypatch, module):
    context = ingested(context_of(), CONTENT)
    context.registry.set_alias("shop", "champion", published(context, "one").version, expected=None)

    def wanted():
        return {
            step.name: step.wanted(context) for step in STEPS if step.name not in ("ingest", "live", "drift", "trial")
        }

    before = wanted()
    assert before == wanted()
    monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    assert before != wanted()


def test_other_rules_of_rows_are_other_rules(context_of, monkeypatch):
    before = rules_of(context_of())
    monkeypatch.setattr("sparkdl.pipeline.steps.ingest.VERSION", 99)
    assert rules_of(context_of()) != before == before


def test_the_label_that_judges_is_told_by_its_name_also_where_it_is_the_first_one(context_of):
    one, other = (
        keys_of(context_of(f"label={{{labels}}}"))
        for labels in ("y: regression, z: regression", "z: regression, y: regression")
    )
    assert one["publish"] != other["publish"]
    assert one["shards"] == other["shards"]
    assert keys_of(context_of("label={y: regression, z: regression}", "publish.label=y")) == one


def test_who_must_beat_the_baseline_decides_a_publication_only_where_it_is_not_as_before(context_of):
    """A key of before there was a choice holds, or a model that was rolled back would be judged anew."""
    gates = [
        publish_inputs(ingested(context_of(f"publish.gate.baseline={word}"), CONTENT), PARTS)["publish"]["gate"]
        for word in ("first", "always", "never")
    ]
    assert "baseline" not in gates[0]
    assert [gate["baseline"] for gate in gates[1:]] == ["always", "never"]


def test_drift_that_is_known_asks_for_a_run_once_the_file_asks_for_a_training_or_a_refusal(context_of, published):
    context = ingested(context_of(), CONTENT)
    context.registry.set_alias("shop", "champion", published(context, "one").version, expected=None)
    with replacing(context.receipts, "drift", []) as made:
        alarm = Drift(reason="it drifts", alarm=True, judged=True, rows=1, features={})
        for name, key in DriftStep().wanted(context).items():
            made[name] = (key, Looked(drift=alarm))

    def asks(action, **asked):
        return DriftStep().asks_for_a_run(context_of(f"drift.action={action}", **asked))

    assert [asks(action) for action in ("warn", "retrain", "fail")] == [False, True, True]
    assert not asks("retrain", train=False)
    learn_from_all(context)
    assert [asks(action) for action in ("warn", "retrain", "fail")] == [False, False, True]
    assert not DriftStep().asks_for_a_run(context_of("drift.action=fail", "drift.psi=0.9")), "not compared by that yet"
