"""The settings of a search: which there are, that a seed draws the same, and what is refused with its line."""

from __future__ import annotations

import pytest

from sparkdl.errors import PipelineFileError
from sparkdl.pipeline import Pipeline
from sparkdl.pipeline.code import importable
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.trials import chosen_by, chosen_settings, trials_of, with_settings

FILE = """\
name: wine
root: data
source: {kind: csv, path: rows, key: bottle}
features: {alcohol: number, colour: category}
label: {quality: regression}
split: {by: hash, train: 0.6, validate: 0.2, test: 0.1, score: 0.1}
"""


def pipeline(*overrides, text=FILE):
    return Pipeline(loads(text, overrides))


def settings(*overrides):
    return trials_of(pipeline(*overrides).spec)


def test_a_grid_is_every_combination_the_last_name_fastest():
    found = settings("search.space={train.epochs: [1, 2.0], model.width: [8, 16]}")
    assert found == [
        {"train.epochs": 1, "model.width": 8}, {"train.epochs": 1, "model.width": 16},
        {"train.epochs": 2, "model.width": 8}, {"train.epochs": 2, "model.width": 16},
    ]  # fmt: skip
    assert all(type(one["train.epochs"]) is int for one in found)
    assert settings() == [{}]
    found = settings("search.space={train.learning_rate: [1, 0.5], model.dropout: [0.0]}")
    assert [[type(value) for value in one.values()] for one in found] == [[float, float], [float, float]]


def test_random_settings_follow_from_the_seed_lie_within_their_limits_and_differ():
    space = (
        "search={method: random, trials: 40, space: {train.learning_rate: {low: 0.0001, high: 0.1, log: true}, "
        "train.batch_size: {low: 8, high: 512}, model.width: {low: 4, high: 64, log: true}, "
        "model.dropout: {low: 0, high: 0.5}, train.optimizer: [adam, sgd]}}"
    )
    found = settings(space)
    assert found == settings(space)
    assert found != settings(space, "search.seed=1")
    assert found[:10] == settings(space, "search.trials=10")
    assert len({tuple(one.values()) for one in found}) == 40
    for one in found:
        assert 1e-4 <= one["train.learning_rate"] <= 0.1
        assert 0 <= one["model.dropout"] <= 0.5
        for name, low, high in (("train.batch_size", 8, 512), ("model.width", 4, 64)):
            assert type(one[name]) is int
            assert low <= one[name] <= high
    assert sum(one["train.learning_rate"] < 1e-3 for one in found) > 5  # evenly by the logarithm: a third of them
    assert {one["train.optimizer"] for one in found} == {"adam", "sgd"}


def test_a_trial_is_the_file_with_its_settings():
    spec = pipeline("model.arguments={depth: 1}", "search.space={train.epochs: [3], model.width: [8]}").spec
    made = with_settings(spec, {"train.epochs": 3, "model.width": 8})
    assert (made.train.epochs, made.model.arguments, made.search) == (3, {"depth": 1, "width": 8}, None)
    assert (spec.train.epochs, spec.model.arguments) == (None, {"depth": 1})
    resolved = {"train": {"epochs": 1, "batch_size": 32}, "model": {"factory": None, "arguments": {"depth": 1}}}
    assert chosen_settings(resolved, {"train.epochs": 3, "model.width": 8}) == {
        "train": {"epochs": 3, "batch_size": 32}, "model": {"factory": None, "arguments": {"depth": 1, "width": 8}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "column"),
    [
        ([], "val_rmse"),
        (["label={quality: binary}"], "val_auc"),
        (["label={quality: multiclass}"], "val_accuracy"),
        (["label={quality: {type: binary, loss: 'cellar:loss'}}", "publish.metric=f1"], "val_loss"),
        (["label={quality: {type: regression, loss: 'cellar:loss'}}"], "val_rmse"),
        (["publish.metric=mae"], "val_mae"),
        (["label.price=regression", "train.metrics=[mae]"], "val_loss"),
        (["label.price=regression", "train.metrics=[rmse]"], "val_quality_rmse"),
        (["label.price=regression", "publish={label: price, metric: rmse}"], "val_loss"),
        (["label.price=regression", "publish={label: price, metric: rmse}", "train.metrics=[rmse]"], "val_price_rmse"),
    ],
)
def test_trials_are_compared_by_the_metric_of_the_gate_where_a_training_computes_it(overrides, column):
    assert chosen_by(loads(FILE, overrides).spec) == column


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ("{space: {model.witdh: [8]}}",
         "search.space.model.witdh is no argument of sparkdl.models.networks:TabularEnsemble: write width"),
        ("{space: {model.features: [8]}}", "search.space.model.features is what the pipeline itself gives"),
        ("{space: {train.start: [scratch, champion]}}", "search.space.train.start is nothing to search"),
        ("{space: {train.verbose: [0, 1]}}", "train.verbose is nothing to search, as it changes no weights"),
        ("{space: {train.num_proc: [1, 2]}}", "search.space.train.num_proc is nothing to search"),
        ("{method: random, trials: 2, space: {train.batch_size: {low: 0, high: 8}}}",
         "search.space.train.batch_size.low=0 is below 1"),
        ("{method: random, trials: 7, space: {train.epochs: [1, 2], model.width: [8, 16, 32]}}",
         "search.trials=7, and the space has no more than 6 settings"),
        ("{method: random, trials: 1001, space: {train.learning_rate: {low: 0.1, high: 1}}}",
         "search.trials makes 1001 trials, and 1000 is the most"),
        ("{slots: 1, space: {train.epochs: [1]}}", "search.slots=1 has no room for one trial, train.num_proc=2"),
        ("{method: halving, space: {model.width: [8, 16]}}",
         "search.trials is missing: say how many settings halving draws"),
        ("{method: halving, trials: 1, space: {train.epochs: [2]}}",
         "search.space.train.epochs is what halving itself varies: leave it out, and set train.epochs"),
        ("{method: halving, trials: 2, reduction: 1, space: {model.width: [8, 16]}}", "search.reduction=1 is below 2"),
        ("{method: random, trials: 2, min_epochs: 2, space: {model.width: [8, 16]}}",
         "search.min_epochs=2 is for method 'halving', and method is 'random': leave it out"),
        ("{method: asha, trials: 2, space: {model.width: [8, 16]}}", "search.method='asha'"),
    ],
)  # fmt: skip
def test_a_search_that_cannot_be_is_refused_with_its_line(search, said):
    with pytest.raises(PipelineFileError) as refused:
        pipeline(text=f"{FILE}train: {{num_proc: 2}}\nsearch: {search}\n")
    assert len(refused.value.problems) == 1
    assert said in refused.value.problems[0]
    assert refused.value.problems[0].startswith("pipeline.yaml:8")


