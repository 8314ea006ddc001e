"""Writing and reading Delta tables by both engines, against Parquet by Spark alone.

T = 500,000 rows of 40 float32 columns; D = as many rows with ids, numbers and texts, in ten day partitions: written by
delta-rs against ``df.write.parquet`` of the same cached frame. Parquet files get neither a transaction nor statistics
for a table log, and are not made durable. V = D's columns read with a deletion vector on every file, against the same
table without. E = 2 million rows of 20 columns, written and read by delta-rs, by Spark's Delta and as Parquet, in a
session of a process of its own with the JARs of ``../shared/jars/delta``. One JSON line per workload;
``python tests/bench/bench_tables.py [workload ...]``.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow
import pyspark
import pytest

from sparkdl.tables.table import Table

ROWS, ROWS_OF_BOTH, REPEATS = 500_000, 2_000_000, 7
TABLES = Path(__file__).resolve().parents[1] / "tables"
JARS = Path(__file__).resolve().parents[3] / "shared" / "jars" / "delta"


def frame_of(spark, workload):
    """The workload's frame, cached, so that only writing is measured."""
    from pyspark.sql import functions as F

    columns = [F.rand(seed).cast("float").alias(f"x{seed}") for seed in range(40)]
    rows = ROWS_OF_BOTH if workload == "E" else ROWS
    if workload == "E":
        columns = [
            F.col("id"),
            *columns[:15],
            *[(F.col("id") % n).cast("string").alias(f"s{n}") for n in (7, 90, 800, 5000)],
        ]
    elif workload == "D":
        columns = [
            F.col("id"),
            *columns[:10],
            *[(F.rand(90 + i) * 200).cast("int").alias(f"zone{i}") for i in range(4)],
            F.concat(F.lit("rider-"), (F.col("id") % 5000).cast("string")).alias("rider"),
            F.date_add(F.lit("2024-01-01").cast("date"), (F.col("id") * 10 / ROWS).cast("int")).alias("day"),
        ]
    frame = spark.range(0, rows, 1, 2).select(*columns).cache()
    assert frame.count() == rows
    return frame


def measure(spark, workload):
    """One workload: a list of lines, each of several ways in one run."""
    if workload == "V":
        return [hidden_rows(spark)]
    frame = frame_of(spark, workload)
    if workload == "E":
        return both_engines(spark, frame)
    by = ["day"] if workload == "D" else []
    ways = {
        "Table.write": lambda path: Table(path).write(frame, partition_by=by),
        "df.write.parquet": lambda path: frame.write.partitionBy(*by).parquet(path),
    }
    result = in_turns(f"write table {workload}", ROWS, {way: fresh(write) for way, write in ways.items()})
    frame.unpersist()
    return [result]


def both_engines(spark, frame):
    """Write and read of the same rows by both engines of ``Table`` and as Parquet."""
    folder = tempfile.mkdtemp()
    writes = {
        "delta-rs": lambda path: Table(path, engine="delta-rs").write(frame),
        "Spark's Delta": lambda path: Table(path, engine="spark").write(frame),
        "df.write.parquet": lambda path: frame.write.parquet(path),
    }
    lines = [in_turns("write table E", ROWS_OF_BOTH, {way: fresh(write) for way, write in writes.items()})]
    for number, write in enumerate(writes.values()):
        write(f"{folder}/{number}")
    reads = {
        "delta-rs": lambda: Table(f"{folder}/0", engine="delta-rs").read(spark),
        "Spark's Delta": lambda: Table(f"{folder}/1", engine="spark").read(spark),
        "df.write.parquet": lambda: spark.read.parquet(f"{folder}/2"),
    }
    lines.append(in_turns("read table E", ROWS_OF_BOTH, {way: consumed(read) for way, read in reads.items()}))
    shutil.rmtree(folder)
    return lines


def hidden_rows(spark):
    """Reading files with a deletion vector each, against the same files without."""
    sys.path.insert(0, str(TABLES))
    from delta_log import actions, commit, hide_rows, protocol

    folder = tempfile.mkdtemp()
    table = Table(f"{folder}/table")
    table.write(frame_of(spark, "D"))
    commit(table.uri, 1, protocol(["deletionVectors"], []))
    adds = [action["add"] for action in actions(table.uri) if "add" in action]
    for number, add in enumerate(adds):
        hide_rows(table.uri, 2 + number, add)
    assert table.read(spark).count() == ROWS - 6 * len(adds)
    reads = {"with vectors": lambda: table.read(spark), "without": lambda: table.read(spark, version=0)}
    result = in_turns("read table V", ROWS, {way: consumed(read) for way, read in reads.items()})
    shutil.rmtree(folder)
    return result


def fresh(write):
    """A write into a folder that is new each time, timed without its removal."""

    def once():
        path = tempfile.mkdtemp() + "/table"
        start = time.perf_counter()
        write(path)
        seconds = time.perf_counter() - start
        shutil.rmtree(path.rsplit("/", 1)[0])
        return seconds

    return once


def consumed(read):
    """A read whose rows Spark computes all and keeps none of."""

    def once():
        start = time.perf_counter()
        read().write.format("noop").mode("overwrite").save()
        return time.perf_counter() - start

    return once


def in_turns(name, rows, ways):
    """Times of all ways, in turns, the first turn unmeasured; the ratio is the last way's to the first's."""
    seconds = {way: [] for way in ways}
    for turn in range(REPEATS + 1):
        for way, once in ways.items():
            found = once()
            if turn:
                seconds[way].append(found)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    quartiles = {way: statistics.quantiles(times, n=4) for way, times in seconds.items()}
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    first, *_, last = ways
    return {
        "workload": name,
        "ratio": round(medians[last] / medians[first], 2),
        "median_s": {way: round(median, 3) for way, median in medians.items()},
        "krows_per_s": {way: round(rows / median / 1e3) for way, median in medians.items()},
        "spread": {way: round((q[2] - q[0]) / medians[way], 3) for way, q in quartiles.items()},
        "git": head,
        "versions": {"pyspark": pyspark.__version__, "pyarrow": pyarrow.__version__},
        "cores": os.cpu_count(),
    }


@pytest.mark.bench
@pytest.mark.parametrize("workload", ["T", "D", "V"])
def test_tables(spark, workload, capsys):
    lines = measure(spark, workload)
    with capsys.disabled():
        print("\n" + "\n".join(map(json.dumps, lines)))


@pytest.mark.bench
@pytest.mark.timeout(1800)
def test_both_engines(capsys):
    if not JARS.is_dir():
        pytest.skip("needs Delta's JARs: ../shared/jars/delta does not lie beside the project")
    command = [sys.executable, __file__, "E"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-4000:]
    with capsys.disabled():
        print("\n" + done.stdout.strip())


def main(workloads):
    """Print one line per workload; ``E`` is for a process of its own, whose session has the JARs."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if "E" in workloads:
        sys.path.insert(0, str(TABLES))
        import contract

        spark = contract.session(tempfile.mkdtemp(), memory="3g", quick_start=False)
    else:
        session = pyspark.sql.SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        session = session.config("spark.driver.memory", "2g").config("spark.ui.showConsoleProgress", "false")
        spark = session.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        for workload in workloads or ["T", "D", "V"]:
            for line in measure(spark, workload):
                print(json.dumps(line), flush=True)
    finally:
        spark.stop()


if __name__ == "__main__":
    import pyspark.sql

    main(sys.argv[1:])
