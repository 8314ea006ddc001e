"""Sections that contradict each other are told with the place of one and the values of both."""

# ruff: noqa: E501 -- a table reads by the line

from __future__ import annotations

from pathlib import Path

import pytest

from sparkdl.errors import PipelineFileError
from sparkdl.pipeline.file import load, loads

FILES = Path(__file__).parent / "files"

TESTED = "split={by: hash, train: 0.7, test: 0.1}"
MINIMAL = [
    (["search={space: {train.epochs: [1, 2]}}"], "search chooses by the rows of split.validate, and the gate would judge"),
    (["split={by: time}"], "split.by='time' needs source.time or source.partition"),
    (["split={by: hash, train: 0.9, validate: 0.2}"], "split has train=0.9, validate=0.2 and score=0.1, together 1.2"),
    (["split={by: hash, test: 0.1}"], "split has train=0.8, validate=0.1, test=0.1 and score=0.1, together 1.1"),
    (["split={by: column, column: f, train: [1], validate: [2], test: [2]}"], "split.test holds 2, which validate holds"),
    (["split={by: hash, train: -0.1}"], "split.train=-0.1 is not above 0"),
    (["split={by: column, column: fold, train: [1, 2], validate: [2]}"], "split.validate holds 2, which train holds, too"),
    (["split={by: column, column: fold, train: [1], validate: [2], score: [1]}"], "split.score holds 1, which train"),
    (["split={by: column, column: quality, train: [1], validate: [2]}"], "split.column='quality' is the label, too"),
    (["split={by: hash, group: [a, quality]}"], "split.group[1]='quality' is the label, too: a part would lack whole labels"),
    (
        ["split={by: hash, copies: spread, group: [a]}"],
        "split.copies='spread' is for rows without a key, and there is split.group: leave one of them out",
    ),
    (["split={by: hash, score: 0}", "score.keep=[a]"], "score has nothing to score, since split.score is empty"),
    (["split={by: tiem}"], "split.by='tiem' is not known: write time"),
    (["features.quality=number"], "features.quality is the label 'quality', too, so the model would read the answer"),
    (["features.x={type: number, column: quality}"], "features.x is the label 'quality', too"),
    (["source.key=alcohol"], "features.alcohol is source.key='alcohol', which tells rows apart only"),
    (["source.key=[a, quality]"], "label.quality is in source.key=['a', 'quality'], too"),
    (["expect={duplicate: quality > 0}"], "expect.duplicate is what runs say of rows of their own accord: give it another name"),
    (["weight=quality"], "weight='quality' is the label, too"),
    (["weight=alcohol"], "weight='alcohol' is a feature, too"),
    (["source.time=day", "source.partition=day"], "source.partition='day' and time='day' both say when"),
    (["publish.metric=pinball"], "publish.metric='pinball' cannot be computed of a label of type 'regression': choose"),
    (["publish.metric=auc"], "publish.metric='auc' cannot be computed of a label of type 'regression': choose one of mse"),
    (["publish.gate.floors=[rmse <= 3, auc >= 0.7]"], "publish.gate.floors[1]='auc >= 0.7' cannot be computed"),
    (["publish.gate.floors=rmse >= 3"], "publish.gate.floors: the floor 'rmse >= 3' refuses good models: rmse is better when lower, write <="),
    (["publish.metric=rmse", "publish.direction=max"], "publish.direction='max' is wrong for metric 'rmse': write min"),
    (["publish.label=qualty"], "publish.label='qualty' is no label: write quality"),
    (["publish.gate.confidence=0.5"], "publish.gate.confidence=0.5 is not above 0.5"),
    (["publish.gate.rule=not_worse"], "publish.gate.margin=0 with rule 'not_worse' can never be shown"),
    (["publish.metric=loss"], "publish.metric='loss' is not known"),
    (["publish.gate.over=window"], "publish.gate.over='window' needs windows"),
    (["publish.gate.over=key"], "publish.gate.over='key' needs source.key"),
    (["publish.registry=a", "places.registry=b"], "publish.registry='a' and places.registry='b' both say"),
    (["train.metrics=[rmse, auc]"], "train.metrics[1]='auc' cannot be computed of regression labels"),
    (["train.metrics=rsme"], "train.metrics: there is no metric 'rsme': did you mean 'rmse'?"),
    (["train={optimizer: 'a:b', learning_rate: 0.1}"], "train.learning_rate=0.1 is not for a:b, which sets its own"),
    (["label.quality.weight=0.5"], "label.quality.weight=0.5 has no meaning for one label"),
    (["drift.ignore=[alcool]"], "drift.ignore[0]='alcool' is no feature: write alcohol"),
    (["drift={after: 3, of: 2}"], "drift.after=3 windows cannot be among the last of=2"),
    ([TESTED, "search.space.epochs=[1]"], "search.space.epochs is no parameter: write train.epochs"),
    ([TESTED, "search.space.train.epohcs=[1]"], "search.space.train.epohcs is no parameter: write train.epochs"),
    ([TESTED, "search.space.train.epochs=[1, 0]"], "search.space.train.epochs[1]=0 is below 1"),
    ([TESTED, "search.space.train.backend=[torch, tcp]"], "search.space.train.backend[1]='tcp' is not what train.backend takes"),
    (["search.space.train.epochs={low: 1, high: 3}"], "search.space.train.epochs is a range, and method is 'grid'"),
    ([TESTED, "search={method: random, trials: 2, space: {train.backend: {low: 1, high: 2}}}"], "search.space.train.backend is a"),
    (["search={space: {model.a: {low: 2, high: 1}}, method: random, trials: 2}"], "search.space.model.a.high=1.0 is not"),
    (["search={space: {model.a: []}}"], "search.space.model.a is empty"),
    (["search={space: {model.a: [1]}, trials: 3}"], "search.trials=3 is for methods that draw"),
    (["expect.x={check: a > 0, above: 0.5}"], "expect.x.above=0.5 has no meaning with action 'quarantine'"),
    (["transform={}"], "transform has neither function nor sql"),
    (["transform={function: 'a:b', sql: SELECT 1}"], "transform has both function and sql"),
    (["transform={sql: SELECT 1, arguments: {a: 1}}"], "transform.arguments={'a': 1} are for a function"),
    (["label.quality.positive=1"], "label.quality.positive=1 belongs to type 'binary', and type is 'regression'"),
    (["label.quality={type: multiclass, classes: [a, b, a]}"], "label.quality.classes=['a', 'b', 'a'] are not three"),
    (["features.numbers={type: ids}"], "features.numbers: the feature 'numbers' has the name of the input"),
    (["features.colour={type: category, buckets: 9, min_count: 3}"], "features.colour.min_count=3 bounds a vocabulary"),
    (["notify={}"], "notify has neither command nor webhook"),
    (["notify={webhook: 'ftp://x'}"], "notify.webhook is no http or https address, or has"),
    (["notify={webhook: 'https://user:word@host/x'}"], "notify.webhook is no http or https address, or has a user"),
    (["notify={webhook: 'https://[host/x'}"], "notify.webhook is no http or https address"),
    (["notify={webhook: 'https://host:port/x'}"], "notify.webhook is no http or https address"),
    (["notify={webhook: 'https:///x'}"], "notify.webhook is no http or https address"),
    (['notify={command: "a \'b"}'], "notify.command=\"a 'b\" has a quotation mark that is not closed"),
    (["publish.mlflow='http://me:word@host:5000'"], "publish.mlflow holds a user or a password"),
    (["publish.mlflow='postgresql://me:wo/rd@host/db'"], "publish.mlflow holds a user or a password"),
    (["publish.mlflow='postgresql://me:wo#r?d@host/db'"], "publish.mlflow holds a user or a password"),
    (["publish.mlflow='mysql://host/db?user=me&password=word'"], "publish.mlflow holds a user or a password"),
    (["source.key=run_id"], "source.key[0]='run_id' is a column that predictions have of their own: rename it where it is read, with kind: sql and SELECT `run_id` AS `run_id_`, ..."),
    (["source.key=[a, Model_Version]", "score.window=all", "split={by: hash, score: 0}"], "source.key[1]='Model_Version' is a column that"),
    (["score.keep=[a, scored_at]"], "score.keep[1]='scored_at' is a column that predictions have of their own: rename the column in transform, such as SELECT *, `scored_at` AS `scored_at_` FROM source, or leave it out"),
    (["score.keep=prediction"], "score.keep[0]='prediction' is a column that predictions have"),
    (["score.keep=probability", "label.quality=binary"], "score.keep[0]='probability' is a column that predictions have"),
    (["score.keep=probabilities", "label.quality=multiclass"], "score.keep[0]='probabilities' is a column that predictions"),
    (["source.key=tax_prediction", "label.tax=regression"], "source.key[0]='tax_prediction' is a column that predictions"),
    (["label={categories: regression}"], "label.categories is the name of an input, which the feature 'colour' makes: rename the column in transform, such as SELECT *, `categories` AS `categories_` FROM source"),
    (["label={numbers: binary}"], "label.numbers is the name of an input, which the feature 'alcohol' makes"),
    (["features.quality={type: text, column: review}"], "label.quality is the name of an input, which the feature 'quality' makes"),
    (["weight=categories"], "weight='categories' is the name of an input, which the feature 'colour' makes: rename the column"),
    (["score.target=sales.predicted"], "score.target='sales.predicted' may be a table without its catalog, or a folder"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "sentence"), MINIMAL, ids=[" ".join(said) for said, _ in MINIMAL])
