"""Which interpreter the workers of a local master run."""

from __future__ import annotations

import sys

import pytest

from sparkdl.compat.worker_python import use_drivers_python
from sparkdl.errors import PreflightError
from sparkdl.launch.driver import barrier
from sparkdl.launch.driver.cluster import as_cluster_error
from sparkdl.shards.write import write_shards


@pytest.fixture
def misled(spark, monkeypatch):
    """A session as pyspark makes it where the first python3 of the PATH is none that has pyspark."""
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/usr/bin/false")
    return spark


def test_ranks_and_writers_run_the_drivers_interpreter(misled, tmp_path):
    assert barrier.launch(misled, lambda world: sys.executable, num_proc=2) == [sys.executable] * 2
    misled.sparkContext.pythonExec = "/usr/bin/false"
    assert write_shards(misled.range(4), (tmp_path / "shards").as_uri()).rows == 4


def test_who_chose_an_interpreter_keeps_it(misled, monkeypatch):
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/python")
    use_drivers_python(misled)
    assert misled.sparkContext.pythonExec == "/usr/bin/false"


def test_another_version_on_a_cluster_is_one_sentence():
    error = as_cluster_error(RuntimeError("[PYTHON_VERSION_MISMATCH] Python in worker has different version ..."))
    assert isinstance(error, PreflightError)
    assert "set PYSPARK_PYTHON" in str(error)
