"""A table scored by its own log: the same rows as ``score`` gives of what Spark reads, for every kind of table."""

from __future__ import annotations

import datetime as dt
import functools
import logging
import operator
import sys
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from pyspark.sql import functions as F
from torch import nn

import sparkdl
from sparkdl.config import ScoreConfig
from sparkdl.errors import ConfigError, DataError, FencedError, SchemaError, StorageError
from sparkdl.models.bundle import save_bundle
from sparkdl.models.signature import Signature, TensorField
from sparkdl.scoring.score import Predictor, score
from sparkdl.scoring.score_table import _arrow_schema, _column
from sparkdl.tables.scan.conditions import conditions_of
from sparkdl.tables.table import AppTransaction, Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tables"))

from delta_log import HIDDEN, actions, commit, hide_rows, protocol


class Echo(nn.Module):
    """Answers with its inputs, so that every number that reached it is in the result, whatever the batch."""

    def forward(self, **inputs):
        return tuple(inputs.values())


TYPES = {
    "tiny": ("tinyint", "int8", ()), "small": ("smallint", "int16", ()), "whole": ("int", "int32", ()),
    "big": ("bigint", "int64", ()), "real": ("float", "float32", ()), "double": ("double", "float64", ()),
    "flag": ("boolean", "bool", ()), "money": ("decimal(12,3)", "float64", ()), "day": ("date", "int64", ()),
    "at": ("timestamp", "int64", ()), "clock": ("timestamp_ntz", "int64", ()),
    "pair": ("array<float>", "float32", (2,)), "grid": ("array<array<double>>", "float64", (2, 2)),
    "picture": ("binary", "uint8", (3,)),
}  # fmt: skip


def echo(names):
    fields = [TensorField(name=name, dtype=TYPES[name][1], shape=TYPES[name][2], columns=(name,)) for name in names]
    inputs = tuple(fields) if len(fields) > 1 else (*fields, TensorField(name="again", columns=("tiny",), dtype="int8"))
    outputs = tuple(TensorField(name=f"{one.name}_y", dtype=one.dtype, shape=one.shape) for one in inputs)
    return Predictor(model=Echo(), signature=Signature(inputs=inputs, outputs=outputs, call="keywords"))


def every_type(spark, rows=60):
    return spark.range(0, rows, 1, 3).selectExpr(
        "id", "cast(id - 30 as tinyint) tiny", "cast(id * 100 as smallint) small", "cast(id * -7 as int) whole",
        "id * 9007199254740993 big", "cast(id / 7 as float) real", "if(id = 3, double('NaN'), id / 3) double",
        "id % 2 = 0 flag", "cast(id / 8 as decimal(12,3)) money",
        "date_add(date'1580-01-01', cast(id * 3000 as int)) day",
        "timestamp_micros(id * 1234567890123 - 5000000000000000) at",
        "cast(timestamp_micros(id * 1000001) as timestamp_ntz) clock",
        "array(cast(id as float), cast(0.5 as float)) pair", "array(array(double(id), 1D), array(2D, 3D)) grid",
        "cast(lpad(cast(id as string), 3, '0') as binary) picture",
        "concat('n', id % 5) name", "named_struct('p', id, 'q', concat('q', id)) inner", "map('k', id) labels",
        "cast(id % 3 as string) part", "date_add(date'2026-03-01', cast(id % 4 as int)) sold",
    )  # fmt: skip


def text_of(rows):
    return sorted(str(row.asDict(recursive=True)) for row in rows)


def check_same(spark, table, predictor, tmp_path, sql="true", **how):
    """Score by the log, and what Spark reads; the tables of both hold the same rows."""
    target = Table(str(tmp_path / f"predictions{len(list(tmp_path.iterdir()))}"))
    done = sparkdl.score_table(table, predictor, target, **how)
    rows = table.read(spark, how.get("version")).where(sql)
    keep, config = how.get("keep"), how.get("config") or predictor.config
    by_spark = score(rows, predictor.model, signature=predictor.signature, keep=keep, config=config).collect()
    assert done.files is not None
    assert target.columns() == list(by_spark[0].asDict())
    assert text_of(target.read(spark).collect()) == text_of(by_spark)
    assert done.written.rows == len(by_spark)
    return done, target


