"""Where a pipeline keeps things: a place that is full or no folder is refused, and HDFS serves as a disk does."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sparkdl.errors import StorageError, StoreUnavailableError
from sparkdl.models.registry import ModelRegistry
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.storage import Storage
from sparkdl.tables.table import Table

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)
FILE = """
name: shop
root: {root}
source: {{kind: parquet, path: "file://{rows}", key: order, time: at}}
features: {{x: number, note: category}}
label: {{y: regression}}
split: {{by: time, train: 2 days, validate: 1 day, score: 1 day}}
train: {{epochs: 1, batch_size: 64, num_proc: 1, verbose: 0}}
publish: {{gate: {{min_rows: 20, baseline: never}}}}
"""


@pytest.fixture
def rows(tmp_path):
    folder = tmp_path / "orders"
    folder.mkdir()
    for day in range(1, 5):
        random = np.random.default_rng(day)
        x = random.normal(size=2000)
        note = [random.bytes(20).hex() for _ in x]
        frame = pd.DataFrame({"order": [f"{day}-{n}" for n in range(2000)], "x": x, "note": note, "y": 2 * x})
        frame["at"] = pd.Timestamp(2026, 3, day, 10, tz="UTC")
        frame.to_parquet(folder / f"{day}.parquet", coerce_timestamps="us")
    return folder


def test_places_that_cannot_be_written_are_named_before_a_row_is_read(tmp_path, rows):
    (tmp_path / "file").write_bytes(b"")
    places = (f"places.tables={tmp_path}/file/t", f"places.runs={tmp_path}/file/r")
    run = Run(Project(loads(FILE.format(root=tmp_path, rows=rows), places)), RunRequest(now=NOW))
    with pytest.raises(StorageError, match=r"^places\.runs: cannot write .*; places\.tables: cannot write "):
        execute(run)


def test_a_full_target_leaves_no_half_written_table_and_no_model(spark, tmp_path, rows):
    place = tmp_path / "full"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        run = Run(
            Project(loads(FILE.format(root=tmp_path, rows=rows), [f"places.tables={place}"])), RunRequest(now=NOW)
        )
        with pytest.raises(StorageError) as refused:
            execute(run, spark)
        assert len(str(refused.value).splitlines()) == 1
        assert not Table(str(place / "clean")).exists()
    finally:
        subprocess.run(["umount", str(place)], check=True)
    record = RunRecord.load(Storage.of(run.record.places["record"]))
    assert (record.outcome, record.exit_code) == ("refused", 1)
    assert not ModelRegistry(f"{tmp_path}/shop/registry").models()


def test_a_store_where_nobody_answers_ends_a_run_with_an_exit_code_of_its_own(tmp_path, rows, monkeypatch):
    pytest.importorskip("s3fs")
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    run = Run(
        Project(loads(FILE.format(root=tmp_path, rows=rows), ["places.registry=s3://lake/models"])), RunRequest(now=NOW)
    )
    with pytest.raises(
        StoreUnavailableError, match=r"^places\.registry: cannot write s3://lake/models: nobody answers"
    ):
        execute(run)
    record = RunRecord.load(Storage.of(run.record.places["record"]))
    assert (record.outcome, record.exit_code, record.error) == ("failed", 5, "StoreUnavailableError")


@pytest.fixture
def python_without_sparkdl(tmp_path):
    """An environment that has all that this one has, but sparkdl."""
    import sysconfig

    import sparkdl

    environment = tmp_path / "without"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if "sparkdl" not in each.name:
            (packages / each.name).symlink_to(each)
    python = environment / "bin" / "python"
    lacks = subprocess.run([str(python), "-c", "import pyspark, sparkdl"], cwd=tmp_path, env={}, check=False)
    assert lacks.returncode == 1, sparkdl.__file__
    return python


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_workers_whose_python_lacks_sparkdl_are_named_before_the_source_is_read(tmp_path, rows, python_without_sparkdl):
    import sparkdl
    from tests.launch.standalone import Worker, standalone_cluster

    settings = "spark.driver.host: 127.0.0.1, spark.executor.memory: 700m, spark.cores.max: 1"
    command = (
        f"import sys; sys.path.insert(0, {str(Path(sparkdl.__file__).parents[1])!r}); from sparkdl.cli import main; "
    )
    command += "sys.exit(main(sys.argv[1:]))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYSPARK_PYTHON": str(python_without_sparkdl), "SPARK_LOCAL_IP": "127.0.0.1"}
    with standalone_cluster(tmp_path, [Worker(env={"PYTHONPATH": ""})]) as master:
        text = FILE.format(root=tmp_path, rows=rows) + f'spark: {{master: "{master}", conf: {{{settings}}}}}\n'
        (tmp_path / "shop.yaml").write_text(text)
        done = subprocess.run(
            [sys.executable, "-c", command, "run", str(tmp_path / "shop.yaml")],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("sparkdl:")]
    assert len(said) == 1, done.stderr
    assert said[0].startswith("sparkdl: the workers' Python has no module 'sparkdl': install it there, or set ")
    assert "Traceback" not in done.stderr
    assert not Table(f"{tmp_path}/shop/tables/clean").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hdfs_serves_as_a_disk_does_and_a_plain_path_lies_there_for_python_as_for_spark(hadoop, hdfs, tmp_path, rows):
    def sparkdl(root, *words):
        (tmp_path / "shop.yaml").write_text(FILE.format(root=root, rows=rows) + 'spark: {master: "local[2]"}\n')
        environment = {**os.environ, "HADOOP_CONF_DIR": str(hadoop), "SPARK_LOCAL_IP": "127.0.0.1"}
        command = [
            sys.executable,
            "-m",
            "sparkdl.cli",
            *words,
            str(tmp_path / "shop.yaml"),
            "--set",
            "features={x: number}",
        ]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    plain = sparkdl(f"{tmp_path}/here", "run")
    assert plain.returncode == 0, plain.stderr
    kept = {entry.name for entry in Storage.of(f"{hdfs}{tmp_path}/here/shop").list()}
    assert kept == {"tables", "shards", "registry", "runs"}
    assert not (tmp_path / "here").exists()
    first = sparkdl(f"{hdfs}/journey", "run")
    assert first.returncode == 0, first.stderr
    kept = {entry.name for entry in Storage.of(f"{hdfs}/journey/shop").list()}
    assert kept == {"tables", "shards", "registry", "runs"}
    assert sparkdl(f"{hdfs}/journey", "run").returncode == 10
