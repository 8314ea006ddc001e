"""Scoring in real Spark stages: every kind of input and output, streams, and errors that keep their type."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pyspark.ml.linalg import DenseVector, Vectors
from pyspark.sql import functions as F
from pyspark.sql import types as T
from torch import nn

from sparkdl.compat.spark_errors import task_errors
from sparkdl.config import ScoreConfig
from sparkdl.errors import BundleError, ConfigError, DataError, IntegrityError, SchemaError
from sparkdl.models.bundle import save_bundle
from sparkdl.models.signature import Signature, TensorField
from sparkdl.scoring.score import score

FEATURES = ("a", "b", "c")


ONE = (TensorField(name="y"),)


def simple(columns=FEATURES, outputs=ONE, dtype="float32"):
    field = TensorField(name="x", shape=(len(columns),), columns=tuple(columns), dtype=dtype)
    return Signature(inputs=(field,), outputs=tuple(outputs))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).eval()


@pytest.fixture
def bundle(model, tmp_path):
    save_bundle(model, str(tmp_path / "bundle"), signature=simple())
    return str(tmp_path / "bundle")


@pytest.fixture
def frame(spark):
    rows = [(i, i * 0.5, i % 3, float(i) ** 0.5, f"r{i}") for i in range(100)]
    frame = spark.createDataFrame(rows, "id long, a double, b int, c float, name string")
    return frame.repartition(3).withColumn("c", F.col("c").alias("c", metadata={"unit": "km"}))


def expected(model, rows):
    with torch.inference_mode():
        return model(torch.tensor([[row.a, row.b, row.c] for row in rows], dtype=torch.float32))[:, 0].tolist()


def test_predictions_are_the_models_and_every_column_is_kept(frame, bundle, model):
    scored = score(frame, bundle)
    assert scored.schema == T.StructType([*frame.schema.fields, T.StructField("y", T.FloatType())])
    rows = sorted(scored.collect(), key=lambda row: row.id)
    assert [tuple(row)[:5] for row in rows] == sorted(map(tuple, frame.collect()))
    assert [row.y for row in rows] == pytest.approx(expected(model, rows), rel=1e-6)


def test_no_job_runs_before_the_result_is_used(spark, frame, bundle):
    tracker = spark.sparkContext.statusTracker()
    before = len(tracker.getJobIdsForGroup(None))
    score(frame, bundle)
    assert len(tracker.getJobIdsForGroup(None)) == before


def test_a_module_travels_with_its_signature_and_only_wanted_columns_come_back(frame, model):
    scored = score(frame, model, signature=simple(), keep=["id", "b"], output_columns=["minutes"])
    assert scored.columns == ["id", "b", "minutes"]
    rows = {row.id: row for row in scored.collect()}
    for row in frame.collect():
        assert rows[row.id].b == row.b
        assert rows[row.id].minutes == pytest.approx(expected(model, [row])[0], rel=1e-6)


@pytest.mark.parametrize("batch_rows", [1, 7, 10_000])
def test_the_batch_size_does_not_change_the_predictions(frame, model, batch_rows):
    seen = nn.Sequential(model, Refuse(batch_rows))
    scored = score(frame, seen, signature=simple(), config=ScoreConfig(batch_rows=batch_rows))
    rows = scored.collect()
    assert [row.y for row in rows] == pytest.approx(expected(model, rows), rel=1e-5)


class Refuse(nn.Module):
    """Passes its input on if the batch is no larger than allowed."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def forward(self, x):
        if len(x) > self.rows:
            raise ValueError(f"a batch of {len(x)} rows")
        return x


class Heads(nn.Module):
    """Two inputs, four outputs, with ids as integers."""

    def __init__(self, named=False):
        super().__init__()
        self.embedding = nn.Embedding(10, 2)
        self.named = named

    def forward(self, numbers, ids=None):
        if ids is None:
            numbers, ids = numbers["numbers"], numbers["ids"]
        assert ids.dtype == torch.int64
        hidden = self.embedding(ids)
        out = {
            "one": numbers.sum(1),
            "two": torch.softmax(hidden, -1),
            "three": ids * 2,
            "four": numbers[:, :, None].expand(-1, -1, 2).double(),
        }
        return out if self.named else tuple(out.values())


