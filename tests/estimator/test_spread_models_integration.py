"""Fits whose model is spread over the ranks: what is refused, a rank that is killed, a driver that is interrupted."""

import functools
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

from sparkdl.errors import ConfigError
from sparkdl.estimator import TorchEstimator, fit
from sparkdl.nn import MixtureOfExperts
from sparkdl.train.callbacks import Callback

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ADAM = functools.partial(torch.optim.Adam, lr=0.01)
STRATEGIES = [
    pytest.param("fsdp", id="fsdp"),
    *(
        pytest.param(strategy, marks=pytest.mark.slow, id=strategy.partition("(")[0])
        for strategy in (
            "zero1",
            "zero2",
            "tensor",
            "pipeline(micro_batches=2, cuts=('2',))",
            "expert",
            "parameter_server(servers=2)",
        )
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
    net = params.pop("model", None) or net_of(strategy)
    settings = {
        "optimizer": torch.optim.Adam(net.parameters(), lr=0.01),
        "batch_size": 8,
        "epochs": 3,
        "num_proc": 2,
        "verbose": 0,
        "run_id": "mine",
        "backend": "torch",
    }
    return TorchEstimator(
        model=net,
        loss=nn.MSELoss(),
        feature_cols=list("abc"),
        label_cols=["y"],
        strategy=strategy,
        store=str(store),
        **(settings | params),
    )


def weights(model):
    return torch.cat([tensor.flatten() for tensor in model.getModel().state_dict().values()])


def layers(*inner):
    return nn.Sequential(nn.Linear(3, 8), *inner, nn.Linear(8, 1))


def tied():
    model = layers(nn.Linear(8, 8), nn.Linear(8, 8))
    model[2].weight = model[1].weight
    return model


class ByRow(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.second(torch.stack([self.first(row) for row in x]))


class MaybeScaled(nn.Module):
    """With an argument that may be left out, so that nobody knows what it computes until the inputs are known."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 1), nn.Linear(1, 1)

    def forward(self, x, scale=None):
        return self.first(x) if scale is None else self.second(self.first(x) * scale)


BEFORE_SPARK_WORKS = {
    "ranks": ("mesh(data=2, tensor=2)", layers(), {}, "2 ranks do not fill the mesh data=2 x tensor=2"),
    "no pairs": ("tensor", layers(nn.Softmax(-1)), {}, "tensor=2 finds nothing to split in Sequential"),
    "odd features": ("tensor(plan={'0': 'column', '1': 'row'})", nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 1)), {},
        "0 has 7 output features, no multiple of 2"),
    "batch norm, tensor": ("tensor", layers(nn.BatchNorm1d(8)), {}, "layer '1', a BatchNorm1d, counts the rows of all"),
    "batch norm, pipeline": ("pipeline", layers(nn.BatchNorm1d(8)), {"batch_size": 16}, "1 is a BatchNorm1d"),
    "few rows": ("pipeline(micro_batches=9)", layers(), {}, "batch_size=8 has fewer rows than the 9 micro-batches of"),
    "no mixture": ("expert", layers(), {}, "has no sparkdl.nn.MixtureOfExperts"),
    "odd experts": ("expert", layers(MixtureOfExperts(8, 16, 3)), {}, "the 3 experts of layer '1' do not divide by 2"),
    "horovod": ("fsdp", layers(), {"backend": "horovod"}, "opens no group of it: choose backend='torch'"),
    "half precision": ("fsdp", layers(), {"precision": "fp16"}, "choose precision='bf16'"),
    "compiled": ("fsdp", layers(), {"compile": True}, "compile=True do not go together: drop one"),
    "few layers": ("pipeline(micro_batches=2)", nn.Sequential(nn.Linear(3, 1)), {}, "1 layers to cut between, and the"),
    "tied": ("pipeline(cuts=('2',))", tied(), {}, "1.weight would lie in the stages 0 and 1"),
    "not traced": ("pipeline", ByRow(), {}, "ByRow cannot be cut into stages, since its forward cannot be"),
    "no such module": ("pipeline(cuts=('7',))", layers(), {}, "cuts names '7', which is no module of Sequential"),
    "other cuts": ("pipeline(cuts=('1', '2'))", layers(nn.Linear(8, 8)), {}, "2 cuts make 3 stages, and the mesh has"),
    "servers": ("parameter_server(servers=3)", layers(), {}, "servers=3, of which each is on a rank of its own"),
    "fewer ranks than servers later": ("parameter_server(servers=2)", layers(), {"max_failures": 1, "min_num_proc": 1},
        "has servers=2, of which each is on a rank of its own, and there are 1 ranks"),
    "half precision, servers": ("parameter_server", layers(), {"precision": "fp16"}, "choose precision='bf16'"),
    "compressed, servers": ("parameter_server", layers(), {"gradient_compression": "bf16"}, "averages no gradients"),
    "batch norm, servers": ("parameter_server", layers(nn.BatchNorm1d(8)), {}, "'1' of the model is a BatchNorm1d"),
    "experts, servers": ("parameter_server", layers(MixtureOfExperts(8, 16, 4)), {}, "choose strategy='all_reduce'"),
    "fewer ranks later": ("tensor", layers(), {"max_failures": 1, "min_num_proc": 1}, "would leave fewer"),
}  # fmt: skip
BEFORE_RANKS_START = {
    "few layers": ("pipeline", MaybeScaled(), {}, "the model has 1 layers to cut between, and the pipeline 2 stages"),
}


def refused(case, frame, store):
    strategy, net, params, sentence = case
    with pytest.raises(ConfigError) as error:
        estimator(strategy, store, model=net, optimizer=torch.optim.Adam(net.parameters()), **params).fit(frame)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", BEFORE_SPARK_WORKS)
def test_what_cannot_be_spread_is_refused_before_spark_works(frame, tmp_path, monkeypatch, case):
    monkeypatch.setattr(fit, "prepare", lambda *_, **__: pytest.fail("shards were written"))
    refused(BEFORE_SPARK_WORKS[case], frame, tmp_path)


@pytest.mark.parametrize("case", BEFORE_RANKS_START)
def test_a_model_that_cannot_be_cut_is_refused_before_a_rank_starts(frame, tmp_path, monkeypatch, case):
    monkeypatch.setattr(fit, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    refused(BEFORE_RANKS_START[case], frame, tmp_path)


@pytest.mark.slow
def test_ranks_that_choose_train_what_one_rank_trains_and_say_why(frame, tmp_path, capfd):
    def net():
        torch.manual_seed(1)
        return layers(nn.Linear(8, 8))

    one = estimator("all_reduce", tmp_path / "one", model=net(), num_proc=1, batch_size=16, optimizer=ADAM).fit(frame)
    both = estimator("auto", tmp_path / "two", model=net(), verbose=1, optimizer=ADAM).fit(frame)
    torch.testing.assert_close(weights(both), weights(one), rtol=1e-4, atol=1e-5)
    assert "strategy='auto' takes" in capfd.readouterr().err
    again = estimator("auto", tmp_path / "two", model=net(), verbose=0, epochs=4, optimizer=ADAM).fit(frame)
    assert "choose" in again.summary.seconds


class KilledOnce(Callback):
    """Kills the last rank inside of the third epoch, if it finds its marker, which it removes."""

    def __init__(self, marker):
        self.marker = marker

    def on_step_end(self, run):
        if run.epoch == 2 and run.world.rank == run.world.size - 1 and Path(self.marker).exists():
            Path(self.marker).unlink()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
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


class RaisesOnce(Callback):
    """Raises on the last rank, inside of the third epoch, if it finds its marker, which it removes."""

    def __init__(self, marker):
        self.marker = marker

    def on_step_end(self, run):
        if run.epoch == 2 and run.world.rank == run.world.size - 1 and Path(self.marker).exists():
            Path(self.marker).unlink()
            raise ValueError("of this rank alone")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_rank_raised_is_told_before_what_others_say_of_its_end(frame, tmp_path, caplog, strategy):
    marker = tmp_path / "marker"
    marker.touch()
    again = estimator(strategy, tmp_path / "store", max_failures=1, callbacks=[RaisesOnce(str(marker))]).fit(frame)
    assert "attempt 1 of 2 failed (rank 1 failed: ValueError: of this rank alone" in caplog.text
    assert len(again.history) == 3


class InterruptsDriver(Callback):
    """Leaves the number of each rank's process, then interrupts the driver, as Ctrl-C does."""

    def __init__(self, folder, driver):
        self.folder, self.driver = folder, driver

    def on_step_end(self, run):
        Path(self.folder, str(os.getpid())).touch()  # in its name: a rank may be ended before it has written
        if run.step == 3 and run.world.is_leader:
            os.kill(self.driver, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ctrl_c_ends_every_rank_and_the_session_fits_on(frame, tmp_path, capfd, strategy):
    pids = tmp_path / "pids"
    pids.mkdir()
    with pytest.raises(KeyboardInterrupt):
        estimator(
            strategy, tmp_path / "store", epochs=10_000, callbacks=[InterruptsDriver(str(pids), os.getpid())]
        ).fit(frame)
    ranks = [int(path.name) for path in pids.iterdir()]
    assert len(ranks) == 2
    until = time.monotonic() + 30
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in ranks):
        assert time.monotonic() < until, "a rank still runs"
        time.sleep(0.05)
    assert "Traceback" not in "".join(capfd.readouterr())
    assert len(estimator(strategy, tmp_path / "next", epochs=1).fit(frame).history) == 1
