"""The loop on one rank: it does what a loop written by hand does, and everything its settings say."""

from __future__ import annotations

import functools
import math
import os

import cloudpickle
import pyarrow as pa
import pytest
import torch
from train_helpers import state_equal

from sparkdl.batches.reading.loader import ShardedDataset
from sparkdl.columns.layout import Layout
from sparkdl.errors import ConfigError, IntegrityError, NonFiniteLossError
from sparkdl.shards.files import write_table_shards
from sparkdl.train.callbacks import Callback
from sparkdl.train.in_memory import TensorSource


def by_hand(model, optimizer, loss_of, source, epochs):
    for epoch in range(epochs):
        source.set_epoch(epoch)
        for batch in source:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return model


def test_weights_equal_those_of_a_loop_written_by_hand_bit_for_bit(task, train, source):
    plain = task().model
    by_hand(
        plain,
        torch.optim.Adam(plain.parameters(), lr=1e-2),
        lambda model, batch: torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"]),
        source(),
        epochs=3,
    )
    result = train(task(), source(), epochs=3)
    assert state_equal(plain, result.model)
    assert (result.steps, result.rows, result.epochs) == (21, 309, 3)


@pytest.mark.parametrize("weighted", [False, True])
def test_accumulated_batches_make_the_step_of_their_union(task, train, data, weighted):
    """Also in the last group, which is short and ends with a short batch."""

    def run(rows, accumulate):
        model = task(model=torch.nn.Linear(5, 1)).model
        torch.nn.init.ones_(model.weight)
        torch.nn.init.zeros_(model.bias)
        doubles = {"x": data["x"].double(), "y": data["y"].double(), "w": torch.ones(103).double()}
        source = TensorSource(doubles, global_batch_rows=rows, shuffle=False)
        parts = task(
            model=model.double(),
            optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            sample_weight="w" if weighted else None,
        )
        return train(parts, source, epochs=2, accumulate_steps=accumulate)

    whole, parts = run(64, 1), run(16, 4)
    assert (whole.steps, parts.steps) == (4, 4)
    torch.testing.assert_close(whole.model.weight, parts.model.weight, rtol=1e-12, atol=0)
    losses = [list(result.history.steps["loss"]) for result in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_history_holds_the_loss_of_every_step_and_epoch(task, train, source, data):
    result = train(task(optimizer=functools.partial(torch.optim.SGD, lr=0.0)), source(), epochs=2)
    with torch.no_grad():
        expected = torch.nn.functional.mse_loss(result.model(data["x"])[:, 0], data["y"]).item()
    assert [row["loss"] for row in result.history.epochs] == pytest.approx([expected] * 2, rel=1e-6)
    table = result.history.to_pandas("steps")
    with pytest.raises(ConfigError, match="there is no table 'step'"):
        result.history.to_pandas("step")
    assert list(table["step"]) == list(range(1, 15))
    assert list(table["epoch"]) == [0] * 7 + [1] * 7
    first = next(iter(source()))
    with torch.no_grad():
        assert table["loss"][0] == pytest.approx(
            torch.nn.functional.mse_loss(result.model(first["x"])[:, 0], first["y"]).item(), rel=1e-6
        )


def test_validation_is_the_mean_over_the_rows_whatever_the_batches(task, train, source, data):
    result = train(task(), source(), source(rows=10), epochs=1)
    with torch.no_grad():
        expected = torch.nn.functional.mse_loss(result.model(data["x"])[:, 0], data["y"]).item()
    assert result.metrics["val_loss"] == pytest.approx(expected, rel=1e-6)
    assert result.monitor == "val_loss"


def test_clipping_bounds_the_step_by_the_global_norm(task, train, source):
    result = train(
        task(optimizer=functools.partial(torch.optim.SGD, lr=1.0)), source(), epochs=1, max_grad_norm=0.01, max_steps=1
    )
    moved = torch.cat(
        [(a - b).flatten() for a, b in zip(result.model.parameters(), task().model.parameters(), strict=True)]
    )
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)
    assert result.history.to_pandas("steps")["grad_norm"][0] > 0.01


