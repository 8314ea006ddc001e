"""What is saved is loaded from the same address, whatever Spark's default filesystem is, and lies there alone."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkdl.storage import Storage

SCRIPT = Path(__file__).with_name("save_everywhere.py")
STAGES = ["TorchModel", "TorchEstimator", "Pipeline", "PipelineModel", "CrossValidatorModel", "bundle"]


def check(found, stages, addresses):
    wrong = {what: said for what, said in found.items() if said != "ok"}
    assert not wrong, "\n\n".join(f"{what}: {said}" for what, said in wrong.items())
    assert len(found) == len(stages) * len(addresses)


def try_here(spark, stages, addresses):
    spec = importlib.util.spec_from_file_location("save_everywhere", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    check(module.try_all(spark, stages, addresses), stages, addresses)


def try_where_plain_paths_are_on_hdfs(hadoop, stages, addresses, folder):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), ",".join(stages), *addresses],
        env={**os.environ, "HADOOP_CONF_DIR": str(hadoop), "SPARK_LOCAL_IP": "127.0.0.1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check(json.loads(done.stdout.splitlines()[-1]), stages, addresses)


def test_stages_are_saved_and_loaded_where_plain_paths_are_local(spark, tmp_path):
    addresses = [str(tmp_path / "plain"), f"file://{tmp_path}/scheme"]
    try_here(spark, ["TorchModel", "PipelineModel", "bundle"], addresses)
    assert sorted(os.listdir(tmp_path / "plain")) == sorted(os.listdir(tmp_path / "scheme"))


@pytest.mark.timeout(900)
def test_stages_are_saved_and_loaded_where_plain_paths_are_on_hdfs(hadoop, hdfs, tmp_path):
    stages = ["TorchModel", "PipelineModel"]
    try_where_plain_paths_are_on_hdfs(hadoop, stages, ["/some/plain", f"file://{tmp_path}/scheme"], tmp_path)
    assert [entry.name for entry in Storage.of(f"{hdfs}/some/plain").list()] == sorted(stages)
    assert os.listdir(tmp_path) == ["scheme"], "something was written to the driver's disk"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage_is_saved_and_loaded_where_plain_paths_are_local(spark, hdfs, tmp_path):
    try_here(spark, STAGES, [str(tmp_path / "plain"), f"file://{tmp_path}/scheme", f"{hdfs}/saved/local-default"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage_is_saved_and_loaded_where_plain_paths_are_on_hdfs(hadoop, hdfs, tmp_path):
    addresses = ["/every/plain", f"file://{tmp_path}/scheme", f"{hdfs}/every/scheme", "relative"]
    try_where_plain_paths_are_on_hdfs(hadoop, STAGES, addresses, tmp_path)
    assert len(Storage.of(f"{hdfs}/every/plain").list()) == len(STAGES)
    assert os.listdir(tmp_path) == ["scheme"], "something was written to the driver's disk"