def test_every_type_scores_as_spark_reads_it_nulls_and_partitions_too(spark, tmp_path):
    table = Table(str(tmp_path / "table"))
    rows = every_type(spark).withColumns({name: F.expr(f"if(id % 7 = 2, null, {name})") for name in TYPES})
    table.write(rows, partition_by=["part"])
    predictor = echo(list(TYPES))
    done, target = check_same(spark, table, predictor, tmp_path, config=ScoreConfig(nulls="null", batch_rows=5))
    assert (done.version, done.skipped, done.written.version) == (0, 0, 0)
    entry = target.history(1)[0]
    assert (entry["sparkdl.source"], entry["sparkdl.sourceVersion"]) == (table.uri, 0)
    assert len(entry["sparkdl.model"]) == 64
    with pytest.raises(DataError, match=r"rows have a null among"):
        sparkdl.score_table(table, predictor, str(tmp_path / "none"))
    assert not Table(str(tmp_path / "none")).exists()
    assert not list((tmp_path / "none").rglob("*.parquet"))


@pytest.mark.slow
def test_every_type_scores_as_spark_reads_it_in_one_folder(spark, tmp_path):
    table = Table(str(tmp_path / "table"))
    table.write(every_type(spark))
    check_same(spark, table, echo(list(TYPES)), tmp_path)
    check_same(spark, table, echo(["real", "double", "pair"]), tmp_path, keep=["id"], config=ScoreConfig(nulls="nan"))


WHERE = [
    ("part = '1'", [("part", "=", "1")]),
    ("sold >= '2026-03-03' and tiny < 0", [("sold", ">=", dt.date(2026, 3, 3)), ("tiny", "<", 0)]),
    ("double > 5", [("double", ">", 5)]),  # NaN, too
    ("double != 5 and double <= 1e9", [("double", "!=", 5.0), ("double", "<=", 1e9)]),
    ("real = 0.1", [("real", "=", 0.1)]),  # which no float is
    ("name in ('n1', 'n3') and flag = true", [("name", "in", ["n1", "n3"]), ("flag", "=", True)]),
    ("name not in ('n1', 'n3')", [("name", "not in", {"n1", "n3"})]),
    ("flag is not null", [("flag", "not in", [])]),
    ("money >= 1.5", [("money", ">=", Decimal("1.5"))]),
    ("at > timestamp'1812-06-01 00:00:00Z'", [("at", ">", dt.datetime(1812, 6, 1, tzinfo=dt.UTC))]),
    ("clock < timestamp_ntz'1970-01-01 00:00:20'", [("clock", "<", dt.datetime(1970, 1, 1, 0, 0, 20))]),
    ("day between '1600-01-01' and '1700-01-01'", [("day", ">=", "1600-01-01"), ("day", "<=", "1700-01-01")]),
    ("big is null", [("big", "is", None)]),
    ("pair is not null and id = 5", [("pair", "is not", None), ("id", "=", 5)]),
]


@pytest.fixture(scope="module")
def parted(spark, tmp_path_factory):
    """Twelve partitions, two versions: the second has rows with nulls besides."""
    table = Table(str(tmp_path_factory.mktemp("parted") / "table"))
    table.write(every_type(spark), partition_by=["part", "sold"])
    more = every_type(spark, 4).withColumn("id", F.expr("id + 100"))
    nulls = {name: F.lit(None).cast(kind) for name, (kind, *_) in TYPES.items() if name != "tiny"}
    table.write(more.withColumns(nulls))
    return table


def test_where_means_what_sql_says(spark, parted):
    rows = parted.read(spark).cache()  # its Parquet reader skips row groups by statistics that leave NaN out
    schema = _arrow_schema(rows.schema)
    by_sql = {f"sql {n}": F.expr(sql) for n, (sql, _) in enumerate(WHERE)}
    by_column = {
        f"column {n}": functools.reduce(operator.and_, map(_column, conditions_of(where, schema)))
        for n, (_, where) in enumerate(WHERE)
    }  # as where Spark reads the rows itself
    found = rows.select("id", *[one.alias(name) for name, one in (by_sql | by_column).items()]).collect()
    for n, (sql, where) in enumerate(WHERE):
        wanted = sorted(row.id for row in found if row[f"sql {n}"])
        assert sorted(row.id for row in found if row[f"column {n}"]) == wanted, sql
        scan = parted.scan(where)
        task = scan.task(["id"], slots=2, batch_rows=4096)
        batches = [batch for share in task.shares for part in share for batch in task.read(part)]
        assert sorted(one for batch in batches for one in batch.column(0).to_pylist()) == wanted, sql
        assert len(wanted) < 64
        assert wanted or "0.1" in sql
    rows.unpersist()


