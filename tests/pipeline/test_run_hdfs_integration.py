"""A run where plain paths are those of HDFS, as Hadoop's files say, and spark-defaults.conf names the master."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from sparkdl.storage import Storage

FILE = """
name: plain
root: {root}/made
source: {{kind: csv, path: {root}/rows}}
features: {{x: number}}
label: {{y: regression}}
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_plain_paths_of_a_run_lie_where_spark_takes_them_and_its_master_is_the_configured_one(hadoop, hdfs, tmp_path):
    root = f"/plain-{uuid.uuid4().hex}"
    rows = "x,y\n" + "".join(f"{i},{2 * i}\n" for i in range(300))
    Storage.of(f"{hdfs}{root}/rows/a.csv").write_atomic(rows.encode())
    (tmp_path / "plain.yaml").write_text(FILE.format(root=root))
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text("spark.master local[1]\nspark.driver.memory 800m\n")
    environment = {**os.environ, "HADOOP_CONF_DIR": str(hadoop), "SPARK_CONF_DIR": str(tmp_path / "conf")}
    for command, said in (("plan", "KiB"), ("run", "300 read"), ("status", "all"), ("run", "nothing new")):
        words = [sys.executable, "-m", "sparkdl.cli", command, "plain.yaml"]
        words += ["--until", "ingest"] if command == "run" else []
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 10), done.stdout + done.stderr
        assert said in done.stdout + done.stderr, done.stdout + done.stderr
        if said == "300 read":
            assert (
                f"from {tmp_path}/conf/spark-defaults.conf spark.driver.memory=800m, spark.master=local[1]"
                in done.stderr
            )
    assert not Path(root).exists()
    assert {entry.name for entry in Storage.of(f"{hdfs}{root}/made/plain").list()} >= {"runs", "tables"}
