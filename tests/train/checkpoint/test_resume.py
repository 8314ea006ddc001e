"""What a run makes of the checkpoints of a run before: go on, start from their weights, or refuse."""

from __future__ import annotations

import functools

import pytest
import torch
from train_helpers import Interrupted, RaiseAt, state_equal

from sparkdl.config import CheckpointConfig, TrainConfig
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.train.callbacks import Callback
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.checkpoint.identity import identity_of
from sparkdl.train.checkpoint.resume import check_start
from sparkdl.train.in_memory import TensorSource


class Start(Callback):
    """Keeps the weights before the first step."""

    def on_fit_start(self, run):
        self.weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        self.step, self.lr = run.step, run.lr


@pytest.fixture
def other():
    """Other rows than those of ``source``."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(70, 5, generator=generator)
    return lambda: TensorSource({"x": x, "y": 3 * x[:, 0]}, global_batch_rows=16)


@pytest.fixture
def fitted(task, train, tmp_path):
    """Fit in one folder, with an identity; keywords of checkpoints, then those of ``train``."""

    def run(rows, lr=1e-2, keep=None, folder="run", **settings):
        made = task(optimizer=functools.partial(torch.optim.Adam, lr=lr), dropout=0.3)
        identity = identity_of(made, TrainConfig(), {"rows": len(rows)})
        config = CheckpointConfig(uri=str(tmp_path / folder), **(keep or {}))
        return train(made, rows, checkpoints=Checkpointer(config, identity), **settings)

    return run


def steps(tmp_path):
    return Checkpointer(CheckpointConfig(uri=str(tmp_path / "run"))).steps()


def test_a_warm_start_takes_the_newest_weights_and_nothing_else(fitted, source, other, tmp_path):
    before = fitted(source(), epochs=3)
    with pytest.raises(ConfigError, match=r"^optimizer is .* start from its weights with resume=\"warm\", or"):
        fitted(other(), lr=0.02, epochs=3)
    start = Start()
    warm = fitted(other(), lr=0.02, keep={"resume": "warm"}, epochs=2, callbacks=[start])
    assert all(torch.equal(start.weights[name], tensor) for name, tensor in before.model.state_dict().items())
    assert (start.step, start.lr, warm.resumed_step) == (0, 0.02, None)
    assert (warm.epochs, warm.steps, warm.history.column("epoch")) == (2, 10, [0, 1])
    assert all(state["step"] == 10 for state in warm.optimizer.state_dict()["state"].values())
    assert steps(tmp_path)[-1] == 21 + 10  # newer than those it started from
    more = fitted(other(), lr=0.02, epochs=3)  # which goes on with the warm run, not with the one before
    assert (more.resumed_step, more.steps, len(more.history)) == (10, 15, 3)


@pytest.mark.parametrize("mode", ["warm", "never"])
def test_another_attempt_of_the_same_fit_goes_on_with_its_own_checkpoints(fitted, source, other, tmp_path, mode):
    for folder in ("run", "undisturbed") if mode == "warm" else ():
        fitted(source(), epochs=2, folder=folder)
    keep = {"resume": mode, "fit_id": "mine", "every_steps": 2}
    whole = fitted(other(), lr=0.02, keep=keep, epochs=3, folder="undisturbed")
    with pytest.raises(Interrupted):
        fitted(other(), lr=0.02, keep=keep, epochs=3, callbacks=[RaiseAt(9)])
    again = fitted(other(), lr=0.02, keep=keep, epochs=3)
    assert again.resumed_step == 8
    assert state_equal(again.model, whole.model)
    assert again.history.column("loss") == whole.history.column("loss")


def test_an_attempt_that_ended_before_its_first_checkpoint_starts_warm_again(fitted, source, other):
    before = fitted(source(), epochs=2)
    keep = {"resume": "warm", "fit_id": "mine"}
    with pytest.raises(Interrupted):
        fitted(other(), keep=keep, epochs=2, callbacks=[RaiseAt(2)])
    start = Start()
    fitted(other(), keep=keep, epochs=2, callbacks=[start])
    assert all(torch.equal(start.weights[name], tensor) for name, tensor in before.model.state_dict().items())
    start = Start()
    fitted(other(), keep=keep | {"fit_id": "another"}, epochs=1, callbacks=[start])  # another fit starts from it
    assert start.step == 0
    assert not torch.equal(start.weights["0.weight"], before.model.state_dict()["0.weight"])


def test_a_warm_run_ends_with_its_own_best_weights(fitted, source, other):
    fitted(source(), epochs=3)
    keep = {"resume": "warm", "fit_id": "mine", "keep_last": 50}
    settings = {"lr": 0.5, "early_stopping_patience": 2, "epochs": 9}  # so high a rate that it soon grows worse
    whole = fitted(other(), keep=keep, callbacks=[start := Start()], **settings)
    assert whole.stopped_early
    again = fitted(other(), keep=keep, **settings)
    assert again.resumed_step == whole.steps
    assert state_equal(again.model, whole.model)
    assert not torch.equal(start.weights["0.weight"], again.model.state_dict()["0.weight"])


def test_there_must_be_something_to_start_from_and_it_must_fit(fitted, source, tmp_path):
    def keeper(mode):
        return Checkpointer(CheckpointConfig(uri=str(tmp_path / "run"), resume=mode))

    message = r'^resume="warm" starts from the newest checkpoint, and .*run holds none: name a run that has'
    with pytest.raises(ConfigError, match=message):
        fitted(source(), keep={"resume": "warm"}, epochs=1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Dropout(), torch.nn.Linear(9, 1))
    with pytest.raises(ConfigError, match=message):
        check_start(keeper("warm"), model, 1)
    fitted(source(), epochs=1)
    with pytest.raises(CheckpointError, match=r"'0.weight' is \(8, 5\) in the checkpoint of step 7 and \(9, 5\) in"):
        check_start(keeper("warm"), model, 1)  # without a look at the tensors
    with pytest.raises(ConfigError, match=r'^resume="never", but .*run holds checkpoints up to step 7'):
        check_start(keeper("never"), model, 1)
    assert check_start(keeper("exact"), model, 1) == "exact"
    with pytest.raises(ConfigError, match=r"^resume='cold' is not one of"):
        keeper("cold")


def test_fewer_epochs_than_were_trained_are_refused_a_part_of_one_included(fitted, source):
    with pytest.raises(Interrupted):
        fitted(source(), keep={"every_steps": 2}, epochs=4, callbacks=[RaiseAt(17)])
    with pytest.raises(ConfigError, match=r"^epochs=2, and the run has trained 2 and a part of the next already"):
        fitted(source(), epochs=2)
    assert fitted(source(), epochs=3).resumed_step == 16


@pytest.mark.parametrize("restore_best", [False, True])
def test_a_run_that_was_killed_behind_its_last_step_ends_as_undisturbed(fitted, source, restore_best):
    """Its last epoch, of which ``max_steps`` left a part, is validated and compared; asked again, it says the same."""

    class KilledInValidation(Callback):
        def on_validation_end(self, run, metrics):
            if run.step == 10:
                raise Interrupted

    def run(folder, *callbacks):
        settings = {"epochs": 3, "max_steps": 10, "restore_best": restore_best, "callbacks": callbacks}
        return fitted(source(), lr=0.3, folder=folder, validation=source(), **settings)

    whole = run("undisturbed")
    assert whole.best_epoch == 0  # not that of the last weights
    with pytest.raises(Interrupted):
        run("killed", KilledInValidation())
    for folder in ("killed", "undisturbed"):
        again = run(folder)
        assert state_equal(whole.model, again.model)
        assert [{**row, "seconds": 0} for row in again.history.epochs] == [
            {**row, "seconds": 0} for row in whole.history.epochs
        ]
        assert {**again.metrics, "seconds": 0} == {**whole.metrics, "seconds": 0}
        assert (again.steps, again.stop_reason) == (10, "max_steps=10 is reached")