@pytest.mark.slow
def test_an_older_version_is_read_as_it_was(spark, parted, tmp_path):
    done, target = check_same(spark, parted, echo(["tiny"]), tmp_path, version=0, keep=["id"])
    assert (done.version, done.written.rows) == (0, 60)
    assert target.history(1)[0]["sparkdl.sourceVersion"] == 0
    with pytest.raises(StorageError, match="version 7"):
        sparkdl.score_table(parted, echo(["tiny"]), target, version=7)


@pytest.mark.slow
def test_many_small_files_hidden_rows_and_columns_added_later(spark, tmp_path):
    table = Table(str(tmp_path / "table"))
    for n in range(12):
        table.append(every_type(spark, 40).where(f"id % 12 = {n} or {n} = 0").select("id", "tiny", "real").toArrow())
    table.append(every_type(spark, 3).select("id", "tiny", "real", "name").toArrow(), new_columns=True)
    commit(table.uri, 13, protocol(["deletionVectors"], []))
    hide_rows(table.uri, 14, next(action["add"] for action in actions(table.uri) if "add" in action))
    done, target = check_same(spark, table, echo(["tiny", "real"]), tmp_path)
    assert done.files == 13
    assert done.written.files < 6
    assert target.read(spark).count() == 40 + 40 - 4 + 3 - len(HIDDEN)


def test_an_empty_table_gives_an_empty_table(spark, tmp_path):
    table, target = Table(str(tmp_path / "table")), Table(str(tmp_path / "predictions"))
    table.write(every_type(spark, 0))
    done = sparkdl.score_table(table, echo(["tiny"]), target)
    assert (done.files, done.written.rows) == (0, 0)
    assert target.columns()[-2:] == ["tiny_y", "again_y"]


def test_predictions_replace_their_partitions_and_the_same_work_commits_once(spark, parted, tmp_path):
    target = Table(str(tmp_path / "predictions"))
    predictor, keep = echo(["tiny"]), ["id", "sold"]
    first = sparkdl.score_table(parted, predictor, target, keep=keep, partition_by=["sold"])
    day = {"where": [("sold", "=", "2026-03-02")], "keep": keep, "mode": "replace"}
    again = sparkdl.score_table(
        parted, predictor, target.uri, transaction=AppTransaction(application="s", version=0), **day
    )
    assert (first.written.rows, again.written.committed) == (64, True)
    assert again.files + again.skipped == first.files == len(parted.files())
    assert again.skipped > again.files
    assert target.read(spark).count() == 64
    once = sparkdl.score_table(parted, predictor, target, transaction=AppTransaction(application="s", version=0), **day)
    assert (once.written.committed, once.written.version, target.version()) == (False, 1, 1)
    with pytest.raises(SchemaError, match="is not in the Delta table"):
        sparkdl.score_table(parted, predictor, target, keep=[*keep, "name"], mode="replace")
    late = AppTransaction(application="s", version=-1, fenced=True)
    with pytest.raises(FencedError, match="a later run of s"):
        sparkdl.score_table(parted, predictor, target, transaction=late, **day)
    assert target.version() == 1


