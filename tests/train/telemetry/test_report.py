"""What a run tells: TensorBoard files that TensorBoard reads."""

from __future__ import annotations

import functools
import shutil

import pytest
import torch
from train_helpers import Interrupted, RaiseAt

from sparkdl.config import CheckpointConfig
from sparkdl.train.callbacks import Callback
from sparkdl.train.checkpoint.checkpoint import Checkpointer


def read(folder):
    """``(step, value)`` pairs by tag, as TensorBoard shows them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder), size_guidance={reader.SCALARS: 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_every_step_and_epoch_once_even_of_a_resumed_run(task, train, source, tmp_path):
    settings = {"epochs": 3, "max_grad_norm": 1.0, "window_steps": 2, "tensorboard_dir": str(tmp_path / "events")}
    parts = {"optimizer": functools.partial(torch.optim.SGD, lr=0.05), "metrics": {"mae": torch.nn.L1Loss()}}
    kept = CheckpointConfig(uri=str(tmp_path / "run"), every_steps=5)
    with pytest.raises(Interrupted):  # steps 11 and before are written, step 10 is the last that is saved
        train(task(**parts), source(), source(), checkpoints=Checkpointer(kept), callbacks=[RaiseAt(11)], **settings)
    result = train(task(**parts), source(), source(), checkpoints=Checkpointer(kept), **settings)
    assert result.resumed_step == 10

    shown = read(tmp_path / "events")
    assert set(shown) == {
        *("step/loss", "step/lr", "step/grad_norm", "epoch/loss", "epoch/mae", "epoch/val_loss", "epoch/val_mae"),
        *("epoch/lr", "epoch/seconds", "epoch/rows"),
    }
    for name in ("loss", "lr", "grad_norm"):
        assert [step for step, _ in shown[f"step/{name}"]] == list(range(1, 22))
        assert [value for _, value in shown[f"step/{name}"]] == pytest.approx(list(result.history.steps[name]))
    for name in ("loss", "val_loss", "val_mae"):
        wanted = [(row["step"], pytest.approx(row[name])) for row in result.history.epochs]
        assert shown[f"epoch/{name}"] == wanted


class CopyOfEpoch(Callback):
    """Copies the event files as an epoch begins: they are what a process that is killed in it leaves behind."""

    def __init__(self, folder, epoch):
        self.folder, self.epoch = folder, epoch

    def on_epoch_start(self, run):
        if run.epoch == self.epoch:
            shutil.copytree(self.folder, f"{self.folder}-killed")


def test_tensorboard_lacks_no_step_that_a_killed_attempt_had_not_written_out(task, train, source, tmp_path):
    folder = tmp_path / "events"
    kept = CheckpointConfig(uri=str(tmp_path / "run"), every_steps=5)
    settings = {"epochs": 3, "tensorboard_dir": str(folder)}
    hooks = [CopyOfEpoch(folder, 1), RaiseAt(11)]
    with pytest.raises(Interrupted):
        train(task(), source(), checkpoints=Checkpointer(kept), callbacks=hooks, **settings)
    shutil.rmtree(folder)
    shutil.move(f"{folder}-killed", folder)  # up to step 7, the end of the first epoch; step 10 is saved
    assert [step for step, _ in read(folder)["step/loss"]] == list(range(1, 8))
    result = train(task(), source(), checkpoints=Checkpointer(kept), **settings)
    assert result.resumed_step == 10
    assert [step for step, _ in read(folder)["step/loss"]] == list(range(1, 22))


@pytest.mark.slow
def test_tensorboard_shows_a_warm_start_behind_the_run_that_it_starts_from(task, train, source, tmp_path):
    folder, place = tmp_path / "events", str(tmp_path / "run")
    settings = {"tensorboard_dir": str(folder)}
    first = train(task(), source(), checkpoints=Checkpointer(CheckpointConfig(uri=place)), epochs=2, **settings)
    warm = CheckpointConfig(uri=place, resume="warm")
    second = train(task(), source(), checkpoints=Checkpointer(warm), epochs=1, **settings)
    third = train(task(), source(), checkpoints=Checkpointer(CheckpointConfig(uri=place)), epochs=2, **settings)
    assert (first.steps, second.steps, third.resumed_step) == (14, 7, 7)
    seconds = {file.name.split(".")[3] for file in folder.iterdir()}
    assert len(seconds) == 3, "TensorBoard reads files of one second by their number as text: 10 before 9"
    shown = read(folder)
    assert [step for step, _ in shown["step/loss"]] == list(range(1, 29))
    assert [step for step, _ in shown["epoch/loss"]] == [7, 14, 21, 28]
    wanted = [*first.history.steps["loss"], *third.history.steps["loss"]]
    assert [value for _, value in shown["step/loss"]] == pytest.approx(wanted)


def test_progress_is_told_once_an_interval_and_at_the_end_of_the_epoch(task, train, source, events):
    train(task(), source(1), epochs=1, steps_per_epoch=100, progress_seconds=1000)
    assert [event["step"] for event in events if event["kind"] == "progress"] == [1, 100]


def test_progress_tells_steps_loss_rate_of_rows_and_time_left(task, train, source, events):
    result = train(task(), source(), epochs=2, progress_seconds=0, window_steps=1)
    told = [event for event in events if event["kind"] == "progress"]
    halfway, last = next(event for event in told if event["step"] == 7), told[-1]
    assert (halfway["epoch"], halfway["batch"], halfway["batches"], halfway["rows"]) == (0, 7, 7, 103)
    assert (last["epoch"], last["epochs"], last["step"], last["rows"], last["eta_seconds"]) == (1, 2, 14, 206, 0.0)
    assert halfway["rows_per_second"] > 0
    assert halfway["eta_seconds"] > 0
    assert last["loss"] == pytest.approx(result.history.steps["loss"][-1])


def test_every_step_is_told_where_no_interval_is_wanted(task, train, source, events):
    train(task(), source(), epochs=1, progress_seconds=0)
    assert [event["step"] for event in events if event["kind"] == "progress"] == [1, 2, 3, 4, 5, 6, 7, 7]
