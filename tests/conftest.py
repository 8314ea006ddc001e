"""Fixtures that every test can ask for: one Spark session per test process, a clean environment around each test."""

from __future__ import annotations

import os
import sys

import pytest

# Spark's workers take the first python3 on the PATH unless they are told.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    """A local Spark session with two slots."""
    pyspark_sql = pytest.importorskip("pyspark.sql")
    warehouse = tmp_path_factory.mktemp("warehouse")
    session = (
        pyspark_sql.SparkSession.builder.master("local[2]")
        .appName("sparkdl-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.driver.memory", "1g")
        # Short jobs: the optimising compiler costs more than it gains.
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m")
        .config("spark.sql.warehouse.dir", str(warehouse))
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    yield session
    session.stop()


@pytest.fixture(autouse=True)
def _environment_is_left_as_it_was():
    """A test that leaves variables behind changes the next one: fail the one that does."""
    before = dict(os.environ)
    yield
    watched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HOROVOD_RANK", "CUDA_VISIBLE_DEVICES")
    changed = {name for name in watched if os.environ.get(name) != before.get(name)}
    os.environ.clear()
    os.environ.update(before)
    assert not changed, f"the test left {sorted(changed)} changed in the environment"
