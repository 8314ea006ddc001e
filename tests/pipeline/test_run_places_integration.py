"""Where a pipeline keeps things: a place that is full or no folder is refused, and HDFS serves as a disk does."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime

import numpy as np
import pandas as pd
import pytest

from sparkdl.errors import StorageError
from sparkdl.models.registry import ModelRegistry
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.run import run
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.record import RunRecord
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
publish: {{gate: {{min_rows: 20}}}}
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
    context = Context(loads(FILE.format(root=tmp_path, rows=rows), places), NOW)
    with pytest.raises(StorageError, match=r"^places\.runs: cannot write .*; places\.tables: cannot write "):
        run(context)


def test_a_full_target_leaves_no_half_written_table_and_no_model(spark, tmp_path, rows):
    place = tmp_path / "full"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        context = Context(loads(FILE.format(root=tmp_path, rows=rows), [f"places.tables={place}"]), NOW)
        with pytest.raises(StorageError) as refused:
            run(context, spark)
        assert len(str(refused.value).splitlines()) == 1
        assert not Table(str(place / "clean")).exists()
    finally:
        subprocess.run(["umount", str(place)], check=True)
    record = RunRecord.load(Storage.of(context.record.places["record"]))
    assert (record.outcome, record.exit_code) == ("refused", 1)
    assert not ModelRegistry(f"{tmp_path}/shop/registry").models()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hdfs_serves_as_a_disk_does_and_a_plain_path_that_would_change_its_meaning_is_refused(
    hadoop, hdfs, tmp_path, rows
):
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

    refused = sparkdl(f"{tmp_path}/here", "run")
    assert refused.returncode == 1, refused.stderr
    assert f"root={tmp_path}/here lies in {hdfs}" in refused.stderr
    first = sparkdl(f"{hdfs}/journey", "run")
    assert first.returncode == 0, first.stderr
    kept = {entry.name for entry in Storage.of(f"{hdfs}/journey/shop").list()}
    assert kept == {"tables", "shards", "registry", "runs"}
    assert sparkdl(f"{hdfs}/journey", "run").returncode == 10
