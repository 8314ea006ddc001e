"""Features: rows per second of ``apply`` by type, and shards of raw columns against the same Spark SQL by hand.

``apply`` is measured in this process on batches of 10,000 rows, as Spark cuts them. ``shards`` writes 500,000 cached
rows of 13 numbers with gaps and 8 strings: once with ``Layout(prepare=features)``, once from columns that Spark SQL has
filled, put on a logarithmic scale, standardised, looked up by broadcast joins and hashed. ``fit`` takes the statistics
of the same rows, against the aggregations that the SQL by hand needs. ``long tail`` shows that the driver's memory does
not grow with the distinct values. One JSON line each; ``python tests/bench/bench_features.py``.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import reduce

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.features.fitted import fit
from sparkdl.features.hashing import hashes
from sparkdl.features.spec import Category, DateParts, Ids, Image, Number, Text, Vector
from sparkdl.features.statistics import statistics_of

ROWS, BATCH, REPEATS = 500_000, 10_000, 5
NUMBERS, LOOKED_UP, HASHED = 13, 4, 4
CITIES, BUCKETS = 5_000, 1_000


def median_s(run, repeats=REPEATS):
    """Median seconds of some runs, the first unmeasured, and their interquartile range over it."""
    seconds = []
    for turn in range(repeats + 1):
        start = time.perf_counter()
        run()
        if turn:
            seconds.append(time.perf_counter() - start)
    low, middle, high = statistics.quantiles(seconds, n=4)
    return middle, round((high - low) / middle, 3)


def picture():
    """The bytes of a small picture."""
    from PIL import Image as pillow

    sink = io.BytesIO()
    pillow.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(sink, "JPEG")
    return sink.getvalue()


def columns():
    """By name, a feature and a column of ``BATCH`` rows."""
    generator = np.random.default_rng(0)
    few = pa.array([f"city {n}" for n in generator.zipf(1.3, BATCH) % CITIES])
    many = pa.array([f"user {n}" for n in generator.integers(0, 2**40, BATCH)])
    ids = generator.integers(0, 1000, (BATCH, 20))
    texts = pa.array([" ".join(f"word{n}" for n in row) for row in ids[:, :10]])
    times = pa.array(generator.integers(0, 2**50, BATCH)).cast(pa.timestamp("us", "UTC"))
    return {
        "number": (Number(log=True, clip="quantiles"), pa.array(generator.lognormal(0, 1, BATCH))),
        "category, vocabulary": (Category(), few),
        "category, hashed": (Category(buckets=BUCKETS), few),
        "category, hashed, all distinct": (Category(buckets=BUCKETS), many),
        "category, integers": (Category(), pa.array(ids[:, 0])),
        "ids, 20 a row": (Ids(), pa.array(ids.tolist(), pa.list_(pa.int64()))),
        "text, 10 words": (Text(), texts),
        "vector, 64": (Vector(), pa.array(generator.normal(size=(BATCH, 64)).tolist(), pa.list_(pa.float32()))),
        "date parts": (DateParts(parts=("year", "month", "weekday", "hour")), times),
        "image, 64 x 64 to 32 x 32": (Image(height=32, width=32), pa.array([picture()] * 500)),
    }


def measure_apply():
    """Millions of rows per second, by type."""
    rates = {}
    for name, (options, column) in columns().items():
        batch = pa.record_batch({"c": column})
        features = fit({"c": options}, statistics_of(batch, {"c": options}))
        seconds, _ = median_s(lambda: features.apply(batch))  # noqa: B023
        rates[name] = round(len(column) / seconds / 1e6, 3)
    texts = [f"user {n}" for n in range(100_000)]
    rates["the hash alone"] = round(len(texts) / median_s(lambda: hashes(texts))[0] / 1e6, 2)
    return {"workload": "features apply", "mrows_per_s": rates, **environment()}


def raw_frame(spark):
    """Rows of gaps and long tails, cached."""
    from pyspark.sql import functions as F

    numbers = [F.when(F.rand(seed) > 0.1, F.exp(F.randn(seed + 50)) * 10).alias(f"n{seed}") for seed in range(NUMBERS)]
    tail = [F.floor(F.pow(F.rand(seed + 99), F.lit(-0.9))) % CITIES for seed in range(LOOKED_UP + HASHED)]
    strings = [F.concat(F.lit("value "), one.cast("string")).alias(f"c{place}") for place, one in enumerate(tail)]
    frame = spark.range(0, ROWS, 1, 2).select(*numbers, *strings, F.rand(7).cast("float").alias("y")).cache()
    assert frame.count() == ROWS
    return frame


OPTIONS = {
    **{f"n{place}": Number(log=True, fill=0.0) for place in range(NUMBERS)},
    **{f"c{place}": Category(min_count=2) for place in range(LOOKED_UP)},
    **{f"c{place}": Category(buckets=BUCKETS) for place in range(LOOKED_UP, LOOKED_UP + HASHED)},
}


def fit_by_hand(frame):
    """Moments of the logarithms and vocabularies, as somebody would write it in Spark SQL."""
    from pyspark.sql import functions as F

    logs = [F.log1p(F.col(f"n{place}")) for place in range(NUMBERS)]
    aggregates = [
        part(one).alias(f"{part.__name__}{i}") for i, one in enumerate(logs) for part in (F.avg, F.stddev_pop)
    ]
    moments = frame.agg(*aggregates).collect()[0]
    vocabularies = []
    for place in range(LOOKED_UP):
        counted = frame.groupBy(f"c{place}").count().where("count >= 2").orderBy(F.desc("count"), f"c{place}")
        vocabularies.append([row[0] for row in counted.limit(100_000).collect()])
    return moments, vocabularies


def inputs_by_hand(spark, frame, moments, vocabularies):
    """The same model inputs by Spark SQL."""
    from pyspark.sql import functions as F

    for place, values in enumerate(vocabularies):
        known = spark.createDataFrame(
            pa.table({f"c{place}": values, f"i{place}": pa.array(np.arange(1, len(values) + 1))})
        )
        frame = frame.join(F.broadcast(known), f"c{place}", "left")
    numbers = [
        ((F.log1p(F.coalesce(F.col(f"n{i}"), F.lit(0.0))) - moments[f"avg{i}"]) / moments[f"stddev_pop{i}"])
        .cast("float")
        .alias(f"x{i}")
        for i in range(NUMBERS)
    ]
    ids = [F.coalesce(F.col(f"i{i}"), F.lit(0)).cast("long").alias(f"z{i}") for i in range(LOOKED_UP)]
    ids += [
        (F.pmod(F.xxhash64(f"c{i}"), F.lit(BUCKETS)) + 1).alias(f"z{i}") for i in range(LOOKED_UP, LOOKED_UP + HASHED)
    ]
    return frame.select(*numbers, *ids, "y")


def measure_spark(spark):
    """Shards and statistics, ours against Spark SQL by hand."""
    from sparkdl.columns.layout import Layout
    from sparkdl.pipeline.work.statistics import spark_statistics
    from sparkdl.shards.write import write_shards

    frame = raw_frame(spark)
    features = fit(OPTIONS, spark_statistics(frame, OPTIONS))
    moments, vocabularies = fit_by_hand(frame)
    pack = {
        "numbers": [f"x{i}" for i in range(NUMBERS)],
        "categories": [f"z{i}" for i in range(LOOKED_UP + HASHED)],
    }

    def prepared():
        with tempfile.TemporaryDirectory() as folder:
            write_shards(frame, f"{folder}/set", labels=["y"], layout=Layout(prepare=features))

    def by_hand():
        with tempfile.TemporaryDirectory() as folder:
            rows = inputs_by_hand(spark, frame, moments, vocabularies)
            write_shards(rows, f"{folder}/set", labels=["y"], layout=Layout(pack=pack))

    pairs = {
        "shards": (prepared, by_hand),
        "fit": (lambda: spark_statistics(frame, OPTIONS), lambda: fit_by_hand(frame)),
    }
    for name, (ours, theirs) in pairs.items():
        (mine, spread), (other, other_spread) = median_s(ours), median_s(theirs)
        yield {
            "workload": f"features {name}",
            "ratio": round(other / mine, 2),
            "median_s": {"sparkdl": round(mine, 3), "Spark SQL by hand": round(other, 3)},
            "krows_per_s": {"sparkdl": round(ROWS / mine / 1e3), "Spark SQL by hand": round(ROWS / other / 1e3)},
            "spread": {"sparkdl": spread, "Spark SQL by hand": other_spread},
            **environment(),
        }
    frame.unpersist()


def measure_long_tail(spark):
    """Resident memory of this process and of its JVM before and after statistics of 10**6 distinct values."""
    import psutil
    from pyspark.sql import functions as F

    from sparkdl.pipeline.work.statistics import spark_statistics

    options = {"c": Category(max_size=1000)}

    def statistics_of_distinct(distinct):
        twice = F.concat(F.lit("a rather long value, number "), (F.col("id") % distinct).cast("string"))
        spark_statistics(spark.range(0, 2 * distinct, 1, 4).select(twice.alias("c")), options)
        return round(psutil.Process().memory_info().rss / 2**20)

    tails = (1_000, 10_000, 100_000, 1_000_000)
    resident = {distinct: statistics_of_distinct(distinct) for distinct in tails}
    return {"workload": "features long tail", "driver_python_mib_by_distinct": resident, **environment()}


def environment():
    """What a figure depends on."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {"git": git, "versions": {"pyarrow": pa.__version__, "numpy": np.__version__}, "cores": os.cpu_count()}


@pytest.mark.bench
def test_features(spark, capsys):
    results = [measure_apply(), *measure_spark(spark), measure_long_tail(spark)]
    with capsys.disabled():
        print(reduce(lambda text, result: f"{text}\n{json.dumps(result)}", results, ""))


def main():
    """Print one line per workload."""
    import pyspark.sql

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    print(json.dumps(measure_apply()), flush=True)
    session = pyspark.sql.SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = session.config("spark.driver.memory", "2g").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    try:
        for result in measure_spark(spark):
            print(json.dumps(result), flush=True)
        print(json.dumps(measure_long_tail(spark)), flush=True)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
