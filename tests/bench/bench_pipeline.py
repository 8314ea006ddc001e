"""A pipeline over 0.2, 2 and 20 million clicks: seconds and peak memory of each step, and the same ETL by hand.

The clicks are those of ``jobs/examples/clicks`` on eight days, with a number of their own behind each line; one in 500
lines repeats the one before. ``ingest`` is measured as the example has it, and once more with that number as the key.
``by hand`` is Spark SQL over the same files in the same session: read, filter, drop duplicates and write Parquet by
day; then the features, by aggregations and broadcast joins, to Parquet. Both ways run on 20,000 rows first, unmeasured;
then by hand, the pipeline twice, by hand, since Java compiles for whoever comes later. Of 20 million rows each is done
once, by hand first.

Each size is a process of its own. Memory is the resident set, sampled every 50 ms: of the driver's Python, of the JVM,
and of all Python workers and ranks together, without the pages that they share. One JSON line a measurement:

    python tests/bench/bench_pipeline.py 200000 2000000 --folder /somewhere/with/space

20 million rows take 7 GB of text and about as much again for tables, shards and what is written by hand.

Four tables more are measured as whoever meets them first does, from a Parquet file to predictions by one ``sparkdl
run`` in a process of its own: ``small``, 22,272 rows of 13 columns, ``dated``, the same on ninety days in no order,
``wide``, 20,000 rows of 502, and ``long``, a million rows of 22, whose training takes one epoch. All but ``dated`` are
divided by a hash of whole rows. Processor seconds are those of the driver's Python, of the JVM, and of all workers and
ranks; on a machine that is busy they tell more than seconds do:

    python tests/bench/bench_pipeline.py small dated wide long
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[2]
SIZES = (200_000, 2_000_000, 20_000_000)
DAYS, WARM_UP = 8, 20_000
TRAINING = DAYS - 2
ETL = ("ingest", "features", "shards")
NUMBERS = [f"I{n}" for n in range(1, 14)]
WHOLE = {
    "small": (22_272, 13, ""), "dated": (22_272, 13, ""), "wide": (20_000, 502, ""),
    "long": (1_000_000, 22, "train: {epochs: 1}"),
}  # fmt: skip
"""Rows and columns of the tables that are taken from a file to predictions, a label and a category among them, and what
else their pipeline files say."""
WHOLE_FILE = """
name: {name}
root: {root}
source: {{kind: parquet, path: {path}{time}}}
expect: {{has a label: label IS NOT NULL}}
features:
  kind: category
{numbers}
label: {{label: regression}}
split: {split}
publish: {{gate: {{baseline: never}}}}
spark: {{master: "local[2]"}}
{more}
"""
BY_HASH, BY_TIME = "{by: hash, train: 0.7, validate: 0.2, score: 0.1}", "{by: time, validate: 18 days, score: 9 days}"
HASHED = ["C3", "C12", "C16", "C21"]
LOOKED_UP = [f"C{n}" for n in range(1, 27) if f"C{n}" not in HASHED]


def make_clicks(folder, rows):
    """Write the clicks, each line with a number behind it, one in 500 as the line before."""
    sys.path.insert(0, str(ROOT))
    from jobs.examples.clicks import make_data

    plain = make_data.World

    class Numbered(plain):
        def chunk(self, day, part, rows):
            line, *known = super().chunk(day, part, rows)
            digits = ((day * 100 + part) * make_data.CHUNK + np.arange(rows))[:, None] // 10 ** np.arange(9, -1, -1)
            number = (digits % 10 + ord("0")).astype(np.uint8)
            tab = np.full((rows, 1), ord("\t"), np.uint8)
            line = np.hstack([line[:, :-1], tab, number, line[:, -1:]])
            line[499::500] = line[498::500]
            return line, *known

    make_data.World = Numbered
    try:
        return make_data.make(folder, rows // DAYS, DAYS)
    finally:
        make_data.World = plain


class Sampler(threading.Thread):
    """Resident memory and processor time of a process, its JVM and all below that, every 50 ms.

    Args:
        process: its number; None takes this one.
    """

    def __init__(self, process=None):
        super().__init__(daemon=True)
        self.root, self.samples, self.over, self.times = psutil.Process(process), [], threading.Event(), {}

    def run(self):
        while not self.over.wait(0.05):
            memory = {"driver": 0, "jvm": 0, "workers": 0}
            with suppress(psutil.Error):
                for process in (self.root, *self.root.children(recursive=True)):
                    with suppress(psutil.Error):
                        who = "jvm" if process.name() == "java" else "workers"
                        who = "driver" if process == self.root else who
                        resident, times = process.memory_info(), process.cpu_times()
                        memory[who] += resident.rss - (resident.shared if who == "workers" else 0)
                        self.times[process] = who, times.user + times.system
            self.samples.append((time.time(), memory))

    def peak_mib(self, since, until):
        """The most memory of each between two times."""
        within = [memory for at, memory in self.samples if since - 0.1 <= at <= until + 0.1]
        return {who: round(max(memory[who] for memory in within) / 2**20) for who in ("driver", "jvm", "workers")}

    def processor_seconds(self):
        """The processor time of each, of processes that have ended, too."""
        return {
            who: round(sum(t for of, t in self.times.values() if of == who), 1) for who in ("driver", "jvm", "workers")
        }


def by_hand(spark, source, schema, folder, keyed):
    """Seconds of the clean table, and of its features."""
    from pyspark.sql import functions as F

    clean, start = f"{folder}/clean", time.perf_counter()
    rows = spark.read.schema(schema).options(sep="\t", mode="DROPMALFORMED").csv(source).where("label IN (0, 1)")
    if keyed:
        rows = rows.dropDuplicates(["day", "id"])
    rows.write.partitionBy("day").parquet(clean)
    took = [time.perf_counter() - start]
    if not keyed:
        start = time.perf_counter()
        rows = spark.read.parquet(clean)
        days = sorted(str(row["day"]) for row in rows.select("day").distinct().collect())
        train, validate = (rows.where(F.col("day").isin(part)) for part in (days[:TRAINING], days[TRAINING:-1]))
        encode = encoder(train)
        for name, part in (("train", train), ("validate", validate)):
            encode(part).write.parquet(f"{folder}/{name}")
        took.append(time.perf_counter() - start)
    shutil.rmtree(folder)
    return took


def encoder(train):
    """From raw rows to encoded ones, with moments and vocabularies of the training rows."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    scaled = {name: F.signum(name) * F.log1p(F.abs(F.coalesce(F.col(name), F.lit(0)))) for name in NUMBERS}
    moments = [f(column).alias(f"{name}_{f.__name__}") for name, column in scaled.items() for f in (F.mean, F.stddev)]
    [moment] = train.agg(*moments).collect()
    pairs = F.explode(F.array(*[F.struct(F.lit(name).alias("name"), F.col(name).alias("value")) for name in LOOKED_UP]))
    counted = train.select(pairs.alias("pair")).groupBy("pair.name", "pair.value").count().where("count >= 15")
    order = Window.partitionBy("name").orderBy(F.desc("count"), "value")
    ids = counted.where("value IS NOT NULL").withColumn("id", F.row_number().over(order)).coalesce(1).persist()
    known = {name: F.broadcast(ids.where(F.col("name") == name).select("value", "id")) for name in LOOKED_UP}

    def encode(rows):
        for name, table in known.items():
            one = table.toDF(f"{name}_value", f"{name}_id")
            rows = rows.join(one, rows[name] == one[f"{name}_value"], "left")
        numbers = [
            ((column - moment[f"{name}_mean"]) / moment[f"{name}_stddev"]).cast("float").alias(name)
            for name, column in scaled.items()
        ]
        missing = [F.col(name).isNull().cast("float").alias(f"{name}_missing") for name in NUMBERS]
        looked_up = [F.coalesce(f"{name}_id", F.lit(0)).cast("long").alias(name) for name in LOOKED_UP]
        hashed = [
            F.when(F.col(name).isNull(), 0).otherwise(F.pmod(F.xxhash64(name), F.lit(20_000)) + 1).alias(name)
            for name in HASHED
        ]
        return rows.select("label", *numbers, *missing, *looked_up, *hashed)

    return encode


