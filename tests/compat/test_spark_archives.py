"""Where Python workers find PySpark's modules."""

from __future__ import annotations

import sys
from pathlib import Path

import pyspark
import pytest

from sparkdl.compat.spark_archives import leave_spark_archives

_HOME = Path(pyspark.__file__).parent
_ARCHIVES = [
    str(next(_HOME.glob(name))) for name in ("python/lib/pyspark.zip", "python/lib/py4j-*", "jars/spark-core_*")
]


@pytest.fixture
def path_of_worker(monkeypatch):
    """The path as Spark makes it for its workers, archives first."""
    monkeypatch.setenv("SPARK_HOME", str(_HOME))
    monkeypatch.setattr(sys, "path", [*_ARCHIVES, *sys.path])
    monkeypatch.setattr(sys, "path_importer_cache", dict.fromkeys(_ARCHIVES))
    return list(sys.path)


def test_modules_are_read_from_where_they_lie_compiled(path_of_worker):
    leave_spark_archives()
    assert sys.path == path_of_worker[3:]
    assert not sys.path_importer_cache.keys() & set(_ARCHIVES)  # which each new worker would list again


def test_archives_stay_where_pyspark_is_installed_nowhere_else(path_of_worker, monkeypatch):
    monkeypatch.setattr(sys, "path", [*_ARCHIVES, "/nowhere"])
    leave_spark_archives()
    assert sys.path == [*_ARCHIVES, "/nowhere"]


def test_archives_of_another_spark_stay(path_of_worker, monkeypatch, tmp_path):
    theirs = tmp_path / "python/lib/pyspark.zip"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(theirs), *path_of_worker])
    leave_spark_archives()
    assert sys.path == [str(theirs), *path_of_worker]


def test_an_archive_of_the_users_stays(path_of_worker, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path / "mine.zip"), *path_of_worker])
    leave_spark_archives()
    assert sys.path == [str(tmp_path / "mine.zip"), *path_of_worker[3:]]


def test_a_process_that_no_spark_started_keeps_its_path(path_of_worker, monkeypatch):
    monkeypatch.delenv("SPARK_HOME")
    leave_spark_archives()
    assert sys.path == path_of_worker
