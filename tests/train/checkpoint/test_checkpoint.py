"""Checkpoints: whole or not at all, found again, kept and deleted as asked; runs that go on from them."""

from __future__ import annotations

import functools
import json
import os
import pickle
import random
import re
import threading

import numpy as np
import pytest
import torch
from train_helpers import Interrupted, RaiseAt, state_equal

from sparkdl.config import CheckpointConfig
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.storage import LocalStorage
from sparkdl.train.callbacks import Callback
from sparkdl.train.checkpoint.checkpoint import Checkpointer


@pytest.fixture
def keeper(tmp_path):
    def make(**config):
        return Checkpointer(CheckpointConfig(uri=str(tmp_path / "run"), **config))

    return make


def messy_state():
    generator = torch.Generator().manual_seed(0)
    return {
        "half": torch.randn(3, 2, generator=generator).half(),
        "brain": torch.randn(5, generator=generator).bfloat16(),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "flags": torch.tensor([True, False]),
        "transposed": torch.arange(6).reshape(2, 3).T,
        "numbers": [1, 2.5, float("nan"), float("-inf"), None, True, 2**70],
        "bytes": b"\x00\xff",
        "pair": (1, "two", (3,)),
        "by number": {0: {"step": torch.tensor(3.0)}, 7: "x", "$odd": 1},
        "array": np.arange(4, dtype=np.uint32),
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
    }


def assert_state(found, wanted):
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_state(found[key], wanted[key])
    elif isinstance(wanted, list | tuple):
        assert type(found) is type(wanted)
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert_state(a, b)
    elif isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    elif isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype
        assert np.array_equal(found, wanted)
    else:
        assert found == wanted or (found != found and wanted != wanted)
        assert type(found) is type(wanted)


def test_state_comes_back_as_it_was(keeper):
    saver = keeper()
    saver.save(messy_state(), step=3, epoch=1)
    saver.close()
    found = keeper().latest()
    assert (found.step, found.epoch, found.best) == (3, 1, False)
    assert_state(found.state, messy_state())


def test_there_is_no_pickle_and_the_library_reads_the_tensors(keeper, tmp_path):
    from safetensors.torch import load_file

    saver = keeper()
    saver.save(messy_state(), step=3, epoch=1)
    saver.close()
    (tensors,) = (tmp_path / "run").glob("*.safetensors")
    assert torch.equal(load_file(tensors)["transposed"], messy_state()["transposed"])
    for file in (tmp_path / "run").iterdir():
        with pytest.raises((pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError)):
            pickle.loads(file.read_bytes())


def test_tied_weights_are_stored_once(keeper, tmp_path):
    weight = torch.randn(100, 100)
    saver = keeper()
    saver.save({"a": weight, "b": weight}, step=1, epoch=0)
    saver.close()
    (tensors,) = (tmp_path / "run").glob("*.safetensors")
    assert tensors.stat().st_size < 1.1 * weight.nbytes
    state = keeper().latest().state
    assert torch.equal(state["a"], weight)
    assert torch.equal(state["b"], weight)


def test_a_snapshot_does_not_change_with_the_tensors(keeper):
    weight = torch.zeros(1000, 100)
    saver = keeper(keep_last=100)
    for step in range(1, 6):
        weight.fill_(step)
        saver.save({"w": weight}, step=step, epoch=0)
        weight.fill_(-1)
    saver.close()
    for step in range(1, 6):
        assert keeper().load(step).state["w"].unique().tolist() == [step]


def test_training_goes_on_while_a_checkpoint_is_written(keeper, monkeypatch):
    may_write = threading.Event()
    writes = LocalStorage.write_atomic
    monkeypatch.setattr(LocalStorage, "write_atomic", lambda self, data: may_write.wait(20) and writes(self, data))
    saver = keeper()
    saver.save({"w": torch.ones(3)}, step=1, epoch=0)
    assert keeper().steps() == []
    may_write.set()
    saver.close()
    assert keeper().steps() == [1]


def test_what_cannot_be_held_without_pickle_is_refused_by_its_path(keeper):
    with pytest.raises(CheckpointError, match=r"'callbacks.0.thing' is a object, which a checkpoint cannot hold"):
        keeper().save({"callbacks": [{"thing": object()}]}, step=1, epoch=0)


