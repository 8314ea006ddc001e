"""A smoke test on the Spark after the locked one, in an environment of its own: launch, fit, transform."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NEXT = "4.3.0"

JOURNEY = """
import os, sys, tempfile
import pyspark, torch
from pyspark.sql import SparkSession
from sparkdl import TorchEstimator, run
from sparkdl.doctor import sum_of_ranks

if __name__ == "__main__":
    assert pyspark.__version__ == sys.argv[1], pyspark.__version__
    spark = (
        SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g").getOrCreate()
    )
    for backend in ("torch", "horovod"):
        assert run(sum_of_ranks, args=(backend,), num_proc=2, backend=backend, spark=spark) == [3.0, 3.0]
    df = spark.range(4000).selectExpr("rand(1) as a", "rand(2) as b").selectExpr("a", "b", "2 * a - b as y")
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    estimator = TorchEstimator(
        num_proc=2, model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.05), loss=torch.nn.MSELoss(),
        feature_cols=["a", "b"], label_cols=["y"], batch_size=100, epochs=15, verbose=0,
    )
    fitted = estimator.fit(df)
    scored = fitted.transform(df)
    error = scored.selectExpr("avg(abs(y - y__output)) as error").first()["error"]
    assert error < 0.05, error
    spark.stop()
    print("journey done")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_next_spark_runs_the_journey(tmp_path):
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sparkdl" / f"spark-{NEXT}"
    if not (cache / "pyspark").is_dir():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(cache)]
        subprocess.run([*install, f"pyspark=={NEXT}", "py4j<0.10.9.10"], check=True)
    script = tmp_path / "journey.py"
    script.write_text(JOURNEY)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("SPARK", "PYSPARK"))}
    env |= {"PYTHONPATH": str(cache), "PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(cache / "pyspark")}
    done = subprocess.run(
        [sys.executable, str(script), NEXT], env=env, capture_output=True, text=True, cwd=tmp_path, timeout=550
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "journey done" in done.stdout
