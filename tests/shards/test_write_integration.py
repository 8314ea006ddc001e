"""DataFrames to shard sets on a real Spark: every type against Spark's own collect(), odd partitions, real failures."""

import datetime
import decimal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from shard_blocks import Ragged, tensor_arrays

from sparkdl.batches.reading.loader import ShardedDataset
from sparkdl.columns.layout import Layout
from sparkdl.config import LoaderConfig, ShardConfig
from sparkdl.errors import ConflictError, DataError, FencedError, NoRowsError, SchemaError, StorageError
from sparkdl.shards.manifest import Manifest, Source
from sparkdl.shards.write import write_shards, write_split
from sparkdl.storage import Storage

pytest.importorskip("pyspark")
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F


def rows_of(manifest, root=None, order="id"):
    """Every tensor as a list of rows, sorted by ``order``."""
    root = root or Storage.of(manifest.uri)
    out = {}
    for shard in manifest.shards:
        file = pa.ipc.open_file(root.child(shard.path).read_bytes())
        assert [file.get_batch(i).num_rows for i in range(file.num_record_batches)] == [b.rows for b in shard.blocks]
        for index in range(file.num_record_batches):
            for name, values in tensor_arrays(file.get_batch(index), manifest.tensors).items():
                if isinstance(values, Ragged):
                    ends = values.offsets
                    values = [values.values[ends[i] : ends[i + 1]].tolist() for i in range(len(ends) - 1)]
                else:
                    values = values.tolist()
                out.setdefault(name, []).extend(values)
    positions = np.argsort(out[order])
    return {name: [values[i] for i in positions] for name, values in out.items()}


def loaded(manifest, order="id"):
    """The same from the tensors of the loader, shuffled, in batches that divide nothing."""
    data = ShardedDataset(manifest.uri, config=LoaderConfig(pool_bytes=20_000))
    out = {spec.name: [] for spec in data.tensors}
    for batch in data.loader(batch_size=7, seed=3):
        for spec in data.tensors:
            assert batch[spec.name].dtype == getattr(torch, "uint8" if spec.dtype == "binary" else spec.dtype)
            rows = batch[spec.name].tolist()
            if f"{spec.name}__valid" in batch:
                valid = batch[f"{spec.name}__valid"].tolist()
                rows = [[x for x, keep in zip(*pair, strict=True) if keep] for pair in zip(rows, valid, strict=True)]
            out[spec.name] += rows
    positions = np.argsort(out[order])
    return {name: [values[i] for i in positions] for name, values in out.items()}


TYPES = """id long, b byte, h short, i int, l long, f float, d double, flag boolean, money decimal(18,4), day date,
at timestamp, local timestamp_ntz, s string, raw binary, vec array<float>, tokens array<int>, m array<array<double>>"""


def typed_rows(n=120):
    start = datetime.datetime(1999, 12, 31, 23, 59, 59, 999_999)
    return [
        (
            k, k % 256 - 128, -k, 2**31 - 1 - k, -(2**63) + k, k / 7, k * 1e300, k % 3 == 0,
            decimal.Decimal(k - 60) / 10_000, datetime.date(1970, 1, 1) - datetime.timedelta(days=k),
            start + datetime.timedelta(days=k), start - datetime.timedelta(days=40 * 365 - k), f"ä{k % 11}",
            bytes(range(k % 5)), [float(k), -1.5, 0.0], list(range(k % 4)), [[float(k), 1.0], [2.0, 3.0], [4.0, 5.0]],
        )
        for k in range(n)
    ]  # fmt: skip