def test_half_a_character_is_refused_when_it_is_written_and_leaves_nothing(keeper, tmp_path):
    saver = keeper()
    saver.save({"callbacks": [{"file": "caf\udce9"}], "w": torch.ones(3)}, step=1, epoch=0)
    with pytest.raises(CheckpointError, match=r"the state of step 1, of callbacks perhaps, .*half a character"):
        saver.close()
    assert keeper().steps() == []
    assert not list(tmp_path.rglob("*.safetensors"))
    whole = keeper()
    whole.save({"callbacks": [{"file": "caf\u00e9 \U0001f600"}]}, step=2, epoch=0)
    whole.close()
    assert keeper().latest().state == {"callbacks": [{"file": "caf\u00e9 \U0001f600"}]}


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([1], ">i4"), np.array(["2026-01-01"], "datetime64[D]")])
def test_an_array_that_no_tensor_holds_is_refused_by_its_path(keeper, array):
    said = rf"'callbacks.0.seen' is an array of {re.escape(str(array.dtype))}, which"
    with pytest.raises(CheckpointError, match=said):
        keeper().save({"callbacks": [{"seen": array}]}, step=1, epoch=0)


def test_what_numpy_says_of_a_comparison_is_true_or_false(keeper):
    saver = keeper()
    saver.save({"callbacks": [{"better": np.float64(1) < np.float64(2)}]}, step=1, epoch=0)
    saver.close()
    assert keeper().load(1).state["callbacks"][0]["better"] is True


def test_the_last_ones_and_the_best_are_kept(keeper, tmp_path):
    saver = keeper(keep_last=2)
    for step in range(1, 8):
        saver.save({"w": torch.tensor(step)}, step=step, epoch=step, best=step in (1, 3))
    saver.close()
    assert keeper().steps() == [3, 6, 7]
    assert len(list((tmp_path / "run").glob("*.safetensors"))) == 3
    assert keeper().best().state["w"].item() == 3
    assert keeper().latest().step == 7


def test_leftovers_of_a_killed_writer_are_no_checkpoint_and_are_swept(keeper, tmp_path):
    saver = keeper()
    saver.save({"w": torch.ones(3)}, step=1, epoch=0)
    saver.close()
    leftover = tmp_path / "run" / "step-0000000002.deadbeef.safetensors"
    leftover.write_bytes(b"half a file")
    again = keeper()
    assert again.latest().step == 1
    again.save({"w": torch.ones(3)}, step=3, epoch=0)
    again.close()
    assert not leftover.exists()


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def damage(folder, step, how):
    (tensors,) = folder.glob(f"step-{step:010d}.*.safetensors")
    listing = folder / f"step-{step:010d}.json"
    if how == "missing":
        tensors.unlink()
    elif how == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-3])
    elif how == "bit":
        flip(tensors, tensors.stat().st_size - 5)
    elif how == "listing":
        flip(listing, listing.read_bytes().index(b'"epoch":') + 9)
    else:
        listing.write_text("")


@pytest.mark.parametrize("how", ["missing", "cut", "bit", "listing", "empty"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(keeper, tmp_path, caplog, how):
    saver = keeper()
    for step in (10, 20):
        saver.save({"w": torch.full((50,), step)}, step=step, epoch=step)
    saver.close()
    damage(tmp_path / "run", 20, how)
    again = keeper()
    assert again.latest().step == 10
    assert "the checkpoint of step 20" in caplog.text
    again.save({"w": torch.full((50,), 15)}, step=15, epoch=15)
    again.close()
    assert keeper().steps() == [10, 15]  # the damaged one is gone
    damage(tmp_path / "run", 10, "bit")
    damage(tmp_path / "run", 15, "cut")
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .* is whole \(steps \[10, 15\]\)"):
        keeper().latest()


def test_a_checkpoint_of_a_later_version_says_so(keeper, tmp_path, caplog):
    from sparkdl.storage import xxh3_hex

    saver = keeper()
    saver.save({"w": torch.ones(1)}, step=1, epoch=0)
    saver.close()
    listing = tmp_path / "run" / "step-0000000001.json"
    body = json.loads(listing.read_text())["checkpoint"] | {"format": 99}
    text = json.dumps(body, separators=(",", ":"))
    listing.write_text(f'{{"checkpoint":{text},"xxh3":"{xxh3_hex(text.encode())}"}}')
    with pytest.raises(CheckpointError):
        keeper().latest()
    assert "format 99 is newer than 1" in caplog.text


def forge(listing, **changes):
    """Change a checkpoint's JSON as one who can write does, with a hash that fits."""
    from sparkdl.storage import xxh3_hex

    body = json.loads(listing.read_text())["checkpoint"] | changes
    text = json.dumps({name: value for name, value in body.items() if value is not ...}, separators=(",", ":"))
    listing.write_text(f'{{"checkpoint":{text},"xxh3":"{xxh3_hex(text.encode())}"}}')


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "two"},
        {"epoch": ...},
        {"bytes": -1},
        {"best": None},
        {"state": []},
        {"state": {"w": {"$tensor": "gone"}}},
        {"state": {"w": {"$tensor": []}}},
        {"state": {"w": {"$bytes": 5}}},
        {"state": {"w": {"$float": "one"}}},
        {"state": {"w": {"$map": [[[], 1]]}}},
        {"state": {"w": {"$map": 3}}},
        {"state": {"w": {"$tuple": None}}},
        {"tensors": 7},
        {"tensors": "../outside"},
        {"tensors": "/tmp/outside"},
        {"tensors": "step-0000000001.deadbeef.safetensors"},
        {"step": 1},
        {"color": "red"},
    ],
    ids=str,
)
def test_whatever_stands_in_a_checkpoint_the_one_before_is_found(keeper, tmp_path, changes):
    saver = keeper()
    for step in (1, 2):
        saver.save({"w": torch.full((3,), step)}, step=step, epoch=0)
    saver.close()
    forge(tmp_path / "run" / "step-0000000002.json", **changes)
    assert keeper().latest().step == 1


