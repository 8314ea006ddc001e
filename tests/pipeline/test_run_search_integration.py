"""A search: trials on the same shards, the best becomes the challenger, and what was tried is not tried again."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pandas as pd
import pytest
import torch

from sparkdl.errors import ClusterError, ConfigError
from sparkdl.models.bundle import load_bundle
from sparkdl.models.registry import ModelRegistry
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.plan import plan_of
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.state.runs import records
from sparkdl.pipeline.summary import summary_lines
from sparkdl.pipeline.work import search as searching

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    x = np.random.default_rng(0).normal(size=240)
    folder = tmp_path_factory.mktemp("rows")
    pd.DataFrame({"id": range(240), "x": x, "y": 3 * x + 1}).to_parquet(folder / "rows.parquet")
    return folder


@pytest.fixture
def shop(spark, rows, tmp_path):
    """A function that runs a pipeline below a folder of this test."""

    def new_run(*overrides, root="p"):
        text = f"""
        name: shop
        root: {tmp_path}/{root}
        source: {{kind: parquet, path: {rows}, key: id}}
        features: {{x: number}}
        label: {{y: regression}}
        split: {{by: hash, train: 0.6, validate: 0.2, test: 0.1, score: 0.1}}
        model: {{arguments: {{width: 4, depth: 1, dropout: 0}}}}
        train: {{epochs: 2, batch_size: 24, optimizer: sgd, verbose: 0}}
        publish: {{metric: rmse, gate: {{min_rows: 20, baseline: never}}}}
        """
        return Run(Project(loads(text, overrides)), RunRequest(now=NOW))

    def go(*overrides, session=spark, root="p"):
        return execute(new_run(*overrides, root=root), session)

    go.new_run = new_run
    go.registry = ModelRegistry(f"{tmp_path}/p/shop/registry")
    return go


def kept(done):
    return [note.kept for note in done.steps if note.name == "trial"]


def weights(bundle):
    return load_bundle(bundle).model.state_dict()


@pytest.mark.slow
def test_the_best_trial_becomes_the_challenger_and_a_larger_space_tries_what_is_new(spark, shop):
    space = "search.space={train.learning_rate: [1.0e-6, 0.01, 1.0e+10], model.width: [4, 8]}"
    first = shop(space, "search.slots=2")
    assert first.outcome == "promoted", first.message
    trials = first.trained.trials
    assert [tuple(trial.settings.values()) for trial in trials] == [
        (rate, width) for rate in (1e-6, 0.01, 1e10) for width in (4, 8)
    ]
    assert [bool(trial.failed) for trial in trials] == [False, False, False, False, True, True]
    assert "the loss of rank 0 is" in trials[4].failed
    values = [trial.value for trial in trials[:4]]
    assert first.trained.chosen == values.index(min(values))
    assert first.trained.chosen in (2, 3)
    assert first.trained.metrics["val_rmse"] == min(values)
    assert (first.trained.ranks, first.trained.chosen_by, kept(first)) == (1, "val_rmse", [False] * 6)
    assert sum(note.seconds for note in first.steps) < first.seconds, "trials that run side by side share their time"
    version = shop.registry.get("shop", "champion")
    assert version.parameters["train"]["learning_rate"] == 0.01
    assert version.parameters["model"]["arguments"]["width"] == trials[first.trained.chosen].settings["model.width"]
    lines = dict(summary_lines(first))
    assert lines["search"] == f"6 trials by val_rmse, 2 failed; trial {first.trained.chosen + 1} is the best"
    assert lines["trial 1"].startswith("train.learning_rate=1e-06, model.width=4: val_rmse ")
    assert next(records(shop.new_run().project.runs)).trained.trials == trials

    assert shop(space, "search.slots=2", session=None).outcome == "nothing new"
    fewer = "search.space={train.learning_rate: [0.01, 0.005], model.width: [4, 8]}"
    (planned,) = [step for step in plan_of(shop.new_run(fewer)).steps if step.name == "train"]
    assert planned.why == "2 of 4 trials of the search are done"
    second = shop(fewer)
    assert sorted(kept(second)) == [False, False, True, True]


@pytest.mark.slow
def test_trials_side_by_side_and_one_by_one_are_the_same_trials(spark, shop, monkeypatch):
    rooms = []
    room = searching.room_for_fits
    monkeypatch.setattr(searching, "room_for_fits", lambda *given: rooms.append(room(*given)) or rooms[-1])
    space = "search={method: random, trials: 3, seed: 5, space: {train.learning_rate: {low: 0.001, high: 0.1}}}"
    found = [shop(space, f"search.slots={slots}", root=f"slots{slots}").trained for slots in (1, 2)]
    assert rooms == [1, 2]
    one, two = found
    assert [trial.value for trial in one.trials] == [trial.value for trial in two.trials]
    assert (one.chosen, one.content_hash) == (two.chosen, two.content_hash)
    first, second = weights(one.bundle), weights(two.bundle)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_equal_trials_choose_the_first_and_a_search_where_all_fail_is_refused(shop):
    same = shop("search.space={train.max_grad_norm: [1.0e+6, 1.0e+7]}").trained
    assert same.trials[0].value == same.trials[1].value
    assert same.chosen == 0
    with pytest.raises(
        ConfigError, match=r"all 2 trials of the search failed, the first \(train.learning_rate=1e\+30\)"
    ):
        shop("search.space={train.learning_rate: [1.0e+30, 1.0e+31]}", root="q")
    refused = next(records(shop.new_run(root="q").project.runs))
    assert (refused.outcome, refused.exit_code) == ("refused", 1)


@pytest.mark.slow
def test_a_search_that_was_cut_short_goes_on_where_it_was(shop, monkeypatch):
    space = "search.space={train.learning_rate: [0.01, 0.02, 0.03]}"
    done, real = [], searching.train

    def lost_at_the_second(*given, **options):
        if done:
            raise ClusterError("the cluster went away")
        done.append(given)
        return real(*given, **options)

    monkeypatch.setattr(searching, "train", lost_at_the_second)
    with pytest.raises(ClusterError, match="went away"):
        shop(space, "search.slots=1")
    lost = next(records(shop.new_run().project.runs))
    assert (lost.exit_code, kept(lost)) == (2, [False])
    monkeypatch.setattr(searching, "train", real)
    again = shop(space)
    assert sorted(kept(again)) == [False, False, True]
    assert again.outcome == "promoted"


HALVING = (
    "search={method: halving, trials: 6, reduction: 2, seed: 3, slots: 1, "
    "space: {train.learning_rate: {low: 1.0e-4, high: 0.1, log: true}}}",
    "train.epochs=4",
)


@pytest.mark.slow
def test_halving_stops_the_worse_trials_early_and_what_goes_on_is_what_it_would_have_been(shop):
    done = shop(*HALVING)
    assert done.outcome == "promoted", done.message
    trials = done.trained.trials
    by_epochs = {epochs: [trial for trial in trials if trial.epochs == epochs] for epochs in (1, 2, 4)}
    assert sum(map(len, by_epochs.values())) == 6
    assert len(by_epochs[1]) >= 3
    assert by_epochs[4]
    assert [trial.stopped for trial in trials] == [trial.epochs < 4 for trial in trials]
    best = trials[done.trained.chosen]
    assert (best.epochs, best.value) == (4, min(trial.value for trial in by_epochs[4]))
    assert f", {len(by_epochs[1]) + len(by_epochs[2])} stopped early; trial" in dict(summary_lines(done))["search"]
    assert shop(*HALVING, session=None).outcome == "nothing new"
    rate = f"train.learning_rate={best.settings['train.learning_rate']}"
    alone = shop(rate, "train.epochs=4", "train.num_proc=1", "train.metrics=[rmse]", root="alone")
    assert alone.trained.metrics["val_rmse"] == best.value
    first, second = weights(done.trained.bundle), weights(alone.trained.bundle)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_of_a_few_trials_that_halving_would_all_stop_the_best_is_trained_to_its_end(shop):
    found = shop(HALVING[0].replace("trials: 6", "trials: 3"), "train.epochs=4", "search.slots=1")
    assert found.outcome == "promoted", found.message
    assert [trial.epochs for trial in found.trained.trials if not trial.stopped] == [4]
    assert found.trained.epochs == 4
    assert sum(trial.stopped for trial in found.trained.trials) == 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["halving", "tpe"])
def test_a_search_that_stops_or_draws_goes_on_after_a_kill_with_each_trial_once(shop, monkeypatch, method):
    if method == "tpe":
        pytest.importorskip("optuna")
        overrides = (HALVING[0].replace("halving", "tpe").replace("reduction: 2, ", ""), HALVING[1])
    else:
        overrides = HALVING
    undisturbed = shop(*overrides, root="undisturbed").trained
    calls, real = [], searching.train

    def lost_at_the_fourth(*given, **options):
        if len(calls) == 3:
            raise ClusterError("the cluster went away")
        calls.append(given[3])
        return real(*given, **options)

    monkeypatch.setattr(searching, "train", lost_at_the_fourth)
    with pytest.raises(ClusterError, match="went away"):
        shop(*overrides)
    looks = []
    monkeypatch.setattr(
        searching, "train", lambda *given, **options: looks.append((given[3], options)) or real(*given, **options)
    )
    again = shop(*overrides).trained
    assert [(trial.settings, trial.value, trial.epochs) for trial in again.trials] == [
        (trial.settings, trial.value, trial.epochs) for trial in undisturbed.trials
    ]
    assert again.chosen == undisturbed.chosen
    if method == "tpe":
        assert len(looks) == 3
        assert not {key for key, _ in looks} & set(calls)
    else:
        assert not [key for key, options in looks if options["epochs"] == 1 and key in calls]


@pytest.mark.slow
def test_halving_that_ends_as_it_keeps_its_trials_sends_no_other_trial_on(shop, monkeypatch):
    overrides = (HALVING[0].replace("seed: 3", "seed: 6"), HALVING[1])
    undisturbed = shop(*overrides, root="undisturbed").trained
    stopped = [trial.epochs for trial in undisturbed.trials[2:]].count(1)
    assert stopped >= 3  # of which the last four by themselves would send one on
    kept_keys, keep = [], searching.TrialSearch._keep

    def lost_at_the_third(search, key, tried):
        if len(kept_keys) == 2:
            raise ClusterError("the cluster went away")
        kept_keys.append(key)
        keep(search, key, tried)

    monkeypatch.setattr(searching.TrialSearch, "_keep", lost_at_the_third)
    with pytest.raises(ClusterError, match="went away"):
        shop(*overrides)
    monkeypatch.setattr(searching.TrialSearch, "_keep", keep)
    monkeypatch.setattr(searching, "train", lambda *given, **options: pytest.fail("a trial was trained once more"))
    again = shop(*overrides).trained
    assert [(trial.value, trial.epochs, trial.stopped) for trial in again.trials] == [
        (trial.value, trial.epochs, trial.stopped) for trial in undisturbed.trials
    ]
    assert again.chosen == undisturbed.chosen
