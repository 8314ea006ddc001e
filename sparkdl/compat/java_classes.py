"""An archive of the classes that Spark loads, from which Java starts in half the time (JEP 350)."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import uuid
from pathlib import Path

_WORK = """
import sys
from pyspark.sql import SparkSession, functions as F
options = "-XX:TieredStopAtLevel=1 -XX:ArchiveClassesAtExit=" + sys.argv[1] + " -Xlog:cds=off -Xlog:cds+dynamic=off"
builder = SparkSession.builder.master("local[2]").config("spark.driver.defaultJavaOptions", options)
builder = builder.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "2")
spark = builder.config("spark.driver.extraJavaOptions", "-Dderby.system.home=" + sys.argv[2]).getOrCreate()
spark.sparkContext.setLogLevel("OFF")
def passed_on(batches):
    yield from batches
rows = spark.range(0, 2000, 1, 2).withColumn("x", F.rand(0)).withColumn("s", F.col("id").cast("string"))
rows = rows.withColumn("t", F.timestamp_seconds("id")).withColumn("d", F.to_date("t"))
rows.write.parquet(sys.argv[2] + "/parquet")
rows.write.option("header", True).csv(sys.argv[2] + "/csv")
read = spark.read.parquet(sys.argv[2] + "/parquet")
text = spark.read.schema(rows.schema).option("header", True).csv(sys.argv[2] + "/csv")
text.createOrReplaceTempView("text")
ranked = spark.sql("select *, row_number() over (partition by s order by x) as n, xxhash64(s, x) as h from text")
joined = ranked.join(read.select("id", F.col("x").alias("y")), "id").where("n = 1 and x between 0 and 1")
joined.mapInArrow(passed_on, joined.schema).groupBy("d").agg(F.sum("x"), F.count("*"), F.min("s")).collect()
joined.mapInArrow(passed_on, joined.schema, barrier=True).write.partitionBy("d").parquet(sys.argv[2] + "/parts")
spark.createDataFrame([(1, "a")], "i long, s string").union(read.selectExpr("id", "s")).distinct().toArrow()
java = spark.sparkContext._gateway.proc
spark.stop()
java.stdin.close()
java.wait()
"""


def archive() -> Path:
    """The path of the archive of this environment, whether it is there or not."""
    return Path(sys.prefix) / "share" / "sparkdl" / f"spark-{importlib.metadata.version('pyspark')}.jsa"


def java_options() -> str:
    """What to start Java with so that it takes the archive; empty where there is none.

    The sessions that sparkdl opens take the archive where it is. Java looks at it first: one of another Java, another
    Spark or other JARs is left alone, without a word, and classes are loaded from the JARs as ever.
    """
    try:
        file = archive()
    except importlib.metadata.PackageNotFoundError:
        return ""
    if not file.exists() or " " in str(file):  # Spark splits the options at spaces
        return ""
    return f"-XX:SharedArchiveFile={file} -Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off"


def make() -> Path:
    """Start a session, let it do what sessions do, and keep the classes that it has loaded; some 170 MB, in 15 s.

    ``python -m sparkdl.compat.java_classes`` does this, once for an environment; ``docker/install.sh`` calls it. A
    session and a first query on two busy cores, with the archive and without, in turns: 4.3 to 4.7 and 8.5 to 9.2
    seconds of Java's processor time, 8.4 to 9.1 and 16.2 to 21.6 on the clock. All of ``make run``: 18.9 and 23.0 of
    Java's.

    Raises:
        RuntimeError: Java made none.
    """
    import tempfile

    file = archive()
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{uuid.uuid4().hex[:8]}")
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    try:
        with tempfile.TemporaryDirectory(prefix="sparkdl-classes-") as folder:
            ended = subprocess.run(
                [sys.executable, "-c", _WORK, str(part), folder], cwd=folder, env=environment,
                capture_output=True, text=True, check=False,
            )  # fmt: skip
        if not part.exists():
            why = (ended.stderr or ended.stdout)[-400:].strip()
            raise RuntimeError(f"Java made no archive of Spark's classes: {why}")
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return file


if __name__ == "__main__":
    print(make())
