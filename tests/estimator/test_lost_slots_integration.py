"""A fit whose executor or worker is killed, on ``local-cluster``: one host, but an executor process a slot."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("pyspark")
pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import psutil, torch
from torch import nn
from pyspark.sql import SparkSession, functions as F
from sparkdl import TorchEstimator
from sparkdl.errors import RankFailedError
from sparkdl.launch.driver.slots import slots_of
from sparkdl.train.callbacks import Callback

home = Path(sys.argv[1])
session = (
    SparkSession.builder.master("local-cluster[2,1,512]")
    .config("spark.driver.memory", "512m").config("spark.executor.memory", "512m")
    .config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
    .config("spark.deploy.maxExecutorRetries", "-1")
    .getOrCreate()
)

class Kill(Callback):
    def __init__(self, whom):
        self.whom, self.marker = whom, home / f"killed-{whom}"

    def on_epoch_start(self, run):
        if run.epoch == 1 and run.world.rank == 1 and not self.marker.exists():
            self.marker.touch()
            worker = psutil.Process()
            # Spark forks its workers from a daemon, which is the child of the executor.
            (worker.parent().parent() if self.whom == "executor" else worker).kill()

def estimator(whom, **more):
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    marker = home / f"killed-{whom}"
    marker.unlink(missing_ok=True)
    return TorchEstimator(
        model=net, optimizer=torch.optim.Adam(net.parameters(), lr=0.05), loss=nn.MSELoss(), feature_cols=["a", "b"],
        label_cols=["y"], batch_size=20, epochs=3, num_proc=2, verbose=0, timeout=120, store=str(home / "store"),
        callbacks=[] if whom is None else [Kill(whom)], **more,
    )

def weights(model):
    return [value.tolist() for value in model.getModel().state_dict().values()]

frame = session.range(0, 400, 1, 2).select(F.randn(1).cast("float").alias("a"), F.randn(2).cast("float").alias("b"))
frame = frame.withColumn("y", F.col("a") - 2 * F.col("b"))
results = {"undisturbed": weights(estimator(None).fit(frame))}
for whom in ("worker", "executor"):
    try:
        estimator(whom).fit(frame)
    except RankFailedError as error:
        results[f"{whom} typed"] = [error.rank, str(error).splitlines()[0]]
    model = estimator(whom, max_failures=1).fit(frame)
    results[f"{whom} again"] = [weights(model), model.summary.num_proc, (home / f"killed-{whom}").exists()]
living = [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
next(one for one in living if any("CoarseGrainedExecutorBackend" in word for word in one.cmdline())).kill()
while slots_of(session) == 2:  # Spark has seen it, and has not replaced it
    time.sleep(0.01)
results["slots"] = slots_of(session)
replaced = estimator(None).fit(frame)
results["replaced"] = [weights(replaced), replaced.summary.num_proc]
fewer = estimator("executor", max_failures=1, min_num_proc=1).fit(frame)
results["fewer"] = [weights(fewer), fewer.summary.num_proc]
session.stop()
print("RESULTS " + json.dumps(results))
"""


@pytest.mark.timeout(400)
def test_a_fit_whose_executor_or_worker_is_killed_ends_as_documented(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=360, env=env, cwd=tmp_path)
    assert "RESULTS" in done.stdout, done.stderr[-6000:]
    results = json.loads(done.stdout.rpartition("RESULTS ")[2])
    for whom in ("worker", "executor"):
        rank, headline = results[f"{whom} typed"]
        assert rank == 1, headline
        assert "died without an exception" in headline
        assert results[f"{whom} again"] == [results["undisturbed"], 2, True]
    assert results["slots"] == 1
    assert results["replaced"] == [results["undisturbed"], 2], "a fit waits for an executor that is being replaced"
    found, ranks = results["fewer"]
    assert ranks in (1, 2)  # Spark may have started another executor by then
    assert [len(one) for one in found] == [len(one) for one in results["undisturbed"]]