@pytest.mark.parametrize("call", ["positional", "dict", "keywords"])
def test_several_inputs_and_heads_keep_their_types(frame, call):
    signature = Signature(
        inputs=(
            TensorField(name="numbers", shape=(2,), columns=("a", "c")),
            TensorField(name="ids", dtype="int64", columns=("b",)),
        ),
        outputs=(
            TensorField(name="one"),
            TensorField(name="two", shape=(2,)),
            TensorField(name="three", dtype="int64"),
            TensorField(name="four", shape=(2, 2), dtype="float64"),
        ),
        call=call,
    )
    model = Heads(named=call == "dict")
    scored = score(frame, model, signature=signature, config=ScoreConfig(vectors=True))
    assert [field.simpleString() for field in scored.schema.fields[-4:]] == [
        "one:float",
        "two:vector",
        "three:bigint",
        "four:array<array<double>>",
    ]
    for row in scored.collect():
        assert row.one == pytest.approx(row.a + row.c, rel=1e-6)
        assert isinstance(row.two, DenseVector)
        assert row.two.toArray() == pytest.approx(model.embedding.weight[row.b].softmax(-1).tolist(), rel=1e-6)
        assert row.three == row.b * 2
        assert np.asarray(row.four).shape == (2, 2)
        assert row.four[1] == pytest.approx([row.c, row.c], rel=1e-6)


class Echo(nn.Module):
    """Answers with its input."""

    def forward(self, x):
        return x


def echo(frame, column, shape, dtype="float64", **config):
    field = TensorField(name="x", shape=shape, columns=column if isinstance(column, tuple) else (column,), dtype=dtype)
    out = TensorField(name="y", shape=shape, dtype=dtype)
    signature = Signature(inputs=(field,), outputs=(out,))
    return [row.y for row in score(frame, Echo(), signature=signature, config=ScoreConfig(**config)).collect()]


def test_vectors_dense_and_sparse_arrays_and_matrices_arrive_whole(spark):
    rows = [
        (Vectors.dense(1.0, 2.0, 3.0), [1, 2], [[1.0, 2.0], [3.0, 4.0]], 1.5),
        (Vectors.sparse(3, [2], [5.0]), [3, 4], [[5.0, 6.0], [7.0, 8.0]], 2.5),
        (Vectors.sparse(3, [], []), [5, 6], [[9.0, 1.0], [2.0, 3.0]], 3.5),
    ]
    schema = T.StructType.fromDDL("l array<int>, m array<array<double>>, s float")
    from pyspark.ml.linalg import VectorUDT

    schema = T.StructType([T.StructField("v", VectorUDT()), *schema.fields])
    frame = spark.createDataFrame(rows, schema).coalesce(1)
    assert echo(frame, "v", (3,)) == [[1.0, 2.0, 3.0], [0.0, 0.0, 5.0], [0.0, 0.0, 0.0]]
    assert echo(frame, "l", (2,), "int64") == [[1, 2], [3, 4], [5, 6]]
    assert echo(frame, "m", (2, 2)) == [row[2] for row in rows]
    assert echo(frame, ("s", "v", "l"), (6,)) == [
        [1.5, 1.0, 2.0, 3.0, 1.0, 2.0],
        [2.5, 0.0, 0.0, 5.0, 3.0, 4.0],
        [3.5, 0.0, 0.0, 0.0, 5.0, 6.0],
    ]
    assert [row.v for row in score(frame, Echo(), signature=simple(["s"])).collect()] == [row[0] for row in rows]
    with pytest.raises(DataError, match="3 numbers a row"), task_errors():
        echo(frame, "v", (4,))


def test_rows_of_different_length_are_padded_with_their_mask(spark):
    frame = spark.createDataFrame([([1, 2, 3],), ([4],), ([],)], "tokens array<int>").coalesce(1)

    class Mean(nn.Module):
        def forward(self, tokens, tokens__valid):
            assert tokens__valid.dtype == torch.bool
            return (tokens * tokens__valid).sum(1) / tokens__valid.sum(1).clamp(min=1)

    tokens = TensorField(name="tokens", shape=(None,), columns=("tokens",), dtype="int64")
    mask = TensorField(name="tokens__valid", shape=(None,), dtype="bool")
    signature = Signature(inputs=(tokens, mask), outputs=(TensorField(name="y"),), call="keywords")
    assert [row.y for row in score(frame, Mean(), signature=signature).collect()] == [2.0, 4.0, 0.0]
    with pytest.raises(DataError, match="rows of 0 and of 3 elements"), task_errors():
        echo(frame, "tokens", (3,), "int64")