@pytest.mark.parametrize("name", ["../outside", "{}/outside", "other", "step-0000000003.deadbeef.safetensors"])
def test_retiring_a_checkpoint_deletes_nothing_but_its_own_file(keeper, tmp_path, name):
    saver = keeper(keep_last=1)
    saver.save({"w": torch.ones(1)}, step=1, epoch=0)
    saver.close()
    victims = [tmp_path / "outside", tmp_path / "run" / "other"]
    for victim in victims:
        victim.write_text("mine")
    forge(tmp_path / "run" / "step-0000000001.json", tensors=name.replace("{}", str(tmp_path)))
    saver = keeper(keep_last=1)
    for step in (3, 4):
        saver.save({"w": torch.ones(1)}, step=step, epoch=0)
    saver.close()
    assert [victim.read_text() for victim in victims] == ["mine", "mine"]
    assert keeper().latest().step == 4


@pytest.mark.parametrize("how", ["link out", "pipe", "huge", "huge listing", "pipe listing"])
def test_what_is_no_plain_file_of_the_recorded_size_is_passed_over(keeper, tmp_path, how):
    saver = keeper()
    for step in (1, 2):
        saver.save({"w": torch.full((3,), step)}, step=step, epoch=0)
    saver.close()
    pattern = "step-0000000002.json" if "listing" in how else "step-0000000002.*.safetensors"
    (file,) = (tmp_path / "run").glob(pattern)
    file.rename(tmp_path / "outside")
    if how == "link out":
        file.symlink_to(tmp_path / "outside")
    elif "pipe" in how:
        os.mkfifo(file)
    else:
        with file.open("wb") as sink:
            sink.truncate(1 << 40)
    assert keeper().latest().step == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_unwritable_place_is_reported_by_the_next_call(tmp_path):
    (tmp_path / "file").write_text("")
    saver = Checkpointer(CheckpointConfig(uri=str(tmp_path / "file" / "run")))
    saver.save({"w": torch.ones(1)}, step=1, epoch=0)
    with pytest.raises(CheckpointError, match="a checkpoint could not be written to"):
        saver.close()


@pytest.mark.parametrize("cut", [3, 7, 8, 12, 19])
def test_a_run_that_was_cut_off_anywhere_goes_on_bit_for_bit(task, train, source, keeper, cut):
    """With dropout, warm-up, a scheduler, a metric over training rows, and random numbers of a user's own."""
    import torchmetrics

    class Noisy(Callback):
        def __init__(self):
            self.drawn = []

        def on_step_end(self, run):
            self.drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))

        def state_dict(self):
            return {"drawn": self.drawn}

        def load_state_dict(self, state):
            self.drawn = state["drawn"]

    def run(*callbacks, checkpoints=None):
        noisy = Noisy()
        parts = task(
            dropout=0.5,
            optimizer=functools.partial(torch.optim.AdamW, lr=0.05),
            scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=21),
            scheduler_interval="step",
            metrics={"mae": torchmetrics.MeanAbsoluteError},
        )
        result = train(
            parts, source(), source(), epochs=3, warmup_steps=9, callbacks=[noisy, *callbacks], checkpoints=checkpoints
        )
        return result, noisy.drawn

    undisturbed, drawn = run()
    with pytest.raises(Interrupted):
        run(RaiseAt(cut), checkpoints=keeper(every_steps=1, keep_last=2))
    resumed, drawn_again = run(checkpoints=keeper())
    assert resumed.resumed_step == cut - 1
    assert state_equal(resumed.model, undisturbed.model)
    assert drawn_again == drawn
    for column in ("step", "epoch", "loss", "lr"):
        assert resumed.history.steps[column] == undisturbed.history.steps[column]
    timeless = [{k: v for k, v in row.items() if k != "seconds"} for row in resumed.history.epochs]
    assert timeless == [{k: v for k, v in row.items() if k != "seconds"} for row in undisturbed.history.epochs]
    assert (resumed.steps, resumed.rows, resumed.epochs) == (21, 309, 3)


