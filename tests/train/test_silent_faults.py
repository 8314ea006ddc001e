"""Faults that other libraries have and nobody notices, each with a test that would."""

from __future__ import annotations

import dataclasses
import functools
import logging

import pytest
import torch

from sparkdl.config import CheckpointConfig
from sparkdl.errors import ConfigError
from sparkdl.storage import Storage
from sparkdl.train.callbacks import Callback
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.schedule import LearningRate
from sparkdl.train.task import Task
from sparkdl.world import World


def test_shuffling_changes_the_order_each_epoch_and_not_shuffling_keeps_it(source):
    def epochs(batches):
        orders = []
        for epoch in range(2):
            batches.set_epoch(epoch)
            orders.append(torch.cat([batch["x"][:, 0] for batch in batches]))
        return orders

    first, second = epochs(source())
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, second.sort().values)
    first, second = epochs(source(shuffle=False))
    assert torch.equal(first, second)


def test_the_loop_trains_each_epoch_in_the_order_of_that_epoch(task, train, source):
    seen = []

    class Spy(torch.nn.Linear):
        def forward(self, x):
            if self.training:
                seen.append(x[:, 0].clone())
            return super().forward(x)

    train(task(model=Spy(5, 1)), source(), source(), epochs=2)
    expected = []
    for epoch in range(2):
        batches = source()
        batches.set_epoch(epoch)
        expected += [batch["x"][:, 0] for batch in batches]
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


def test_every_hook_of_a_callback_is_called_in_order(task, train, source, tmp_path):
    calls = []

    def overridden(name):
        def hook(self, run, *rest):
            calls.append(name)

        return hook

    names = [name for name in vars(Callback) if name.startswith("on_")]
    every = type("Every", (Callback,), {name: overridden(name) for name in names})()
    checkpoints = Checkpointer(CheckpointConfig(uri=str(tmp_path)))
    train(task(), source(60), source(), epochs=1, callbacks=[every], checkpoints=checkpoints)
    assert calls == [
        "on_fit_start",
        "on_epoch_start",
        "on_step_end",
        "on_step_end",
        "on_validation_start",
        "on_validation_end",
        "on_epoch_end",
        "on_checkpoint",
        "on_fit_end",
    ]
    calls.clear()

    class Fails(Callback):
        def on_step_end(self, run):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        train(task(), source(), epochs=1, callbacks=[every, Fails()])
    assert calls[-1] == "on_error"


def rate_of(world, scale, scheduler=None, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    made = scheduler(optimizer) if scheduler else None
    settings = {"interval": "step", "warmup_steps": 0} | options
    return LearningRate(optimizer, made, scale=world.size if scale else 1, reports=world.is_leader, **settings)


def test_the_learning_rate_is_multiplied_only_when_asked_and_says_so(caplog):
    caplog.set_level(logging.INFO, "sparkdl")
    world = World(rank=0, size=4, local_size=4)
    quiet = rate_of(world, scale=False)
    quiet.start()
    assert quiet.current == 0.1
    assert caplog.text == ""
    loud = rate_of(world, scale=True)
    loud.start()
    assert loud.current == pytest.approx(0.4)
    assert "learning rate 0.1 -> 0.4 (scale_lr: 4 ranks)" in caplog.text


def test_the_rate_that_swalr_anneals_to_is_multiplied_with_the_others():
    world = World(rank=0, size=4, local_size=4)
    rate = rate_of(world, True, lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, 0.05, anneal_epochs=2))
    rate.start()
    rates = []
    for _ in range(4):
        rates.append(rate.current)
        rate._optimizer.step()
        rate.after_step()
    assert rates[-1] == pytest.approx(0.2)
    assert sorted(rates, reverse=True) == rates
    assert rates[0] <= 0.4


def test_warm_up_climbs_evenly_and_schedulers_step_when_they_were_told_to(task, train, source):
    def rates(**settings):
        parts = {"optimizer": functools.partial(torch.optim.SGD, lr=0.08)}
        parts["scheduler"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        parts["scheduler_interval"] = settings.pop("interval", "epoch")
        result = train(task(**parts), source(60), epochs=3, **settings)  # two steps an epoch
        return list(result.history.steps["lr"])

    assert rates() == pytest.approx([0.08, 0.08, 0.04, 0.04, 0.02, 0.02])
    assert rates(interval="step") == pytest.approx([0.08, 0.04, 0.02, 0.01, 0.005, 0.0025])
    assert rates(warmup_steps=4) == pytest.approx([0.02, 0.04, 0.03, 0.04, 0.02, 0.02])


def test_a_scheduler_that_steps_by_the_monitored_value_is_refused_after_each_step():
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    with pytest.raises(ConfigError, match="'step' does not go with ReduceLROnPlateau"):
        rate_of(World(), scale=False, scheduler=plateau)
    rate_of(World(), scale=False, scheduler=plateau, interval="epoch").after_epoch(1.0)


@pytest.mark.parametrize("scheduler", [None, lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5)])
@pytest.mark.parametrize("warmup", [0, 5])
def test_a_scaled_learning_rate_fits_the_world_a_run_resumes_in(scheduler, warmup):
    def steps(rate, count):
        found = []
        for _ in range(count):
            found.append(rate.current)
            rate._optimizer.step()
            rate.after_step()
        return found

    four = rate_of(World(size=4, local_size=4), True, scheduler, warmup_steps=warmup)
    four.start()
    expected = steps(four, 3)
    state, groups = four.state_dict(), four._optimizer.state_dict()
    rest = steps(four, 5)

    for size, factor in ((4, 1.0), (2, 0.5), (1, 0.25)):
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
        again = rate_of(World(size=size, local_size=size), True, scheduler, optimizer, warmup_steps=warmup)
        optimizer.load_state_dict(groups)
        again.load_state_dict(state)
        assert steps(again, 5) == pytest.approx([factor * rate for rate in rest])
    assert expected[0] == pytest.approx(0.4 / 5 if warmup else 0.4)


