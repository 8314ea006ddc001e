"""What follows from the number of training rows where ``train`` does not say, on however many ranks."""

from __future__ import annotations

import pytest

from sparkdl.pipeline.amounts import Amount
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.pipeline import Pipeline
from sparkdl.pipeline.plan import _recipe
from sparkdl.pipeline.recipe import accuracy_column, calibrates, recipe_of, smoothing_of, with_recipe
from sparkdl.pipeline.spec import Train
from sparkdl.pipeline.spec.training import RULES


@pytest.mark.parametrize(
    ("rows", "epochs", "batch"),
    [
        (1, 60, 16),
        (300, 60, 16),
        (1_200, 60, 32),
        (3_000, 34, 64),
        (8_000, 16, 64),
        (50_000, 12, 512),
        (10**8, 6, 512),
    ],
)
def test_epochs_and_batches_follow_from_the_number_of_training_rows(rows, epochs, batch):
    filled = with_recipe(Train(), rows, default_network=True, slots=1)
    assert (filled.epochs, filled.batch_size) == (epochs, batch)
    assert filled.warmup_steps < epochs * -(-rows // batch)
    assert recipe_of(Train(), filled).keys() == RULES.keys() - {"monitor"}


@pytest.mark.parametrize(("rows", "epochs"), [(1_200, 60), (8_000, 20), (30_000, 20), (50_000, 12)])
def test_several_classes_that_accuracy_judges_are_read_more_often_and_the_best_epoch_is_its(rows, epochs):
    filled = with_recipe(Train(), rows, default_network=True, accuracy="val_accuracy", slots=1)
    assert (filled.epochs, filled.monitor, filled.learning_rate) == (epochs, "val_accuracy", 0.016)
    assert recipe_of(Train(), filled).keys() == RULES.keys()


@pytest.mark.parametrize(
    ("train", "planned"),
    [
        ("epochs: 1, batch_size: 512", {"warmup_steps": "(a twentieth of all steps, 200 at most)"}),
        ("epochs: 1, batch_size: 512, num_proc: 2", {"warmup_steps": 14}),
        ("epochs: 1", {"warmup_steps": 27, "batch_size": "512 of all ranks together"}),
        ("batch_size: 512", {"epochs": f"({RULES['epochs']})", "warmup_steps": f"({RULES['warmup_steps']})"}),
    ],
)
def test_a_plan_says_the_rule_where_steps_follow_from_slots_that_it_does_not_know(train, planned):
    text = "source: {kind: parquet, path: x}\nfeatures: {x: number}\nlabel: {y: binary}\n"
    recipe = _recipe(loads(f"{text}train: {{{train}}}").spec, Amount(rows=269_573))
    names = ("epochs", "batch_size", "warmup_steps")
    assert {name: recipe[name] for name in names if name in recipe} == planned
    assert (recipe["decay"], recipe["learning_rate"]) == ("cosine", 0.005)


def test_each_name_is_overridden_alone_and_the_others_follow_from_it():
    train = Train(epochs=2, batch_size=10, early_stopping_patience=0, decay="none", num_proc=2)
    filled = with_recipe(train, 1_000, default_network=True, slots=4)
    assert filled.warmup_steps == 5  # a twentieth of 2 epochs of 50 steps
    assert recipe_of(train, filled) == {"warmup_steps": 5, "learning_rate": 0.005}
    assert filled.parameters().get("early_stopping_patience") is None


def test_all_ranks_together_take_one_batch_however_many_they_are():
    one, four = (with_recipe(Train(), 60_000, default_network=True, slots=slots) for slots in (1, 4))
    assert (one.batch_size, one.num_proc) == (512, 1)
    assert (four.batch_size, four.num_proc) == (128, 4)
    assert (one.epochs, one.warmup_steps) == (four.epochs, four.warmup_steps)


def test_a_rank_has_64_rows_of_a_step_unless_the_file_asks_for_more_ranks():
    def ranks(rows=1_000, slots=8, default_network=True, **train):
        return with_recipe(Train(**train), rows, default_network=default_network, slots=slots).num_proc

    assert (ranks(), ranks(rows=16_000), ranks(rows=60_000), ranks(rows=60_000, slots=64)) == (1, 2, 8, 8)
    assert (ranks(default_network=False), ranks(num_proc=3)) == (8, 3)
    assert (ranks(strategy="zero1"), ranks(min_num_proc=2), ranks(gradient_compression="fp16")) == (8, 8, 8)
    assert (ranks(slots=None), ranks(rows=16_000, slots=None), ranks(rows=16_000, slots=1)) == (1, None, 1)


def test_the_rate_is_the_default_networks_anothers_or_an_optimizers_own():
    rates = [
        with_recipe(Train(optimizer=optimizer), 100, default_network=default_network).learning_rate
        for optimizer, default_network in (("adamw", True), ("sgd", False), ("mine:optimizer", True))
    ]
    assert rates == [0.005, 0.001, None]


FILE = """
name: classes
source: {{kind: parquet, path: rows}}
features: {{x: number}}
label: {label}
split: {{by: hash, train: 0.7, validate: 0.2, score: 0.1}}
publish: {publish}
"""


@pytest.mark.parametrize(
    ("label", "publish", "column", "smoothing", "calibrated"),
    [
        ("{kind: multiclass}", "{name: a}", "val_accuracy", 0.1, True),
        ("{kind: {type: multiclass, loss: log_loss}}", "{name: a}", "val_accuracy", 0.1, True),
        ("{kind: {type: multiclass, smoothing: 0}}", "{name: a}", "val_accuracy", 0.0, False),
        ("{kind: {type: multiclass, calibrate: none}}", "{name: a}", "val_accuracy", 0.1, False),
        ("{kind: {type: multiclass, smoothing: 0.2}}", "{name: a, metric: log_loss}", None, 0.2, True),
        ("{kind: multiclass}", "{name: a, metric: log_loss}", None, 0.0, False),
        ("{kind: {type: multiclass, loss: 'operator:sub'}}", "{name: a}", None, 0.0, False),
        ("{kind: binary}", "{name: a}", None, 0.0, False),
        ("{kind: {type: binary, calibrate: temperature}}", "{name: a}", None, 0.0, True),
        ("{kind: regression}", "{name: a}", None, 0.0, False),
        ("{kind: multiclass, size: regression}", "{name: a, label: kind}", None, 0.0, False),
    ],
)
def test_labels_are_smoothed_and_probabilities_calibrated_where_accuracy_judges_several_classes(
    tmp_path, label, publish, column, smoothing, calibrated
):
    (tmp_path / "p.yaml").write_text(FILE.format(label=label, publish=publish))
    spec = Pipeline.load(str(tmp_path / "p.yaml")).spec
    assert accuracy_column(spec) == column
    assert (smoothing_of(spec, "kind"), calibrates(spec, "kind")) == (smoothing, calibrated)