def test_bundles_fitted_models_and_what_is_none(spark, parted, tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(2, 3).eval()
    fitted = sparkdl.TorchModel(
        model=model, feature_columns=["real", "double"], label_columns=["y"], outputCols=["p"],
        loss=nn.CrossEntropyLoss(), transform_batch_size=9,
    )  # fmt: skip
    where = [("id", "<", 60), ("double", "<", 1e9)]
    target = Table(str(tmp_path / "fitted"))
    sparkdl.score_table(parted, fitted, target, where=where, keep=["id"])
    wanted = {row.id: row.p for row in fitted.transform(parted.read(spark).where("id < 60 and double < 1e9")).collect()}
    found = {row.id: row.p for row in target.read(spark).collect()}
    assert found.keys() == wanted.keys()
    assert all(found[key] == pytest.approx(wanted[key], rel=1e-5) for key in wanted)

    classes = sparkdl.TorchModel(
        model=model, feature_columns=["real", "double"], label_columns=["y"], loss=nn.CrossEntropyLoss(),
        predictionCol="kind", probabilityCol="shares",
    )  # fmt: skip
    sparkdl.score_table(parted, classes, str(tmp_path / "classes"), where=where, keep=["id"])
    row = Table(str(tmp_path / "classes")).read(spark).first()
    assert (len(row.shares), row.kind) == (3, max(range(3), key=row.shares.__getitem__))

    field = TensorField(name="x", shape=(2,), columns=("real", "double"))
    outputs = (TensorField(name="y", shape=(3,)),)
    save_bundle(model, str(tmp_path / "bundle"), signature=Signature(inputs=(field,), outputs=outputs))
    sparkdl.score_table(parted, str(tmp_path / "bundle"), str(tmp_path / "plain"), where=where, keep=["id"])
    assert {row.id: row.y for row in Table(str(tmp_path / "plain")).read(spark).collect()} == found
    with pytest.raises(SchemaError, match="keep names"):
        sparkdl.score_table(parted, classes, str(tmp_path / "no"), keep=["nothing"])
    with pytest.raises(ConfigError, match="where="):
        sparkdl.score_table(parted, classes, str(tmp_path / "no"), where="id < 3")
    with pytest.raises(StorageError, match="no Delta table"):
        sparkdl.score_table(str(tmp_path / "nowhere"), classes, str(tmp_path / "no"))
    assert not (tmp_path / "no").exists()


def test_what_the_reader_does_not_know_spark_reads_or_it_is_refused_by_name(spark, tmp_path, caplog):
    table = Table(str(tmp_path / "table"), allow_folders=[str(tmp_path)])
    table.write(every_type(spark).select("id", "tiny", "sold", "name", "double"), partition_by=["name"])
    add = next(action["add"] for action in actions(table.uri) if "add" in action)
    elsewhere = tmp_path / "elsewhere.parquet"
    (Path(table.uri) / add["path"]).rename(elsewhere)
    commit(table.uri, 1, {"remove": {"path": add["path"], "deletionTimestamp": 1, "dataChange": True}})
    commit(table.uri, 2, {"add": {**add, "path": elsewhere.as_uri()}})
    predictor, target = echo(["tiny"]), Table(str(tmp_path / "predictions"))
    with caplog.at_level(logging.INFO, logger="sparkdl"):
        done = sparkdl.score_table(
            table, predictor, target, keep=["id"], where=[("tiny", "<", 0), ("sold", "!=", "2026-03-02")]
        )
    [line] = [record.getMessage() for record in caplog.records if "Spark reads the rows" in record.getMessage()]
    assert "does not lie in its folder" in line
    assert (done.version, done.files, done.skipped) == (2, None, None)
    wanted = table.read(spark).where("tiny < 0 and sold != '2026-03-02'").select("id", F.col("tiny").alias("tiny_y"))
    assert text_of(target.read(spark).select("id", "tiny_y").collect()) == text_of(wanted.collect())
    assert target.history(1)[0]["sparkdl.sourceVersion"] == 2
    done = sparkdl.score_table(table, predictor, target, keep=["id"], where=[("double", ">", 1e6)])
    assert (done.written.rows, done.files) == (1, None)  # NaN, which the statistics of its file leave out
    commit(table.uri, 3, protocol(["typeWidening"], []))
    with pytest.raises(StorageError, match=r"typeWidening.*Spark session with Delta"):
        sparkdl.score_table(table, predictor, target, keep=["id"])
    assert target.version() == 1


@pytest.mark.slow
def test_a_table_on_s3_is_scored_into_another(spark, s3_root, s3_endpoint, tmp_path):
    """Workers reach the store with the settings that the table was given."""
    options = {
        "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3_endpoint, "AWS_ALLOW_HTTP": "true", "AWS_S3_ALLOW_UNSAFE_RENAME": "true",
    }  # fmt: skip
    table, target = (Table(s3_root.child(name).uri, options) for name in ("table", "predictions"))
    rows = every_type(spark)
    table.write(rows, partition_by=["sold"])
    done = sparkdl.score_table(
        table, echo(["tiny", "pair"]), target, where=[("sold", ">", "2026-03-01")], keep=["id", "sold"]
    )
    assert done.files > 0
    assert done.skipped > 0
    found = {(row["id"], row["tiny_y"], tuple(row["pair_y"])) for row in target.rows().to_pylist()}
    wanted = rows.where("sold > '2026-03-01'").collect()
    assert found == {(row.id, row.tiny, tuple(row.pair)) for row in wanted}
