"""score() against a hand-written ``predict_batch_udf`` on the same model and rows.

400,000 rows of an id and 40 float32 columns, cached or in Parquet files; an MLP 40-64-1; batches of 4,096 rows; one
thread a task on both sides; the sink takes every row and drops it. "narrow" asks for id and prediction, "wide" for
every column as well; "files narrow" and "files wide" read the files, which the page cache holds; "memory" and "files
memory" are the largest private memory of a worker at 1x and 4x the rows. "table" is ``score_table`` against ``score``
of what Spark reads and ``Table.write``: 1,600,000 such rows of a Delta table to another one of ids and predictions;
"table memory" its workers' memory. Each way has a Spark session of its own, so that neither profits from what the other
leaves in its workers; they take turns. ``python tests/bench/bench_score.py [workload ...]`` prints one JSON line per
workload.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import psutil
import pyspark
import pytest
import torch
from torch import nn

ROWS, FEATURES, BATCH, REPEATS = 400_000, 40, 4096, 11
ROWS_OF_TABLE = 1_600_000
COLUMNS = [f"x{i}" for i in range(FEATURES)]


def frame_of(spark, rows, files=False):
    """An id and the features: cached, so that reading is not measured, or in files."""
    from pyspark.sql import functions as F

    made = spark.range(0, rows, 1, 4)
    frame = made.select("id", *[F.rand(i).cast("float").alias(name) for i, name in enumerate(COLUMNS)])
    if files:
        path = os.path.join(tempfile.mkdtemp(), "rows")
        frame.write.parquet(path)
        return spark.read.parquet(path)
    frame.cache()
    assert frame.count() == rows
    return frame


def table_of(folder, rows):
    """The same as a Delta table of files with 200,000 rows each."""
    import pyarrow as pa

    from sparkdl.tables.table import Table

    table, random = Table(f"{folder}/rows"), np.random.default_rng(0)
    for start in range(0, rows, 200_000):
        made = {name: random.random(200_000, dtype=np.float32) for name in COLUMNS}
        table.append(pa.table({"id": np.arange(start, start + 200_000), **made}))
    return table


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


def signature_of():
    from sparkdl.models.signature import Signature, TensorField

    inputs = (TensorField(name="x", shape=(FEATURES,), columns=tuple(COLUMNS)),)
    return Signature(inputs=inputs, outputs=(TensorField(name="y"),))


def ours(frame, model, wide):
    from sparkdl.config import ScoreConfig
    from sparkdl.scoring.score import score

    keep = None if wide else ["id"]
    return score(frame, model, signature=signature_of(), keep=keep, config=ScoreConfig(batch_rows=BATCH))


def table_by_log(spark, table, target):
    from sparkdl import score_table
    from sparkdl.config import ScoreConfig
    from sparkdl.scoring.score import Predictor

    predictor = Predictor(model=model_of(), signature=signature_of(), config=ScoreConfig(batch_rows=BATCH))
    score_table(table, predictor, target, keep=["id"], mode="overwrite")


def table_by_spark(spark, table, target):
    target.write(ours(table.read(spark), model_of(), False), "overwrite")


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


WORKLOADS = ("narrow", "wide", "files narrow", "files wide", "table", "memory", "files memory", "table memory")
WAYS = {"score": ours, "predict_batch_udf": by_hand}
WAYS_OF_TABLE = {"score_table": table_by_log, "score": table_by_spark}


def session():
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    return builder.config("spark.driver.memory", "2g").config("spark.ui.showConsoleProgress", "false").getOrCreate()


def prepared(spark, way, workload, folder):
    """The sum of all predictions of one way, and what runs it once."""
    if workload == "table":
        from sparkdl.tables.table import Table

        table, target = Table(f"{folder}/rows"), Table(f"{folder}/{way}")
        WAYS_OF_TABLE[way](spark, table, target)
        return target.read(spark).selectExpr("sum(y)").first()[0], lambda: WAYS_OF_TABLE[way](spark, table, target)
    scored = WAYS[way](frame_of(spark, ROWS, "files" in workload), model_of(), "wide" in workload)
    return scored.selectExpr("sum(y)").first()[0], lambda: drain(scored)


def serve(way, workload, folder):
    """Be one way's process: the sum of all predictions first, then wall and CPU seconds of a run for each line read."""
    spark = session()
    total, run = prepared(spark, way, workload, folder)
    print(total, flush=True)
    for _ in sys.stdin:
        start, before = time.perf_counter(), cpu_seconds()
        run()
        print(time.perf_counter() - start, cpu_seconds() - before, flush=True)
    spark.stop()


