"""What every engine of a table does alike: one list of checks, each with a session and a maker of fresh tables.

``python contract.py RESULT`` runs them all in a session with Delta's extension, which a test starts in a process of its
own, and writes ``{"check[kind]": traceback or ""}``.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from delta_log import commit, remove

from sparkdl.errors import ConfigError, DataError, FencedError, IntegrityError, SchemaError, StorageError
from sparkdl.tables.table import AppTransaction, Fence, Table

JARS = Path(__file__).resolve().parents[3] / "shared" / "jars" / "delta"
KINDS = ("delta-rs", "spark", "name")
HALVES = pa.array([1.5], pa.float16())
NOON = dt.datetime(2024, 1, 2, 13)
DAYS = [dt.date(2024, 1, day) for day in (1, 2, 3)]


def frame_of(spark, days=DAYS, rows=4, start=0):
    data = [(start + i, i / 2, f"r{i}", day) for day in days for i in range(rows)]
    return spark.createDataFrame(data, "id long, x double, name string, day date")


def found(frame):
    return sorted(map(str, map(tuple, frame.collect())))


def raises(kind, words, action):
    """Check that an action raises an error of a type, in one line with these words."""
    with pytest.raises(kind) as refusal:
        action()
    text = str(refusal.value)
    assert all(word in text for word in words)
    assert "\n" not in text


def check_rows_go_in_and_come_out_at_every_version(spark, make):
    table = make()
    assert not table.exists()
    assert table.transaction_version("app") is None
    raises(StorageError, ["no Delta table"], table.version)
    frame = frame_of(spark)
    first = table.write(frame, partition_by=["day"])
    assert (first.version, first.rows, first.committed) == (0, 12, True), first
    second = table.write(frame.select("name", "day", "id", "x"))
    assert (second.version, second.rows) == (1, 12), second
    assert table.exists()
    assert table.version() == 1
    assert table.partition_columns() == ["day"]
    assert table.columns() == ["id", "x", "name", "day"]
    assert table.read(spark).schema == frame.schema
    assert found(table.read(spark)) == found(frame.union(frame))
    assert found(table.read(spark, version=0)) == found(frame)
    raises(StorageError, ["version"], lambda: table.read(spark, version=9).collect())
    assert table.rows(["id"], where="id = 1", version=0).column("id").to_pylist() == [1] * 3
    pinned = table.read(spark)
    table.write(frame, "overwrite")
    assert pinned.count() == 24
    assert found(table.read(spark)) == found(frame)


def check_columns_that_differ_are_refused_and_change_only_on_demand(spark, make):
    table, frame = make(), frame_of(spark)
    table.write(frame)
    for columns, name in ((["id", "x", "day"], "'name'"), (["*", "1 as extra"], "'extra'")):
        raises(SchemaError, [name], lambda columns=columns: table.write(frame.selectExpr(*columns)))
    raises(
        SchemaError, ["'id'", "string", "long"], lambda: table.write(frame.withColumn("id", frame.id.cast("string")))
    )
    raises(ConfigError, ["partition_by"], lambda: table.write(frame, partition_by=["day"]))
    raises(ConfigError, ["partition columns"], lambda: table.write(frame, "replace"))
    assert table.version() == 0
    other = frame.withColumnRenamed("x", "y")
    table.write(other, "overwrite", overwrite_schema=True)
    assert table.columns() == ["id", "y", "name", "day"]
    assert found(table.read(spark)) == found(other)
    assert table.read(spark, version=0).columns == ["id", "x", "name", "day"]
    assert table.schema_json(0) != table.schema_json()


def check_an_overwrite_with_other_columns_keeps_the_partition_columns(spark, make):
    table, frame = make(), frame_of(spark)
    table.write(frame, partition_by=["day"])
    other = frame.withColumnRenamed("x", "y")
    table.write(other, "overwrite", overwrite_schema=True)
    assert (table.columns(), table.partition_columns()) == (["id", "y", "name", "day"], ["day"])
    empty = other.where("false")
    table.write(empty, "replace", partitions=[{"day": dt.datetime(2024, 1, 2)}])
    assert found(table.read(spark)) == found(other.where("day != '2024-01-02'"))
    raises(ConfigError, ["'2024-01-02T13"], lambda: table.write(empty, "replace", partitions=[{"day": NOON}]))
    raises(SchemaError, ["['day']"], lambda: table.write(other.drop("day"), "overwrite", overwrite_schema=True))
    how = {"partition_by": ["name"], "overwrite_schema": True}
    raises(ConfigError, ["['name']", "['day']"], lambda: table.write(other, "overwrite", **how))
    assert table.version() == 2


def check_partitions_are_replaced_and_the_history_says_so(spark, make):
    table = make()
    how = {"partition_by": ["day"], "partitions": [{"day": DAYS[1]}]}
    raises(DataError, ["2024", "filter the rows"], lambda: table.write(frame_of(spark), "replace", **how))
    assert not table.exists()
    table.write(frame_of(spark), partition_by=["day"])
    spark.conf.set("spark.sql.sources.partitionOverwriteMode", "static")
    day = frame_of(spark, DAYS[1:2], rows=2, start=100)
    table.write(day, "replace")
    kept = frame_of(spark, [DAYS[0], DAYS[2]])
    assert found(table.read(spark)) == found(kept.union(day))
    result = table.write(frame_of(spark, []), "replace", partitions=[{"day": DAYS[0]}])
    assert result.committed
    assert found(table.read(spark)) == found(frame_of(spark, DAYS[2:]).union(day))
    entry = table.history(1)[0]
    assert (entry["operation"], entry["operationParameters"]["mode"]) == ("WRITE", "Overwrite"), entry
    assert "2024-01-01" in entry["operationParameters"]["predicate"], entry
    assert (entry["sparkdl.mode"], entry["isBlindAppend"], entry["readVersion"]) == ("replace", False, 1), entry
    numbers = entry["operationMetrics"]
    assert int(numbers.get("numOutputRows", 0)) == 0
    assert int(numbers["numRemovedFiles"]) >= 1
    version = table.version()
    raises(DataError, ["2024"], lambda: table.write(frame_of(spark), "replace", partitions=[{"day": DAYS[1]}]))
    assert table.version() == version
    spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")  # which is not to make a difference
    try:
        table.write(day, "overwrite")
    finally:
        spark.conf.unset("spark.sql.sources.partitionOverwriteMode")
    assert found(table.read(spark)) == found(day)
    empty = day.withColumn("day", day.day.cast("date")).selectExpr("id", "x", "name", "cast(null as date) day")
    table.write(empty)
    table.write(frame_of(spark, []), "replace", partitions=[{"day": None}])
    assert found(table.read(spark)) == found(day)


def check_a_transaction_commits_once(spark, make):
    table, frame = make(), frame_of(spark)
    mark = AppTransaction(application="etl", version=7)
    assert table.write(frame, transaction=mark).committed
    for version in (7, 6):
        again = table.write(frame, transaction=AppTransaction(application="etl", version=version))
        assert (again.committed, again.rows) == (False, 0), again
    assert table.read(spark).count() == 12
    assert table.transaction_version("etl") == 7
    assert table.transaction_version("other") is None
    later = table.write(frame, "overwrite", transaction=AppTransaction(application="etl", version=8))
    assert later.committed
    assert table.transaction_version("etl") == 8


def check_nothing_of_a_run_is_committed_once_a_later_one_has_claimed_the_table(spark, make):
    table, frame = make(), frame_of(spark)
    first, second = Fence("etl", 1), Fence("etl", 2)
    table.claim(first.transaction())
    assert not table.exists()
    days = [{"day": day} for day in DAYS]
    for more in ({"partition_by": ["day"]}, {"mode": "overwrite"}, {"mode": "replace"}, {"partitions": days}):
        how = {"mode": "replace"} | more if "partitions" in more else more
        assert table.write(frame, transaction=first.transaction(), **how).committed, more
    late = first.transaction()
    table.claim(second.transaction())
    claimed, rows = table.version(), pa.table({"id": [1], "x": [1.0], "name": ["a"], "day": [DAYS[0]]})
    for action in (
        lambda: table.write(frame, transaction=late),
        lambda: table.write(frame, "overwrite", transaction=first.transaction()),
        lambda: table.write(frame, "replace", partitions=days, transaction=first.transaction()),
        lambda: table.append(rows, transaction=first.transaction()),
        lambda: table.claim(first.transaction()),
    ):
        raises(FencedError, ["epoch 2", "epoch 1"], action)
    assert table.version() == claimed
    assert found(table.read(spark)) == found(frame)
    for _ in range(2):
        assert table.write(frame, "overwrite", transaction=second.transaction()).committed
    assert table.write(frame).committed, "who has no epoch is not asked for one"
    assert table.write(frame, "overwrite", transaction=Fence("another", 1).transaction()).committed


def check_a_claim_while_a_write_is_under_way_refuses_it(spark, make):
    table, frame = make(), frame_of(spark)
    first, second = Fence("etl", 1), Fence("etl", 2)
    table.write(frame, partition_by=["day"], transaction=first.transaction())
    place = tempfile.mkdtemp()

    def wait(batches):
        Path(place, "written").touch()
        for _ in range(600):
            if Path(place, "claimed").exists():
                break
            time.sleep(0.1)
        yield from batches

    slow = frame.coalesce(1).mapInArrow(wait, frame.schema)  # the claim needs a slot, too
    with ThreadPoolExecutor(1) as pool:
        days = [{"day": day} for day in DAYS]
        writing = pool.submit(table.write, slow, "replace", partitions=days, transaction=first.transaction())
        while not Path(place, "written").exists():
            assert not writing.done(), writing.result()
            time.sleep(0.05)
        table.claim(second.transaction())
        Path(place, "claimed").touch()
        raises(FencedError, ["epoch 2"], writing.result)
    assert table.transaction_version("etl") >> 24 == 2
    assert found(table.read(spark)) == found(frame)


def check_small_tables_are_appended_and_merged(spark, make):
    table = make()
    raises(StorageError, ["no Delta table"], lambda: table.rows(version=0))
    raises(StorageError, ["no Delta table"], lambda: table.read(spark, version=0))
    raises(SchemaError, ["cannot be those of a Delta table"], lambda: table.append(pa.table({"k": HALVES})))
    assert table.append(pa.table({"k": [1, 2], "v": ["a", "b"]})) == 0
    mark = AppTransaction(application="small", version=1)
    assert [table.append(pa.table({"k": [5], "v": ["e"]}), transaction=mark) for _ in range(2)] == [1, 1]
    assert table.merge(pa.table({"k": [2, 3], "v": ["B", "C"]}), on=["k"]) == 2
    expected = {1: "a", 2: "B", 3: "C", 5: "e"}
    assert {row["k"]: row["v"] for row in table.rows().to_pylist()} == expected
    assert {row.k: row.v for row in table.read(spark).collect()} == expected
    raises(SchemaError, ["'v'"], lambda: table.merge(pa.table({"k": [2]}), on=["k"]))
    raises(DataError, [], lambda: table.merge(pa.table({"k": [2, 2], "v": ["x", "y"]}), on=["k"]))
    raises(ConfigError, ["on=[]"], lambda: table.merge(pa.table({"k": [2], "v": ["x"]}), on=[]))
    raises(SchemaError, ["'v'"], lambda: table.append(pa.table({"k": [2]})))
    raises(SchemaError, ["cannot be those of"], lambda: table.append(pa.table({"k": HALVES, "v": ["a"]})))
    raises(SchemaError, ["cannot be those of"], lambda: table.merge(pa.table({"k": HALVES, "v": ["a"]}), on=["k"]))
    for given in ({"where": "zz > 1"}, {"where": "k >"}, {"columns": ["zz"]}):
        raises(StorageError, ["cannot read from", "check columns"], functools.partial(table.rows, **given))
    table.append(pa.table({"k": [9], "n": [1.5]}), new_columns=True)
    assert table.columns() == ["k", "v", "n"]
    assert table.rows(["n"], where="k = 9").column("n").to_pylist() == [1.5]


def check_a_log_that_names_files_elsewhere_is_refused(spark, make):
    table = make()
    table.append(pa.table({"x": [1, 2]}))
    folder = table.uri
    if "/" not in folder:
        folder = spark.sql(f"DESCRIBE DETAIL {table.uri}").first()["location"].removeprefix("file:")
    outside = tempfile.mkdtemp()
    pq.write_table(pa.table({"x": [100]}), f"{outside}/x.parquet")
    add = {"partitionValues": {}, "size": os.path.getsize(f"{outside}/x.parquet"), "modificationTime": 1}
    up = os.path.relpath(outside, folder)
    spellings = [
        f"file://{outside}",
        f"file:{outside}",
        outside,
        up,
        up.replace("..", "%2e%2e"),
        up.replace("/", "%2F"),
    ]
    info = {"commitInfo": {"timestamp": 1, "operation": "WRITE", "operationParameters": {}}}
    for version, text in zip(itertools.count(1, 2), spellings, strict=False):
        file = {**add, "path": f"{text}/x.parquet", "dataChange": True}
        commit(folder, version, info, {"add": file})
        for action in (lambda: table.read(spark), table.rows, lambda: table.merge(pa.table({"x": [1]}), ["x"])):
            raises(IntegrityError, ["x.parquet", "does not lie in the table's folder", "allow_folders"], action)
        if text.startswith(("file:", "/")):  # as a shallow clone writes them
            allowed = dataclasses.replace(table, allow_folders=[outside])
            assert found(allowed.read(spark)) == ["(1,)", "(100,)", "(2,)"]
            assert sorted(allowed.rows().column("x").to_pylist()) == [1, 2, 100]
        commit(folder, version + 1, info, remove(file))
        assert found(table.read(spark)) == ["(1,)", "(2,)"]


CHECKS = {name: value for name, value in dict(globals()).items() if name.startswith("check_")}


def agree(spark, table, kind):
    """Each engine reads what the other wrote: the same rows, the same newest version, the same columns."""
    if kind == "name":
        where = spark.sql(f"DESCRIBE DETAIL {table.uri}").first()["location"].removeprefix("file:")
        other = Table(where, engine="delta-rs")
    else:
        other = Table(table.uri, engine="delta-rs" if kind == "spark" else "spark")
    assert found(other.read(spark)) == found(table.read(spark))
    assert other.version() == table.version()
    assert other.columns() == table.columns()
    assert [entry["operation"] for entry in other.history()] == [entry["operation"] for entry in table.history()]


def session(folder, memory="1g", quick_start=True):
    """A session with Delta's extension; a quick start is without the optimising compiler."""
    from pyspark.sql import SparkSession

    quick = "-XX:TieredStopAtLevel=1 " if quick_start else ""
    jars = ",".join(str(jar) for jar in sorted(JARS.glob("*.jar")))
    return (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", jars)
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
        .config("spark.databricks.delta.snapshotPartitions", "2")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", memory)
        .config("spark.driver.extraJavaOptions", f"{quick}-Dderby.system.home={folder}")
        .config("spark.sql.warehouse.dir", f"{folder}/warehouse")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )


