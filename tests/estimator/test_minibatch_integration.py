"""Horovod's ``train_minibatch_fn`` through the estimator, on real ranks."""

import numpy as np
import pandas as pd
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