def test_large_integers_do_not_lose_digits_and_labels_do_not_round(spark):
    frame = spark.createDataFrame([(2**53 + 1, 3), (2**62 + 1, 4)], "id long, k long").coalesce(1)
    assert echo(frame, ("id", "k"), (2,), "int64") == [[2**53 + 1, 3], [2**62 + 1, 4]]

    class Third(nn.Module):
        def forward(self, x):
            return x[:, 0] / 3

    signature = Signature(
        inputs=(TensorField(name="x", shape=(1,), columns=("k",)),), outputs=(TensorField(name="y"),), labels=("k",)
    )
    assert score(frame, Third(), signature=signature).collect()[1].y == pytest.approx(4 / 3)


def test_nulls_follow_the_policy_and_nan_reaches_the_model(spark):
    nan = float("nan")
    rows = [(1, 1.0, 2.0), (2, None, 3.0), (3, nan, 4.0), (4, 5.0, None)]
    frame = spark.createDataFrame(rows, "id int, a double, b double").coalesce(1)
    with pytest.raises(DataError, match=r"2 rows have a null among \['a', 'b'\]"), task_errors():
        echo(frame, ("a", "b"), (2,))
    null = echo(frame, ("a", "b"), (2,), nulls="null")
    assert [value is None for value in null] == [False, True, False, True]
    assert math.isnan(null[2][0])
    for vectors in (True, False):
        assert echo(frame, ("a", "b"), (2,), nulls="null", vectors=vectors)[1] is None
    filled = echo(frame, ("a", "b"), (2,), nulls="nan")
    assert math.isnan(filled[1][0])
    assert filled[1][1] == 3.0
    with pytest.raises(DataError, match="cannot hold NaN"), task_errors():
        echo(frame, ("a", "b"), (2,), "int64", nulls="nan")
    only_a = echo(frame, "b", (), nulls="null")
    assert [value is None for value in only_a] == [False, False, False, True]


def test_empty_frames_and_partitions_give_no_rows_and_the_schema(spark, bundle, frame):
    empty = score(frame.where("id < 0"), bundle)
    assert empty.collect() == []
    assert empty.columns == [*frame.columns, "y"]
    assert score(frame.where("id = 3").repartition(4), bundle).count() == 1


def test_what_does_not_fit_is_refused_before_anything_runs(frame, bundle, model, tmp_path):
    with pytest.raises(SchemaError, match="needs the column 'a'"):
        score(frame.drop("a"), bundle)
    with pytest.raises(SchemaError, match="'name' has the type string"):
        score(frame, model, signature=simple(["a", "name"]))
    with pytest.raises(SchemaError, match=r"'y'.*output_columns"):
        score(frame.withColumnRenamed("name", "Y"), bundle)
    with pytest.raises(ConfigError, match="signature"):
        score(frame, model)
    with pytest.raises(ConfigError, match="one name each"):
        score(frame, bundle, output_columns=["p", "q"])
    with pytest.raises(SchemaError, match="keep names"):
        score(frame, bundle, keep=["nothing"])
    with pytest.raises(BundleError, match="holds no bundle"):
        score(frame, str(tmp_path / "nowhere"))


class Seconds(nn.Module):
    def forward(self, t):
        return t.double() / 1e6


@pytest.mark.parametrize("trained", ["timestamp", "timestamp_ntz", "date", ""])
def test_a_time_means_in_scoring_what_it_meant_in_training(spark, trained):
    kinds = {"timestamp": "timestamp", "timestamp_ntz": "timestamp_ntz", "date": "date", "": "bigint"}
    text = "cast('2026-03-02' as date)" if trained else "cast(17 as bigint)"
    signature = Signature(
        inputs=(TensorField(name="t", dtype="int64", columns=("t",), logical=trained),),
        outputs=(TensorField(name="y", dtype="float64"),),
    )
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        frame = spark.sql(f"select cast({text} as {kinds[trained]}) as t")
        (row,) = score(frame, Seconds(), signature=signature).collect()
        day = 1772409600.0  # 2026-03-02 in UTC; New York is five hours behind
        wanted = {"timestamp": day + 5 * 3600, "timestamp_ntz": day, "date": day / 86400 / 1e6, "": 17 / 1e6}
        assert row.y == wanted[trained]
        for other in kinds.keys() - {trained}:
            source = "cast('2026-03-02' as date)" if other else "cast(17 as bigint)"
            wrong = spark.sql(f"select cast({source} as {kinds[other]}) as t")
            with pytest.raises(SchemaError, match=f"^column 't' is of type {kinds[other]}, and the model was trained"):
                score(wrong, Seconds(), signature=signature)
    finally:
        spark.conf.unset("spark.sql.session.timeZone")


