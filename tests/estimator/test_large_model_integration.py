"""A model above 2 GB, the limit of many a format and of Java's arrays, through everything that a model goes through."""

import resource

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from torch import nn

from sparkdl.estimator import TorchEstimator, TorchModel

ROWS, WIDTH = 8_500_000, 64  # 2.18 GB of float32


def net():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(ROWS, WIDTH, sparse=True, _weight=torch.zeros(ROWS, WIDTH)), nn.Flatten(), nn.Linear(WIDTH, 1)
    )
    with torch.no_grad():
        model[0].weight[-8:] = 1.0
    return model


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(psutil.virtual_memory().available < 14 << 30, reason="needs 14 GiB of free memory")
def test_a_model_above_two_gigabytes_is_fitted_saved_loaded_and_scores(spark, tmp_path):
    ids = np.arange(ROWS - 64, ROWS)
    table = pd.DataFrame({"id": ids, "y": (ids % 2).astype("float32")})
    frame = spark.createDataFrame(table).coalesce(1).cache()
    model = net()
    estimator = TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=nn.MSELoss(),
        feature_cols=["id"],
        label_cols=["y"],
        batch_size=16,
        epochs=2,
        num_proc=1,
        verbose=0,
    )
    fitted = estimator.fit(frame)
    del estimator, model
    history = fitted.history["loss"]
    assert history.iloc[1] < history.iloc[0]
    before = [row["y__output"] for row in fitted.transform(frame).orderBy("id").collect()]
    fitted.save(str(tmp_path / "m"))
    del fitted
    assert max(file.stat().st_size for file in (tmp_path / "m").rglob("*.safetensors")) > 2 << 30
    again = TorchModel.load(str(tmp_path / "m"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert peak < 4.5 * 4 * ROWS * WIDTH, (
        "the driver holds the user's model, its own copy, and the weights it gets back"
    )
    assert [row["y__output"] for row in again.transform(frame).orderBy("id").collect()] == before
