"""The whole road on S3 with Spark's own client: by the session's settings alone; no secret in what it leaves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import boto3
import numpy as np
import pandas as pd
import pyspark
import pytest

from sparkdl.storage import Storage

JARS = Path(__file__).resolve().parents[3] / "shared" / "jars"
DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "2",
}
LOG = """
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %p %c: %m%n%ex
logger.spark.name = org.apache.spark
logger.spark.level = debug
logger.s3a.name = org.apache.hadoop.fs.s3a
logger.s3a.level = debug
"""
PIPELINE = """
name: shop
root: s3://{bucket}/lake
source: {{kind: parquet, path: "s3://{bucket}/orders", key: order, time: at}}
features: {{x: number}}
label: {{y: regression}}
split: {{by: time, train: 2 days, validate: 1 day, score: 1 day}}
train: {{epochs: 1, batch_size: 64, num_proc: 1, verbose: 0}}
publish: {{gate: {{min_rows: 20}}}}
spark:
  master: "local[2]"
  conf:
    spark.jars: "{jars}"
    spark.hadoop.fs.s3a.endpoint: "{endpoint}"
    spark.hadoop.fs.s3a.endpoint.region: us-east-1
    spark.hadoop.fs.s3a.path.style.access: true
    spark.hadoop.fs.s3a.access.key: ${{S3_ACCESS_KEY}}
    spark.hadoop.fs.s3a.secret.key: ${{S3_SECRET_KEY}}
"""


@pytest.fixture
def lake(guarded_s3, tmp_path):
    """A bucket, and a folder to work in: their names, what opens the bucket, the environment of who starts there."""
    if not (JARS / "s3a").is_dir() or not (JARS / "delta").is_dir():
        pytest.skip("needs the JARs of S3A and Delta: ../shared/jars does not lie beside the project")
    if not pyspark.__version__.startswith("4.2."):
        pytest.skip(f"the JARs are for Spark 4.2, this is {pyspark.__version__}")
    endpoint, key, secret = guarded_s3
    bucket = f"lake-{uuid.uuid4().hex[:8]}"
    client = boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id=key, aws_secret_access_key=secret, region_name="us-east-1"
    )
    for name in (bucket, f"wrong-{bucket}"):
        client.create_bucket(Bucket=name)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FSSPEC_"))}
    (tmp_path / "tmp").mkdir()
    environment |= {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_DIRS": f"{tmp_path}/local", "TMPDIR": f"{tmp_path}/tmp"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    return bucket, client, guarded_s3, environment


def jars(*folders):
    return ",".join(str(path) for folder in folders for path in sorted((JARS / folder).glob("*.jar")))


def configured(folder, settings):
    """A folder of settings as every session that starts with it takes them."""
    folder.mkdir()
    (folder / "log4j2.properties").write_text(LOG)
    lines = [f"{name} {value}" for name, value in settings.items()]
    (folder / "spark-defaults.conf").write_text("\n".join(lines) + "\n")
    return str(folder)


def assert_shown_nowhere(secret, client, bucket, *, folder, printed, besides):
    """Neither on this machine's disk nor in the bucket nor in what was printed."""
    kept = [path for path in folder.rglob("*") if path.is_file() and path not in besides]
    found = {str(path): path.read_bytes() for path in kept}
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    for name in [one["Key"] for page in pages for one in page.get("Contents", ())]:
        found[name] = client.get_object(Bucket=bucket, Key=name)["Body"].read()
    for name, data in {**found, "printed": printed.encode()}.items():
        place = data.find(secret.encode())
        assert place < 0, (name, data[max(0, place - 300) : place])
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rows_become_predictions_in_a_bucket_that_the_session_alone_can_open(lake, tmp_path):
    bucket, client, (endpoint, key, secret), environment = lake
    settings = {
        "endpoint": endpoint,
        "endpoint.region": "us-east-1",
        "path.style.access": "true",
        "access.key": key,
        "secret.key": secret,
        f"bucket.wrong-{bucket}.secret.key": "another-5ecret",
        "bucket.off.endpoint": "http://127.0.0.1:1",
    }
    (tmp_path / "events").mkdir()
    conf = configured(
        tmp_path / "conf",
        {
            "spark.master": "local[2]",
            "spark.ui.enabled": "false",
            "spark.jars": jars("s3a", "delta"),
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": f"file://{tmp_path}/events",
            **DELTA,
            **{f"spark.hadoop.fs.s3a.{name}": value for name, value in settings.items()},
        },
    )
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("s3_journey.py")), f"s3://{bucket}"],
        env={**environment, "SPARK_CONF_DIR": conf},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[done.stderr.rfind("Traceback (most") :][:3000]
    found = json.loads(done.stdout.splitlines()[-1])
    refusals = {name: found.pop(name) for name in ("keys", "bucket", "endpoint")}
    assert found == {
        "tables": [0, 1, 65],
        "shards": 64,
        "batches": 64,
        "checkpoints": found["checkpoints"],
        "predictions": 64,
        "versions": [1],
        "ranks": [["predictions", "registry", "saved", "set", "store", "tables"]] * 2,
    }
    assert found["checkpoints"] >= 2
    words = {
        "keys": "the store does not take these credentials|access is denied",
        "bucket": "there is no such bucket",
        "endpoint": r"nobody answers at http://127\.0\.0\.1:1 ",
    }
    for name, sentences in refusals.items():
        for sentence in sentences:
            assert len(sentence.splitlines()) == 1, sentence
            assert re.search(words[name], sentence), sentence
    left = assert_shown_nowhere(
        secret,
        client,
        bucket,
        folder=tmp_path,
        printed=done.stdout + done.stderr,
        besides=(Path(conf) / "spark-defaults.conf",),
    )
    assert any(b"SparkListenerTaskEnd" in data for data in left.values())
    assert "Physical Plan" in done.stdout
    assert "DEBUG org.apache.hadoop.fs.s3a" in done.stderr
    assert "py4j" in done.stderr