def pipeline_of(source, root, *more):
    """The example over these files, with the number as a column."""
    from sparkdl.pipeline import Pipeline

    place = ROOT / "jobs" / "examples" / "clicks" / "clicks.yaml"
    schema = Pipeline.load(place).spec.source.schema + ", id BIGINT"
    gate = {"publish.gate.floors": "[]", "train.verbose": 0, "train.num_proc": 2, "spark.master": "local[2]"}
    given = [f"source.path={source}", f"source.schema={schema}", f"root={root}", *(f"{k}={v}" for k, v in gate.items())]
    return Pipeline.load(place, [*given, *more]), schema


def compared(spark, folder, again):
    """The whole pipeline's record, and seconds of the pipeline and by hand, by what is compared."""
    source, root, hand = f"{folder}/rows", f"{folder}/p", f"{folder}/hand"
    pipeline, schema = pipeline_of(source, root)
    theirs = [by_hand(spark, source, schema, hand, False)]
    theirs_keyed = [by_hand(spark, source, schema, hand, True)]
    done = pipeline.run(spark)
    ours, ours_keyed = [{note.name: note.seconds for note in done.steps}], []
    shutil.rmtree(f"{root}/clicks/shards")
    for number in range(1 + again):
        keyed, _ = pipeline_of(source, f"{root}-keyed{number}", "source.key=[id]", f"name=keyed{number}")
        only = keyed.run(spark, until="ingest")
        ours_keyed.append({note.name: note.seconds for note in only.steps})
        assert only.rows["duplicates"] > 0, only.rows
        shutil.rmtree(f"{root}-keyed{number}")
    if again:
        twice = pipeline_of(source, f"{root}-twice", "name=twice")[0].run(spark, until=ETL[-1])
        ours.append({note.name: note.seconds for note in twice.steps})
        theirs.append(by_hand(spark, source, schema, hand, False))
        theirs_keyed.append(by_hand(spark, source, schema, hand, True))
    return done, {
        "ingest": ([run["ingest"] for run in ours], [took[0] for took in theirs]),
        "ETL": ([sum(run[step] for step in ETL) for run in ours], [sum(took) for took in theirs]),
        "keyed ingest": ([run["ingest"] for run in ours_keyed], [sum(took) for took in theirs_keyed]),
    }


