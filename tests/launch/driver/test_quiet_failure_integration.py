"""What Spark prints when a rank fails: no traceback of its own before the one sentence of the driver."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("pyspark")
pytestmark = pytest.mark.slow

SCRIPT = """
import os, time
from pyspark.sql import SparkSession
from sparkdl import run
from sparkdl.errors import RankFailedError

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
workers = run(os.getpid, num_proc=2, spark=spark)

def fail():
    if os.environ["RANK"] == "1":
        raise ValueError("no good")
    time.sleep(600)

try:
    run(fail, num_proc=2, spark=spark)
except RankFailedError as error:
    print("CAUGHT", error)
again = run(os.getpid, num_proc=2, spark=spark)
print("FRESH", not set(workers) & set(again))
while any(os.path.exists(f"/proc/{pid}") for pid in workers):
    time.sleep(0.1)
print("ENDED")
spark.stop()
"""


def test_a_failed_rank_is_one_sentence_and_its_workers_end(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, env=env)
    assert "CAUGHT rank 1 failed: ValueError: no good\n" in done.stdout, done.stderr
    assert "FRESH True\n" in done.stdout, "a failed rank's process is not used again"
    assert "ENDED\n" in done.stdout, "its process ends"
    assert "ERROR" not in done.stderr
    assert "Traceback" not in done.stderr
    assert "\tat org.apache" not in done.stderr
