"""Two ranks of an estimator train the model of one, batch norm included, through the backend that is named."""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd
import pytest
import torch

from sparkdl.estimator import TorchEstimator

ROWS = 39  # global batches of 18, 18 and 3 rows


@pytest.fixture
def frame(spark):
    generator = np.random.default_rng(0)
    columns = {name: generator.normal(size=ROWS).astype("float32") for name in "abc"}
    columns["y"] = (columns["a"] + 2 * columns["b"] + 3).astype("float32")
    return spark.createDataFrame(pd.DataFrame(columns)).coalesce(1)


def fitted(frame, ranks, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    options.setdefault("optimizer", functools.partial(torch.optim.SGD, lr=0.05))
    estimator = TorchEstimator(
        model=model,
        loss=torch.nn.MSELoss(),
        feature_cols=list("abc"),
        label_cols=["y"],
        batch_size=18 // ranks,
        epochs=2,
        num_proc=ranks,
        verbose=0,
        **options,
    )
    return estimator.fit(frame)


@pytest.mark.parametrize(
    ("backend", "carried_by"),
    [pytest.param("horovod", "horovod", marks=pytest.mark.slow), ("auto", "torch, gradients in shared memory")],
)
def test_two_ranks_equal_one_with_batch_norm(frame, backend, carried_by):
    pytest.importorskip("horovod.torch")
    one, two = fitted(frame, 1), fitted(frame, 2, backend=backend)
    assert one.summary.backend == "solo"
    assert two.summary.backend == carried_by
    assert f"2 ranks ({carried_by})" in str(two.summary)
    found, expected = two.getModel().state_dict(), one.getModel().state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    assert type(two.getModel()[1]) is torch.nn.BatchNorm1d


def test_batch_norm_that_is_not_synchronised_trains_another_model(frame):
    whole = {"train_steps_per_epoch": 2}  # of the last batch a rank has one row, which it could not normalise by itself
    one, two = fitted(frame, 1, **whole), fitted(frame, 2, backend="torch", sync_batch_norm=False, **whole)
    assert two.summary.backend == "torch"
    mean = one.getModel()[1].running_mean
    assert not torch.allclose(two.getModel()[1].running_mean, mean, rtol=1e-3, atol=1e-3)


def test_two_ranks_with_the_optimizer_in_parts_train_the_very_weights_of_two_without(frame):
    adam = functools.partial(torch.optim.AdamW, lr=0.05)
    whole = fitted(frame, 2, backend="torch", optimizer=adam)
    parts = fitted(frame, 2, strategy="zero1", optimizer=adam)
    assert parts.summary.backend == whole.summary.backend
    expected = whole.getModel().state_dict()
    for name, tensor in parts.getModel().state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    theirs, ours = whole.getOptimizer().state_dict()["state"], parts.getOptimizer().state_dict()["state"]
    assert theirs.keys() == ours.keys() != set()
    for number, state in theirs.items():
        assert torch.equal(state["exp_avg"], ours[number]["exp_avg"])
