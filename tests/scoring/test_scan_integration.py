"""Workers that read the files themselves give what Spark's own reading gives, and leave everything else to Spark."""

from __future__ import annotations

import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F
from torch import nn

from sparkdl.compat.spark_errors import task_errors
from sparkdl.config import ScoreConfig
from sparkdl.errors import StorageError
from sparkdl.models.signature import Signature, TensorField
from sparkdl.scoring.scan import parquet_tasks
from sparkdl.scoring.score import score
from sparkdl.tables.table import Table

SIGNATURE = Signature(
    inputs=(TensorField(name="x", shape=(3,), columns=("a", "b", "c")),),
    outputs=(TensorField(name="y", shape=(3,)),),
)


@pytest.fixture(scope="module")
def model():
    """Each number by itself, so that no bit depends on which rows share a batch."""
    return nn.Softsign()


@pytest.fixture(scope="module")
def folder(spark, tmp_path_factory):
    """Every type that workers read, nulls among them, over partitions with nulls and odd characters."""
    day = F.lit("2024-02-28").cast("date")
    rows = spark.range(0, 500, 1, 4).select(
        "id",
        (F.col("id") * 0.5).alias("a"),
        (F.col("id") % 7).cast("int").alias("b"),
        F.sqrt("id").cast("float").alias("c"),
        F.when(F.col("id") % 5 > 0, F.concat(F.lit("né/"), "id")).alias("text"),
        F.when(F.col("id") % 3 > 0, F.encode(F.col("id").cast("string"), "utf-8")).alias("bytes"),
        F.array(F.col("id").cast("double"), F.lit(None)).alias("list"),
        F.date_add(day, F.col("id").cast("int")).alias("date"),
        F.timestamp_micros(F.col("id") * 1_000_003 - 3_000_000_000_000_000).alias("instant"),
        F.to_timestamp_ntz(F.lit("2024-03-10 02:30:00")).alias("wall"),
        (F.col("id") % 2 == 0).alias("flag"),
        (F.col("id") % 100).cast("byte").alias("byte"),
        F.when(F.col("id") % 4 > 0, F.concat(F.lit("k=%/ "), F.col("id") % 3)).alias("kind"),
        F.date_add(day, (F.col("id") % 2).cast("int")).alias("day"),
    )
    place = tmp_path_factory.mktemp("a b=c%") / "table"
    rows.write.partitionBy("kind", "day").parquet(str(place))
    return str(place)


def compared(frame, model, keep=None):
    """The rows as workers read them and as Spark does; asserts which way each took."""
    ours = score(frame, model, signature=SIGNATURE, keep=keep)
    sparks = score(frame, model, signature=SIGNATURE, keep=keep, config=ScoreConfig(read_files=False))
    assert "FileScan" not in ours._jdf.queryExecution().toString()
    assert "FileScan" in sparks._jdf.queryExecution().toString()
    assert ours.schema == sparks.schema
    return sorted(ours.collect(), key=lambda row: row.id), sorted(sparks.collect(), key=lambda row: row.id)


def test_every_type_is_read_as_spark_reads_it(spark, folder, model):
    ours, sparks = compared(spark.read.parquet(folder), model)
    assert len(ours) == 500
    assert ours == sparks


def test_columns_may_be_picked_and_renamed(spark, folder, model):
    frame = spark.read.parquet(folder).withColumnRenamed("a", "other").withColumnRenamed("c", "a")
    frame = frame.select("id", "a", "b", F.col("other").alias("c"), F.col("kind").alias("what")).alias("t")
    ours, sparks = compared(frame, model)
    assert ours == sparks
    ours, sparks = compared(frame, model, keep=["id"])
    assert ours == sparks
    assert ours[0].asDict().keys() == {"id", "y"}


def test_a_wider_schema_and_absent_columns_are_as_in_spark(spark, folder, model):
    wider = spark.read.schema("id long, a double, b long, c double, absent string").parquet(folder)
    ours, sparks = compared(wider, model)
    assert ours == sparks
    assert ours[0].absent is None


def test_a_version_of_a_table_is_read_by_workers(spark, folder, model, tmp_path):
    table = Table(str(tmp_path / "table"))
    rows = spark.read.parquet(folder).select("id", "a", "b", "c", "day")
    table.write(rows.where("id < 300"), partition_by=["day"])
    table.write(rows.where("id >= 300"))
    for version, count in ((0, 300), (1, 500)):
        ours, sparks = compared(table.read(spark, version=version), model)
        assert len(ours) == count
        assert ours == sparks


