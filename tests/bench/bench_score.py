"""score() against a hand-written ``predict_batch_udf`` on the same model, rows and session.

400,000 rows of an id and 40 float32 columns, cached; an MLP 40-64-1; batches of 4,096 rows; one thread a task on both
sides; the sink takes every row and drops it. "narrow" asks for id and prediction, "wide" for every column as well;
"memory" is the largest private memory of a Python worker at 1x and 4x the rows. Both ways share one pool of workers, so
the peer profits from the shorter garbage collections that score() leaves behind; the ratio is the smaller for it.
``python tests/bench/bench_score.py`` prints one JSON line per workload.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pyspark
import pytest
import torch
from torch import nn

ROWS, FEATURES, BATCH, REPEATS = 400_000, 40, 4096, 11
COLUMNS = [f"x{i}" for i in range(FEATURES)]


def frame_of(spark, rows):
    """An id and the features, cached, so that reading is not measured."""
    from pyspark.sql import functions as F

    made = spark.range(0, rows, 1, 4)
    frame = made.select("id", *[F.rand(i).cast("float").alias(name) for i, name in enumerate(COLUMNS)]).cache()
    assert frame.count() == rows
    return frame


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 1)).eval()


def by_hand(frame, model, wide):
    """What a careful user writes today."""
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import functions as F
    from pyspark.sql.types import FloatType

    def make():
        import torch

        torch.set_num_threads(1)

        def predict(x: np.ndarray) -> np.ndarray:
            with torch.inference_mode():
                return model(torch.from_numpy(x))[:, 0].numpy()

        return predict

    predict = predict_batch_udf(make, return_type=FloatType(), batch_size=BATCH, input_tensor_shapes=[[FEATURES]])
    scored = frame.withColumn("y", predict(F.array(*COLUMNS)))
    return scored if wide else scored.select("id", "y")


def ours(frame, model, wide):
    from sparkdl.config import ScoreConfig
    from sparkdl.lakehouse.score import score
    from sparkdl.lakehouse.signature import Signature, TensorField

    inputs = (TensorField(name="x", shape=(FEATURES,), columns=tuple(COLUMNS)),)
    signature = Signature(inputs=inputs, outputs=(TensorField(name="y"),))
    keep = None if wide else ["id"]
    return score(frame, model, signature=signature, keep=keep, config=ScoreConfig(batch_rows=BATCH))


def drain(frame):
    frame.write.format("noop").mode("overwrite").save()


def cpu_seconds():
    """CPU time of the JVM and its Python workers so far: says more than the clock on a machine that others use too."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def spread(seconds):
    """Interquartile range over the median."""
    low, _, high = statistics.quantiles(seconds, n=4)
    return round((high - low) / statistics.median(seconds), 3)


def facts():
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "git": head,
        "versions": {"pyspark": pyspark.__version__, "torch": str(torch.__version__)},
        "cores": os.cpu_count(),
    }


def measure(spark, workload):
    """Both ways in turns, the first turn unmeasured; the answers are compared before."""
    frame, model, wide = frame_of(spark, ROWS), model_of(), workload == "wide"
    ways = {"score": ours(frame, model, wide), "predict_batch_udf": by_hand(frame, model, wide)}
    sums = {way: scored.selectExpr("sum(y)").first()[0] for way, scored in ways.items()}
    assert abs(sums["score"] - sums["predict_batch_udf"]) < 1e-3 * abs(sums["score"]), sums
    seconds, cpu = {way: [] for way in ways}, {way: [] for way in ways}
    for turn in range(REPEATS + 1):
        for way, scored in ways.items():
            start, before = time.perf_counter(), cpu_seconds()
            drain(scored)
            if turn:
                seconds[way].append(time.perf_counter() - start)
                cpu[way].append(cpu_seconds() - before)
    frame.unpersist()
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    return {
        "workload": f"score {workload}",
        "ratio": round(medians["predict_batch_udf"] / medians["score"], 2),
        "bound": 1.5,
        "median_s": {way: round(median, 3) for way, median in medians.items()},
        "krows_per_s": {way: round(ROWS / median / 1e3) for way, median in medians.items()},
        "spread": {way: spread(times) for way, times in seconds.items()},
        "cpu_s": {way: round(statistics.median(times), 2) for way, times in cpu.items()},
        "cpu_ratio": round(statistics.median(cpu["predict_batch_udf"]) / statistics.median(cpu["score"]), 2),
        **facts(),
    }


def peak_private_mib(run):
    """The largest private memory of any Python worker while ``run`` runs, MiB."""
    peak, done = [0], threading.Event()

    def watch():
        while not done.wait(0.02):
            for process in psutil.Process().children(recursive=True):
                try:
                    if "python" in process.name():
                        peak[0] = max(peak[0], process.memory_full_info().uss)
                except psutil.Error:
                    continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return peak[0] >> 20


def measure_memory(spark):
    found = {}
    for factor in (1, 4):
        frame = frame_of(spark, ROWS * factor)
        found[f"{factor}x"] = peak_private_mib(lambda frame=frame: drain(ours(frame, model_of(), False)))
        frame.unpersist()
    return {"workload": "score memory", "ratio": round(found["4x"] / found["1x"], 2), "peak_mib": found, **facts()}


@pytest.mark.bench
@pytest.mark.parametrize("workload", ["narrow", "wide", "memory"])
def test_score(spark, workload, capsys):
    result = measure_memory(spark) if workload == "memory" else measure(spark, workload)
    with capsys.disabled():
        print("\n" + json.dumps(result))


def main():
    """Print one line per workload."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    session = pyspark.sql.SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = session.config("spark.driver.memory", "2g").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    try:
        for workload in ("narrow", "wide"):
            print(json.dumps(measure(spark, workload)), flush=True)
        print(json.dumps(measure_memory(spark)), flush=True)
    finally:
        spark.stop()


if __name__ == "__main__":
    import pyspark.sql

    main()
