"""A job looks at the places that it will write to before it reads a row."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.entry import open_session
from jobs.settings import PathSettings, Settings
from sparkdl.errors import StorageError
from sparkdl.storage import Storage

ROOT = Path(__file__).resolve().parents[2]


def test_every_place_of_a_job_that_cannot_be_written_is_named_at_its_start(spark, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    settings = Settings(paths=PathSettings(root=str(tmp_path), lake=f"{tmp_path}/file/lake", runs=f"{tmp_path}/file/r"))
    with pytest.raises(StorageError, match=r"^paths\.lake: cannot write .*; paths\.runs: cannot write ") as caught:
        open_session(settings, "lake", "shards", "registry", "runs")
    assert "paths.shards" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_journey_means_the_same_places_from_its_first_stage_to_its_last_where_plain_paths_are_on_hdfs(
    hadoop, hdfs, tmp_path
):
    def launch(job, *options):
        small = ["--set.events.rows=6000", "--set.events.days=5", "--set.events.late_day=1", "--set.train.epochs=1"]
        return subprocess.run(
            [sys.executable, str(ROOT / "jobs" / f"{job}.py"), "--set.paths.root=/journey", *small, *options],
            env={**os.environ, "HADOOP_CONF_DIR": str(hadoop), "SPARK_LOCAL_IP": "127.0.0.1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    for job in ("make_events", "retrain"):
        refused = launch(job)
        assert refused.returncode == 1, refused.stderr
        assert f"paths.raw={hdfs}/journey/raw is not a folder of this machine" in refused.stderr
    done = launch("retrain", "--set.etl.validation_days=1", f"--set.paths.raw=file://{tmp_path}/raw")
    assert done.returncode == 0, done.stderr
    assert {entry.name for entry in Storage.of(f"{hdfs}/journey").list()} == {"lake", "shards", "registry", "runs"}
    assert os.listdir(tmp_path) == ["raw"]
    records = [run.child("record.json") for run in map(Storage.of(f"{hdfs}/journey/runs").child, _runs(hdfs))]
    assert sorted(json.loads(record.read_bytes())["status"] for record in records) == ["done", "refused", "refused"]


def _runs(hdfs):
    return [entry.name for entry in Storage.of(f"{hdfs}/journey/runs").list() if entry.name != "checkpoints"]