def test_sparse_gradients_can_be_clipped(train):
    embedding = torch.nn.EmbeddingBag(10, 4, sparse=True, mode="sum")
    before = embedding.weight.detach().clone()
    from sparkdl.train.task import Task

    ids = torch.tensor([[1, 1], [2, 3], [1, 2]])
    train(
        Task(
            model=embedding,
            optimizer=functools.partial(torch.optim.SGD, lr=1.0),
            loss=torch.nn.MSELoss(),
            inputs=("ids",),
            labels=("y",),
        ),
        TensorSource({"ids": ids, "y": torch.ones(3, 4) * 100}, global_batch_rows=3),
        epochs=1,
        max_grad_norm=0.5,
    )
    assert (embedding.weight - before).norm().item() == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_trains_and_keeps_float32_weights(task, train, source, precision):
    seen = []

    class Spy(torch.nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            seen.append(out.dtype)
            return out

    result = train(task(model=Spy(5, 1)), source(), source(), epochs=20, precision=precision)
    wanted = torch.bfloat16 if precision == "bf16" else torch.float16
    assert set(seen) == {wanted}
    assert result.model.weight.dtype == torch.float32
    assert result.history.epochs[-1]["val_loss"] < result.history.epochs[0]["val_loss"] / 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_and_names_step_rank_and_batch(task, train, data, bad):
    data["x"][20:22] = bad
    source = TensorSource(data, global_batch_rows=10, shuffle=False)
    with pytest.raises(
        NonFiniteLossError, match=r"rank 0 is (nan|inf) at step 3 \(epoch 0, batch 2: 10 of its 10 rows"
    ):
        train(task(), source, epochs=1)


def test_several_inputs_outputs_and_labels_with_loss_weights(train, data):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(5, 1), torch.nn.Linear(5, 3)

        def forward(self, x, w):
            return {"k": self.b(x), "y": self.a(x) + 0 * w[:, None]}

    from sparkdl.train.task import Task

    source = TensorSource(data, global_batch_rows=16)
    result = train(
        Task(
            model=Two,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
            loss={"y": torch.nn.MSELoss, "k": torch.nn.CrossEntropyLoss()},
            inputs=("x", "w"),
            labels=("y", "k"),
            loss_weights={"y": 0.25, "k": 2.0},
        ),
        source,
        source,
        epochs=1,
    )
    row = result.metrics
    assert row["val_loss"] == pytest.approx(0.25 * row["val_y_loss"] + 2 * row["val_k_loss"])
    assert row["loss"] == pytest.approx(row["val_loss"], rel=1e-5)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(result.model.b(data["x"]), data["k"]).item()
    assert row["val_k_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("style", ["positional", "keyword", "dict"])
def test_models_are_called_in_the_style_they_want(task, train, source, style):
    class Model(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x["x"] if style == "dict" else x)

    result = train(task(model=Model(5, 1), input_style=style), source(), epochs=1)
    assert result.steps == 7


def test_a_train_step_of_ones_own_replaces_model_call_and_loss(task, train, source):
    def step(model, batch):
        outputs = model(batch["x"])
        return (outputs[:, 0] - batch["y"]).square().mean(), outputs

    plain = train(task(), source(), source(), epochs=2)
    own = train(task(train_step=step), source(), source(), epochs=2)
    assert state_equal(plain.model, own.model)
    assert own.metrics["val_loss"] == pytest.approx(plain.metrics["val_loss"])


def test_a_train_step_must_return_a_scalar(task, train, source):
    with pytest.raises(ConfigError, match=r"train_step returned a loss of shape \(16, 1\)"):
        train(task(train_step=lambda model, batch: model(batch["x"])), source(), epochs=1)


def test_sample_weights_give_the_weighted_mean(task, train, source, data):
    result = train(
        task(optimizer=functools.partial(torch.optim.SGD, lr=0.0), sample_weight="w"), source(), source(), epochs=1
    )
    with torch.no_grad():
        squares = (result.model(data["x"])[:, 0] - data["y"]).square()
    assert result.metrics["val_loss"] == pytest.approx(((squares * data["w"]).sum() / data["w"].sum()).item(), rel=1e-5)


def test_sample_weights_need_a_loss_a_row(task, train, source):
    with pytest.raises(ConfigError, match="one value a row"):
        train(task(loss=lambda o, y: (o[:, 0] - y).square().mean(), sample_weight="w"), source(), epochs=1)


def test_early_stopping_waits_and_restores_the_best_weights(task, train, source, data):
    kept = []

    class Keep(Callback):
        def on_epoch_end(self, run, metrics):
            kept.append([p.detach().clone() for p in run.model.parameters()])

    # a rate that doubles each epoch: the loss falls first and explodes later
    result = train(
        task(
            optimizer=functools.partial(torch.optim.SGD, lr=0.01),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 2.0),
        ),
        source(),
        source(),
        epochs=50,
        early_stopping_patience=2,
        callbacks=[Keep()],
    )
    values = [row["val_loss"] for row in result.history.epochs]
    best = min(range(len(values)), key=values.__getitem__)
    assert result.stopped_early
    assert "did not improve for 2 epochs" in result.stop_reason
    assert result.best_epoch == best == len(values) - 3
    assert all(torch.equal(a, b) for a, b in zip(result.model.parameters(), kept[best], strict=True))
    assert result.metrics == result.history.epochs[best]


def test_without_early_stopping_the_last_weights_stay_unless_the_best_are_wanted(task, train, source):
    parts = {
        "optimizer": functools.partial(torch.optim.SGD, lr=0.01),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 2.5),
    }
    last = train(task(**parts), source(), source(), epochs=8)
    best = train(task(**parts), source(), source(), epochs=8, restore_best=True)
    assert last.best_epoch == best.best_epoch < 7
    assert last.metrics["epoch"] == 7
    assert best.metrics["epoch"] == best.best_epoch
    assert not state_equal(last.model, best.model)