def measure(workload):
    """Both ways in turns, the first two turns unmeasured; the answers are compared before."""
    with tempfile.TemporaryDirectory() as folder:
        if workload == "table":
            table_of(folder, ROWS_OF_TABLE)
        return measure_in(folder, workload, *(WAYS_OF_TABLE if workload == "table" else WAYS))


def measure_in(folder, workload, way, peer):
    """Measure one way against another."""
    rows = ROWS_OF_TABLE if workload == "table" else ROWS
    command = [sys.executable, os.path.abspath(__file__), "serve"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    processes = {one: subprocess.Popen([*command, one, workload, folder], text=True, **pipes) for one in (way, peer)}
    try:
        sums = [float(process.stdout.readline()) for process in processes.values()]
        assert abs(sums[0] - sums[1]) < 1e-3 * abs(sums[0]), sums
        seconds, cpu = {one: [] for one in processes}, {one: [] for one in processes}
        for turn in range(REPEATS + 2):
            for one, process in processes.items():
                print("go", file=process.stdin, flush=True)
                wall, used = map(float, process.stdout.readline().split())
                if turn >= 2:
                    seconds[one].append(wall)
                    cpu[one].append(used)
    finally:
        for process in processes.values():
            process.stdin.close()
            process.wait(60)
    medians = {one: statistics.median(times) for one, times in seconds.items()}
    used = {one: statistics.median(times) for one, times in cpu.items()}
    return {
        "workload": f"score {workload}",
        "ratio": round(medians[peer] / medians[way], 2),
        "cpu_ratio": round(used[peer] / used[way], 2),
        "bound": 1.3 if workload == "table" else 1.5,
        "median_s": {one: round(median, 3) for one, median in medians.items()},
        "cpu_s": {one: round(median, 3) for one, median in used.items()},
        "krows_per_s": {one: round(rows / median / 1e3) for one, median in medians.items()},
        "spread": {one: spread(times) for one, times in seconds.items()},
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


def measure_memory(workload):
    spark, found = session(), {}
    for factor in (1, 4):
        if workload == "table memory":
            from sparkdl.tables.table import Table

            with tempfile.TemporaryDirectory() as folder:
                table, target = table_of(folder, ROWS * factor), Table(f"{folder}/scored")
                found[f"{factor}x"] = peak_private_mib(functools.partial(table_by_log, spark, table, target))
            continue
        frame = frame_of(spark, ROWS * factor, "files" in workload)
        found[f"{factor}x"] = peak_private_mib(lambda frame=frame: drain(ours(frame, model_of(), False)))
        frame.unpersist()
    return {"workload": f"score {workload}", "ratio": round(found["4x"] / found["1x"], 2), "peak_mib": found, **facts()}


@pytest.mark.bench
@pytest.mark.parametrize("workload", WORKLOADS)
def test_score(workload, capsys):
    result = measure_memory(workload) if "memory" in workload else measure(workload)
    with capsys.disabled():
        print("\n" + json.dumps(result))


def main(arguments):
    """Print one line per workload, or serve one way."""
    if arguments[:1] == ["serve"]:
        serve(*arguments[1:])
        return
    for workload in arguments or WORKLOADS:
        print(json.dumps(measure_memory(workload) if "memory" in workload else measure(workload)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
