"""The archive of Spark's classes: Java takes it where it fits, and leaves any other alone without a word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkdl.compat import java_classes

STARTED = """
import sys
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
options = sys.argv[1] + " -Xlog:class+load:file=" + sys.argv[2]
builder = builder.config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 " + options)
spark = builder.config("spark.driver.memory", "1g").getOrCreate()
print(spark.range(3).count())
"""


def started(tmp_path, options):
    """What a session printed, and from where its classes came."""
    loaded = tmp_path / "classes"
    words = [sys.executable, "-c", STARTED, options, str(loaded)]
    ended = subprocess.run(words, capture_output=True, text=True, check=True, timeout=200)
    return ended.stdout, loaded.read_text()


@pytest.mark.slow
def test_java_takes_what_fits_and_is_silent_about_what_does_not(tmp_path, monkeypatch):
    if not java_classes.archive().exists():
        pytest.skip("this environment has no archive: python -m sparkdl.compat.java_classes")
    printed, classes = started(tmp_path, java_classes.java_options())
    assert printed == "3\n"
    assert "org.apache.spark.SparkContext source: shared objects file (top)" in classes
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert java_classes.java_options() == ""
    java_classes.archive().parent.mkdir(parents=True)
    java_classes.archive().write_bytes(b"of another Java" * 10_000)
    java = Path(os.environ["JAVA_HOME"], "bin", "java") if os.environ.get("JAVA_HOME") else "java"
    words = [java, *java_classes.java_options().split(), "-version"]
    ended = subprocess.run(words, capture_output=True, text=True, check=True)
    plain = subprocess.run([java, "-version"], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr.split("(")[0]) == (plain.stdout, plain.stderr.split("(")[0])