def run(spark, folder, kind, name):
    """One check on one kind of table; the traceback where it fails."""
    made = []

    def make():
        text = f"spark_catalog.default.{name}" if kind == "name" else f"{folder}/{kind}/{name}"
        made.append(Table(text) if kind == "name" else Table(text, engine=kind))
        return made[-1]

    try:
        CHECKS[name](spark, make)
        agree(spark, made[-1], kind)
    except Exception:
        return traceback.format_exc()
    return ""


def at_once(spark, folder):
    """Both engines append to one table at once, from two processes: nothing is lost."""
    path = f"{folder}/at-once"
    by_spark = Table(path, engine="spark")
    by_spark.append(pa.table({"k": [-1], "by": ["spark"]}))
    code = (
        "import sys, pyarrow as pa\nfrom sparkdl.tables.table import Table\n"
        "for k in range(40): Table(sys.argv[1]).append(pa.table({'k': [k], 'by': ['delta-rs']}))"
    )
    try:
        with subprocess.Popen([sys.executable, "-c", code, path]) as other:
            for k in range(6):
                by_spark.append(pa.table({"k": [k], "by": ["spark"]}))
        assert other.returncode == 0
        found = sorted((row["by"], row["k"]) for row in by_spark.rows().to_pylist())
        assert found == [*(("delta-rs", k) for k in range(40)), *(("spark", k) for k in range(-1, 6))]
        assert by_spark.version() == 46
    except Exception:
        return traceback.format_exc()
    return ""


