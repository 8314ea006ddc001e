"""The order and the partitions of a frame change no model: not its weights, validation rows, stopping or folds."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import ParamGridBuilder
from torch import nn

from sparkdl.estimator import CrossValidator, TorchEstimator


@pytest.fixture(scope="module")
def table():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(3000, 3)).astype("float32")
    x[:, 2] = np.round(x[:, 2])
    y = (x[:, 0] * x[:, 2] + 0.1 * generator.normal(size=3000)).astype("float32")
    return pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": y, "fold": np.arange(3000) % 2})


def frames(spark, table):
    """The same rows in random order in two partitions, by the label in three, by a feature in one."""
    yield spark.createDataFrame(table.sample(frac=1, random_state=1)).repartition(2)
    yield spark.createDataFrame(table.sort_values(["y", "a"])).coalesce(3)
    yield spark.createDataFrame(table.sort_values("c")).coalesce(1)


def estimator(**params):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
    given = {
        "model": net,
        "optimizer": torch.optim.Adam(net.parameters(), lr=0.02),
        "loss": nn.MSELoss(),
        "feature_cols": ["a", "b", "c"],
        "label_cols": ["y"],
        "batch_size": 64,
        "num_proc": 1,
        "verbose": 0,
    }
    return TorchEstimator(**{**given, **params})


def weights(model):
    return torch.cat([tensor.flatten() for tensor in model.getModel().state_dict().values()])


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"epochs": 3}, marks=pytest.mark.slow),
        {"epochs": 2, "num_proc": 2, "batch_size": 32, "validation": 0.2},
        pytest.param({"epochs": 30, "validation": 0.3, "early_stopping_patience": 2}, marks=pytest.mark.slow),
    ],
    ids=["alone", "two ranks and a split", "early stopping"],
)
def test_a_sorted_frame_trains_the_very_model_of_a_shuffled_one(spark, table, params):
    models = [estimator(**params).fit(frame) for frame in frames(spark, table)]
    for one, other in itertools.pairwise(models):
        assert torch.equal(weights(one), weights(other))
        assert one.history.equals(other.history) or np.allclose(
            one.history.drop(columns="seconds", errors="ignore"), other.history.drop(columns="seconds", errors="ignore")
        )


@pytest.mark.slow
def test_folds_of_a_sorted_frame_are_judged_like_those_of_a_shuffled_one(spark, table):
    def judged(frame):
        mae = RegressionEvaluator(labelCol="y", predictionCol="y__output", metricName="mae")
        base = estimator(epochs=2)
        grid = ParamGridBuilder().addGrid(base.batch_size, [64]).build()
        search = CrossValidator(estimator=base, estimatorParamMaps=grid, evaluator=mae, numFolds=2, foldCol="fold")
        return search.fit(frame).avgMetrics

    shuffled, by_label, _ = frames(spark, table)
    assert judged(by_label) == pytest.approx(judged(shuffled), rel=1e-6)


def test_rows_stay_in_the_frames_order_without_shuffle(spark, table):
    """Each row is a batch, and the last ones decide."""
    ordered = table.sort_values("y")
    in_order = estimator(shuffle=False, epochs=1).fit(spark.createDataFrame(ordered).coalesce(1))
    reverse = estimator(shuffle=False, epochs=1).fit(spark.createDataFrame(ordered[::-1]).coalesce(1))
    again = estimator(shuffle=False, epochs=1).fit(spark.createDataFrame(ordered).coalesce(1))
    assert torch.equal(weights(in_order), weights(again))
    assert not torch.equal(weights(in_order), weights(reverse))