def test_of_epochs_with_one_value_the_one_with_the_least_loss_is_the_best(task, train, source, tmp_path):
    """All epochs predict the sign of all rows alike, as few rows give few accuracies; waiting ends it all the same."""

    def always_right(outputs, labels):
        return torch.ones(len(labels))

    parts = {
        "optimizer": functools.partial(torch.optim.SGD, lr=0.01),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 2.5),
        "metrics": {"right": always_right},
    }
    options = {"monitor": "val_right", "monitor_mode": "max", "restore_best": True}
    whole = train(task(**parts), source(), source(), epochs=8, **options)
    losses = [row["val_loss"] for row in whole.history.epochs]
    assert [row["val_right"] for row in whole.history.epochs] == [1.0] * 8
    assert 0 < whole.best_epoch == min(range(8), key=losses.__getitem__) < 7
    assert whole.metrics == whole.history.epochs[whole.best_epoch]
    stopped = train(task(**parts), source(), source(), epochs=8, early_stopping_patience=2, **options)
    assert (stopped.epochs, stopped.best_epoch) == (3, min(range(3), key=losses.__getitem__))


def test_a_function_does_not_say_whether_more_of_it_is_better_so_it_is_asked_for(task, train, source):
    with pytest.raises(ConfigError, match=r"^monitor='val_rmse' and monitor_mode='auto', and the metric does not say"):
        train(task(metrics={"rmse": rmse}), source(), source(), monitor="val_rmse")
    result = train(task(metrics={"rmse": rmse}), source(), source(), epochs=3, monitor="val_rmse", monitor_mode="min")
    values = [row["val_rmse"] for row in result.history.epochs]
    assert result.best_value == min(values) < max(values)


def test_a_callback_may_stop_the_run(task, train, source):
    class Enough(Callback):
        def on_step_end(self, run):
            if run.step == 5:
                run.request_stop("enough")

    result = train(task(), source(), epochs=9, window_steps=2, callbacks=[Enough()])
    assert (result.steps, result.stop_reason, result.stopped_early) == (6, "enough", True)


def test_max_steps_ends_inside_an_epoch(task, train, source):
    result = train(task(), source(), epochs=9, max_steps=10)
    assert (result.steps, result.epochs) == (10, 1)
    assert "max_steps=10" in result.stop_reason


def test_a_part_of_the_epoch_can_be_asked_for(task, train, source):
    result = train(task(), source(), source(), epochs=3, steps_per_epoch=2, validation_steps=1)
    assert (result.steps, result.epochs, result.rows) == (6, 3, 96)
    with pytest.raises(ConfigError, match="steps_per_epoch=8 exceeds the 7 batches"):
        train(task(), source(), epochs=1, steps_per_epoch=8)


