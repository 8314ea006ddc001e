"""The whole way: statistics, features, shards, a fit on them, predictions from raw columns."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from sparkdl import TorchEstimator
from sparkdl.columns.layout import Layout
from sparkdl.features.fitted import fit
from sparkdl.features.spec import Category, Ids, Number
from sparkdl.pipeline.work.statistics import spark_statistics
from sparkdl.shards.write import write_shards


class Net(nn.Module):
    """Sized by the description of its inputs."""

    def __init__(self, inputs):
        super().__init__()
        sizes = {one["name"]: one["cardinalities"] for one in inputs}
        self.city = nn.Embedding(sizes["categories"][0], 4)
        self.history = nn.EmbeddingBag(sizes["history"][0], 4, mode="sum")
        self.last = nn.Linear(1 + 4 + 4, 1)

    def forward(self, numbers, categories, history, history_offsets):
        parts = [numbers, self.city(categories[:, 0]), self.history(history, history_offsets)]
        return self.last(torch.cat(parts, dim=1))


@pytest.mark.slow
def test_a_model_fitted_to_features_scores_raw_columns(spark, tmp_path):
    generator = np.random.default_rng(0)
    histories = [generator.integers(0, 5, generator.integers(0, 4)).tolist() for _ in range(300)]
    rows = pa.table(
        {
            "row": np.arange(300),
            "a": pa.array([None if n % 7 == 0 else float(n) for n in range(300)]),
            "city": pa.array([["Rio", "Oslo", None][n] for n in generator.integers(0, 3, 300)]),
            "history": pa.array(histories, pa.list_(pa.int64())),
            "y": generator.normal(size=300).astype(np.float32),
        }
    )
    frame = spark.createDataFrame(rows).repartition(2)
    options = {"a": Number(), "city": Category(), "history": Ids()}
    features = fit(options, spark_statistics(frame, options))
    write_shards(frame, str(tmp_path / "set"), labels=["y"], layout=Layout(prepare=features))
    net = Net(features.describe())
    estimator = TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05),
        loss=nn.MSELoss(),
        feature_cols=["numbers", "categories", "history"],
        label_cols=["y"],
        epochs=1,
        num_proc=2,
        verbose=0,
    )
    model = estimator.fit_on_shards(str(tmp_path / "set")).setFeatures(features)
    found = model.transform(frame).orderBy("row").toArrow()["y__output"].to_numpy()
    made = features.apply(rows.combine_chunks().to_batches()[0])
    lists = made.column("history")
    expected = model.getModel()(
        torch.tensor(made.column("numbers").flatten().to_numpy()).reshape(300, 1),
        torch.tensor(made.column("categories").flatten().to_numpy()).reshape(300, 1),
        torch.tensor(lists.values.to_numpy()),
        torch.tensor(lists.offsets.to_numpy()[:-1].astype(np.int64)),
    )
    np.testing.assert_allclose(found, expected.detach().numpy().reshape(-1), rtol=1e-4, atol=1e-6)
