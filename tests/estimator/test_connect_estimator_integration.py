"""The estimator on Spark Connect: a real server from the wheel, with its client in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("grpc")

SCRIPT = """
import json, sys
import torch
from torch import nn
from pyspark.sql import SparkSession, functions as F
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import ParamGridBuilder
from sparkdl import TorchEstimator, TorchModel
from sparkdl.columns.layout import Layout
from sparkdl.estimator import CrossValidator
from sparkdl.features.fitted import fit
from sparkdl.features.spec import Category, Number
from sparkdl.models.bundle import Signature, TensorField, save_bundle
from sparkdl.models.preprocessing import preprocessing_of
from sparkdl.pipeline.work.statistics import spark_statistics
from sparkdl.scoring.score import score
from sparkdl.shards.write import write_shards

session = SparkSession.builder.remote("local[2]").getOrCreate()
assert type(session).__module__.startswith("pyspark.sql.connect")
columns = [F.randn(i).cast("float").alias(name) for i, name in enumerate("abc")]
df = session.range(0, 300, 1, 2).select(*columns).withColumn("y", (F.col("a") + 2 * F.col("b")).cast("float"))
torch.manual_seed(0)
net = nn.Linear(3, 1)
model = TorchEstimator(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss=nn.MSELoss(),
                       feature_cols=list("abc"), label_cols=["y"], validation=0.2, epochs=5, num_proc=2, verbose=0,
                       store=sys.argv[1]).fit(df)
scored = model.transform(df)
error = scored.select(F.avg(F.abs(F.col("y") - F.col("y__output")))).first()[0]
model.write().session(session).overwrite().save(sys.argv[1] + "/model")
again = TorchModel.read().session(session).load(sys.argv[1] + "/model").transform(df)
same = again.select(F.avg(F.abs(F.col("y") - F.col("y__output")))).first()[0]
evaluator = RegressionEvaluator(labelCol="y", predictionCol="y__output")
estimator = TorchEstimator(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss=nn.MSELoss(),
                           feature_cols=list("abc"), label_cols=["y"], num_proc=1, verbose=0, store=sys.argv[1])
grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 4]).build()
search = CrossValidator(estimator=Pipeline(stages=[estimator]), estimatorParamMaps=grid, evaluator=evaluator,
                        numFolds=2, parallelism=2)
search.save(sys.argv[1] + "/search")
search.write().overwrite().save(sys.argv[1] + "/search")
metrics = [float(one) for one in CrossValidator.load(sys.argv[1] + "/search").fit(df).avgMetrics]
raw = df.withColumn("c", F.when(F.col("a") > 0, "up"))
options = {"a": Number(), "c": Category()}
features = fit(options, spark_statistics(raw, options))
set_ = write_shards(raw, sys.argv[1] + "/set", labels=["y"], layout=Layout(prepare=features))
save_bundle(nn.Linear(1, 1), sys.argv[1] + "/raw", preprocessing=preprocessing_of(features), signature=Signature(
    inputs=(TensorField(name="numbers", shape=(1,), columns=("numbers",)),), outputs=(TensorField(name="p"),)))
rows = score(raw, sys.argv[1] + "/raw", keep=["y"]).count()
kinds = [list(spec.shape) for spec in set_.tensors if spec.role == "feature"]
values = features.fitted[1].statistics.values
print("RESULTS " + json.dumps([error, same, model.summary.num_proc, scored.dtypes[-1], metrics, rows, kinds, values]))
session.stop()
"""


@pytest.mark.slow
def test_fit_transform_search_save_and_load(tmp_path):
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert "RESULTS" in done.stdout, done.stderr[-6000:]
    error, same, ranks, column, metrics, *of_features = json.loads(
        done.stdout.rpartition("RESULTS ")[2].splitlines()[0]
    )
    assert error < 0.1
    assert same == pytest.approx(error, rel=1e-6)
    assert ranks == 2
    assert column == ["y__output", "float"]
    assert metrics[1] < metrics[0]
    assert of_features == [300, [[1], [1]], ["up"]]
