"""What a session that a run opens is set to: small work and large work on one machine want different things."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sparkdl.pipeline.file import loads
from sparkdl.pipeline.session import SMALL, settings_of

FILE = "source: {kind: csv, path: wine.csv}\nfeatures: {alcohol: number}\nlabel: {quality: regression}\n"
QUICK, TASKS = "spark.driver.defaultJavaOptions", "spark.sql.shuffle.partitions"


def settings(size, *overrides, submitted=None):
    return settings_of(loads(FILE, overrides).spec, size, submitted or {})


def test_a_small_source_is_read_with_the_quick_compiler_and_few_tasks():
    small, large = settings(SMALL - 1), settings(SMALL)
    assert small[QUICK] == "-XX:TieredStopAtLevel=1"
    assert QUICK not in large
    assert (small[TASKS], settings(1 << 30)[TASKS], settings(1 << 40)[TASKS]) == ("4", "64", "200")


@pytest.mark.parametrize("overrides", [["spark.master=yarn"], ["spark.master=k8s://https://host"]])
def test_a_cluster_is_left_as_it_is(overrides):
    assert not {QUICK, TASKS} & set(settings(0, *overrides))
    assert not {QUICK, TASKS} & set(settings(0, submitted={"spark.master": "yarn"}))


def test_nothing_is_set_for_a_source_that_only_spark_can_measure():
    assert not {QUICK, TASKS} & set(settings(None))


def test_the_file_and_spark_submit_win():
    found = settings(0, f"spark.conf.{TASKS}=7", f"spark.conf.{QUICK}=-Xss4m", submitted={"spark.driver.memory": "9g"})
    assert (found[TASKS], found[QUICK], found["spark.driver.memory"]) == ("7", "-Xss4m", "9g")


def test_torch_is_loaded_beside_the_start_of_spark():
    """The thread that loads it may meet the imports of pyspark: both must end."""
    program = (
        "import importlib, threading\n"
        "loading = threading.Thread(target=importlib.import_module, args=('sparkdl.pipeline.work.work',))\n"
        "loading.start()\n"
        "import pyspark.sql, pyspark.sql.functions\n"
        "loading.join()\n"
        "from sparkdl.pipeline.work.work import work\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_import_lock_that_an_interrupt_left_taken_does_not_keep_a_run_from_ending():
    program = (
        "import _imp, sparkdl.pipeline.run as run; run._LOADING_SECONDS = 0.2\n"
        "_imp.acquire_lock()\nwith run._loading('colorsys') as loading: pass\nassert loading.is_alive()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
