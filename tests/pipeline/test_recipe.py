"""What follows from the number of training rows where ``train`` does not say, on however many ranks."""

from __future__ import annotations

import pytest

from sparkdl.pipeline.recipe import recipe_of, with_recipe
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
        (10**8, 10, 512),
    ],
)
def test_epochs_and_batches_follow_from_the_number_of_training_rows(rows, epochs, batch):
    filled = with_recipe(Train(), rows, 10, default_network=True, slots=1)
    assert (filled.epochs, filled.batch_size) == (epochs, batch)
    assert filled.warmup_steps < epochs * -(-rows // batch)
    assert recipe_of(Train(), filled).keys() == RULES.keys()


def test_each_name_is_overridden_alone_and_the_others_follow_from_it():
    train = Train(epochs=2, batch_size=10, early_stopping_patience=0, decay="none", num_proc=2)
    filled = with_recipe(train, 1_000, 10, default_network=True, slots=4)
    assert filled.warmup_steps == 5  # a twentieth of 2 epochs of 50 steps
    assert recipe_of(train, filled) == {"warmup_steps": 5, "learning_rate": 0.005}
    assert filled.parameters().get("early_stopping_patience") is None


def test_all_ranks_together_take_one_batch_however_many_they_are():
    one, four = (with_recipe(Train(), 60_000, 10, default_network=True, slots=slots) for slots in (1, 4))
    assert (one.batch_size, one.num_proc) == (512, 1)
    assert (four.batch_size, four.num_proc) == (128, 4)
    assert (one.epochs, one.warmup_steps) == (four.epochs, four.warmup_steps)


def test_few_rows_are_trained_on_by_one_rank_unless_the_file_asks_for_more():
    def ranks(rows=1_000, features=10, default_network=True, **train):
        return with_recipe(Train(**train), rows, features, default_network=default_network, slots=8).num_proc

    assert (ranks(), ranks(rows=50_000), ranks(default_network=False), ranks(num_proc=3)) == (1, 8, 8, 3)
    assert (ranks(rows=10_000, features=199), ranks(rows=10_000, features=200)) == (1, 8)
    assert (ranks(strategy="zero1"), ranks(min_num_proc=2), ranks(gradient_compression="fp16")) == (8, 8, 8)


def test_the_rate_is_the_default_networks_anothers_or_an_optimizers_own():
    rates = [
        with_recipe(Train(optimizer=optimizer), 100, 10, default_network=default_network).learning_rate
        for optimizer, default_network in (("adamw", True), ("sgd", False), ("mine:optimizer", True))
    ]
    assert rates == [0.005, 0.001, None]
