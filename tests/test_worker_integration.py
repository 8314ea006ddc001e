"""The whole of training, shards to weights, through a real barrier stage: two ranks end where one rank ends."""

from __future__ import annotations

import functools
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch

from sparkdl.columns.layout import Layout
from sparkdl.config import TrainConfig
from sparkdl.runner import run
from sparkdl.shards.files import write_table_shards
from sparkdl.train.task import Task
from sparkdl.worker import RankJob, run_rank
from sparkdl.world import World

ROWS, GLOBAL_BATCH = 3001, 256  # neither divides the other, and the last step has an odd number of rows
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """One set of the same rows in each precision: numbers, ids for an embedding, a label."""
    rng = np.random.default_rng(3)
    numbers = rng.normal(size=(ROWS, 4))
    zone = rng.integers(0, 20, ROWS)
    label = numbers @ [1.0, -2.0, 0.5, 3.0] + np.sin(zone) + 0.1 * rng.normal(size=ROWS)
    places = {}
    for dtype in TOLERANCE:
        table = pa.table(
            {
                **{f"x{i}": numbers[:, i].astype(dtype) for i in range(4)},
                "zone": zone.astype("int32"),
                "label": label.astype(dtype),
            }
        )
        places[dtype] = str(tmp_path_factory.mktemp(dtype))
        layout = Layout(pack={"features": [f"x{i}" for i in range(4)]})
        write_table_shards(table, places[dtype], labels=["label"], layout=layout)
    return places


def make_model(dtype):
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.zones = torch.nn.Embedding(20, 3)
            self.layers = torch.nn.Sequential(torch.nn.Linear(7, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

        def forward(self, features, zone):
            return self.layers(torch.cat([features, self.zones(zone.long())], dim=1)).squeeze(1)

    return Net().to(getattr(torch, dtype))


def job(shards, dtype, ranks, backend):
    task = Task(
        model=functools.partial(make_model, dtype),
        optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        loss=torch.nn.MSELoss(),
        inputs=("features", "zone"),
    )
    return RankJob(
        task=task,
        train_uri=shards[dtype],
        validation_uri=shards[dtype],
        batch_size=GLOBAL_BATCH // ranks,
        train=TrainConfig(epochs=2, seed=5),
        backend=backend,
    )


def train_all(jobs):
    """On each rank: one training after the other."""
    return [run_rank(World.from_env(), each) for each in jobs]


@pytest.fixture(scope="module")
def alone(shards):
    return {dtype: run_rank(World(), job(shards, dtype, 1, "solo")) for dtype in TOLERANCE}


@pytest.mark.parametrize("backend", ["horovod", "torch"])
def test_two_ranks_in_a_barrier_stage_train_the_model_of_one(spark, shards, alone, backend):
    if backend == "horovod":
        pytest.importorskip("horovod")
    jobs = [job(shards, dtype, 2, backend) for dtype in TOLERANCE]
    first, second = run(train_all, args=(jobs,), num_proc=2, backend=backend, spark=spark)
    assert all(report.weights is None for report in second)
    for dtype, report in zip(TOLERANCE, first, strict=True):
        reference = alone[dtype]
        assert report.backend == backend
        assert report.result.steps == reference.result.steps == 2 * -(-ROWS // GLOBAL_BATCH)
        for name, weights in reference.weights.items():
            assert weights.dtype == getattr(torch, dtype)
            torch.testing.assert_close(report.weights[name], weights, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        for ours, theirs in zip(report.result.history.epochs, reference.result.history.epochs, strict=True):
            assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=TOLERANCE[dtype])


def test_training_learned_something(alone):
    label_variance = 1 + 4 + 0.25 + 9 + 0.5
    for report in alone.values():
        assert report.result.history.epochs[-1]["val_loss"] < 0.15 * label_variance


def loaded_by_training(one, heavy):
    run_rank(World.from_env(), one)
    return sorted(set(heavy) & set(sys.modules))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["horovod", "torch"])
def test_a_rank_loads_no_package_that_it_does_not_use(shards, backend):
    if backend == "horovod":
        pytest.importorskip("horovod")
    heavy = (
        "torch._dynamo",
        "torch._inductor",
        "sympy",
        "torchmetrics",
        "matplotlib",
        "tensorboard",
        "deltalake",
        "pandas",
        "pyspark",
    )
    ranks = run(loaded_by_training, args=(job(shards, "float32", 2, backend), heavy), num_proc=-2, backend=backend)
    assert ranks == [[], []]


def test_a_strategy_that_an_earlier_attempt_chose_is_kept_where_the_ranks_that_are_left_fill_it():
    from sparkdl.worker import _is_filled

    assert all(_is_filled(name, 3) for name in ("all_reduce", "zero1", "fsdp", "mesh(data=None, shard=3)"))
    assert _is_filled("mesh(data=2, tensor=2)", 4)
    assert not _is_filled("mesh(data=2, tensor=2)", 3)