def test_strings_are_scored_by_their_codes_alone_and_the_refusal_says_so(spark):
    signature = Signature(
        inputs=(TensorField(name="s", dtype="int32", columns=("s",), logical="string"),),
        outputs=(TensorField(name="y", dtype="int32"),),
    )
    with pytest.raises(SchemaError, match=r"^column 's' holds strings, and the model was trained on their codes"):
        score(spark.createDataFrame([("x",)], "s string"), nn.Identity(), signature=signature)
    coded = spark.createDataFrame([(2,)], "s int")
    assert score(coded, nn.Identity(), signature=signature).collect()[0].y == 2


def test_names_that_differ_in_case_alone_are_told_apart_where_spark_does(spark, model):
    frame = spark.createDataFrame([(1.0, 2.0, 3.0, 4.0)], "a double, A double, b double, c double")
    with pytest.raises(SchemaError, match=r"\['a'\] would appear twice"):
        score(frame, model, signature=simple())
    with pytest.raises(SchemaError, match=r"^the frame has 2 columns of the name 'a', \['a', 'A'\], which Spark does"):
        score(frame, model, signature=simple(), keep=["b"])
    for one in ("keep", "output_columns"):
        with pytest.raises(ConfigError, match=f"^{one}='c' is one string: give a list of names"):
            score(frame, model, signature=simple(), **{one: "c"})
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        (row,) = score(frame, model, signature=simple(("a", "b", "c"))).collect()
        (other,) = score(frame, model, signature=simple(("A", "b", "c"))).collect()
        assert (row["a"], row["A"]) == (other["a"], other["A"]) == (1.0, 2.0)
        assert row.y == pytest.approx(model(torch.tensor([[1.0, 3.0, 4.0]])).item(), abs=1e-6)
        assert other.y == pytest.approx(model(torch.tensor([[2.0, 3.0, 4.0]])).item(), abs=1e-6)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_a_model_that_answers_otherwise_than_declared_is_named(frame, model):
    with pytest.raises(SchemaError, match=r"returns \(\d+, 1\).*'y'.*, 2\)"), task_errors():
        score(frame, model, signature=simple(outputs=[TensorField(name="y", shape=(2,))])).collect()
    two = simple(outputs=[TensorField(name="y"), TensorField(name="z")])
    with pytest.raises(BundleError, match="declared"), task_errors():
        score(frame, model, signature=two).collect()


def test_a_bundle_altered_after_planning_is_refused_by_the_workers(frame, bundle, tmp_path):
    scored = score(frame, bundle)
    weights = tmp_path / "bundle" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(IntegrityError, match=r"weights\.safetensors"), task_errors():
        scored.collect()


def test_predictions_go_into_a_delta_table_once(frame, bundle, tmp_path):
    from sparkdl.tables.table import AppTransaction, Table

    table = Table(str(tmp_path / "predictions"))
    for _ in range(2):
        mark = AppTransaction(application="score", version=1)
        table.write(score(frame, bundle, keep=["id"]), transaction=mark)
    assert table.rows().num_rows == 100


def test_a_stream_is_scored(spark, frame, bundle, model, tmp_path):
    frame.write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(frame.schema).parquet(str(tmp_path / "in"))
    query = (
        score(stream, bundle)
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "state"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "out"))
    )
    assert query.awaitTermination(120)
    assert query.exception() is None
    rows = spark.read.parquet(str(tmp_path / "out")).collect()
    assert len(rows) == 100
    assert [row.y for row in rows] == pytest.approx(expected(model, rows), rel=1e-6)