def test_every_type_equals_sparks_collect(spark, tmp_path):
    frame = spark.createDataFrame(typed_rows(), TYPES).repartition(3)
    manifest = write_shards(frame, tmp_path, labels=["id"], config=ShardConfig(block_rows=16))
    got, want = rows_of(manifest), sorted(frame.collect())
    zones = manifest.tensor("s").dictionary
    epoch = datetime.datetime(1970, 1, 1)
    micro = datetime.timedelta(microseconds=1)
    for name in ("b", "h", "i", "f", "vec", "tokens", "m"):
        assert got[name] == [row[name] for row in want], name
    assert got["id"] == [row["id"] for row in want]
    assert got["l"] == [row["l"] for row in want]
    assert got["flag"] == [int(row["flag"]) for row in want]
    assert got["features"] == [[row["d"], float(row["money"])] for row in want]
    assert got["day"] == [(row["day"] - epoch.date()).days for row in want]
    assert got["local"] == [(row["local"] - epoch) // micro for row in want]
    assert got["at"] == [
        round((row["at"].astimezone(datetime.UTC).replace(tzinfo=None) - epoch) / micro) for row in want
    ]
    assert [zones[code] for code in got["s"]] == [row["s"] for row in want]
    assert [bytes(item) for item in got["raw"]] == [bytes(row["raw"]) for row in want]
    assert loaded(manifest) == {name: [list(x) for x in rows] if name == "raw" else rows for name, rows in got.items()}
    shapes = {spec.name: (spec.dtype, spec.shape, spec.ragged) for spec in manifest.tensors}
    assert shapes["vec"] == ("float32", (3,), False)
    assert shapes["tokens"] == ("int32", (), True)
    assert shapes["m"] == ("float64", (3, 2), False)
    assert shapes["i"] == ("int32", (), False)


def test_vectors_dense_and_sparse_equal_to_array(spark, tmp_path):
    rows = [(0, Vectors.dense(1, 2, 3)), (1, Vectors.sparse(3, [2], [9.0])), (2, Vectors.sparse(3, [], [])), (3, None)]
    frame = spark.createDataFrame(rows, ["id", "v"])
    layout = Layout(nulls={"v": "mask"}, dtypes={"v": "float32"})
    manifest = write_shards(frame.coalesce(1), tmp_path, labels=["id"], layout=layout)
    got = rows_of(manifest)
    assert got["v"] == [[1, 2, 3], [0, 0, 9], [0, 0, 0], [0, 0, 0]]
    assert got["v__mask"] == [[1, 1, 1]] * 3 + [[0, 0, 0]]
    assert loaded(manifest) == got
    assert (manifest.tensor("v").shape, manifest.tensor("v__mask").shape) == ((3,), (3,))
    assert manifest.statistics["v"].max == 9


def test_packed_columns_statistics_and_masks(spark, tmp_path):
    frame = spark.range(1000).select(
        "id",
        *[F.when(F.col("id") % 7 != k, F.col("id") * (k + 1.0)).cast("float").alias(f"x{k}") for k in range(4)],
        (F.col("id") % 2).cast("double").alias("y"),
    )
    manifest = write_shards(frame, tmp_path, labels=["y", "id"], layout=Layout(nulls="mask", fill={"x1": -5}))
    got = rows_of(manifest)
    assert loaded(manifest) == got
    for row in frame.collect():
        want = [row[f"x{k}"] for k in range(4)]
        assert got["features"][row["id"]] == [(-5 if k == 1 else 0) if x is None else x for k, x in enumerate(want)]
        assert got["features__mask"][row["id"]] == [int(x is not None) for x in want]
    for k in range(4):
        mean, variance, nulls = frame.select(F.mean(f"x{k}"), F.var_pop(f"x{k}"), F.count_if(F.isnull(f"x{k}"))).first()
        stats = manifest.statistics[f"x{k}"]
        assert stats.mean == pytest.approx(mean, rel=1e-12)
        assert stats.variance == pytest.approx(variance, rel=1e-12)
        assert stats.null_count == nulls


def test_columns_of_nulls_alone_are_refused_filled_or_masked(spark, tmp_path):
    columns = "cast(id AS long) id, cast(null AS float) x, cast(null AS array<int>) r, cast(null AS string) s"
    frame = spark.range(20).selectExpr(*columns.split(", "))
    with pytest.raises(DataError, match=r"'x' has 20 nulls \(also r: 20, s: 20\), allowed are 0"):
        write_shards(frame, tmp_path / "refused", labels=["id"])
    manifest = write_shards(
        frame.drop("r", "s"), tmp_path / "filled", labels=["id"], layout=Layout(nulls="fill", fill={"x": 4})
    )
    assert loaded(manifest) == rows_of(manifest) == {"id": list(range(20)), "x": [4.0] * 20}
    assert (manifest.statistics["x"].null_count, manifest.statistics["x"].mean) == (20, None)
    manifest = write_shards(frame.drop("r", "s"), tmp_path / "masked", labels=["id"], layout=Layout(nulls="mask"))
    assert loaded(manifest)["x__mask"] == [False] * 20
    manifest = write_shards(frame.drop("x"), tmp_path / "other", labels=["id"], layout=Layout(nulls="fill"))
    assert loaded(manifest)["r"] == [[]] * 20
    assert manifest.statistics["s"].null_count == 20


def test_nulls_are_counted_over_all_tasks(spark, tmp_path):
    frame = spark.range(0, 1000, 1, 4).select("id", F.when(F.col("id") % 10 > 0, F.lit(1.0)).alias("y"))
    with pytest.raises(DataError, match="'y' has 100 nulls, allowed are 0"):
        write_shards(frame, tmp_path, labels=["y"])
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.parametrize(("rows", "partitions"), [(1, 8), (5, 8), (20_000, 1)])
def test_empty_partitions_one_row_and_one_giant_partition(spark, tmp_path, rows, partitions):
    frame = spark.range(0, rows, 1, partitions).select("id", (F.col("id") / 2).alias("x"))
    config = ShardConfig(block_rows=512, shard_bytes=50_000, spread_rows=False)
    manifest = write_shards(frame, tmp_path, labels=["id"], config=config)
    assert manifest.rows == rows
    assert rows_of(manifest)["x"] == [k / 2 for k in range(rows)]
    assert loaded(manifest) == rows_of(manifest)
    if partitions == 1:
        assert [len(shard.blocks) for shard in manifest.shards] == [6] * 6 + [4]


def test_a_skewed_frame_is_repartitioned_only_on_request(spark, tmp_path):
    frame = spark.range(0, 4000, 1, 4).where("id < 1000").select("id", F.rand(1).alias("x"))
    plain = {"labels": ["id"], "config": ShardConfig(spread_rows=False)}
    kept = write_shards(frame, tmp_path / "kept", **plain)
    even = write_shards(frame, tmp_path / "even", labels=["id"], config=ShardConfig(repartition=4, spread_rows=False))
    assert [shard.rows for shard in kept.shards] == [1000]
    assert [shard.rows for shard in even.shards] == [250] * 4


def test_no_rows_and_no_set(spark, tmp_path):
    with pytest.raises(DataError, match="0 rows to write"):
        write_shards(spark.range(0).withColumn("x", F.lit(1.0)), tmp_path)


def test_codes_do_not_depend_on_the_partitioning(spark, tmp_path):
    frame = spark.range(500).select("id", F.concat(F.lit("k"), F.pmod(F.hash("id"), F.lit(50))).alias("s"))
    one = write_shards(frame.repartition(1), tmp_path / "one", labels=["id"])
    many = write_shards(frame.repartition(5, "s"), tmp_path / "many", labels=["id"])
    assert rows_of(one) == rows_of(many)
    assert one.schema_hash == many.schema_hash
    with pytest.raises(DataError, match=r"'s' has .* or more strings, above max_dictionary_values=9"):
        write_shards(frame, tmp_path / "limit", config=ShardConfig(max_dictionary_values=9))


def test_the_same_rows_and_seed_give_the_same_bytes_from_any_files(spark, tmp_path):
    frame = spark.range(0, 9000, 1, 3).select(
        "id", F.rand(5).alias("x"), F.concat(F.lit("k"), F.pmod("id", F.lit(5))).alias("s"), F.expr("id % 3").alias("d")
    )
    frame.write.parquet(f"{tmp_path}/rows")
    rows = spark.read.parquet(f"{tmp_path}/rows")
    for columns in (["id", "x", "s"], ["s", "d"]):  # the second: rows of 15 kinds
        hashes = set()
        for files, by in ((1, "x"), (20, "s")):
            rows.repartition(files).sortWithinPartitions(by).write.parquet(f"{tmp_path}/{len(columns)}-{files}")
            sorted_rows = spark.read.parquet(f"{tmp_path}/{len(columns)}-{files}")
            for shard_bytes in (128 << 20, 20_000):
                uri = tmp_path / f"shards-{len(columns)}-{files}-{shard_bytes}"
                config = ShardConfig(shard_bytes=shard_bytes)
                manifest = write_shards(sorted_rows, uri, columns=columns, config=config)
                assert (manifest.rows, manifest.spread) == (9000, True)
                hashes.add((shard_bytes, manifest.content_hash))
        assert len(hashes) == 2
    other = write_shards(rows, tmp_path / "other", columns=["s", "d"], config=ShardConfig(seed=3))
    assert other.content_hash not in {content_hash for _, content_hash in hashes}
    kept = write_shards(rows.coalesce(1), tmp_path / "kept", columns=["id"], config=ShardConfig(spread_rows=False))
    unshuffled = ShardedDataset(kept.uri).loader(batch_size=1000, shuffle=False)
    in_order = torch.cat([batch["id"].clone() for batch in unshuffled]).flatten().tolist()
    assert in_order == [row.id for row in rows.coalesce(1).select("id").collect()]


SPLIT = {"columns": ["id", "x"], "labels": [], "layout": Layout(), "config": ShardConfig()}


def test_two_sets_of_one_reading_are_those_of_two_readings(spark, tmp_path):
    frame = spark.range(0, 9000, 1, 3).select("id", F.rand(5).alias("x"), F.expr("id % 7 = 0").alias("m"))
    frame = frame.withColumn("m", F.when(frame.id % 50 != 3, frame.m))  # rows with null are in neither
    both = write_split(frame, "m", (tmp_path / "train", tmp_path / "held"), **SPLIT)
    assert [written.rows for written in both] == [frame.where("NOT m").count(), frame.where("m").count()]
    for part, written in (("held", both[1]), ("train", both[0])):
        alone = frame.where("m" if part == "held" else "NOT m").select("id", "x")
        assert written.content_hash == write_shards(alone, tmp_path / f"{part} alone").content_hash
        assert Manifest.load(tmp_path / part) == written
    with pytest.raises(ConflictError, match="another shard set of"):
        write_split(frame, "m", (tmp_path / "more", tmp_path / "held"), **SPLIT)


def test_two_sets_of_a_pinned_table_are_found_again_and_refused_by_who_commits(spark, tmp_path):
    frame = spark.range(0, 1000, 1, 3).select("id", F.rand(5).alias("x"), F.expr("id % 3 = 0").alias("m"))
    uris = (tmp_path / "a", tmp_path / "b")
    sources = tuple(Source(uri="/lake/t", version="7", transformation=part) for part in ("train", "held"))
    commits = []
    both = write_split(frame, "m", uris, **SPLIT, sources=sources, before_commit=lambda: commits.append(1))
    assert [written.source for written in both] == list(sources)
    assert write_split(frame, "m", uris, **SPLIT, sources=sources, before_commit=lambda: commits.append(2)) == both
    assert commits == [1, 1]
    (tmp_path / "b" / "manifest.json").unlink()  # as after a kill between two commits
    again = write_split(frame, "m", uris, **SPLIT, sources=sources, overwrite=True)
    assert [written.content_hash for written in again] == [written.content_hash for written in both]
    assert [Manifest.load(uri) for uri in uris] == again

    def refuse():
        raise FencedError("a later run has taken over")

    later = tuple(replace(source, version="8") for source in sources)
    with pytest.raises(FencedError):
        write_split(frame, "m", uris, **SPLIT, sources=later, overwrite=True, before_commit=refuse)
    assert [Manifest.load(uri) for uri in uris] == again
    with pytest.raises(ConflictError, match="another shard set of"):
        write_split(frame, "m", uris, **SPLIT, sources=later)


def test_the_column_that_divides_the_rows_may_be_one_of_the_sets(spark, tmp_path):
    frame = spark.range(0, 100, 1, 2).select("id", F.expr("id < 30").alias("m"), F.rand(5).alias("x"))
    for number, columns in enumerate((["id", "m", "x"], ["m", "x"])):
        uris = (tmp_path / f"train {number}", tmp_path / f"held {number}")
        both = write_split(frame, "m", uris, **SPLIT | {"columns": columns})
        assert [written.rows for written in both] == [70, 30]


def test_each_row_of_a_frame_that_is_never_the_same_is_in_one_of_two_sets(spark, tmp_path):
    now = F.udf(lambda: float(time.time_ns() % 1000), "double").asNondeterministic()
    frame = spark.range(0, 4000, 1, 3).withColumn("x", now())
    both = write_split(frame.withColumn("m", F.expr("x < 500")), "m", (tmp_path / "a", tmp_path / "b"), **SPLIT)
    train, held = (rows_of(one) for one in both)
    assert sorted([*train["id"], *held["id"]]) == list(range(4000))
    assert min(train["x"]) >= 500 > max(held["x"])


def test_a_set_without_rows_and_one_with_bad_rows(spark, tmp_path):
    frame = spark.range(100).select("id", F.rand(5).alias("x"), F.lit(False).alias("m"))
    train, held = write_split(frame, "m", (tmp_path / "a", tmp_path / "b"), **SPLIT)
    assert (train.rows, type(held)) == (100, NoRowsError)
    assert not Storage.of(tmp_path / "b").child("manifest.json").exists()
    bad = frame.withColumn("m", F.expr("id < 5")).withColumn("x", F.expr("IF(id < 3, NULL, x)"))
    with pytest.raises(DataError, match="'x' has 3 nulls"):
        write_split(bad, "m", (tmp_path / "c", tmp_path / "d"), **SPLIT)
    assert not list((tmp_path / "d" / "shards").glob("*"))


def test_a_pinned_source_is_a_cache_hit_and_another_query_on_it_is_not(spark, tmp_path):
    source = Source(uri="/lake/t", version="7")
    frame = spark.range(100).withColumn("x", F.rand(1))
    first = write_shards(frame.where("id < 50"), tmp_path, source=source)
    assert write_shards(frame.where("id < 50"), tmp_path, source=source) == first
    for other in (frame.where("id < 51"), frame.where("id < 50").withColumn("x", F.rand(2))):
        with pytest.raises(ConflictError, match="another shard set of 50 rows"):
            write_shards(other, tmp_path, source=source)
    with pytest.raises(ConflictError):
        write_shards(frame.where("id < 50"), tmp_path)
    named = Source(uri="/lake/t", version="7", transformation="first half, scaled, code 12ab")
    write_shards(frame.where("id < 50"), tmp_path, source=named, overwrite=True)
    assert write_shards(frame.where("id < 50"), tmp_path, source=named).source == named


def test_errors_of_types_values_and_targets(spark, tmp_path):
    frame = spark.range(3).select("id", F.create_map("id", "id").alias("bad"))
    with pytest.raises(SchemaError, match="'bad' is map<bigint,bigint>, which no tensor can hold"):
        write_shards(frame, tmp_path)
    assert write_shards(frame, tmp_path / "ok", columns=["id"]).rows == 3
    with pytest.raises(SchemaError, match="'idd' is missing, the frame has id"):
        write_shards(frame, tmp_path, columns=["idd"])
    with pytest.raises(DataError, match="'id' holds 2, which bool cannot hold"):
        write_shards(frame, tmp_path, columns=["id"], layout=Layout(dtypes={"id": "bool"}))
    uneven = spark.range(2).select(
        F.array_repeat(F.array_repeat(F.lit(1.0), 2), (F.col("id") + 1).cast("int")).alias("m")
    )
    with pytest.raises(DataError, match="'m' has rows of"):
        write_shards(uneven.coalesce(1), tmp_path)
    pair = frame.select("id", (F.col("id") * 1000).alias("big"))
    with pytest.raises(DataError, match="'big' holds 1000, which int8 cannot hold"):
        write_shards(pair, tmp_path, layout=Layout(dtypes={"features": "int8"}, pack={"features": ["id", "big"]}))
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "shards").write_text("in the way of the tasks, not of the driver")
    with pytest.raises(StorageError, match=r"cannot write .*blocked/shards.*a file stands where a directory is needed"):
        write_shards(pair, blocked)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot .*file/set.*a file stands where a directory is needed"):
        write_shards(spark.range(3), tmp_path / "file" / "set")