def test_halving_needs_epochs_to_stop_early_and_tpe_needs_optuna(monkeypatch):
    search = "search={method: halving, trials: 2, min_epochs: 3, space: {model.width: [8, 16]}}"
    with pytest.raises(PipelineFileError, match=r"search\.min_epochs=3, and train.epochs=3: there is nothing to stop"):
        pipeline(search, "train.epochs=3")
    assert len(settings(search, "train.epochs=4")) == 2
    monkeypatch.setattr("sparkdl.pipeline.trials.find_spec", lambda name: None)
    with pytest.raises(PipelineFileError, match=r"search\.method=tpe draws by Optuna, which is not installed: pip"):
        pipeline("search={method: tpe, trials: 2, space: {model.width: [8, 16]}}")


def test_settings_that_contradict_each_other_are_refused_although_each_is_sound(tmp_path):
    (tmp_path / "cellar.py").write_text("def make(model): ...\n")
    space = "{train.optimizer: [adam, 'cellar:make'], train.learning_rate: [0.1]}"
    text = f"{FILE}code: {tmp_path}\nsearch: {{space: {space}}}\n"
    with pytest.raises(PipelineFileError, match=r"search.space holds train.optimizer=cellar:make.*leave it out"):
        pipeline(text=text)


def test_arguments_that_a_factory_does_not_take_are_refused_before_it_is_imported(tmp_path):
    code = "raise ValueError('imported')\n"
    code += "def network(features, width: int = 8, *, gates=2) -> Module: ...\ndef any(**given) -> Module: ...\n"
    (tmp_path / "cellar.py").write_text(code)
    made = f"{FILE}code: {tmp_path}\nmodel: {{factory: 'cellar:network', arguments: {{gate: 3}}}}\n"
    with pytest.raises(
        PipelineFileError, match=r"model\.arguments\.gate is no argument of cellar:network: write gates"
    ):
        pipeline(text=made)
    pipeline(text=made.replace("gate:", "gates:"))
    pipeline(text=made.replace("cellar:network", "cellar:any"))
    space = "search={method: random, trials: 3, space: {model.width: {low: 1, high: 50}}}"
    spec = pipeline(space, text=made.replace("gate:", "gates:")).spec
    with importable(spec.code):
        whole = trials_of(spec)
    assert all(type(one["model.width"]) is int for one in whole)


def test_the_first_argument_of_a_constructor_is_none_that_a_file_can_give_whatever_its_name_is(tmp_path):
    (tmp_path / "cellar.py").write_text("class Network:\n    def __init__(this, features, width=8): ...\n")
    made = f"{FILE}code: {tmp_path}\nmodel: {{factory: 'cellar:Network', arguments: {{this: 3}}}}\n"
    with pytest.raises(PipelineFileError, match=r"model\.arguments\.this is no argument of cellar:Network"):
        pipeline(text=made)