def test_a_contradiction_is_one_sentence(overrides, sentence):
    with pytest.raises(PipelineFileError) as caught:
        load(FILES / "minimal.yaml", overrides)
    (told,) = caught.value.problems
    assert f": {sentence}" in told


@pytest.mark.parametrize(
    "overrides",
    [
        ["score.keep=[probability, tax_prediction]"],  # of a regression there is none
        ["score.keep=prediction", "label.tax=regression"],
        ["source.key=run_id", "split={by: hash, score: 0}"],  # nothing is predicted
        ["label={categories: regression}", "features={alcohol: number}"],
        ["features.quality_={type: number, column: length}"],
    ],
)
def test_names_that_nothing_else_has_are_taken(overrides):
    assert load(FILES / "minimal.yaml", overrides).spec.label


IN_TIME = [
    (["split.validate=36 hours"], "split.validate='36 hours' is not a multiple of source.every='day'"),
    (["split.train=-3 days"], "split.train='-3 days' is not of the form that is wanted: write it like '14 days'"),
    (["split.score=0 days"], "split.score='0 days' is not of the form"),
    (["split.validate=all"], "split.validate='all' is not of the form"),
    (['split.validate="14 days\\n"'], r"split.validate='14 days\n' is not of the form"),
    (["source.table=crm.customers"], "source.table='crm.customers' may be a table without its catalog, or a folder"),
    (["source.version=-1"], "source.version=-1 is below 0"),
]