def test_epochs_go_on_counting_after_a_restart(task, train, source, tmp_path):
    seen = []

    class Epochs(Callback):
        def on_epoch_start(self, run):
            seen.append(run.epoch)

    for epochs in (2, 4):
        checkpoints = Checkpointer(CheckpointConfig(uri=str(tmp_path)))
        train(task(), source(), epochs=epochs, callbacks=[Epochs()], checkpoints=checkpoints)
    assert seen == [0, 1, 2, 3]


def test_the_best_checkpoint_is_that_of_the_best_epoch(task, train, source, tmp_path):
    parts = {
        "optimizer": functools.partial(torch.optim.SGD, lr=0.01),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 2.5),
    }
    checkpoints = Checkpointer(CheckpointConfig(uri=str(tmp_path), keep_last=1))
    result = train(task(**parts), source(), source(), epochs=7, checkpoints=checkpoints)
    assert result.best_epoch < 6
    best, last = checkpoints.best(), checkpoints.latest()
    assert (best.step, last.step) == ((result.best_epoch + 1) * 7, 49)
    assert not torch.equal(best.state["model"]["0.weight"], last.state["model"]["0.weight"])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64, torch.uint8, torch.bool])
def test_inputs_keep_their_dtype(train, dtype):
    seen = []

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(4, 1)

        def forward(self, ids):
            seen.append(ids.dtype)
            return self.table(ids.long())

    tensors = {"ids": torch.tensor([0, 1, 1, 0]).to(dtype), "y": torch.ones(4)}
    task = Task(model=Net(), optimizer=torch.optim.SGD, loss=torch.nn.MSELoss(), inputs=["ids"], labels=["y"])
    train(task, TensorSource(tensors, global_batch_rows=2), TensorSource(tensors, global_batch_rows=2), epochs=1)
    assert set(seen) == {dtype}


def test_validation_records_no_gradients_and_leaves_every_module_in_its_mode(task, train, source):
    seen = []

    class Spy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.linear = torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)
            self.frozen.eval()  # a user who fine-tunes freezes the statistics

        def forward(self, x):
            seen.append(
                (self.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), self.frozen.training)
            )
            return self.linear(self.frozen(x))

    train(task(model=Spy()), source(60), source(60), epochs=2)
    assert seen == ([(True, True, False, False)] * 2 + [(False, False, True, False)] * 2) * 2


def test_a_column_of_labels_is_not_broadcast_against_a_column_of_outputs(task, train, source, data):
    """``(rows, 1)`` minus ``(rows,)`` is a matrix, whose mean trains towards the mean of all labels."""
    result = train(task(), source(), epochs=60)
    with torch.no_grad():
        error = (result.model(data["x"])[:, 0] - data["y"]).square().mean()
    assert error < 0.2 * data["y"].var()


@pytest.mark.parametrize("label", [torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0, 1, 1])], ids=["float", "int"])
@pytest.mark.parametrize("loss", [torch.nn.CrossEntropyLoss(), torch.nn.functional.cross_entropy], ids=["module", "f"])
def test_one_number_a_row_is_not_taken_for_the_classes_of_one_row(train, loss, label):
    """Torch takes labels of the same shape for probabilities, and trains."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))
    task = Task(model=model, optimizer=torch.optim.SGD, loss=loss, inputs=["x"], labels=["y"])
    with pytest.raises(ConfigError, match=r"^the output has shape \(3,\), and a loss over classes takes one number a"):
        train(task, TensorSource({"x": torch.eye(3), "y": label}, global_batch_rows=3))


@pytest.mark.parametrize(
    ("loss", "outputs", "label"),
    [
        (torch.nn.CrossEntropyLoss(), 3, torch.tensor([0.0, 2.0, 1.0], dtype=torch.float64)),
        (torch.nn.CrossEntropyLoss(), 3, torch.tensor([0, 2, 1], dtype=torch.int32)),
        (torch.nn.CrossEntropyLoss(), 3, torch.tensor([[0], [2], [1]])),
        (torch.nn.functional.cross_entropy, 3, torch.tensor([0, 2, 1], dtype=torch.int16)),
        (torch.nn.BCEWithLogitsLoss(), 1, torch.tensor([0, 1, 1])),
        (torch.nn.MSELoss(), 1, torch.tensor([0, 1, 1], dtype=torch.int32)),
        (torch.nn.MSELoss(), 1, torch.tensor([0.0, 1, 1], dtype=torch.float64)),
    ],
)
def test_labels_of_any_numeric_column_fit_their_loss(train, loss, outputs, label):
    """Spark's labels are doubles or ints, whatever the loss wants."""
    tensors = {"x": torch.eye(3), "y": label}
    task = Task(model=torch.nn.Linear(3, outputs), optimizer=torch.optim.SGD, loss=loss, inputs=["x"], labels=["y"])
    batches = TensorSource(tensors, global_batch_rows=3)
    assert train(task, batches, batches, epochs=1).steps == 1


def test_a_checkpointer_travels_as_its_settings_and_writes_nothing_unasked(tmp_path):
    import cloudpickle

    checkpointer = Checkpointer(CheckpointConfig(uri=str(tmp_path / "run"), keep_last=7))
    again = cloudpickle.loads(cloudpickle.dumps(checkpointer)).config
    assert dataclasses.replace(again, uri=checkpointer.config.uri) == checkpointer.config
    assert Storage.of(again.uri) == Storage.of(checkpointer.config.uri)
    assert not (tmp_path / "run").exists()