def foreign_words(spark, folder):
    """What another writer notes with a commit does not pass for what the log says of it."""
    table = Table(f"{folder}/foreign-words", engine="spark")
    table.append(pa.table({"k": [1]}))
    words = {"job": "etl", "version": "1.4", "timestamp": 1, "operation": "none"}
    setting = "spark.databricks.delta.commitInfo.userMetadata"
    spark.conf.set(setting, json.dumps(words))
    try:
        spark.sql(f"INSERT INTO delta.`{folder}/foreign-words` VALUES (2)")
    finally:
        spark.conf.unset(setting)
    assert table.version() == 1
    entry = table.history(1)[0]
    assert (entry["job"], entry["version"], entry["operation"]) == ("etl", 1, "WRITE"), entry
    assert entry["timestamp"] > 1
    assert table.read(spark).count() == 2


def options_of_the_store(spark, folder):
    """Options for the store are delta-rs's, and so is a table that has some, though Spark could open it."""
    plain, opened = (Table(f"{folder}/options", options) for options in (None, {"timeout": "30s"}))
    assert (plain.can_stage(spark), opened.can_stage(spark)) == (False, True)
    assert opened.write(frame_of(spark), metadata={"job": "etl"}).rows == 12
    assert opened.history(1)[0]["job"] == "etl"
    assert "delta-rs" in opened.history(1)[0]["clientVersion"]
    raises(ConfigError, ["storage_options are given"], lambda: Table(plain.uri, {"timeout": "30s"}, "spark"))


APART = {"foreign words": foreign_words, "options of the store": options_of_the_store}


def outcome(check, *given):
    """The traceback of one check, empty where it holds."""
    try:
        check(*given)
    except Exception:
        return traceback.format_exc()
    return ""


def main(result):
    """Run every check on every kind of table."""
    import features_of_tables

    with tempfile.TemporaryDirectory() as folder:
        spark = session(folder)
        spark.sparkContext.setLogLevel("ERROR")
        try:
            outcomes = {"at once": at_once(spark, folder)}
            outcomes |= {name: outcome(check, spark, folder) for name, check in APART.items()}
            for kind, name in itertools.product(KINDS, CHECKS):
                outcomes[f"{name}[{kind}]"] = run(spark, folder, kind, name)
                Path(result).write_text(json.dumps(outcomes))
            for feature in features_of_tables.TABLES:
                outcomes[feature] = features_of_tables.run(spark, folder, feature)
                Path(result).write_text(json.dumps(outcomes))
        finally:
            spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
