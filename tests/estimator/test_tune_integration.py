"""Searches on real rows: trials share shards, stop early, and go on after an interrupt."""

from __future__ import annotations

import functools

import pytest
import torch
from pyspark.sql import functions as F
from torch import nn

from sparkdl import Range, TorchEstimator, tune
from sparkdl.errors import ConfigError
from sparkdl.estimator.fit import Fit


@pytest.fixture(scope="module")
def rows(spark):
    columns = [F.randn(seed).cast("float").alias(name) for seed, name in enumerate("ab")]
    frame = spark.range(0, 300, 1, 2).select(*columns)
    return frame.withColumn("y", (F.col("a") - 2 * F.col("b")).cast("float")).cache()


def linear(lr, epochs=4, store=None, **params):
    given = {"feature_cols": ["a", "b"], "label_cols": ["y"], "validation": 0.2, "batch_size": 32, "verbose": 0}
    given |= {"model": nn.Linear(2, 1), "optimizer": functools.partial(torch.optim.SGD, lr=lr), "loss": nn.MSELoss()}
    return TorchEstimator(epochs=epochs, store=store, **given, **params)


@pytest.fixture
def trained(monkeypatch):
    """The runs that were trained, with their epochs, and how many sets were written."""
    jobs, sets, train, write = [], [], Fit.train, Fit.write

    def counted(fit, prepared):
        jobs.append((int(fit.spec.run_id.rpartition("-")[2]), fit.spec.train.epochs))
        return train(fit, prepared)

    monkeypatch.setattr(Fit, "train", counted)
    monkeypatch.setattr(Fit, "write", lambda *given: sets.append(1) or write(*given))
    return jobs, sets


def test_trials_share_their_shards_and_the_best_of_a_grid_is_returned(rows, trained):
    jobs, sets = trained
    search = tune(linear, rows, {"lr": [1e-5, 0.1, 1e30]}, method="grid")
    assert sorted(jobs) == [(0, 4), (1, 4), (2, 4)]
    assert len(sets) == 1
    assert search.settings == {"lr": 0.1}
    table = search.table()
    assert list(table.columns) == ["trial", "lr", "epochs", "val_loss", "seconds", "failed"]
    assert "the loss of rank 0 is inf" in table["failed"][2]
    assert search.best.value == pytest.approx(search.model.summary.metrics["val_loss"])
    predicted = search.model.transform(rows).select(F.avg(F.abs(F.col("y") - F.col("y__output")))).first()[0]
    assert predicted < 0.1


def test_a_search_without_a_name_leaves_nothing_in_the_store(rows, tmp_path):
    search = tune(functools.partial(linear, store=str(tmp_path)), rows, {"lr": [0.01, 0.1]}, method="grid")
    assert search.settings == {"lr": 0.1}
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_a_search_that_was_interrupted_goes_on_where_it_was(rows, trained, tmp_path):
    jobs, _ = trained
    space = {"lr": Range(1e-5, 0.2, log=True)}
    options = {"method": "halving", "trials": 6, "reduction": 2, "slots": 1, "seed": 3}
    undisturbed = tune(functools.partial(linear, store=str(tmp_path / "a")), rows, space, run_id="whole", **options)
    wanted, made = list(jobs), []
    jobs.clear()

    def interrupted(**settings):
        made.append(1)
        if len(made) == 6:
            raise KeyboardInterrupt
        return linear(store=str(tmp_path / "b"), **settings)

    with pytest.raises(KeyboardInterrupt):
        tune(interrupted, rows, space, run_id="part", **options)
    assert 2 < len(jobs) < len(wanted)
    resumed = tune(functools.partial(linear, store=str(tmp_path / "b")), rows, space, run_id="part", **options)
    assert jobs[: len(wanted)] == wanted  # each once, in the same order
    assert resumed.settings == undisturbed.settings
    assert [trial.values for trial in resumed.trials] == [trial.values for trial in undisturbed.trials]
    assert max(trial.epochs for trial in resumed.trials) == 4
    assert min(trial.epochs for trial in resumed.trials) == 1
    assert torch.equal(resumed.model.getModel().weight, undisturbed.model.getModel().weight)

    jobs.clear()
    again = tune(functools.partial(linear, store=str(tmp_path / "b")), rows, space, run_id="part", **options)
    assert len(jobs) == 1  # the best one's weights are read from its last checkpoint
    assert torch.equal(again.model.getModel().weight, undisturbed.model.getModel().weight)
    with pytest.raises(ConfigError, match=r"is looked at after \[1, 2, 3\] epochs, and the search whose trials lie in"):
        tune(functools.partial(linear, store=str(tmp_path / "b"), epochs=3), rows, space, run_id="part", **options)
    with pytest.raises(ConfigError, match="and the search whose trials lie in"):
        tune(functools.partial(linear, store=str(tmp_path / "b")), rows, space, run_id="part", **options | {"seed": 4})


@pytest.mark.slow
def test_settings_that_follow_earlier_ones_are_drawn_as_undisturbed_after_an_interrupt(rows, trained, tmp_path):
    jobs, _ = trained
    space, made = {"lr": Range(1e-5, 0.2, log=True)}, []
    options = {"method": "tpe", "trials": 4, "slots": 1, "seed": 3}
    undisturbed = tune(functools.partial(linear, epochs=1, store=str(tmp_path / "a")), rows, space, **options)
    jobs.clear()

    def interrupted(**settings):
        made.append(1)
        if len(made) == 4:
            raise KeyboardInterrupt
        return linear(store=str(tmp_path / "b"), epochs=1, **settings)

    with pytest.raises(KeyboardInterrupt):
        tune(interrupted, rows, space, run_id="part", **options)
    make = functools.partial(linear, epochs=1, store=str(tmp_path / "b"))
    resumed = tune(make, rows, space, run_id="part", **options)
    assert [number for number, _ in jobs[:4]] == [0, 1, 2, 3]
    assert [trial.settings for trial in resumed.trials] == [trial.settings for trial in undisturbed.trials]
    assert [trial.values for trial in resumed.trials] == [trial.values for trial in undisturbed.trials]


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (lambda lr: lr, {}, "make returned a int: return a TorchEstimator"),
        (lambda lr: linear(lr), {"metric": "val_auc"}, "metric='val_auc' is none of this training: choose of"),
        (lambda lr: linear(lr), {"run_id": "kept"}, "and none is set: set store"),
        (lambda lr: linear(lr, shuffle=lr > 1), {}, "asks for other rows, columns or store than trial 0"),
        (lambda lr: linear(1e30), {}, "all 2 trials failed, the first (lr=1): "),
    ],
)
def test_a_search_that_cannot_be_is_one_sentence(rows, make, options, sentence):
    with pytest.raises(ConfigError) as refused:
        tune(make, rows, {"lr": [1, 2]}, method="grid", **options)
    assert sentence in str(refused.value)
