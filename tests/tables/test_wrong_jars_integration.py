"""Sessions that name Delta's extension, and lack its JAR or have one of another Spark: one sentence each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

SPARK = Path(pyspark.__file__).parent / "jars"
EXTENSION, CATALOG = "io.delta.sql.DeltaSparkSessionExtension", "org.apache.spark.sql.delta.catalog.DeltaCatalog"

# What a JAR of another Spark comes to: its classes call methods that this Spark does not have.
ELSEWHERE = {
    "org/apache/spark/sql/SparkSessionExtensions.java": """
        package org.apache.spark.sql;
        public class SparkSessionExtensions { public void injectAsElsewhere() {} }
    """,
}
CALL = "new org.apache.spark.sql.SparkSessionExtensions().injectAsElsewhere();"
CLASSES = {
    "io/delta/sql/DeltaSparkSessionExtension.java": """
        package io.delta.sql;
        import org.apache.spark.sql.SparkSessionExtensions;
        import scala.runtime.BoxedUnit;
        public class DeltaSparkSessionExtension
                extends scala.runtime.AbstractFunction1<SparkSessionExtensions, BoxedUnit> {
            public BoxedUnit apply(SparkSessionExtensions given) { EXTENSION return BoxedUnit.UNIT; }
        }
    """,
    "org/apache/spark/sql/delta/catalog/DeltaCatalog.java": """
        package org.apache.spark.sql.delta.catalog;
        import org.apache.spark.sql.connector.catalog.*;
        public class DeltaCatalog extends DelegatingCatalogExtension {
            public Table loadTable(Identifier name) { CATALOG return null; }
        }
    """,
}

SCRIPT = """
import json, sys
import pyarrow as pa
from sparkdl.errors import SparkdlError
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.session import open_session
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run
from sparkdl.tables.table import Table

folder, jar, result = sys.argv[1:]
pa.parquet.write_table(pa.table({"x": [1.0, 2.0], "y": [1.0, 2.0]}), f"{folder}/rows.parquet")
Table(f"{folder}/table", engine="delta-rs").append(pa.table({"x": [1]}))
conf = {"spark.sql.extensions": "EXTENSION", "spark.sql.catalog.spark_catalog": "CATALOG", "spark.jars": jar,
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1", "spark.driver.memory": "1g"}
file = loads(f"root: {folder}/root\\nsource: {{kind: parquet, path: {folder}/rows.parquet}}\\n"
             f"features: {{x: number}}\\nlabel: {{y: regression}}\\nspark: {{conf: {json.dumps(conf)}}}")
said = {}

def tell(name, action):
    try:
        said[name] = ["", repr(action())]
    except SparkdlError as error:
        said[name] = [type(error).__name__, str(error)]

tell("run", lambda: execute(Run(Project(file))).outcome)
try:
    spark = open_session(file.spec)
except SparkdlError as error:
    said["session"] = [type(error).__name__, str(error)]
else:
    table, name = Table(f"{folder}/table"), Table("spark_catalog.default.name")
    tell("exists", table.exists)
    tell("version", table.version)
    tell("read", lambda: table.read(spark))
    tell("append", lambda: table.append(pa.table({"x": [1]})))
    tell("name exists", name.exists)
    tell("name rows", name.rows)
with open(result, "w") as stream:
    json.dump(said, stream)
"""


def built(folder, name, sources, classpath):
    """A folder of classes compiled from sources by name."""
    files = []
    for path, text in sources.items():
        files.append(folder / name / "source" / path)
        files[-1].parent.mkdir(parents=True)
        files[-1].write_text(text)
    out = folder / name / "classes"
    subprocess.run(["javac", "-d", out, "-cp", classpath, *files], check=True, capture_output=True)
    return out


def jar_of(folder, wrong):
    """A JAR with Delta's names, the class ``wrong`` of which needs another Spark."""
    elsewhere = built(folder, "elsewhere", ELSEWHERE, f"{SPARK}/*")
    calls = {"EXTENSION": CALL if wrong == "extension" else "", "CATALOG": CALL if wrong == "catalog" else ""}
    sources = CLASSES
    for word, call in calls.items():
        sources = {path: text.replace(f" {word} ", f" {call} ") for path, text in sources.items()}
    classes = built(folder, "delta", sources, f"{elsewhere}:{SPARK}/*")
    shutil.make_archive(str(folder / "delta"), "zip", classes)
    return (folder / "delta.zip").rename(folder / "delta.jar")


def outcomes(folder, jar):
    """What came of every action in a session with that JAR: the type of the error, and its sentence."""
    result, script = folder / "result.json", folder / "script.py"
    script.write_text(SCRIPT.replace("EXTENSION", EXTENSION).replace("CATALOG", CATALOG))
    command = [sys.executable, str(script), str(folder), str(jar), str(result)]
    done = subprocess.run(command, cwd=folder, env={**os.environ}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(result.read_text())
    assert all(len(sentence.splitlines()) == 1 and len(sentence) < 500 for _, sentence in said.values()), said
    return said


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["missing", "catalog", "extension"])
def test_a_jar_that_is_missing_or_of_another_spark_is_one_sentence(tmp_path, wrong):
    if wrong != "missing" and shutil.which("javac") is None:
        pytest.skip("needs a Java compiler to make a JAR of another Spark: javac is not on the PATH")
    said = outcomes(tmp_path, "" if wrong == "missing" else jar_of(tmp_path, wrong))
    if wrong != "catalog":
        kind, sentence = said.pop("run")
    if wrong == "missing":  # nothing but the tables needs it
        assert kind == "StorageError"
        assert sentence.endswith(f"add io.delta:delta-spark of Spark {pyspark.__version__}")
    if wrong == "extension":
        assert kind == "ConfigError"
        assert sentence.startswith(
            f"a JAR of this session is missing, or was built for another Spark than {pyspark.__version__} "
            "(NoSuchMethodError: "
        )
        assert said["session"] == [kind, sentence]
        return
    assert {*said} >= {"exists", "version", "read", "append", "name exists", "name rows"}
    for name, (kind, sentence) in said.items():
        if name != "run":  # whose tables are delta-rs's, and need no catalog
            assert kind == "StorageError", name
            assert (
                "the session's settings name Delta's extension, and its JAR is missing or of another Spark ("
                in sentence
            )
            assert sentence.endswith(f"add io.delta:delta-spark of Spark {pyspark.__version__}")
    assert "NoSuchMethodError" in said["name rows"][1] or wrong == "missing"
