"""Examples written for Horovod's Spark estimator, with other imports and other data, and nothing else changed.

The two functions for HorovodRunner and TorchDistributor stand in ``test_horovod_runner_integration.py``.
"""

import sys

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import OneHotEncoder
from pyspark.ml.linalg import Vectors
from pyspark.sql import types as T
from pyspark.sql.functions import udf

import sparkdl as hvd
from sparkdl import Store
from sparkdl.estimator import SparkBackend


@pytest.fixture(scope="module")
def digits(spark):
    from sklearn.datasets import load_digits

    data = load_digits()
    rows = [(Vectors.dense(x / 16.0), float(y)) for x, y in zip(data.data, data.target, strict=True)]
    train_df, test_df = spark.createDataFrame(rows, ["features", "label"]).randomSplit([0.9, 0.1], seed=7)
    return train_df.cache(), test_df.cache()


@pytest.mark.slow
def test_a_convolutional_network_on_vectors_of_digits(digits, tmp_path):
    train_df, test_df = digits
    encoder = OneHotEncoder(inputCols=["label"], outputCols=["label_vec"], dropLast=False).fit(train_df)
    train_df, test_df = encoder.transform(train_df), encoder.transform(test_df)
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 10, kernel_size=3, padding=1)
            self.conv2 = nn.Conv2d(10, 20, kernel_size=3, padding=1)
            self.conv2_drop = nn.Dropout2d(0.1)
            self.fc1 = nn.Linear(80, 50)
            self.fc2 = nn.Linear(50, 10)

        def forward(self, x):
            x = x.float()
            x = F.relu(F.max_pool2d(self.conv1(x), 2))
            x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
            x = x.view(-1, 80)
            x = F.relu(self.fc1(x))
            x = F.dropout(x, 0.1, training=self.training)
            return F.log_softmax(self.fc2(x), 1)

    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss = nn.NLLLoss()
    store = Store.create(str(tmp_path))
    backend = SparkBackend(num_proc=2, stdout=sys.stdout, stderr=sys.stderr)
    torch_estimator = hvd.TorchEstimator(
        backend=backend,
        store=store,
        model=model,
        optimizer=optimizer,
        loss=lambda input, target: loss(input, target.long()),
        input_shapes=[[-1, 1, 8, 8]],
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=32,
        epochs=8,
        validation=0.1,
        verbose=1,
    )
    torch_model = torch_estimator.fit(train_df).setOutputCols(["label_prob"])
    pred_df = torch_model.transform(test_df)
    argmax = udf(lambda v: float(np.argmax(v)), returnType=T.DoubleType())
    pred_df = pred_df.withColumn("label_pred", argmax(pred_df.label_prob))
    evaluator = MulticlassClassificationEvaluator(predictionCol="label_pred", labelCol="label", metricName="accuracy")
    assert evaluator.evaluate(pred_df) > 0.9
    assert len(torch_model.getHistory()) == 8


@pytest.mark.slow
def test_several_inputs_with_embeddings_and_sample_weights(spark):
    generator = np.random.default_rng(2)
    effect = generator.normal(size=12)
    stores, days = generator.integers(0, 12, 800), generator.integers(0, 7, 800)
    distance = generator.uniform(0, 1, 800)
    sales = effect[stores] + 0.3 * days + 2 * distance
    weight = np.where(generator.random(800) < 0.1, 0.0, 1.0)
    sales = np.where(weight == 0, 100.0, sales)  # rows of weight 0 are absurd: whoever ignores weights, fails
    rows = [
        (int(s), int(d), float(x), float(y), float(w))
        for s, d, x, y, w in zip(stores, days, distance, sales, weight, strict=True)
    ]
    train_df = spark.createDataFrame(rows, ["Store", "DayOfWeek", "Distance", "Sales", "Weight"])
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stores = nn.Embedding(12, 4)
            self.days = nn.Embedding(7, 3)
            self.fc1 = nn.Linear(8, 32)
            self.fc2 = nn.Linear(32, 1)

        def forward(self, store, day, distance):
            x = torch.cat([self.stores(store.long()), self.days(day.long()), distance], dim=1)
            return self.fc2(F.relu(self.fc1(x)))

    def mse(output, target, reduction="mean"):
        return F.mse_loss(output, target.float(), reduction=reduction)

    model = Model()
    torch_estimator = hvd.TorchEstimator(
        num_proc=2,
        model=model,
        optimizer=optim.Adam(model.parameters(), lr=0.02),
        loss=mse,
        metrics=[[F.l1_loss]],
        feature_cols=["Store", "DayOfWeek", "Distance"],
        input_shapes=[[-1], [-1], [-1, 1]],
        label_cols=["Sales"],
        sample_weight_col="Weight",
        batch_size=32,
        epochs=12,
        random_seed=1,
        verbose=0,
    )
    torch_model = torch_estimator.fit(train_df)
    scored = torch_model.transform(train_df.where("Weight > 0")).toPandas()
    error = np.sqrt(np.mean((scored["Sales__output"] - scored["Sales"]) ** 2))
    assert error < 0.5
    assert "l1_loss" in torch_model.history
