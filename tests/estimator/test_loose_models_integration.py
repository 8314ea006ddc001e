"""Models of a module that lies beside a script, which workers cannot import: they go there by value."""

import os
import subprocess
import sys

import pytest

NET = """
from torch import nn
class Net(nn.Module):
    def __init__(self, width, factor):
        super().__init__()
        self.layer, self.factor = nn.Linear(width, 1, bias=False), factor
        nn.init.ones_(self.layer.weight)
    def forward(self, x):
        return self.factor * self.layer(x)
    def bundle_arguments(self):
        return {"width": self.layer.in_features, "factor": self.factor}
"""
SCRIPT = """
import ownnet
from pyspark.sql import SparkSession
from sparkdl.estimator import TorchModel
from sparkdl.estimator.transform import Published, score_frame
from sparkdl.models.signature import Signature, TensorField
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
try:
    df = spark.createDataFrame([(1.0, 2.0)], "a double, b double")
    field = TensorField(name="x", shape=(2,), columns=("a", "b"))
    signature = Signature(inputs=(field,), outputs=(TensorField(name="y"),))
    model = TorchModel(model=ownnet.Net(2, 3.0), signature=signature)
    print("BUNDLE", model.transform(df).first()["y__output"])
    _, wanted, rows, _ = model._asked(df)
    travels = Published(model.getModel(), signature)  # as on a cluster without a store
    print("TASK", score_frame(df, travels, wanted, rows).first()["y__output"])
finally:
    spark.stop()
"""


@pytest.mark.slow
def test_a_model_that_says_its_arguments_reaches_workers_that_cannot_import_it(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "ownnet.py").write_text(NET)
    (tmp_path / "app" / "script.py").write_text(SCRIPT)
    (tmp_path / "elsewhere").mkdir()
    command = [sys.executable, str(tmp_path / "app" / "script.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
    done = subprocess.run(
        command, cwd=tmp_path / "elsewhere", env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert [line for line in done.stdout.splitlines() if line.startswith(("BUNDLE", "TASK"))] == [
        "BUNDLE 9.0",
        "TASK 9.0",
    ], done.stderr[-2000:]