@pytest.mark.parametrize(("overrides", "sentence"), IN_TIME, ids=[" ".join(said) for said, _ in IN_TIME])
def test_an_impossible_window_is_one_sentence(overrides, sentence):
    with pytest.raises(PipelineFileError) as caught:
        load(FILES / "churn.yaml", overrides, {})
    (told,) = caught.value.problems
    assert f": {sentence}" in told


def test_a_removed_time_column_is_told_where_the_split_needs_it():
    text = (FILES / "churn.yaml").read_text().replace("  time: snapshot_day", "  # time: snapshot_day")
    with pytest.raises(PipelineFileError) as caught:
        loads(text, (), {}, name="churn.yaml")
    line = next(number for number, one in enumerate(text.splitlines(), 1) if one.startswith("  by: time"))
    assert caught.value.problems[0].startswith(f"churn.yaml:{line}: split.by='time' needs source.time")


def test_several_labels_are_judged_by_the_first_or_by_the_one_that_is_named():
    several = ["label.bought=binary", "label.price=regression"]
    load(FILES / "minimal.yaml", [*several, "publish.metric=rmse"])
    load(FILES / "minimal.yaml", [*several, "publish.metric=auc", "publish.label=bought"])
    with pytest.raises(PipelineFileError, match=r"label of type 'regression': .* or say publish\.label, one of"):
        load(FILES / "minimal.yaml", [*several, "publish.metric=auc"])


def test_a_gate_over_windows_holds_out_as_many_as_it_needs():
    daily = ["source.time=day", "split={by: time, validate: 5 days}", "publish.gate.over=window"]
    load(FILES / "minimal.yaml", daily)
    with pytest.raises(PipelineFileError, match=r"needs 5 windows .* split\.validate='1 day' holds out 1"):
        load(FILES / "minimal.yaml", [daily[0], daily[2]])
    with pytest.raises(PipelineFileError, match=r"needs 5 windows .* split\.validate='4 days' holds out 4"):
        load(FILES / "minimal.yaml", [*daily, "split.validate=4 days"])
    load(FILES / "minimal.yaml", [*daily, "split.validate=1 day", "split.test=5 days"])
    with pytest.raises(PipelineFileError, match=r"needs 5 windows .* split\.test='4 days' holds out 4"):
        load(FILES / "minimal.yaml", [*daily, "split.test=4 days"])
    with pytest.raises(PipelineFileError, match=r"needs 7 windows .* split\.validate='5 days' holds out 5"):
        load(FILES / "minimal.yaml", [*daily, "publish.gate.confidence=0.99"])