CLIENT = """
import json, sys
from pyspark import SparkContext
from pyspark.sql import SparkSession
from sparkdl import write_shards
from sparkdl.storage import Storage, session

spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
assert SparkContext._active_spark_context is None and session.connected()
frame = spark.range(0, 64).selectExpr("CAST(id AS FLOAT) AS x", "CAST(id AS FLOAT) AS y")
rows = write_shards(frame, sys.argv[2], columns=["x"], labels=["y"]).rows
print(json.dumps([rows, [entry.name for entry in Storage.of(sys.argv[2]).list()]]))
spark.stop()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_client_of_spark_connect_uses_what_the_servers_settings_show(lake, connect_server, tmp_path):
    bucket, client, (endpoint, key, secret), environment = lake
    settings = {"endpoint": endpoint, "path.style.access": "true", "access.key": key, "secret.key": secret}
    named = {f"spark.hadoop.fs.s3a.{name}": value for name, value in settings.items()}
    conf = configured(tmp_path / "conf", named)
    with connect_server(SPARK_CONF_DIR=conf) as url:
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, url, f"s3://{bucket}/set"],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [64, ["manifest.json", "shards"]]
    besides = (Path(conf) / "spark-defaults.conf",)
    left = assert_shown_nowhere(
        secret, client, bucket, folder=tmp_path, printed=done.stdout + done.stderr, besides=besides
    )
    assert str(tmp_path / "server.log") in left


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_pipeline_lives_in_a_bucket_that_its_own_file_opens(lake, tmp_path):
    bucket, client, (endpoint, key, secret), environment = lake
    place = Storage.of(
        f"s3://{bucket}/orders",
        {"endpoint_url": endpoint, "key": key, "secret": secret, "client_kwargs": {"region_name": "us-east-1"}},
    )
    for day in range(1, 5):
        x = np.random.default_rng(day).normal(size=500)
        frame = pd.DataFrame({"order": [f"{day}-{n}" for n in range(500)], "x": x, "y": 2 * x})
        frame["at"] = pd.Timestamp(2026, 3, day, 10, tz="UTC")
        with place.child(f"{day}.parquet").open_output() as file:
            frame.to_parquet(file, coerce_timestamps="us")
    file = tmp_path / "shop.yaml"
    file.write_text(PIPELINE.format(bucket=bucket, jars=jars("s3a"), endpoint=endpoint))

    def sparkdl(*words, **more):
        done = subprocess.run(
            [sys.executable, "-m", "sparkdl.cli", *words, str(file)],
            env={**environment, "S3_ACCESS_KEY": key, "S3_SECRET_KEY": secret, **more},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        printed.append(done.stdout + done.stderr)
        return done

    printed: list[str] = []
    wrong = sparkdl("run", S3_SECRET_KEY="another-5ecret")
    assert wrong.returncode == 1, wrong.stderr
    assert "places.runs: cannot " in wrong.stderr
    assert "Traceback" not in wrong.stderr
    first = sparkdl("run")
    assert first.returncode == 0, first.stderr[-4000:]
    assert sparkdl("plan").returncode == 0
    assert sparkdl("run").returncode == 10
    status = sparkdl("status")
    assert status.returncode == 0, status.stderr
    assert f"s3://{bucket}/lake" in first.stdout
    left = assert_shown_nowhere(secret, client, bucket, folder=tmp_path, printed="".join(printed), besides=())
    assert any(name.endswith("report.html") for name in left)
    assert any(name.startswith("lake/shop/registry") for name in left)
