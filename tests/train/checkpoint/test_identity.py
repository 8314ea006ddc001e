import functools

import pytest
import torch

from sparkdl.config import CheckpointConfig, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.checkpoint.identity import identity_of


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
        from sparkdl.train.checkpoint.identity import described

        return described(torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, weight])))

    assert text(1.0) == text(1.0) != text(2.0)
