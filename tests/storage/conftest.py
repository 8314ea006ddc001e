"""What tests of storage share."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest


def _answers(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def connect_server(tmp_path):
    """Start a server of Spark Connect in a process of its own, with variables of its environment: gives its URL."""
    pyspark = pytest.importorskip("pyspark")
    pytest.importorskip("grpc")

    @contextmanager
    def start(**variables):
        home = Path(pyspark.__file__).parent
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [str(home / "bin" / "spark-class"), "org.apache.spark.deploy.SparkSubmit", "--master", "local[2]"]
        command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
        command += ["--conf", f"spark.connect.grpc.binding.port={port}", "--conf", "spark.ui.enabled=false"]
        local = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(home)}
        env = {**os.environ, **local, **variables}
        (tmp_path / "server").mkdir()
        with (tmp_path / "server.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "spark-internal"], env=env, cwd=tmp_path / "server", stdout=log, stderr=log
            )
        try:
            while not _answers(port):
                assert process.poll() is None, (tmp_path / "server.log").read_text()
                time.sleep(0.2)
            yield f"sc://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)

    return start
