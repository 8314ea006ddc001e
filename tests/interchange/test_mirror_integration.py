"""A pipeline and an MLflow server, each a process of its own: mirrored, served to Spark, away, and mirrored again."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import sparkdl
from sparkdl.cli import main
from sparkdl.interchange.mlflow import mirror
from sparkdl.models.registry import ModelRegistry
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)
SERVER = Path(os.environ.get("MLFLOW_SERVER", Path(__file__).parents[2] / ".venv-mlflow" / "bin" / "mlflow"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # Spark's workers and the server each load MLflow


@contextmanager
def serving(folder, port):
    """A server over an SQLite store in ``folder``."""
    command = [
        str(SERVER), "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination",
        str(folder / "artifacts"), "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        for _ in range(600):
            assert process.poll() is None, (folder / "log").read_text()
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # its own group: the server starts workers
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def rows(tmp_path):
    """A table with numbers, integers with gaps, and a category; the class follows from them."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"id": np.arange(400), "x": draw.normal(size=400), "n": draw.integers(0, 9, 400)})
    frame["city"] = np.where(frame.x + frame.n > 4, "Rio", np.where(frame.n % 3 == 0, None, "Oslo"))
    frame["y"] = (frame.x * 2 + frame.n > 8).astype("int64")
    frame["n"] = frame["n"].astype("Int64").mask(frame.n == 5)
    (tmp_path / "rows").mkdir()
    frame.to_parquet(tmp_path / "rows" / "rows.parquet")
    return tmp_path / "rows"


def pipeline(root, rows, to, *overrides):
    text = f"""
    name: main.ml.cities
    root: {root}
    source: {{kind: parquet, path: {rows}, key: id}}
    features: {{x: number, n: number, city: category}}
    label: {{y: binary}}
    split: {{by: hash, train: 0.6, validate: 0.4, score: 0}}
    train: {{epochs: 2, batch_size: 32, num_proc: 1, verbose: 0}}
    score: {{window: all}}
    publish: {{metric: auc, gate: {{min_rows: 10}}, mlflow: "{to}"}}
    """
    return loads(text, overrides)


def test_spark_scores_with_mlflows_function_as_sparkdl_does(spark, bundles, tmp_path, monkeypatch):
    import mlflow
    from pyspark.sql import functions as F

    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    to = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", to)
    registry = ModelRegistry(str(tmp_path / "registry"))
    draw = np.random.default_rng(1)
    frame = spark.createDataFrame(
        pd.DataFrame({"row": range(50), "a": draw.normal(size=50), "b": draw.integers(0, 9, 50)})
    )
    for name in ("plain", "vector"):  # several columns; one of several numbers
        registry.publish(name, str(bundles / name))
        mirror(registry, name, to)
        score = mlflow.pyfunc.spark_udf(spark, f"models:/{name}/1", env_manager="local")
        found = frame.repartition(2).withColumn("p", score(F.struct("a", "b"))).select("row", "p.*").orderBy("row")
        expected = sparkdl.load_model(f"{name}@1", registry).transform(frame).orderBy("row").toPandas()
        made = found.toPandas()
        assert list(made) == ["row", *(column for column in expected if column not in ("row", "a", "b"))]
        for column in list(made)[1:]:
            values = [getattr(one, "toArray", lambda one=one: one)() for one in expected[column]]
            np.testing.assert_allclose(np.stack(made[column]), np.stack(values), rtol=1e-6)


@pytest.mark.skipif(not SERVER.exists(), reason="needs MLflow's server in an environment of its own: make mlflow")
def test_a_pipeline_is_mirrored_to_a_server_which_serves_its_model_to_spark(spark, rows, tmp_path, monkeypatch, caplog):
    import mlflow
    from pyspark.sql import functions as F

    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    (tmp_path / "server").mkdir()
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving(tmp_path / "server", port) as to:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", to)
        done = execute(Run(Project(pipeline(tmp_path / "p", rows, to)), RunRequest(now=NOW)), spark)
        assert done.outcome == "promoted"
        registry = ModelRegistry(f"{tmp_path}/p/main.ml.cities/registry")
        client = mlflow.MlflowClient()
        version = client.get_model_version_by_alias("main.ml.cities", "champion")
        mirrored = client.get_run(version.run_id)
        assert mirrored.data.metrics["auc"] == registry.get("main.ml.cities", 1).metrics["auc"]
        assert mirrored.data.params["train.epochs"] == "2"
        (table,) = mirrored.inputs.dataset_inputs
        assert mlflow.data.get_source(table).path == done.places["clean"]

        raw = pd.read_parquet(rows / "rows.parquet")
        ours = sparkdl.load_model("main.ml.cities@champion", registry)
        expected = ours.predict(raw)
        model = mlflow.pyfunc.load_model("models:/main.ml.cities@champion")
        found = model.predict(raw)
        types = {one.name: str(one.type) for one in model.metadata.signature.inputs.inputs}
        assert types == {"x": "DataType.double", "n": "Any", "city": "DataType.string"}
        for name in ("prediction", "probability"):
            np.testing.assert_array_equal(np.stack(found[name]), np.stack(expected[name]))

        frame = spark.read.parquet(str(rows)).repartition(2)
        score = mlflow.pyfunc.spark_udf(spark, "models:/main.ml.cities@champion", env_manager="local")
        scored = frame.withColumn("p", score(F.struct("x", "n", "city"))).select("id", "p.*").orderBy("id").toPandas()
        np.testing.assert_array_equal(scored["prediction"], expected["prediction"])
        np.testing.assert_allclose(np.stack(scored["probability"]), np.stack(expected["probability"]), rtol=1e-6)

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        again = execute(Run(Project(pipeline(tmp_path / "p", rows, to, "train.epochs=3")), RunRequest(now=NOW)), spark)
    assert again.outcome in ("promoted", "not promoted")
    assert len(registry.list("main.ml.cities")) == 2
    (said,) = [one for one in caplog.messages if "stays published" in one]
    command = shlex.split(re.search(r"sparkdl models mirror .*", said)[0])
    assert main(command[1:]) == 1
    with serving(tmp_path / "server", port):
        assert main(command[1:]) == main(command[1:]) == 0
        assert len(client.search_model_versions("name = 'main.ml.cities'")) == 2
        champion = registry.get("main.ml.cities", "champion").version
        assert client.get_model_version_by_alias("main.ml.cities", "champion").tags["sparkdl.version"] == str(champion)
