import math

import pytest
import torch
import torch.nn.functional as F
from own_step_functions import ADAM, FUNCTIONS, SGD, by_hand, data, horovods_own, own_loss, task_of, trained
from train_helpers import Interrupted, RaiseAt, state_equal

from sparkdl.config import CheckpointConfig, TrainConfig
from sparkdl.errors import ConfigError, NonFiniteLossError
from sparkdl.train.checkpoint.checkpoint import Checkpointer
from sparkdl.train.in_memory import TensorSource
from sparkdl.train.trainer import fit


def fitted(task, solo, tensors=None, **config):
    return fit(
        task, TensorSource(tensors or data(), global_batch_rows=17), collective=solo, config=TrainConfig(**config)
    )


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_a_function_that_owns_the_step_trains_what_it_trains_in_a_plain_process(solo, name):
    wanted = by_hand(name)
    found = trained(name, solo).model
    for mine, theirs in zip(found.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_the_optimizer_is_the_users_own_and_is_clean_afterwards(solo):
    seen = []

    def looking(model, optimizer, *given):
        seen.append(optimizer)
        return own_loss(model, optimizer, *given[:5])

    task = task_of(looking)
    result = fitted(task, solo)
    assert all(optimizer is task.optimizer for optimizer in seen)
    assert not hasattr(result.optimizer, "synchronize")
    assert not result.optimizer._optimizer_step_pre_hooks
    assert not result.optimizer._optimizer_step_post_hooks


def test_history_has_a_row_for_each_step_however_the_function_steps(solo):
    assert list(trained("own loss", solo).history.steps["step"]) == list(range(1, 15))
    assert list(trained("two steps", solo).history.steps["step"]) == list(range(2, 29, 2))
    for window in (1, 3, 50):
        steps = trained("horovod's own, two passes", solo, window_steps=window).history.steps
        assert list(steps["step"]) == list(range(1, 9))  # 7 batches: three pairs and one alone
        assert all(map(math.isfinite, steps["loss"]))


def test_the_loss_of_the_history_is_what_the_function_returns(solo):
    task = task_of(own_loss, optimizer=SGD)
    plain = [loss.item() for loss in _losses(own_loss)]
    assert list(fitted(task, solo).history.steps["loss"]) == pytest.approx(plain)


def _losses(function):
    task = task_of(function, optimizer=SGD)
    source = TensorSource(data(), global_batch_rows=17)
    for batch in source:
        yield function(task.model, task.optimizer, None, None, [batch["x"]], [batch["y"]], None)[1]


@pytest.mark.parametrize("name", ["horovod's own", "horovod's own, three passes, sample weights", "two steps"])
def test_it_goes_on_bit_for_bit_inside_an_epoch(solo, tmp_path, name):
    def saving(folder):
        return Checkpointer(CheckpointConfig(uri=str(tmp_path / folder), every_steps=2))

    undisturbed = trained(name, solo, checkpoints=saving("whole"))
    cut = 9 if name != "horovod's own, three passes, sample weights" else 5
    with pytest.raises(Interrupted):
        trained(name, solo, checkpoints=saving("cut"), callbacks=[RaiseAt(cut)])
    resumed = trained(name, solo, checkpoints=saving("cut"))
    assert resumed.resumed_step
    assert state_equal(resumed.model, undisturbed.model)
    for column in ("step", "loss", "lr"):
        assert resumed.history.steps[column] == undisturbed.history.steps[column]


def test_a_checkpoint_is_due_where_the_last_steps_of_an_epoch_pass_its_number(solo, tmp_path):
    """14 steps an epoch, two a batch: the 13th and the 14th are made by one."""
    keep = CheckpointConfig(uri=str(tmp_path), every_steps=13, every_epochs=None, keep_best=False, keep_last=9)
    trained("two steps", solo, checkpoints=Checkpointer(keep))
    assert Checkpointer(keep).steps() == [14, 26, 28]


def test_schedules_of_the_loop_and_rates_set_inside_both_hold(solo):
    def halves(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    by_step = fitted(task_of(own_loss, optimizer=SGD, scheduler=halves, scheduler_interval="step"), solo)
    assert list(by_step.history.steps["lr"]) == pytest.approx([0.05 * 0.5**n for n in range(7)])

    def slower(model, optimizer, *given):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        return own_loss(model, optimizer, *given[:5])

    by_epoch = fitted(task_of(slower, optimizer=SGD, scheduler=halves), solo, epochs=2)
    rates = [0.05 * 0.9 ** (n + 1) * 0.5 ** (n // 7) for n in range(14)]
    assert list(by_epoch.history.steps["lr"]) == pytest.approx(rates)
    with pytest.raises(ConfigError, match=r"was set to .* while warmup_steps=5 sets it"):
        fitted(task_of(slower, optimizer=SGD), solo, warmup_steps=5)


def test_clipping_of_the_loop_applies_to_steps_of_the_function(solo):
    task = task_of(own_loss, optimizer=SGD)
    before = [p.detach().clone() for p in task.model.parameters()]
    fitted(task, solo, max_grad_norm=1e-3, max_steps=1)
    moved = math.sqrt(sum((a - b).square().sum().item() for a, b in zip(task.model.parameters(), before, strict=True)))
    assert moved == pytest.approx(0.05 * 1e-3, rel=1e-3)


def never_steps(model, optimizer, transform_outputs, loss_fn, inputs, labels, weights):
    outputs = model(*inputs)
    loss = F.mse_loss(outputs[:, 0], labels[0])
    loss.backward()
    return outputs, loss


def never_learns(model, optimizer, transform_outputs, loss_fn, inputs, labels, weights):
    with torch.no_grad():
        outputs = model(*inputs)
    optimizer.step()
    return outputs, F.mse_loss(outputs[:, 0], labels[0])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (never_steps, "train_minibatch_fn never called optimizer.step\\(\\) in 7 batches"),
        (never_learns, "train_minibatch_fn made no gradient in 7 batches"),
        (lambda *given: None, "train_minibatch_fn must return \\(outputs, loss\\)"),
        (lambda *given: (None, "loss"), "train_minibatch_fn must return \\(outputs, loss\\)"),
    ],
)
def test_a_function_that_trains_nothing_is_refused(solo, function, message):
    with pytest.raises(ConfigError, match=message):
        fitted(task_of(function), solo)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"precision": "fp16"}, "precision='fp16' scales the loss"), ({"accumulate_steps": 2}, "accumulate_steps=2 does")],
)
def test_settings_that_the_function_owns_are_refused(solo, settings, message):
    with pytest.raises(ConfigError, match=message):
        fitted(task_of(own_loss), solo, **settings)


def test_a_loss_that_is_not_finite_stops_the_run(solo):
    tensors = data()
    tensors["x"][33] = math.nan
    with pytest.raises(NonFiniteLossError, match="is nan at step"):
        fitted(task_of(horovods_own, optimizer=ADAM), solo, tensors)
