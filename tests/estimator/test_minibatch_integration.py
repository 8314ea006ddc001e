"""Horovod's ``train_minibatch_fn`` through the estimator, on real ranks."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from sparkdl.estimator import TorchEstimator


def horovods_own(model, optimizer, transform_outputs, loss_fn, inputs, labels, weights, passes, batch_idx):
    if batch_idx % passes == 0:
        if batch_idx != 0:
            optimizer.step()
        optimizer.zero_grad()
    outputs, labels = transform_outputs(model(*inputs), labels)
    loss = loss_fn(outputs, labels, weights)
    if passes > 1:
        loss.div_(float(passes))
    loss.backward()
    return outputs, loss


def test_horovods_own_function_with_two_passes_fits_the_model_that_none_fits(spark):
    generator = np.random.default_rng(0)
    table = pd.DataFrame(generator.normal(size=(600, 4)).astype("float32"), columns=list("abcy"))
    table["held_out"] = np.arange(600) >= 480  # leaves eight global batches of 60 rows
    frame = spark.createDataFrame(table)

    def fitted(function):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        estimator = TorchEstimator(
            model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
            loss=nn.MSELoss(),
            feature_cols=list("abc"),
            label_cols=["y"],
            batch_size=30,
            num_proc=2,
            epochs=2,
            validation="held_out",
            backward_passes_per_step=2,
            train_minibatch_fn=function,
            verbose=0,
        )
        return estimator.fit(frame)

    found, wanted = fitted(horovods_own), fitted(None)
    for mine, theirs in zip(found.getModel().parameters(), wanted.getModel().parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    assert np.allclose(found.history["val_loss"], wanted.history["val_loss"], atol=1e-5)


@pytest.mark.parametrize("function", [None, horovods_own])
def test_adasum_steps_by_a_last_row_as_far_as_one_rank_does(spark, function):
    """Of three equal rows, in batches of two, one of the two ranks has none of the last batch."""
    frame = spark.createDataFrame(pd.DataFrame([[1.0, -2.0, 0.5, 3.0]] * 3, columns=list("abcy"), dtype="float32"))

    def fitted(ranks):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        estimator = TorchEstimator(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            loss=nn.MSELoss(),
            feature_cols=list("abc"),
            label_cols=["y"],
            batch_size=2 // ranks,
            num_proc=ranks,
            epochs=3,
            gradient_compression="adasum",
            train_minibatch_fn=function,
            verbose=0,
        )
        return estimator.fit(frame)

    both, alone = fitted(2), fitted(1)
    for mine, theirs in zip(both.getModel().parameters(), alone.getModel().parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    assert np.allclose(both.history["loss"], alone.history["loss"], rtol=1e-5)


def with_closure(model, optimizer, transform_outputs, loss_fn, inputs, labels, weights):
    def closure():
        optimizer.zero_grad()
        outputs, shaped = transform_outputs(model(*inputs), labels)
        loss = loss_fn(outputs, shaped, weights)
        loss.backward()
        return loss

    return model(*inputs), optimizer.step(closure)


def test_lbfgs_searches_the_line_that_it_searches_in_one_process(spark):
    generator = np.random.default_rng(0)
    table = pd.DataFrame(generator.normal(size=(240, 4)).astype("float32"), columns=list("abcy"))
    table["y"] = (table["a"] > table["b"]).astype("float32")
    frame = spark.createDataFrame(table)

    def fitted(ranks):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")
        estimator = TorchEstimator(
            model=model,
            optimizer=optimizer,
            loss=nn.BCEWithLogitsLoss(),
            feature_cols=list("abc"),
            label_cols=["y"],
            batch_size=60 // ranks,
            num_proc=ranks,
            epochs=2,
            train_minibatch_fn=with_closure,
            verbose=0,
        )
        return estimator.fit(frame)

    both, alone = fitted(2), fitted(1)
    assert both.history["loss"].iloc[-1] < both.history["loss"].iloc[0] / 1.5
    for mine, theirs in zip(both.getModel().parameters(), alone.getModel().parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4)
    assert isinstance(both.getOptimizer(), torch.optim.LBFGS)
