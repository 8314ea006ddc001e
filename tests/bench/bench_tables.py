"""Writing a Delta table by Spark's tasks and delta-rs, against ``df.write.parquet`` of the same cached frame.

T = 500,000 rows of 40 float32 columns; D = as many rows with ids, numbers and texts, in ten day partitions. Parquet
files get neither a transaction nor statistics for a table log, and are not made durable. One JSON line per workload;
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

import pyarrow
import pyspark
import pytest

ROWS, REPEATS = 500_000, 7


def frame_of(spark, workload):
    """The workload's frame, cached, so that only writing is measured."""
    from pyspark.sql import functions as F

    columns = [F.rand(seed).cast("float").alias(f"x{seed}") for seed in range(40)]
    if workload == "D":
        columns = [
            F.col("id"),
            *columns[:10],
            *[(F.rand(90 + i) * 200).cast("int").alias(f"zone{i}") for i in range(4)],
            F.concat(F.lit("rider-"), (F.col("id") % 5000).cast("string")).alias("rider"),
            F.date_add(F.lit("2024-01-01").cast("date"), (F.col("id") * 10 / ROWS).cast("int")).alias("day"),
        ]
    frame = spark.range(0, ROWS, 1, 2).select(*columns).cache()
    assert frame.count() == ROWS
    return frame


def measure(spark, workload):
    """Times of both ways, in turns, the first turn unmeasured."""
    from sparkdl.tables.table import Table

    frame = frame_of(spark, workload)
    by = ["day"] if workload == "D" else []
    ways = {
        "Table.write": lambda path: Table(path).write(frame, partition_by=by),
        "df.write.parquet": lambda path: frame.write.partitionBy(*by).parquet(path),
    }
    seconds = {way: [] for way in ways}
    for turn in range(REPEATS + 1):
        for way, write in ways.items():
            path = tempfile.mkdtemp() + "/table"
            start = time.perf_counter()
            write(path)
            if turn:
                seconds[way].append(time.perf_counter() - start)
            shutil.rmtree(path.rsplit("/", 1)[0])
    frame.unpersist()
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    quartiles = {way: statistics.quantiles(times, n=4) for way, times in seconds.items()}
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "workload": f"write table {workload}",
        "ratio": round(medians["df.write.parquet"] / medians["Table.write"], 2),
        "median_s": {way: round(median, 3) for way, median in medians.items()},
        "krows_per_s": {way: round(ROWS / median / 1e3) for way, median in medians.items()},
        "spread": {way: round((q[2] - q[0]) / medians[way], 3) for way, q in quartiles.items()},
        "git": head,
        "versions": {"pyspark": pyspark.__version__, "pyarrow": pyarrow.__version__},
        "cores": os.cpu_count(),
    }


@pytest.mark.bench
@pytest.mark.parametrize("workload", ["T", "D"])
def test_tables(spark, workload, capsys):
    result = measure(spark, workload)
    with capsys.disabled():
        print("\n" + json.dumps(result))


def main(workloads):
    """Print one line per workload."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    session = pyspark.sql.SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = session.config("spark.driver.memory", "2g").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    try:
        for workload in workloads or ["T", "D"]:
            print(json.dumps(measure(spark, workload)), flush=True)
    finally:
        spark.stop()


if __name__ == "__main__":
    import pyspark.sql

    main(sys.argv[1:])
