import functools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from sparkdl.config import CheckpointConfig, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.checkpoint.identity import described, identity_of


def squares(output, label):
    return (output - label).square().mean()


def powers(power):
    return lambda output, label: ((output - label) ** power).mean()


def parts(**changes):
    model = changes.pop("model", None) or torch.nn.Sequential(torch.nn.Linear(5, 1))
    lr = changes.pop("lr", 0.1)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=lr), "loss": squares} | changes


CHANGES = {
    "model": {"model": torch.nn.Sequential(torch.nn.Linear(5, 1), torch.nn.Tanh())},
    "optimizer": {"lr": 0.2},
    "loss": {"loss": powers(4)},
    "scheduler": {"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 2)},
}


@pytest.mark.parametrize(
    ("task_changes", "settings", "message"),
    [(changes, {}, f"^{name} is ") for name, changes in CHANGES.items()]
    + [
        ({}, {"seed": 3}, "^seed is 3, and the run whose checkpoints lie in .* had 0: go on with what it had"),
        ({}, {"max_grad_norm": 1.0}, "^max_grad_norm is 1.0, and .* had None"),
        ({}, {"rows": 99}, "^training data is 99, and .* had 16"),
        ({}, {"epochs": 1}, "^epochs=1, and the run has trained 2 already"),
    ],
)
def test_a_run_goes_on_only_as_what_it_was_and_says_what_differs(
    task, train, source, tmp_path, task_changes, settings, message
):
    def fitted(changes, rows=16, epochs=2, **config):
        made = task(**parts(**changes))
        identity = identity_of(made, TrainConfig(epochs=epochs, **config), {"training data": rows})
        keeper = Checkpointer(CheckpointConfig(uri=str(tmp_path / "run")), identity)
        return train(made, source(), checkpoints=keeper, epochs=epochs, **config)

    fitted({})
    assert fitted({}, epochs=3).resumed_step == 14  # longer is the same run
    fitted_epochs = {"epochs": 3} | settings
    message = message.replace("trained 2", "trained 3")
    with pytest.raises(ConfigError, match=message):
        fitted(task_changes, **fitted_epochs)


def test_the_same_things_made_twice_are_described_alike():
    def made(weight=1.0):
        model = torch.nn.Linear(2, 3)
        optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}])
        weights = torch.tensor([1.0, weight, 1.0])
        from sparkdl.train.task import Task

        loss = functools.partial(torch.nn.functional.cross_entropy, weight=weights)
        return identity_of(Task(model=model, optimizer=optimizer, loss=loss), TrainConfig(), {"rows": powers(2)})

    assert made() == made()
    assert {name for name, text in made(2.0).items() if text != made()[name]} == {"loss"}


def test_class_weights_of_a_loss_count():
    def text(weight):
        return described(torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, weight])))

    assert text(1.0) == text(1.0) != text(2.0)


SHARE = 0.5
CALLS = 0


def share(output, label):
    global CALLS
    CALLS += 1
    return SHARE * (output - label).abs().mean()


def limited(limit):
    def loss(output, label, *, limit=limit):
        return (output - label).abs().clamp(max=limit).mean()

    return loss


def test_a_default_of_a_keyword_alone_counts():
    assert described(limited(1.0)) == described(limited(1.0)) != described(limited(5.0))


def test_a_number_of_the_module_counts_that_a_function_reads_and_no_counter_that_it_sets(monkeypatch):
    before = described(share)
    share(torch.ones(1), torch.ones(1))
    assert described(share) == before
    monkeypatch.setitem(globals(), "SHARE", 0.25)
    assert described(share) != before


def test_what_a_callable_object_does_counts():
    def loss_of(call):
        return type("Loss", (), {"__call__": call})()

    absolute = lambda self, output, label: (output - label).abs().mean()  # noqa: E731
    square = lambda self, output, label: (output - label).square().mean()  # noqa: E731
    assert described(loss_of(absolute)) == described(loss_of(absolute)) != described(loss_of(square))


@pytest.mark.slow
def test_a_set_is_described_alike_in_every_process():
    """Python gives the texts in a set another order in each."""
    code = f"from sparkdl.train.checkpoint.identity import described; print(described({{*{sorted('abcdefgh')}}}))"
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, check=True
        ).stdout
        for seed in "12"
    }
    assert len(texts) == 1


def test_each_number_of_an_array_counts_however_long_it_is():
    numbers = np.arange(5000.0)
    other_numbers = numbers.copy()
    other_numbers[2500] = 7
    assert described(numbers) != described(other_numbers)
    assert described(numbers) == described(numbers.copy())


def test_a_number_of_a_layer_counts():
    class Scaled(torch.nn.Linear):
        def __init__(self, scale):
            super().__init__(2, 2)
            self.scale = scale

    def text(scale):
        return described(torch.nn.Sequential(Scaled(scale)))

    assert text(1.0) == text(1.0) != text(7.0)
