"""Fits whose model is spread over the ranks: a rank that is killed, a driver that is interrupted."""

import os
import signal
import sys
import time
from pathlib import Path

import cloudpickle
import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from torch import nn

from sparkdl.estimator import TorchEstimator
from sparkdl.nn import MixtureOfExperts
from sparkdl.train.callbacks import Callback

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STRATEGIES = [
    pytest.param("fsdp", id="fsdp"),
    *(
        pytest.param(strategy, marks=pytest.mark.slow, id=strategy.partition("(")[0])
        for strategy in ("zero1", "zero2", "tensor", "pipeline(micro_batches=2, cuts=('2',))", "expert")
    ),
]


@pytest.fixture(scope="module")
def frame(spark):
    x = np.random.default_rng(3).normal(size=(64, 3)).astype("float32")
    table = pd.DataFrame(x, columns=list("abc"))
    table["y"] = x.sum(1)
    return spark.createDataFrame(table).coalesce(2)


def net_of(strategy):
    torch.manual_seed(0)
    inner = MixtureOfExperts(8, 16, 4) if strategy == "expert" else nn.Linear(8, 8)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), inner, nn.Dropout(0.2), nn.Linear(8, 8), nn.Linear(8, 1))


def estimator(strategy, store, **params):
    net = net_of(strategy)
    settings = {"batch_size": 8, "epochs": 3, "num_proc": 2, "verbose": 0, "run_id": "mine", "backend": "torch"}
    return TorchEstimator(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
        loss=nn.MSELoss(),
        feature_cols=list("abc"),
        label_cols=["y"],
        strategy=strategy,
        store=str(store),
        **(settings | params),
    )


def weights(model):
    return torch.cat([tensor.flatten() for tensor in model.getModel().state_dict().values()])


class KilledOnce(Callback):
    """Kills the last rank inside of the third epoch, if it finds its marker, which it removes."""

    def __init__(self, marker):
        self.marker = marker

    def on_step_end(self, run):
        if run.epoch == 2 and run.world.rank == run.world.size - 1 and Path(self.marker).exists():
            Path(self.marker).unlink()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_that_lost_a_rank_ends_with_the_weights_of_an_undisturbed_one(frame, tmp_path, caplog, strategy):
    undisturbed = estimator(strategy, tmp_path / "undisturbed").fit(frame)
    marker = tmp_path / "marker"
    marker.touch()
    again = estimator(strategy, tmp_path / "store", max_failures=1, callbacks=[KilledOnce(str(marker))]).fit(frame)
    assert not marker.exists()
    assert "attempt 1 of 2 failed" in caplog.text
    assert torch.equal(weights(again), weights(undisturbed))
    assert list(again.history["loss"]) == list(undisturbed.history["loss"])


class InterruptsDriver(Callback):
    """Leaves the number of each rank's process, then interrupts the driver, as Ctrl-C does."""

    def __init__(self, folder, driver):
        self.folder, self.driver = folder, driver

    def on_step_end(self, run):
        Path(self.folder, str(run.world.rank)).write_text(str(os.getpid()))
        if run.step == 3 and run.world.is_leader:
            os.kill(self.driver, signal.SIGINT)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ctrl_c_ends_every_rank_and_the_session_fits_on(frame, tmp_path, capfd, strategy):
    pids = tmp_path / "pids"
    pids.mkdir()
    with pytest.raises(KeyboardInterrupt):
        estimator(
            strategy, tmp_path / "store", epochs=10_000, callbacks=[InterruptsDriver(str(pids), os.getpid())]
        ).fit(frame)
    ranks = [int(path.read_text()) for path in pids.iterdir()]
    assert len(ranks) == 2
    until = time.monotonic() + 30
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in ranks):
        assert time.monotonic() < until, "a rank still runs"
        time.sleep(0.05)
    assert "Traceback" not in "".join(capfd.readouterr())
    assert len(estimator(strategy, tmp_path / "next", epochs=1).fit(frame).history) == 1