def test_tasks_write_to_s3_with_the_drivers_options(spark, s3_root):
    frame = spark.range(0, 3000, 1, 3).select("id", F.rand(1).alias("x"))
    manifest = write_shards(frame, s3_root, labels=["id"])
    assert Manifest.load(s3_root) == manifest
    assert rows_of(manifest, s3_root)["id"] == list(range(3000))
    with pytest.raises(ConflictError):
        write_shards(frame, s3_root, labels=["id"])


FAILURES = """
    import os, signal, sys, time
    from pyspark import TaskContext
    from pyspark.sql import SparkSession
    from sparkdl.shards.write import write_shards, write_split
    from sparkdl.config import ShardConfig
    root = sys.argv[1]
    spark = (SparkSession.builder.master("local[2,3]").config("spark.ui.enabled", "false")
             .config("spark.driver.memory", "512m").config("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
             .getOrCreate())

    def flaky(mode, root):
        def run(batches):
            for number, batch in enumerate(batches):
                if number == 5 and TaskContext.get().attemptNumber() < 2 and TaskContext.get().partitionId() == 1:
                    if mode == "killed":
                        while not os.path.isdir(root + "/shards"):
                            time.sleep(0.05)
                        os.kill(int(os.environ["DRIVER"]), signal.SIGKILL)
                        time.sleep(60)
                    raise RuntimeError("lost")
                yield batch
        return run

    for mode in ("retried", "killed"):
        frame = spark.range(0, 2000, 1, 2).mapInArrow(flaky(mode, root + "/" + mode), "id long")
        write_shards(frame, root + "/" + mode, config=ShardConfig(block_rows=100, shard_bytes=2000))
"""