def measured(rows, folder):
    """Print the lines of one size."""
    from sparkdl.observe import set_sink
    from sparkdl.pipeline.session import open_session

    for name, count in (("small", WARM_UP), ("large", rows)):
        start = time.perf_counter()
        truth = make_clicks(folder / name, count)
        made = time.perf_counter() - start
    os.environ["SPARK_LOCAL_DIRS"] = str(folder)
    spark = open_session(pipeline_of("/none", folder)[0].spec)
    ends, sampler = {}, Sampler()

    def listen(event):
        if event["kind"] == "step" and event["state"] != "started":
            ends.setdefault(event["name"], event["time"])

    set_sink(listen)
    compared(spark, folder / "small", False)
    ends.clear()
    sampler.start()
    done, pairs = compared(spark, folder / "large", rows < SIZES[-1])
    sampler.over.set()
    steps = {note.name: note.seconds for note in done.steps if note.seconds > 0.001}
    common = stamp(rows)
    say("make the data", common, seconds=round(made, 2), gib=round(size_of(folder / "large" / "rows") / 2**30, 2))
    for name, took in steps.items():
        end = ends.get(name)
        peak = sampler.peak_mib(end - took, end) if end else {}
        say(name, common, seconds=round(took, 2), krows_per_s=round(rows / took / 1e3, 1), peak_mib=peak)
    of_day = truth["days"][done.windows["validate"][-1]]
    reached = done.evaluated.decision.challenger.values
    quality = {name: {"model": round(reached[name], 4), "best": of_day[name]} for name in ("auc", "log_loss")}
    say("quality", common, **quality)
    for name, (own, hand) in pairs.items():
        both = {"pipeline": [round(took, 2) for took in own], "by hand": [round(took, 2) for took in hand]}
        say(f"{name} by hand", common, ratio=round(sum(hand) / sum(own), 2), seconds=both)
    spark.stop()