def test_an_optimizer_instance_survives_the_journey_with_its_groups(train, source):
    from sparkdl.train.task import Task

    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1].parameters(), "lr": 0.1, "momentum": 0.9}]
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    sent = Task(
        model=model, optimizer=optimizer, loss=torch.nn.MSELoss(), scheduler=scheduler, inputs=["x"], labels=["y"]
    )
    task = cloudpickle.loads(cloudpickle.dumps(sent))
    result = train(task, source(), epochs=2)
    assert torch.equal(result.model[0].weight, model[0].weight)  # lr 0: frozen by its group
    assert not torch.equal(result.model[1].weight, model[1].weight)
    assert [group["lr"] for group in task.optimizer.param_groups] == [0.0, 0.025]
    assert task.optimizer.param_groups[1]["momentum"] == 0.9


def test_an_optimizer_of_another_model_is_refused(task, train, source):
    other = torch.nn.Linear(5, 1)
    with pytest.raises(ConfigError, match="2 parameters of the optimizer are not among the 4 of the model"):
        train(task(optimizer=torch.optim.SGD(other.parameters(), lr=0.1)), source(), epochs=1)


def test_an_optimizer_that_needs_a_closure_is_refused(task, train, source):
    with pytest.raises(ConfigError, match="LBFGS evaluates the loss several times"):
        train(task(optimizer=torch.optim.LBFGS), source(), epochs=1)


def test_the_caller_keeps_his_random_numbers(task, train, source):
    mine = task(dropout=0.5)
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    train(mine, source(), epochs=1)
    assert torch.equal(torch.rand(3), expected)


def test_the_same_seed_gives_the_same_model_and_another_seed_another(train, source):
    from sparkdl.train.task import Task

    def run(seed):
        return train(
            Task(
                model=lambda: torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)),
                optimizer=torch.optim.Adam,
                loss=torch.nn.MSELoss(),
                inputs=["x"],
                labels=["y"],
            ),
            source(),
            epochs=1,
            seed=seed,
        ).model

    assert state_equal(run(1), run(1))
    assert not state_equal(run(1), run(2))


def test_channels_last_reaches_images_and_convolutions(train):
    from sparkdl.train.task import Task

    seen = []

    class Net(torch.nn.Conv2d):
        def forward(self, x):
            seen.append(x.is_contiguous(memory_format=torch.channels_last))
            return super().forward(x).mean((1, 2, 3))

    images = {"image": torch.randn(8, 3, 6, 6), "y": torch.randn(8)}
    task = Task(model=Net(3, 4, 3), optimizer=torch.optim.SGD, loss=torch.nn.MSELoss(), inputs=["image"], labels=["y"])
    result = train(task, TensorSource(images, global_batch_rows=4), epochs=1, channels_last=True)
    assert seen == [True, True]
    assert result.model.weight.is_contiguous(memory_format=torch.channels_last)