def test_accumulation_and_the_fp16_scaler_go_on_bit_for_bit(task, train, source, keeper):
    settings = {"epochs": 2, "accumulate_steps": 3, "precision": "fp16", "max_grad_norm": 1.0}
    undisturbed = train(task(dropout=0.2), source(), **settings)
    with pytest.raises(Interrupted):
        train(task(dropout=0.2), source(), checkpoints=keeper(every_steps=1), callbacks=[RaiseAt(3)], **settings)
    resumed = train(task(dropout=0.2), source(), checkpoints=keeper(), **settings)
    assert resumed.resumed_step == 2
    assert state_equal(resumed.model, undisturbed.model)
    assert resumed.history.steps["grad_norm"] == undisturbed.history.steps["grad_norm"]


def test_the_fp16_scale_that_overflows_led_to_is_kept(task, train, source, keeper):
    """Every gradient overflows at first, so that the scale falls; a fresh scaler would skip the next steps again."""
    parts = {"loss": lambda output, label: 1e3 * (output[:, 0] - label).square().mean()}
    settings = {"epochs": 2, "precision": "fp16"}
    undisturbed = train(task(**parts), source(), **settings)
    with pytest.raises(Interrupted):
        train(task(**parts), source(), checkpoints=keeper(every_steps=1), callbacks=[RaiseAt(12)], **settings)
    assert keeper().latest().state["scaler"]["scale"] < 2.0**14
    resumed = train(task(**parts), source(), checkpoints=keeper(), **settings)
    assert resumed.resumed_step == 11
    assert state_equal(resumed.model, undisturbed.model)


def test_patience_and_the_best_weights_survive_an_interruption(task, train, source, keeper):
    parts = {
        "optimizer": functools.partial(torch.optim.SGD, lr=0.01),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 2.0),
    }
    settings = {"epochs": 50, "early_stopping_patience": 3}
    undisturbed = train(task(**parts), source(), source(), **settings)
    late = undisturbed.best_epoch * 7 + 7 + 10  # an epoch and a half after the best one
    with pytest.raises(Interrupted):
        train(task(**parts), source(), source(), checkpoints=keeper(keep_last=1), callbacks=[RaiseAt(late)], **settings)
    resumed = train(task(**parts), source(), source(), checkpoints=keeper(keep_last=1), **settings)
    assert resumed.resumed_step > (undisturbed.best_epoch + 1) * 7
    assert resumed.best_epoch == undisturbed.best_epoch
    assert resumed.stop_reason == undisturbed.stop_reason
    assert state_equal(resumed.model, undisturbed.model)
    assert resumed.metrics["val_loss"] == undisturbed.metrics["val_loss"]


def test_a_run_that_goes_on_with_patience_returns_the_metrics_of_an_earlier_best_epoch(task, train, source, keeper):
    def part(epochs, **settings):
        parts = {
            "optimizer": functools.partial(torch.optim.SGD, lr=0.01),
            "scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda epoch: 1.0 if epoch < 2 else 300.0
            ),
        }
        return train(task(**parts), source(), source(), epochs=epochs, checkpoints=keeper(), **settings)

    first = part(2)
    longer = part(9, early_stopping_patience=2)
    assert (longer.resumed_step, longer.epochs, longer.best_epoch) == (14, 4, 1)
    assert longer.metrics == first.history.epochs[1]
    assert state_equal(longer.model, first.model)


def test_a_finished_run_is_not_trained_again_but_may_be_prolonged(task, train, source, keeper):
    first = train(task(), source(), epochs=2, checkpoints=keeper())
    again = train(task(), source(), epochs=2, checkpoints=keeper())
    assert (again.steps, again.resumed_step, len(again.history)) == (14, 14, 2)
    assert state_equal(again.model, first.model)
    longer = train(task(), source(), epochs=3, checkpoints=keeper())
    assert state_equal(longer.model, train(task(), source(), epochs=3).model)


