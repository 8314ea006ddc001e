"""Writing shards from Spark, with and without spreading their rows, against ``df.write.parquet`` in the same session.

T = 500,000 rows of 40 float32 columns and a label; V = 200,000 vectors of 128 floats. One JSON line per workload;
``python tests/bench/bench_write.py [workload ...]``. Shards are permuted, hashed, counted into statistics and made
durable (fsync); Parquet files are none of these.
``spreading_costs_s`` is what it takes to put the rows in random order over the set.
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

REPEATS = 9
WORKLOADS = {"T": 500_000, "V": 200_000}


def frame_of(spark, workload):
    """The workload's frame, cached, so that only writing is measured."""
    from pyspark.sql import functions as F

    rows = spark.range(0, WORKLOADS[workload], 1, 2)
    label = F.rand(99).cast("float").alias("y")
    if workload == "T":
        frame = rows.select(*[F.rand(seed).cast("float").alias(f"x{seed}") for seed in range(40)], label)
    else:
        numbers = F.transform(F.sequence(F.lit(1), F.lit(128)), lambda i: (F.xxhash64("id", i) / 2.0**63).cast("float"))
        frame = rows.select(numbers.alias("v"), label)
    frame = frame.cache()
    assert frame.count() == WORKLOADS[workload]
    return frame


def spread(seconds):
    """Interquartile range over the median."""
    low, _, high = statistics.quantiles(seconds, n=4)
    return round((high - low) / statistics.median(seconds), 3)


def measure(spark, workload):
    """Times of both ways, in turns, the first turn unmeasured."""
    from sparkdl.config import ShardConfig
    from sparkdl.shards.write import write_shards

    frame = frame_of(spark, workload)
    ways = {
        "write_shards": lambda path: write_shards(frame, path, labels=["y"]),
        "spread_rows=False": lambda path: write_shards(
            frame, path, labels=["y"], config=ShardConfig(spread_rows=False)
        ),
        "df.write.parquet": lambda path: frame.write.parquet(path),
    }
    seconds = {way: [] for way in ways}
    megabytes = {}
    for turn in range(REPEATS + 1):
        for way, write in ways.items():
            path = Path(tempfile.mkdtemp()) / "set"
            start = time.perf_counter()
            write(str(path))
            if turn:
                seconds[way].append(time.perf_counter() - start)
            megabytes[way] = round(sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) / 1e6, 1)
            shutil.rmtree(path.parent)
    frame.unpersist()
    ours, unspread, theirs = (statistics.median(seconds[way]) for way in ways)
    return {
        "workload": f"write {workload}",
        "ratio": round(theirs / ours, 2),
        "ratio_without_spreading": round(theirs / unspread, 2),
        "spreading_costs_s": round(ours - unspread, 3),
        "median_s": {way: round(statistics.median(times), 3) for way, times in seconds.items()},
        "krows_per_s": {way: round(WORKLOADS[workload] / statistics.median(t) / 1e3) for way, t in seconds.items()},
        "spread": {way: spread(times) for way, times in seconds.items()},
        "megabytes": megabytes,
        "git": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "versions": {"pyspark": pyspark.__version__, "pyarrow": pyarrow.__version__},
        "cores": os.cpu_count(),
    }


@pytest.mark.bench
@pytest.mark.parametrize("workload", WORKLOADS)
def test_write(spark, workload, capsys):
    result = measure(spark, workload)
    with capsys.disabled():
        print("\n" + json.dumps(result))


def main(workloads):
    """Print one line per workload."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    session = pyspark.sql.SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = session.config("spark.driver.memory", "2g").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    try:
        for workload in workloads or WORKLOADS:
            print(json.dumps(measure(spark, workload)), flush=True)
    finally:
        spark.stop()


if __name__ == "__main__":
    import pyspark.sql

    main(sys.argv[1:])
