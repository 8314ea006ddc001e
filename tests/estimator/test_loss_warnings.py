"""A fit says where its losses look wrong: no better than guessing, or far lower on the rows that trained."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from sparkdl.columns.statistics import RunningStats
from sparkdl.estimator.summary import guess_loss, loss_warnings
from sparkdl.shards.manifest import Manifest

RANDOM = np.random.default_rng(0)
NUMBERS = RANDOM.normal(5, 2, 2000), RANDOM.normal(6, 3, 1000)
CLASSES = (RANDOM.random(2000) < 0.2).astype(float), (RANDOM.random(1000) < 0.3).astype(float)


def stats(values):
    running = RunningStats()
    running.add(np.asarray(values))
    return running.result()


def of_torch(loss, outputs, labels):
    return float(loss(torch.as_tensor(outputs, dtype=torch.float64), torch.as_tensor(labels)))


@pytest.mark.parametrize("loss", [nn.MSELoss(), functional.mse_loss])
def test_the_mean_costs_what_torch_says(loss):
    train, rows = NUMBERS
    words, cost = guess_loss(loss, stats(train), stats(rows))
    assert cost == pytest.approx(of_torch(loss, np.full(1000, train.mean()), rows))
    assert words.startswith(f"always the mean of the training labels, {train.mean():.4g}")


def test_the_share_of_two_classes_costs_what_torch_says_for_one_output_and_for_two():
    train, rows = CLASSES
    share = train.mean()
    wanted = of_torch(nn.BCELoss(), np.full(1000, share), rows)
    for loss in (nn.BCEWithLogitsLoss(), nn.BCELoss(), nn.CrossEntropyLoss()):
        assert guess_loss(loss, stats(train), stats(rows))[1] == pytest.approx(wanted)


def test_what_statistics_do_not_know_exactly_is_no_less_than_the_guess_costs():
    train, rows = NUMBERS
    assert guess_loss(nn.L1Loss(), stats(train), stats(rows))[1] >= np.abs(rows - train.mean()).mean()
    labels = RANDOM.integers(0, 4, 1000)
    assert guess_loss(nn.CrossEntropyLoss(), stats(labels), stats(labels)) == (
        "all 4 classes alike",
        math.log(4),
    )


class Own(nn.MSELoss):
    """A loss of the user's own, whatever it inherits."""


@pytest.mark.parametrize(
    "loss",
    [
        Own(),
        lambda output, label: (output - label).abs().mean(),
        nn.MSELoss(reduction="sum"),
        functools.partial(functional.mse_loss, reduction="sum"),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(ignore_index=0),
        nn.HuberLoss(),
    ],
)
def test_of_losses_that_statistics_cannot_judge_nothing_is_said(loss):
    assert guess_loss(loss, stats(CLASSES[0]), stats(CLASSES[1])) is None
    assert warnings(loss, [(0.1, 99.0)] * 2) == []


def warnings(loss, losses, rows=1000, weighted=False, validation=True, step=100, labels=CLASSES):
    epochs = [
        {"epoch": n, "step": step * (n + 1), "loss": seen, **({"val_loss": held} if validation else {})}
        for n, (seen, held) in enumerate(losses)
    ]
    sets = [
        Manifest(rows=count, bytes=0, shards=(), tensors=(), statistics={"y": stats(values[:count])})
        for count, values in ((2000, labels[0]), (rows, labels[1]))
    ]
    return loss_warnings(epochs, epochs[-1], {"y": loss}, sets[0], sets[1] if validation else None, weighted=weighted)


BCE = nn.BCEWithLogitsLoss()
GUESS = guess_loss(BCE, stats(CLASSES[0]), stats(CLASSES[1]))[1]


def test_a_loss_that_does_not_beat_the_guess_is_told_with_both_figures():
    (said,) = warnings(BCE, [(0.6, GUESS * 1.02)])
    assert said.startswith(
        f"beats the baseline: no. val_loss is {GUESS * 1.02:.4g} over 1,000 rows, and always the mean"
    )
    assert f"costs {GUESS:.4g}" in said
    assert warnings(BCE, [(GUESS, GUESS)])  # a network that learned nothing but the mean
    assert warnings(BCE, [(0.5, GUESS * 0.97)]) == []


def test_a_training_loss_far_below_from_the_first_epoch_on_is_named():
    said = warnings(BCE, [(0.30, 0.58), (0.25, 0.6)])[0]
    assert said.startswith(
        "the training loss lies far below the validation loss from the first epoch on (0.3 against 0.58)"
    )
    assert all(word in said for word in ("order", "leak", "by heart"))
    assert warnings(BCE, [(0.55, 0.56), (0.25, 0.56)]) == []  # which came later: early stopping is for that
    assert warnings(BCE, [(0.01, 0.02), (0.005, 0.01)]) == []  # both far below a guess's
    assert warnings(BCE, [(0.30, 0.58), (0.52, 0.56)]) == []


def test_nothing_is_said_where_it_cannot_be_known():
    bad = [(0.1, 5.0), (0.1, 5.0)]
    assert len(warnings(BCE, bad)) == 2
    assert warnings(BCE, bad, rows=100) == []
    assert len(warnings(BCE, bad, step=5)) == 1  # batch normalization has hardly begun: the gap may be its
    assert len(warnings(BCE, bad, weighted=True)) == 1  # the statistics know nothing of weights
    assert warnings(BCE, [(9.0, 0)], validation=False) == []  # one epoch's mean begins at random weights
    assert len(warnings(BCE, [(9.0, 0), (0.7, 0)], validation=False)) == 1
    assert warnings(nn.MSELoss(), [(0.0, 0.0)], labels=(np.ones(2000), np.ones(1000))) == []  # nothing to beat
    assert warnings(BCE, [(math.nan, math.nan)]) == []
