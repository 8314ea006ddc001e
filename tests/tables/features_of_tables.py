"""Tables as Spark's Delta makes them, one a feature: what each engine does with it."""

from __future__ import annotations

import traceback

import pyarrow as pa
import pytest

from sparkdl.errors import SchemaError, StorageError
from sparkdl.tables.table import Table

ROWS = "select id, cast(id % 2 as string) day, id * 2 x from range(40)"
PLAIN = f"create table {{t}} using delta as {ROWS}"


def with_properties(*properties):
    said = ", ".join(f"'delta.{name}' = '{value}'" for name, value in (one.split("=") for one in properties))
    return f"create table {{t}} using delta partitioned by (day) tblproperties ({said}) as {ROWS}"


INSERT = "insert into {t} (id, day, x) select id, cast(id % 2 as string), id * 2 from range(40)"
COLUMNS = "id bigint, day string, x bigint"
# feature: statements, what delta-rs does when it reads and when it writes: "" works, else words of its refusal
TABLES = {
    "plain": ([PLAIN], "", ""),
    "partitioned": ([f"create table {{t}} using delta partitioned by (day) as {ROWS}"], "", ""),
    "append-only": ([with_properties("appendOnly=true")], "", ""),
    "v2 checkpoint": ([with_properties("checkpointPolicy=v2", "checkpointInterval=2"), INSERT, INSERT], "", ""),
    "merged": ([PLAIN, "merge into {t} o using {t} n on o.id = n.id when matched then update set x = n.x + 1"], "", ""),
    "restored": ([PLAIN, "delete from {t} where id > 3", "restore table {t} to version as of 0"], "", ""),
    "optimized": ([PLAIN, INSERT, "optimize {t}"], "", ""),
    "random prefixes": ([with_properties("randomizeFilePrefixes=true")], "", ""),
    "partitioned by a timestamp": (
        ["create table {t} using delta partitioned by (at) as select id, id x, timestamp'2024-01-01 10:00:00' at, "
         "'a' day from range(9)"],
        "",
        "'at'",
    ),
    "change feed": ([with_properties("enableChangeDataFeed=true")], "", "enableChangeDataFeed"),
    "constraint": ([PLAIN, "alter table {t} add constraint small check (id < 100)"], "", "constraints.small"),
    "generated": (
        [f"create table {{t}} ({COLUMNS}, g bigint generated always as (id + 1)) using delta", INSERT],
        "",
        "generation",
    ),
    "identity": (
        [f"create table {{t}} ({COLUMNS}, n bigint generated always as identity) using delta", INSERT],
        "",
        "identityColumns",
    ),
    "row tracking": ([with_properties("enableRowTracking=true")], "", "rowTracking"),
    "clustering": ([f"create table {{t}} using delta cluster by (id) as {ROWS}"], "", "clustering"),
    "column defaults": (
        [
            f"create table {{t}} ({COLUMNS}, d bigint default 7) using delta "
            "tblproperties ('delta.feature.allowColumnDefaults' = 'supported')",
            INSERT,
        ],
        "",
        "allowColumnDefaults",
    ),
    "in-commit timestamps": ([with_properties("enableInCommitTimestamps=true")], "", "inCommitTimestamp"),
    "deletion vectors": (
        [with_properties("enableDeletionVectors=true"), "delete from {t} where id in (3, 4, 30)", INSERT],
        "",
        "deletion vectors",
    ),
    "column mapping": (
        [with_properties("columnMapping.mode=name"), "alter table {t} rename column x to y",
         "alter table {t} drop column y", "alter table {t} add column x bigint", INSERT],
        "",
        "columnMapping",
    ),
    "column mapping by id": (
        [with_properties("columnMapping.mode=id"), "alter table {t} rename column x to y",
         "alter table {t} drop column y", "alter table {t} add column x bigint", INSERT],
        "",
        "columnMapping",
    ),
    "nested columns by id": (
        ["create table {t} using delta tblproperties ('delta.columnMapping.mode' = 'id') as select id, "
         "cast(id % 2 as string) day, id * 2 x, named_struct('a', id, 'b', array(named_struct('c', id))) s, "
         "map('k', named_struct('d', id)) m from range(40)",
         "alter table {t} rename column s.a to z"],
        "",
        "columnMapping",
    ),
    "mapping and vectors": (
        [with_properties("columnMapping.mode=name", "enableDeletionVectors=true"),
         "alter table {t} rename column x to `y z`", "delete from {t} where id % 5 = 1"],
        "",
        "deletion vectors",
    ),
    "type widening": (
        [
            "create table {t} (id int, day string, x bigint) using delta "
            "tblproperties ('delta.enableTypeWidening' = 'true')",
            INSERT,
            "alter table {t} alter column id type bigint",
        ],
        "typeWidening",
        "typeWidening",
    ),
    "variant": (
        [f"create table {{t}} ({COLUMNS}, v variant) using delta", INSERT,
         "insert into {t} select id, day, x, parse_json('{{\"a\": 1}}') from {t}"],
        "variantType",
        "variant",
    ),
}  # fmt: skip