@pytest.mark.slow
def test_retried_tasks_leave_one_whole_set_and_a_killed_driver_none(tmp_path):
    launch = f"import os; os.environ['DRIVER'] = str(os.getpid())\n{textwrap.dedent(FAILURES)}"
    done = subprocess.run([sys.executable, "-c", launch, str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == -9, done.stderr[-2000:]
    manifest = Manifest.load(tmp_path / "retried")
    written = [f"shards/{path.name}" for path in (tmp_path / "retried" / "shards").iterdir()]
    assert sorted(shard.path for shard in manifest.shards) == sorted(written)
    assert rows_of(manifest)["id"] == list(range(2000))
    assert list((tmp_path / "killed" / "shards").iterdir())
    with pytest.raises(StorageError, match="no committed shard set"):
        Manifest.load(tmp_path / "killed")


CONNECT = """
    import sys
    from pyspark.sql import SparkSession, functions as F
    from sparkdl.shards.write import write_shards, write_split
    from sparkdl.shards.manifest import Source
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    frame = spark.range(0, 1000, 1, 3).select("id", F.rand(1).alias("x"), (F.col("id") % 3).cast("string").alias("s"))
    source = Source(uri="t", version="1")
    first = write_shards(frame, sys.argv[1], labels=["id"], source=source)
    assert write_shards(frame, sys.argv[1], labels=["id"], source=source) == first
    spark.stop()
"""


@pytest.mark.slow
def test_a_connect_session_writes_the_same(tmp_path):
    pytest.importorskip("grpc")
    command = [sys.executable, "-c", textwrap.dedent(CONNECT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert rows_of(Manifest.load(tmp_path))["id"] == list(range(1000))


def test_names_with_dots_and_backticks_are_columns_like_others(spark, tmp_path):
    rows = [(0, 1.0, 2.0, "u", 1.5, [1, 2]), (1, None, 4.0, "v", 0.5, [3, 4])]
    kinds = "id long, `a.b` double, `c``d` double, `s.t` string, `label.y` double, `v.w` array<int>"
    manifest = write_shards(
        spark.createDataFrame(rows, kinds).coalesce(1), tmp_path, labels=["id", "label.y"], layout=Layout(nulls="mask")
    )
    got = rows_of(manifest)
    assert got["features"] == [[1, 2], [0, 4]]
    assert got["features__mask"] == [[1, 1], [0, 1]]
    assert (got["s.t"], got["label.y"], got["v.w"]) == ([0, 1], [1.5, 0.5], [[1, 2], [3, 4]])
    assert manifest.tensor("features").columns == ("a.b", "c`d")


def test_names_that_spark_cannot_tell_apart_are_refused_where_they_are_used(spark, tmp_path):
    frame = spark.createDataFrame([(1.0, 2.0, 3.0, 4.0)], "a double, A double, b double, c double")
    twice = frame.toDF("x", "x", "b", "c")
    for chosen, arguments in ((frame, {}), (twice, {}), (frame, {"columns": ["b"], "labels": ["a"]})):
        with pytest.raises(
            SchemaError, match=r"has 2 columns of the name '[aAx]'.*does not tell apart: rename or drop"
        ):
            write_shards(chosen, tmp_path / "refused", **arguments)
    with pytest.raises(SchemaError, match="a column has an empty name"):
        write_shards(frame.toDF("x", "", "b", "c"), tmp_path / "refused")
    assert write_shards(twice, tmp_path / "unused", columns=["b", "c"]).tensor("features").columns == ("b", "c")
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        both = write_shards(frame, tmp_path / "both")
        assert both.tensor("features").columns == ("a", "A", "b", "c")
        with pytest.raises(SchemaError, match="2 columns of the name 'x'"):
            write_shards(twice, tmp_path / "refused")
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_a_column_that_spark_takes_for_the_packed_tensor_is_refused_by_name(spark, tmp_path):
    frame = spark.createDataFrame([(1.0, 2.0, 3)], "a double, b double, Features long")
    with pytest.raises(SchemaError, match="the packed tensor 'features' and 'Features' have one name to Spark"):
        write_shards(frame, tmp_path / "refused", labels=["Features"])
    packs = Layout(pack={"X": ["a"], "x": ["b"], "y": ["a2", "b2"], "Y": ["a3", "b3"]})
    more = frame.selectExpr("*", "a as a2", "b as b2", "a as a3", "b as b3")
    with pytest.raises(SchemaError, match="the packed tensor 'y' and 'Y' have one name to Spark"):
        write_shards(more, tmp_path / "refused", labels=["Features"], layout=packs)
    named = write_shards(frame, tmp_path / "named", labels=["Features"], layout=Layout(pack={"inputs": ["a", "b"]}))
    assert rows_of(named, order="Features")["inputs"] == [[1, 2]]
