"""Which windows a run scores, which of them judge a champion, and whom a model is compared with."""

from __future__ import annotations

import pytest
from torch import nn

from sparkdl.models.bundle import save_bundle
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.rows.parts import Parts
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.keys import (
    features_inputs,
    judged_against,
    publish_inputs,
    score_inputs,
    scored_windows,
    shards_inputs,
    trial_inputs,
    windows_to_score,
)
from sparkdl.pipeline.state.results import Published, ScoredWindows
from sparkdl.pipeline.state.steps import content_key

D1, D2, D3, D4, D5, D6 = (f"2026-03-0{day}" for day in range(1, 7))
PARTS = Parts(train=(D1, D2, D3), validate=(D4,), score=(D5, D6))


@pytest.fixture
def context_of(tmp_path):
    def make(*overrides):
        text = f"""
        name: shop
        root: {tmp_path}
        source: {{kind: parquet, path: {tmp_path}/orders, time: at}}
        features: {{x: number}}
        label: {{y: regression}}
        split: {{by: time, train: 3 days, validate: 1 day, score: 2 days}}
        """
        return Context(loads(text, overrides))

    return make


def test_days_that_no_run_scored_and_rows_that_came_late_are_owed(context_of):
    context = context_of()
    content = {name: f"rows of {name}" for name in (D1, D2, D3, D4, D5, D6)} | {"none": "lost"}
    assert windows_to_score(context, PARTS, content) == (D5, D6)
    scored = {D2: "rows of before", D3: content[D3]}  # a run of the third day; none came on the fourth
    context.steps.put("score", scored_windows(context), ScoredWindows(content=scored), 0.0)
    assert windows_to_score(context, PARTS, content) == (D2, D4, D5, D6)
    assert windows_to_score(context, PARTS, content | {D2: "rows of before"}) == (D4, D5, D6)
    assert windows_to_score(context, PARTS, content | {D2: ""}) == (D2, D4, D5, D6)  # its rows are gone
    assert windows_to_score(context, PARTS, content | {D2: "", D4: ""}) == (D2, D5, D6)  # nobody predicted the fourth
    validated = context_of("score.window=validate")
    assert windows_to_score(validated, PARTS, content | {D2: "rows of before"}) == (D4,)  # newer ones are not asked for


def test_without_windows_in_time_nothing_is_owed_but_what_is_gone(context_of):
    content = {D1: "a", D2: "", D3: "c"}
    for overrides in (["score.window=all"], ["split={by: hash, train: 0.8, validate: 0.1, score: 0.1}"]):
        context = context_of(*overrides)
        parts = Parts(train=(D1, D3), validate=(D1, D3), score=(D1, D3))
        assert windows_to_score(context, parts, content) == (D1, D3)
        place = scored_windows(context)
        context.steps.put("score", place, ScoredWindows(content={D1: "a", D2: "b"}), 0.0)
        assert windows_to_score(context, parts, content) == (D1, D2, D3)
        context.steps.put("score", place, ScoredWindows(content=content), 0.0)
        assert windows_to_score(context, parts, content) == (D1, D3)


def test_a_trial_is_done_again_for_a_metric_that_it_did_not_compute_and_a_training_is_not(context_of):
    def inputs(trial, *overrides):
        search = ("search.space={train.epochs: [1, 2]}", "split.test=1 day")
        return trial_inputs(context_of(*search, *overrides), "shards", trial)

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
    content = dict.fromkeys((D1, D2, D3, D4, D5, D6), "rows")
    first, second = (publish_inputs(context, PARTS, content, training) for training in ("one", "two"))
    assert judged_against(context, first) is None
    assert published(context, "one").version == 1
    context.registry.set_alias("shop", "champion", 1, expected=None)
    assert judged_against(context, first) is None  # nobody was champion before it
    assert judged_against(context, second) == 1
    published(context, "two")
    context.registry.set_alias("shop", "champion", 2, expected=1)  # and here a run was killed
    assert judged_against(context, second) == 1
    context.steps.put("publish", second, Published(version=2, promoted=True, reason="", against=1), 0.0)
    published(context, "three")
    context.registry.set_alias("shop", "champion", 3, expected=2)
    assert judged_against(context, second) == 1
    assert judged_against(context, publish_inputs(context, PARTS, content, "four")) == 3
    context.registry.delete("shop", 1)
    context.registry.set_alias("shop", "champion", 2, expected=3)
    edited = publish_inputs(context_of("publish.gate.min_rows=7"), PARTS, content, "two")
    assert judged_against(context, edited) == 3


BY_HASH = "split={by: hash, train: 0.6, validate: 0.2, score: 0.2}"
GROUPED = "split={by: hash, train: 0.6, validate: 0.2, score: 0.2, group: [shop]}"


def keys_of(context):
    """The keys of the steps that cut rows into parts, of equal rows."""
    content = dict.fromkeys((D1, D2, D3, D4, D5, D6), "rows")
    found = {
        "features": features_inputs(context, PARTS, content),
        "shards": shards_inputs(context, PARTS, content, "fitted"),
        "publish": publish_inputs(context, PARTS, content, "train"),
    }
    return {name: content_key(name, inputs) for name, inputs in found.items()}


def test_another_key_cuts_the_rows_anew_where_it_is_hashed_and_judges_anew(context_of):
    one, other = (keys_of(context_of(BY_HASH, f"source.key={key}")) for key in ("order", "receipt"))
    assert {name for name in one if one[name] != other[name]} == {"features", "shards", "publish"}
    one, other = (keys_of(context_of(GROUPED, f"source.key={key}")) for key in ("order", "receipt"))
    assert {name for name in one if one[name] != other[name]} == {"publish"}
    one, other = (keys_of(context_of(f"source.key={key}")) for key in ("order", "receipt"))
    assert {name for name in one if one[name] != other[name]} == {"publish"}


def test_predictions_are_made_anew_where_they_are_to_have_another_key(context_of, tmp_path):
    champion = context_of().registry.publish("shop", save_bundle(nn.Linear(1, 1), str(tmp_path / "bundle")).uri)
    made = [
        score_inputs(context_of(f"source.key={key}", *more), champion, {D5: "rows"})[D5]
        for more in ([], ["score.window=all"])
        for key in ("order", "receipt")
    ]
    assert len({content_key("score", inputs) for inputs in made}) == 4


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
    content = dict.fromkeys((D1, D2, D3, D4, D5, D6), "rows")
    gates = [
        publish_inputs(context_of(f"publish.gate.baseline={word}"), PARTS, content, "train")["publish"]["gate"]
        for word in ("first", "always", "never")
    ]
    assert "baseline" not in gates[0]
    assert [gate["baseline"] for gate in gates[1:]] == ["always", "never"]
