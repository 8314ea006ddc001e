"""What is saved is loaded from the same address, whatever Spark's default filesystem is, and lies there alone."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.ml import PipelineModel

from sparkdl import TorchModel
from sparkdl.errors import ConfigError, ConflictError, StorageError
from sparkdl.estimator import save_atomically
from sparkdl.storage import TEMPORARY, Storage

SCRIPT = Path(__file__).with_name("save_everywhere.py")
STAGES = [
    "TorchModel",
    "TorchEstimator",
    "Pipeline",
    "PipelineModel",
    "AtomicPipelineModel",
    "CrossValidator",
    "CrossValidatorModel",
    "bundle",
]


def check(found, stages, addresses):
    wrong = {what: said for what, said in found.items() if said != "ok"}
    assert not wrong, "\n\n".join(f"{what}: {said}" for what, said in wrong.items())
    assert len(found) == len(stages) * len(addresses)


def load_script():
    spec = importlib.util.spec_from_file_location("save_everywhere", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def try_here(spark, stages, addresses):
    check(load_script().try_all(spark, stages, addresses), stages, addresses)


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


@pytest.mark.slow
def test_stages_are_saved_and_loaded_where_plain_paths_are_local(spark, tmp_path):
    addresses = [str(tmp_path / "plain"), f"file://{tmp_path}/scheme"]
    try_here(spark, ["TorchModel", "PipelineModel", "CrossValidator", "bundle"], addresses)
    assert sorted(os.listdir(tmp_path / "plain")) == sorted(os.listdir(tmp_path / "scheme"))


@pytest.mark.parametrize("scheme", ["", "memory://", pytest.param("hdfs", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", ["TorchModel", "TorchEstimator"])
def test_whichever_write_fails_the_target_is_as_it_was_and_nothing_lies_beside_it(
    spark, request, tmp_path, monkeypatch, scheme, stage
):
    saved = {"TorchModel": load_script().model(1.0), "TorchEstimator": load_script().estimator(3)}[stage]
    scheme = request.getfixturevalue("hdfs") if scheme == "hdfs" else scheme
    home = Storage.of(f"{scheme}{tmp_path}/home")
    target = home.child("stage")
    left, kind = [0], type(home)

    def limited(write):
        def wrapped(self, *arguments):
            left[0] -= 1
            if left[0] < 0:
                raise StorageError("the device is full")
            return write(self, *arguments)

        return wrapped

    for name in ("write_atomic", "open_output", "write_if_absent"):
        monkeypatch.setattr(kind, name, limited(getattr(kind, name)))
    failures = 0
    for overwritten in (False, True):
        if overwritten:
            left[0] = 1000
            saved.save(target.uri)
        before = contents(home)
        for allowed in range(100):
            left[0] = allowed
            try:
                (saved.write().overwrite() if overwritten else saved.write()).save(target.uri)
            except StorageError:
                failures += 1
                assert contents(home) == before
            else:
                break
        type(saved).load(target.uri)
        if not overwritten:
            target.delete(recursive=True)
    assert failures >= 6


@pytest.mark.parametrize("kind", ["PipelineModel", pytest.param("CrossValidatorModel", marks=pytest.mark.slow)])
def test_a_pipeline_or_search_that_cannot_be_saved_leaves_the_one_before_it(spark, tmp_path, kind):
    script = load_script()
    make = {"PipelineModel": lambda one: PipelineModel([script.plain(), one]), "CrossValidatorModel": script.searched}
    good, bad = make[kind](script.model(2.0)), make[kind](TorchModel(feature_columns=["x"], label_columns=["y"]))
    home = Storage.of(tmp_path / "home")
    target = str(tmp_path / "home/saved")
    with pytest.raises(ConfigError, match="holds no model"):
        save_atomically(bad, target)
    assert home.list() == []
    save_atomically(good, target)
    before = contents(home)
    with pytest.raises(ConflictError, match="exists already"):
        save_atomically(good, target)
    with pytest.raises(ConfigError, match="holds no model"):
        save_atomically(bad, target, overwrite=True)
    assert contents(home) == before
    type(good).load(target)


def test_a_stage_that_fails_in_sparks_own_writer_says_why_and_leaves_nothing_of_its_own(spark, tmp_path):
    """Spark's writer has deleted the old pipeline by then, and leaves what it wrote itself."""
    script, target = load_script(), str(tmp_path / "saved")
    PipelineModel([script.model(2.0), script.plain()]).save(target)
    bad = PipelineModel([script.model(3.0), TorchModel(feature_columns=["x"], label_columns=["y"])])
    with pytest.raises(ConfigError, match="holds no model"):
        bad.write().overwrite().save(target)
    [stage] = (tmp_path / "saved/stages").iterdir()
    assert script.weight(TorchModel.load(str(stage))) == 3.0
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(TEMPORARY)]


def contents(folder):
    found = {}
    for entry in folder.list():
        below = folder.child(entry.name)
        found[entry.name] = contents(below) if entry.is_dir else below.read_bytes()
    return found


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