def test_deterministic_mode_holds_while_training_only(task, train, source):
    seen = []

    class Look(Callback):
        def on_step_end(self, run):
            seen.append(torch.are_deterministic_algorithms_enabled())

    train(task(), source(), epochs=1, deterministic=True, callbacks=[Look()])
    assert set(seen) == {True}
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        train(task(), source(), epochs=1, deterministic=True, callbacks=[Look()])
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_torch_compile_gives_the_same_training(task, train, source):
    plain = train(task(), source(), epochs=1)
    compiled = train(task(), source(), epochs=1, compile="default")
    for a, b in zip(plain.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert type(compiled.model) is torch.nn.Sequential


def test_activation_checkpointing_works_as_it_is(task, train, source):
    from torch.utils.checkpoint import checkpoint

    class Saving(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    plain = train(task(dropout=0.3), source(), epochs=1)
    saving = train(task(model=Saving(task(dropout=0.3).model)), source(), epochs=1)
    assert state_equal(plain.model, saving.model.inner)


def test_a_sum_is_a_sum(task, train, source, data):
    result = train(
        task(loss=torch.nn.MSELoss(reduction="sum"), optimizer=functools.partial(torch.optim.SGD, lr=0.0)),
        TensorSource(data, global_batch_rows=103),
        epochs=1,
    )
    with torch.no_grad():
        expected = (result.model(data["x"])[:, 0] - data["y"]).square().sum().item()
    assert result.metrics["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"monitor": "val_loss"}, "needs validation data"),
        ({"monitor": "accuracy"}, "is no column of an epoch"),
        ({"epochs": 0}, "epochs=0 is below 1"),
        ({"epochs": 1.5}, "epochs=1.5 is no whole number"),
        ({"precision": "fp8"}, "precision='fp8' is not one of"),
        ({"max_grad_norm": 0.0}, "is not above 0"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(task, train, source, settings, message):
    with pytest.raises(ConfigError, match=message):
        train(task(), source(), **settings)


def test_the_loss_of_a_label_is_monitored_in_validation_and_refused_of_training(task, train, source):
    """Before the first epoch, whose row has no such column."""

    class Seen(Callback):
        epochs = 0

        def on_epoch_start(self, run):
            self.epochs += 1

    class Two(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).unbind(1)

    seen, two = Seen(), functools.partial(task, labels=("y", "w"))
    with pytest.raises(ConfigError, match=r"^monitor='w_loss' is no column of an epoch"):
        train(two(model=Two(5, 2)), source(), source(), monitor="w_loss", callbacks=[seen])
    assert seen.epochs == 0
    assert train(two(model=Two(5, 2)), source(), source(), monitor="val_w_loss").best_epoch == 0


def test_a_source_of_validation_without_batches_is_refused(task, train, source):
    class Empty:
        def __len__(self):
            return 0

        def __iter__(self):
            return iter(())

        def set_epoch(self, epoch):
            pass

    with pytest.raises(ConfigError, match=r"^the source of validation gives 0 batches"):
        train(task(), source(), Empty())


def test_outputs_and_labels_of_different_sizes_are_refused(task, train, source):
    with pytest.raises(ConfigError, match=r"the label has shape \(16,\), the output \(16, 3\)"):
        train(task(model=torch.nn.Linear(5, 3)), source(), epochs=1)


def test_a_plateau_scheduler_follows_the_monitored_value(task, train, source):
    result = train(
        task(
            optimizer=functools.partial(torch.optim.SGD, lr=0.0),
            scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
        ),
        source(),
        source(),
        epochs=3,
    )
    assert result.steps == 21
    assert not math.isnan(result.metrics["val_loss"])


def rmse(output, label):
    return (output - label).square().mean().sqrt()


@pytest.mark.parametrize("rows", [3, 16, 103])
def test_a_metric_given_as_a_function_is_its_value_over_all_rows(task, train, source, data, rows):
    """A mean of the batches' values is another number, and depends on the batch size."""
    result = train(task(metrics={"rmse": rmse}), source(), source(rows, shuffle=False), epochs=2)
    model = result.model.eval()
    with torch.no_grad():
        wanted = rmse(model(data["x"])[:, 0], data["y"])
    assert result.metrics["val_rmse"] == pytest.approx(float(wanted), rel=1e-6)


def test_more_rows_than_a_function_can_be_given_are_refused(task, train, source, monkeypatch):
    monkeypatch.setattr("sparkdl.train.objective.metrics.MOST_BYTES", 400)
    with pytest.raises(ConfigError, match="metric 'rmse' is a function, computed over all rows, and their outputs"):
        train(task(metrics={"rmse": rmse}), source())


@pytest.mark.parametrize("settings", [{}, {"steps_per_epoch": 3}, {"max_steps": 3}], ids=str)
def test_shards_that_are_damaged_in_the_last_epoch_of_a_run_fail_it(task, train, data, tmp_path, settings):
    x = pa.array(data["x"].tolist(), pa.list_(pa.float32()))
    table = pa.table({"x": x, "y": data["y"].numpy()})
    manifest = write_table_shards(table, tmp_path / "s", labels=["y"], layout=Layout(shapes={"x": (5,)}))

    class Damage(Callback):
        def on_step_end(self, run):
            if run.step == 3:
                # In place: a mapped file that is cut short for a moment kills its readers (SIGBUS).
                with (tmp_path / "s" / manifest.shards[0].path).open("r+b") as file:
                    file.seek(manifest.shards[0].blocks[0].offset + 600)
                    byte = file.read(1)[0]
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte ^ 255]))

    source = ShardedDataset(tmp_path / "s").loader(batch_size=16)
    with pytest.raises(IntegrityError, match="has hash"):
        train(task(), source, epochs=1, callbacks=[Damage()], **settings)
