"""A run_id that was trained before: the fit goes on, starts from its weights, or is refused before a rank starts."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.estimator import TorchEstimator, fit
from sparkdl.train.callbacks import Callback


def rows_of(spark, seed, slope=1.0):
    x = np.random.default_rng(seed).normal(size=(64, 3)).astype("float32")
    table = pd.DataFrame(x, columns=list("abc"))
    table["y"] = slope * x.sum(1)
    return spark.createDataFrame(table).coalesce(2)


@pytest.fixture(scope="module")
def frame(spark):
    return rows_of(spark, 3)


def net_of(width=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))


def estimator(lr=0.05, net=None, **params):
    net = net or net_of()
    given = {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=lr),
        "loss": nn.MSELoss(),
        "feature_cols": list("abc"),
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 2,
        "num_proc": 2,
        "verbose": 0,
        "run_id": "mine",
    }
    return TorchEstimator(**(given | params))


def weights(model):
    return torch.cat([tensor.flatten().float() for tensor in model.getModel().state_dict().values()])


@pytest.fixture(scope="module")
def trained(frame, tmp_path_factory):
    """Two epochs, and the store that holds them."""
    store = tmp_path_factory.mktemp("store")
    return estimator(store=str(store)).fit(frame), store


@pytest.fixture
def store(trained, tmp_path):
    """A copy of that store, for one test."""
    shutil.copytree(trained[1], tmp_path / "store")
    return str(tmp_path / "store")


@pytest.fixture
def no_ranks(monkeypatch):
    monkeypatch.setattr(fit, "run", lambda *a, **k: pytest.fail("ranks were started"))


def test_the_same_run_goes_on_bit_for_bit(frame, store, tmp_path):
    longer = estimator(store=store, epochs=4).fit(frame)
    whole = estimator(store=str(tmp_path / "other"), epochs=4).fit(frame)
    assert torch.equal(weights(longer), weights(whole))
    assert list(longer.history["loss"]) == list(whole.history["loss"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.1}, r"^optimizer is .*lr: 0\.1,.* had .*lr: 0\.05,.*"),
        ({"loss": nn.L1Loss()}, "^loss is .*L1Loss.* had .*MSELoss"),
        ({"batch_size": 4}, "^batch_size is 4, and the run whose checkpoints lie in .* had 8: go on with what it had"),
        ({"random_seed": 5}, "^random_seed is 5, and .* had 0"),
        ({"sync_batch_norm": False}, "^sync_batch_norm is False, and .* had None"),
        (
            {"spread_rows": False},
            r"^training data is '64 rows, content (\w+)', and .* had '64 rows, content (?!\1)",
        ),
        ({"epochs": 1}, "^epochs=1, and the run has trained 2 already: ask for more"),
        ({"resume": "never"}, '^resume="never", but .*mine.* holds checkpoints up to step 8'),
        ({"resume": "warm", "run_id": "typo"}, '^resume="warm" starts from .*typo.* holds none'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_run_is_refused_by_name_before_a_rank_starts(frame, store, no_ranks, changes, message):
    with pytest.raises(ConfigError, match=message):
        estimator(store=store, **changes).fit(frame)


def test_other_data_and_weights_that_do_not_fit_are_refused_before_a_rank_starts(spark, frame, store, no_ranks):
    with pytest.raises(ConfigError, match=r"^training data is .*\(the same rows; with shuffle=False"):
        estimator(store=store).fit(rows_of(spark, 4))
    with pytest.raises(CheckpointError, match=r"^'0.weight' is \(4, 3\) in the checkpoint of step 8 and \(5, 3\)"):
        estimator(store=store, net=net_of(5), resume="warm").fit(frame)


class FailsOnce(Callback):
    """Fails on the last rank in the third epoch, if it finds its marker, and removes it."""

    def __init__(self, marker, killed):
        self.marker, self.killed = marker, killed

    def on_epoch_start(self, run):
        if run.epoch == 2 and run.world.rank == run.world.size - 1 and Path(self.marker).exists():
            Path(self.marker).unlink()
            if self.killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("the disk of this host is gone")


def test_a_warm_start_trains_those_weights_on_other_rows_at_another_rate(spark, trained, store):
    other = rows_of(spark, 4, slope=3.0)
    still = estimator(store=store, resume="warm", lr=0.0, epochs=1, num_proc=2).fit(other)
    before = trained[0].getModel().train()
    table = other.toPandas()
    x, y = (torch.tensor(table[names].to_numpy(), dtype=torch.float32) for names in (list("abc"), ["y"]))
    parameters = [torch.equal(a, b) for a, b in zip(still.getModel().parameters(), before.parameters(), strict=True)]
    assert all(parameters)
    # Of whole-set statistics, where training has those of a batch of 16: near it, and far from fresh weights' loss.
    fresh = nn.functional.mse_loss(net_of().train()(x), y).item()
    expected = nn.functional.mse_loss(before(x), y).item()
    assert still.history["loss"].iloc[0] == pytest.approx(expected, rel=0.1)
    assert abs(fresh - expected) > 0.3 * expected


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["raises", "killed"])
def test_a_warm_start_that_fails_goes_on_with_its_own_checkpoints(spark, store, tmp_path, caplog, killed):
    other = rows_of(spark, 4, slope=3.0)
    marker = tmp_path / "marker"
    shutil.copytree(store, tmp_path / "undisturbed")
    given = {"resume": "warm", "lr": 0.02, "epochs": 4}
    whole = estimator(store=str(tmp_path / "undisturbed"), **given).fit(other)
    marker.touch()
    again = estimator(store=store, max_failures=1, callbacks=[FailsOnce(str(marker), killed)], **given).fit(other)
    assert "attempt 1 of 2 failed" in caplog.text
    assert torch.equal(weights(again), weights(whole))
    assert list(again.history["loss"]) == list(whole.history["loss"])
    assert list(again.history["epoch"]) == [0, 1, 2, 3]