def test_small_files_share_tasks_and_large_ones_are_cut(spark, model, tmp_path):
    path = str(tmp_path / "t")
    spark.range(0, 4000, 1, 8).selectExpr("id", "id * 1D a", "1 b", "2F c").write.parquet(path)
    spark.conf.set("spark.sql.files.openCostInBytes", "0")
    try:
        frame = spark.read.parquet(path)
        assert len(parquet_tasks(frame, ["id"])) <= 3
        spark.conf.set("spark.sql.files.maxPartitionBytes", "2000")
        assert len(parquet_tasks(frame, ["id"])) > 8
        ours, sparks = compared(frame, model)
    finally:
        spark.conf.unset("spark.sql.files.maxPartitionBytes")
        spark.conf.unset("spark.sql.files.openCostInBytes")
    assert ours == sparks


MORE_THAN_FILES = {
    "a filter": lambda frame: frame.where("id > 3"),
    "a filter that keeps all": lambda frame: frame.where("true"),
    "a limit": lambda frame: frame.limit(5),
    "an expression": lambda frame: frame.withColumn("a", F.col("a") + 1),
    "a join": lambda frame: frame.join(frame.select("id").withColumnRenamed("id", "i"), F.col("id") == F.col("i")),
    "a union": lambda frame: frame.union(frame),
    "a shuffle": lambda frame: frame.repartition(3),
    "a decimal": lambda frame: frame.withColumn("a", F.col("a").cast("decimal(9, 2)")),
    "two columns of one name": lambda frame: frame.select("*", F.col("a").alias("text")),
}


@pytest.mark.parametrize("more", MORE_THAN_FILES)
def test_what_is_more_than_files_is_left_to_spark(spark, folder, more):
    frame = MORE_THAN_FILES[more](spark.read.parquet(folder))
    assert parquet_tasks(frame, ["id", "a", "b", "c"]) is None


def test_what_is_cached_is_not_read_again(spark, folder):
    frame = spark.read.parquet(folder)
    assert parquet_tasks(frame, ["id"]) is not None
    frame.cache()
    try:
        assert parquet_tasks(frame, ["id"]) is None
    finally:
        frame.unpersist()


def test_settings_and_options_that_change_the_reading_leave_it_to_spark(spark, folder):
    assert parquet_tasks(spark.read.option("datetimeRebaseMode", "LEGACY").parquet(folder), ["id"]) is None
    assert parquet_tasks(spark.read.option("pathGlobFilter", "*.parquet").parquet(folder), ["id"]) is not None
    frame = spark.read.parquet(folder)
    spark.conf.set("spark.sql.files.ignoreMissingFiles", "true")
    try:
        assert parquet_tasks(frame, ["id"]) is None
    finally:
        spark.conf.unset("spark.sql.files.ignoreMissingFiles")


def test_other_formats_streams_and_types_are_left_to_spark(spark, folder, tmp_path):
    frame = spark.read.parquet(folder)
    frame.select("id", "a").write.json(str(tmp_path / "json"))
    assert parquet_tasks(spark.read.json(str(tmp_path / "json")), ["id"]) is None
    assert parquet_tasks(spark.range(3), ["id"]) is None
    stream = spark.readStream.schema(frame.schema).parquet(folder)
    assert parquet_tasks(stream, ["id"]) is None
    pq.write_table(pa.table({"id": [1], "s": [{"k": 1}]}), tmp_path / "s.parquet")
    nested = spark.read.parquet(str(tmp_path / "s.parquet"))
    assert parquet_tasks(nested, ["id"]) is not None
    assert parquet_tasks(nested, ["id", "s"]) is None


def test_dates_of_old_files_are_left_to_spark(spark, tmp_path):
    dates = pa.table({"day": pa.array([datetime.date(1500, 1, 1)])})
    pq.write_table(dates.replace_schema_metadata({"org.apache.spark.version": "2.4.8"}), tmp_path / "old.parquet")
    assert parquet_tasks(spark.read.parquet(str(tmp_path)), ["day"]) is None


def test_no_job_runs_before_the_result_is_used(spark, folder, model):
    frame = spark.read.parquet(folder)
    tracker = spark.sparkContext.statusTracker()
    before = len(tracker.getJobIdsForGroup(None))
    score(frame, model, signature=SIGNATURE)
    assert len(tracker.getJobIdsForGroup(None)) == before


def test_a_file_that_vanished_is_named(spark, model, tmp_path):
    path = str(tmp_path / "t")
    spark.range(0, 10, 1, 2).selectExpr("id", "id * 1D a", "1 b", "2F c").write.parquet(path)
    scored = score(spark.read.parquet(path), model, signature=SIGNATURE)
    gone = max(Path(path).glob("*.parquet"))
    gone.unlink()
    with pytest.raises(StorageError, match=f"cannot read {gone}: it does not exist"), task_errors():
        scored.collect()