def test_a_run_that_was_ended_inside_an_epoch_goes_on_there(task, train, source, keeper):
    train(task(), source(), source(), epochs=3, max_steps=10, checkpoints=keeper())
    longer = train(task(), source(), source(), epochs=3, checkpoints=keeper())
    whole = train(task(), source(), source(), epochs=3)
    assert longer.resumed_step == 10
    assert state_equal(longer.model, whole.model)
    assert longer.history.column("val_loss") == whole.history.column("val_loss")
    assert longer.history.column("loss") == whole.history.column("loss")


def test_old_checkpoints_are_never_mixed_with_a_fresh_run(task, train, source, keeper):
    train(task(), source(), epochs=1, checkpoints=keeper())
    with pytest.raises(ConfigError, match=r'resume="never", but .* holds checkpoints up to step 7'):
        train(task(), source(), epochs=1, checkpoints=keeper(resume="never"))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": torch.nn.Linear(5, 1)}, "'weight' is no such tensor in the checkpoint of step 7 and"),
        (
            {"optimizer": lambda m: torch.optim.Adam([{"params": [p]} for p in m.parameters()])},
            "does not fit the task's",
        ),
        (
            {"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 1)},
            "the task has one scheduler, the checkpoint none",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(task, train, source, keeper, parts, message):
    train(task(), source(), epochs=1, checkpoints=keeper())
    with pytest.raises(CheckpointError, match=message):
        train(task(**parts), source(), epochs=2, checkpoints=keeper())


def test_a_callback_sees_each_checkpoint_and_an_event_tells_of_it(task, train, source, keeper, events):
    seen = []

    class Look(Callback):
        def on_checkpoint(self, run):
            seen.append(run.step)

    train(task(), source(), epochs=2, checkpoints=keeper(every_steps=3, every_epochs=None), callbacks=[Look()])
    # 9 and 12 stand in the second epoch; 7 was the best epoch, 14 is the best and the last
    assert seen == [3, 6, 7, 9, 12, 14]
    told = [event for event in events if event["kind"] == "checkpoint"]
    assert [event["step"] for event in told] == seen
    assert all(event["bytes"] > 0 for event in told)


GONE = ...  # one with a name that is the same in every process


def rewritten(keeper, step, *way, value):
    """The checkpoint again with another value at one place of its state, and hashes that fit."""
    state = keeper().load(step).state
    inner = state
    for name in way[:-1]:
        inner = inner[name]
    if value is GONE:
        del inner[way[-1]]
    else:
        inner[way[-1]] = value
    saver = keeper(keep_last=10)
    saver.save(state, step=step, epoch=1)
    saver.close()


@pytest.mark.parametrize(
    ("way", "value"),
    [
        *(
            ((name,), GONE)
            for name in ("model", "optimizer", "rate", "ranks", "loader", "run", "window", "model_selection")
        ),
        *(((name,), "x") for name in ("model", "optimizer", "scaler", "callbacks", "history", "identity")),
        (("run", "step"), -1),
        (("run", "world"), 1),
        (("ranks", 0, "rng"), None),
        (("model_selection", "stopping", "waited"), "x"),
        (("history", "epochs"), [1]),
        (("rate", "steps"), 2**70),
    ],
    ids=str,
)
def test_a_state_that_the_loop_has_not_written_is_passed_over(task, train, source, keeper, way, value):
    train(task(), source(), epochs=1, checkpoints=keeper(every_steps=3, keep_last=10))
    rewritten(keeper, 7, *way, value=value)
    assert train(task(), source(), epochs=2, checkpoints=keeper()).resumed_step == 6


def test_a_checkpoint_that_calls_model_selection_by_its_name_of_before_is_taken(task, train, source, keeper):
    train(task(), source(), epochs=1, checkpoints=keeper())
    rewritten(keeper, 7, "judge", value=keeper().load(7).state["model_selection"])
    rewritten(keeper, 7, "model_selection", value=GONE)
    result = train(task(), source(), epochs=2, checkpoints=keeper())
    assert result.resumed_step == 7
    assert result.best_value == train(task(), source(), epochs=2).best_value


@pytest.mark.parametrize(
    ("way", "value"),
    [
        (("loader", "epoch"), []),
        (("history", "steps"), 3),
        (("window", "rows"), GONE),
        (("ranks", 0, "rng", "torch"), torch.ones(3)),
        (("ranks", 0, "rng", "python"), (3, [1], None)),
        (("optimizer", "param_groups"), 5),
        (("model", "strange"), 1),
    ],
    ids=str,
)
def test_a_state_that_no_part_can_take_over_is_refused_by_type(task, train, source, keeper, way, value):
    train(task(), source(), epochs=1, checkpoints=keeper())
    rewritten(keeper, 7, *way, value=value)
    with pytest.raises(CheckpointError):
        train(task(), source(), epochs=2, checkpoints=keeper())