def from_file_to_predictions(name, folder):
    """Make the table ``name``, run its pipeline once, and return the line of it."""
    rows, columns, more = WHOLE[name]
    rng = np.random.default_rng(7)
    numbers = {f"x{place}": rng.standard_normal(rows) for place in range(columns - 2)}
    kind = rng.integers(0, 20, rows)
    label = numbers["x0"] - 2 * numbers["x1"] + 0.1 * kind + 0.1 * rng.standard_normal(rows)
    table = pa.table({**numbers, "kind": pa.array([f"k{value}" for value in kind]), "label": label})
    if name == "dated":
        seconds = pa.array(1_770_000_000 + rng.integers(0, 90 * 86_400, rows))
        table = table.append_column("at", seconds.cast(pa.timestamp("s", "UTC")).cast(pa.timestamp("us", "UTC")))
    (folder / "rows").mkdir(parents=True)
    pq.write_table(table, folder / "rows" / "part.parquet")
    file, root = folder / f"{name}.yaml", folder / "p"
    lines = "\n".join(f"  {number}: number" for number in numbers)
    time_column, split = (", time: at", BY_TIME) if name == "dated" else ("", BY_HASH)
    places = {"root": root, "path": folder / "rows"}
    file.write_text(WHOLE_FILE.format(name=name, numbers=lines, more=more, time=time_column, split=split, **places))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    start = time.perf_counter()
    command = [sys.executable, "-m", "sparkdl.cli", "run", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    sampler = Sampler(process.pid)
    sampler.start()
    summary = process.communicate()[0]
    seconds = time.perf_counter() - start
    sampler.over.set()
    assert process.returncode == 0, summary
    steps = next(line for line in summary.splitlines() if line.startswith("time ")).removeprefix("time").strip()
    figures = {"seconds": round(seconds, 1), "processor_seconds": sampler.processor_seconds(), "steps": steps}
    return {"workload": f"from file to predictions: {name}", **figures, "columns": columns, **stamp(rows)}


def size_of(folder):
    """Bytes of all files below."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def stamp(rows):
    """What every line says."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    versions = {
        "python": platform.python_version(),
        **{name: version(name) for name in ("pyspark", "torch", "pyarrow")},
    }
    return {"rows": rows, "git": head.strip(), "versions": versions, "cores": os.cpu_count()}


def say(workload, common, **figures):
    """Print one line."""
    print(json.dumps({"workload": f"clicks: {workload}", **figures, **common}), flush=True)


def lines_of(sizes, folder):
    """Measure the sizes, each in a process and a folder of its own; yield their lines, and how they grow."""
    found = {}
    for rows in sizes:
        place = Path(tempfile.mkdtemp(prefix="clicks-", dir=folder))
        try:
            command = [sys.executable, __file__, "--alone", str(rows), "--folder", str(place)]
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
            lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"workload"')]
            yield from lines
            assert done.returncode == 0, f"{rows} rows: exit code {done.returncode}"
        finally:
            shutil.rmtree(place)
        found[rows] = {line["workload"]: line for line in lines}
    for less, more in pairwise(sizes):
        small, large = found[less], found[more]
        steps = [name for name in small if "peak_mib" in small[name] and name in large]
        growth = {name: round(large[name]["seconds"] / small[name]["seconds"] / (more / less), 2) for name in steps}
        driver = {name: [one[name]["peak_mib"].get("driver") for one in (small, large)] for name in steps}
        yield {"workload": "clicks: growth", "rows": [less, more], "seconds_over_rows": growth, "driver_mib": driver}


@pytest.mark.bench
@pytest.mark.parametrize("name", WHOLE)
def test_from_file_to_predictions(name, tmp_path, capsys):
    """A first run of a small, a wide and a long table."""
    line = from_file_to_predictions(name, tmp_path)
    with capsys.disabled():
        print("\n" + json.dumps(line), flush=True)


@pytest.mark.bench
def test_clicks(tmp_path, capsys):
    """The sizes of SPARKDL_BENCH_ROWS, or all three."""
    sizes = [int(size) for size in os.environ.get("SPARKDL_BENCH_ROWS", "").split()] or SIZES
    for line in lines_of(sizes, tmp_path):
        with capsys.disabled():
            print("\n" + json.dumps(line), flush=True)


def main():
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="*", default=SIZES, help=f"rows of clicks, or {' or '.join(WHOLE)}")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to write")
    parser.add_argument("--alone", type=int, help="measure this size in this process")
    given = parser.parse_args()
    if given.alone:
        measured(given.alone, given.folder)
        return
    for name in filter(WHOLE.__contains__, given.sizes):
        with tempfile.TemporaryDirectory(dir=given.folder) as place:
            print(json.dumps(from_file_to_predictions(name, Path(place))), flush=True)
    for line in lines_of([int(size) for size in given.sizes if size not in WHOLE], given.folder):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