def rows_of(frame):
    return sorted(map(str, map(tuple, frame.collect())))


def refused(words, action):
    """Check that an action is refused at once, by name, with the way out."""
    with pytest.raises((StorageError, SchemaError)) as refusal:
        action()
    text = str(refusal.value)
    assert words in text
    assert "Spark session" in text or words in SCANNED.values() or isinstance(refusal.value, SchemaError)


SCANNED = {"partitioned by a timestamp": "partitioned by ['at']"}
"""What workers that read files themselves refuse beside what delta-rs does."""


def flat(frame):
    """The rows without nested columns, whose inside workers do not rename."""
    return frame.select(*(name for name, kind in frame.dtypes if "<" not in kind))


def scanned(spark, table, version=None):
    """The rows that workers would read by the table's log."""
    scan = table.scan(version=version)
    task = scan.task([field.name for field in scan.schema if not field.type.num_fields], slots=2, batch_rows=7)
    batches = [batch for share in task.shares for part in share for batch in task.read(part)]
    return spark.createDataFrame(pa.Table.from_batches(batches, task.schema))


def check_scores(spark, folder, feature, by_log):
    """The table scored into another one of Spark's Delta; by the log where that is read, by Spark elsewhere."""
    import torch

    import sparkdl
    from sparkdl.models.signature import Signature, TensorField
    from sparkdl.scoring.score import Predictor

    field = TensorField(name="id", dtype="int64", columns=("id",))
    signature = Signature(inputs=(field,), outputs=(TensorField(name="y", dtype="int64"),))
    predictor = Predictor(model=torch.nn.Identity(), signature=signature)
    path, target = f"{folder}/features/{feature}", Table(f"{folder}/scored/{feature}")
    how = {"where": [("id", ">=", 2), ("day", "!=", "7")], "keep": ["day"]}
    done = sparkdl.score_table(path, predictor, target, **how)
    assert (done.files is not None) == by_log
    wanted = rows_of(spark.read.format("delta").load(path).where("id >= 2 and day != '7'").selectExpr("day", "id"))
    assert rows_of(target.read(spark)) == wanted
    entry = target.history(1)[0]
    assert (entry["sparkdl.sourceVersion"], done.written.rows) == (done.version, len(wanted))
    if feature == "plain":
        spark.sql(f"create table default.plain using delta as select * from delta.`{path}`")
        done = sparkdl.score_table("spark_catalog.default.plain", predictor, "spark_catalog.default.scored", **how)
        assert done.files is None
        assert rows_of(spark.table("default.scored")) == wanted


def check(spark, folder, feature):
    """Both engines on the table of one feature."""
    statements, read_refusal, write_refusal = TABLES[feature]
    path = f"{folder}/features/{feature}"
    for statement in statements:
        spark.sql(statement.format(t=f"delta.`{path}`"))
    by_spark, by_rs = Table(path, engine="spark"), Table(path, engine="delta-rs")
    expected = spark.read.format("delta").load(path)
    assert expected.count() > 0
    assert rows_of(by_spark.read(spark)) == rows_of(expected)
    assert rows_of(Table(path).read(spark)) == rows_of(expected)
    if read_refusal:
        refused(read_refusal, lambda: by_rs.read(spark))
    else:
        assert by_rs.read(spark).columns == expected.columns
        assert rows_of(by_rs.read(spark)) == rows_of(expected)
        assert rows_of(by_rs.read(spark, version=0)) == rows_of(by_spark.read(spark, version=0))
    unscanned = SCANNED.get(feature, read_refusal)
    if unscanned:
        refused(unscanned, lambda: by_rs.scan())
    else:
        assert rows_of(scanned(spark, by_rs)) == rows_of(flat(expected))
        assert rows_of(scanned(spark, by_rs, 0)) == rows_of(flat(by_spark.read(spark, version=0)))
    check_scores(spark, folder, feature, by_log=not unscanned)
    more = expected.limit(3).localCheckpoint()
    before, version = expected.count(), by_spark.version()
    if write_refusal:
        refused(write_refusal, lambda: by_rs.write(more))
        assert by_spark.version() == version
    else:
        by_rs.write(more)
        assert by_spark.read(spark).count() == before + 3
    if feature == "append-only":
        for table in (by_rs, by_spark):
            with pytest.raises(StorageError, match=r"delta\.appendOnly"):
                table.write(more, "overwrite")
    if feature not in ("generated", "identity"):  # whose values are not for the writer to say
        by_spark.write(more)
        assert by_spark.read(spark).count() == before + (3 if write_refusal else 6)


def run(spark, folder, feature):
    """The traceback of one feature's check, empty where it holds."""
    try:
        check(spark, folder, feature)
    except Exception:
        return traceback.format_exc()
    return ""
