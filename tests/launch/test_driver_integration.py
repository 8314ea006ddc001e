"""Drivers as a user starts them: with spark-submit and files of his own, interrupted at the terminal, killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from launch_helpers import until

pytest.importorskip("pyspark")
pytestmark = pytest.mark.slow

SESSION = """
import os, sys, time
from pyspark.sql import SparkSession
from sparkdl.runner import run
spark = SparkSession.builder.config("spark.ui.enabled", "false").config("spark.driver.memory", "512m").getOrCreate()
"""
STAY = """
def stay():
    print("here", flush=True)
    while True:
        try:
            time.sleep(1)
        except BaseException:
            pass
run(stay, num_proc=2)
"""
USE = """
import helping
def work(thing):
    import helping as again
    return again.twice(thing.x), helping.Thing(int(os.environ["RANK"]))
(a, first), (b, second) = run(work, (helping.Thing(4),), num_proc=2)
print("RESULT", a, b, first.x, second.x, type(first) is helping.Thing)
"""
HELPING = "class Thing:\n    def __init__(self, x): self.x = x\n\ndef twice(x): return 2 * x\n"


def environment(folder):
    return {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "TMPDIR": str(folder),
    }


def in_session(session):
    """Processes of a session that have not ended, whoever their parents are now."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getsid(process.pid) == session and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except ProcessLookupError:
            continue
    return found


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_ends_leaves_no_process(end, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(SESSION.replace("builder.", "builder.master('local[2]').", 1) + STAY)
    driver = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=environment(tmp_path),
    )
    try:
        lines = sorted(driver.stdout.readline() for _ in range(2))
        assert lines == ["[rank 0] here\n", "[rank 1] here\n"]
        if end == signal.SIGINT:
            os.killpg(driver.pid, end)  # as the terminal sends it: to the JVM as well
        else:
            driver.send_signal(end)
        assert driver.wait() != 0
        until(lambda: not in_session(driver.pid))
    finally:
        for pid in in_session(driver.pid):
            os.kill(pid, signal.SIGKILL)
        driver.stdout.close()


def test_a_job_of_spark_submit_takes_its_own_files_along(tmp_path):
    (tmp_path / "helping.py").write_text(HELPING)
    archive = shutil.make_archive(str(tmp_path / "files"), "zip", tmp_path, "helping.py")
    (tmp_path / "helping.py").unlink()
    job = tmp_path / "job.py"
    job.write_text(SESSION + USE)
    submit = str(Path(sys.executable).parent / "spark-submit")
    done = subprocess.run(
        [submit, "--master", "local[2]", "--py-files", archive, str(job)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(tmp_path),
        cwd=tmp_path,
    )
    assert "RESULT 8 8 0 1 True" in done.stdout, done.stderr[-4000:]
    assert done.returncode == 0
