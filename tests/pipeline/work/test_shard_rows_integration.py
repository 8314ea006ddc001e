"""The rows of shards, from files or from Spark, are those that SQL would choose, and are counted alike."""

from __future__ import annotations

import pickle
from collections import Counter
from types import SimpleNamespace

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from sparkdl.columns.layout import Layout
from sparkdl.columns.numpy_arrow import one_value
from sparkdl.config import ShardConfig
from sparkdl.errors import ConfigError, DataError
from sparkdl.features.fitted import fit
from sparkdl.features.spec import Category, Number
from sparkdl.features.statistics import statistics_of
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.rows.parts import PART, rows_of, rows_of_parts
from sparkdl.pipeline.windows import WINDOW
from sparkdl.pipeline.work import file_rows
from sparkdl.pipeline.work.labels import FittedLabel, LabelCounts, Labels, encoded, labelled
from sparkdl.pipeline.work.shard_rows import VALIDATES, _LabelledRows, shard_rows
from sparkdl.shards.write import write_split
from sparkdl.tables.table import Table

COLUMNS = (
    "IF(id % 7 = 0, NULL, id) AS x",
    "IF(id % 11 = 0, NULL, id % 2 = 0) AS y",
    "CAST(IF(id % 5 = 0, 'NaN', id / 3) AS DOUBLE) AS `a.b`",
    "CAST(id AS FLOAT) AS single",
    "IF(id % 13 = 0, NULL, CAST(id % 4 AS BYTE)) AS byte",
    "concat('row ', repeat('x', CAST(id % 3 AS INT))) AS text",
    "'light' AS note",
    "id % 2 = 0 AS even",
    f"IF(id % 3 = 0, 'one', 'two') AS {WINDOW}",
)
HASH = "split={by: hash, train: 0.5, validate: 0.2, score: 0.3}"
GROUP = "split={by: hash, group: x, train: 0.5, validate: 0.2, score: 0.3}"
TIME = "split={by: time, train: 1 day, validate: 1 day}"
BOTH = {"train": ["one", "two"], "validate": ["one", "two"]}
DAYS = {"train": ["one"], "validate": ["two"]}
OPTIONS = {"x": Number(), "odd": Number(column="a.b"), "kind": Category(column="text")}
FLAG = FittedLabel(name="y", type="binary", classes=("true", "false"))
WHOLE = FittedLabel(name="byte", type="multiclass", classes=("3", "0", "2", "1"))
TEXT = FittedLabel(name="text", type="multiclass", classes=("row x", "row ", "row xx"))
AMOUNT = FittedLabel(name="single", type="regression")


@pytest.fixture(scope="module")
def table(spark, tmp_path_factory):
    table = Table(str(tmp_path_factory.mktemp("rows") / "clean"))
    table.write(spark.range(0, 900, 1, 3).selectExpr(*COLUMNS), partition_by=[WINDOW])
    return table


@pytest.fixture(scope="module")
def features(spark, table):
    return fit(OPTIONS, statistics_of(table.read(spark).toArrow(), OPTIONS))


@pytest.fixture(autouse=True)
def small_files_are_worth_it(monkeypatch):
    monkeypatch.setattr(file_rows, "LEAST_BYTES", 0)


def project_of(table, *overrides):
    text = (
        "source: {kind: parquet, path: /none, partition: p}\nfeatures: {x: number, odd: {type: number, column: a.b}, "
        "kind: {type: category, column: text}}\nlabel: {y: binary}\n"
    )
    return SimpleNamespace(spec=loads(text, list(overrides)).spec, table={"clean": table}.__getitem__)


def told(batches):
    """A task that tells all its rows."""
    rows = [row for batch in batches for row in batch.to_pylist()]
    yield pa.RecordBatch.from_arrays([one_value(pickle.dumps(rows))], ["report"])


def reads_files(rows):
    """Whether no row of the clean table goes through the JVM."""
    return "Scan parquet" not in rows.mapped(told, "report binary")._jdf.queryExecution().toString()


DIVIDED = {
    "booleans": (HASH, BOTH, [FLAG], None),
    "two, weighed": (HASH, BOTH, [FLAG, WHOLE], "single"),
    "bad weights": (HASH, BOTH, [TEXT], "byte"),
    "weighed by booleans": (HASH, BOTH, [AMOUNT], "even"),
    "groups": (GROUP, BOTH, [FLAG, WHOLE], "single"),
    "days": (TIME, DAYS, [AMOUNT, FLAG], None),
    "days, weighed": (TIME, DAYS, [FLAG, WHOLE], "single"),
}
OF_SPARK = {"bad weights", "days, weighed"}  # that Spark hands on in a quick test, too


@pytest.mark.parametrize(
    ("source", "split", "windows", "labels", "weight"),
    [
        pytest.param(
            source,
            *given,
            id=f"{name}-{source}",
            marks=() if source == "files" or name in OF_SPARK else pytest.mark.slow,
        )
        for name, given in DIVIDED.items()
        for source in ("files", "spark")
    ],
)
def test_the_rows_and_their_totals_are_those_of_sql(
    spark, table, features, source, split, windows, labels, weight, monkeypatch
):
    of_labels = Labels(labels=tuple(labels))
    project = project_of(table, split, *([f"weight={weight}"] if weight else []))
    if source == "spark":
        monkeypatch.setattr(file_rows, "_file_rows", lambda *_: None)
    clean = table.read(spark)
    rows = rows_of_parts(clean, project.spec, windows)
    shards = shard_rows(project, clean, windows, features.columns, of_labels)
    assert reads_files(shards) == (source == "files")
    of_weight = F.col(weight).cast("float").alias("weight") if weight else F.lit(1.0).alias("weight")
    seen = rows.select(PART, F.concat(*(F.col(name).cast("string") for name in of_labels.names)).alias("l"), of_weight)
    wanted = counted(seen.collect())
    if weight == "byte":  # which is missing in some rows
        count = wanted["train"].refused_weights
        with pytest.raises(
            DataError, match=f"weight 'byte' is missing, negative or not finite in {count} of the rows to"
        ):
            shards.reports(told)
        assert shards.counts == wanted
        return
    found = [row for report in shards.reports(told) for row in pickle.loads(report)]
    numbers = {label.name: encoded(label) for label in labels} | (
        {weight: F.col(weight).cast("float")} if weight else {}
    )
    chosen = labelled(rows.where(F.col(PART).isNotNull()), of_labels.names).withColumns(
        {**numbers, VALIDATES: F.col(PART) == "validate"}
    )
    names = [f"`{name}`" for name in dict.fromkeys([*features.columns, *numbers, VALIDATES])]
    expected = [row.asDict() for row in chosen.select(*names).collect()]
    assert Counter(map(str, map(dict.items, map(sorted_row, found)))) == Counter(
        map(str, map(dict.items, map(sorted_row, expected)))
    )
    assert len({row[VALIDATES] for row in found}) == 2
    assert shards.counts == wanted


def counted(rows):
    """What is to be counted of rows of a part, a text that is null where a label is, and a weight."""
    counts = {}
    for part in ("train", "validate"):
        labelled_rows = [row for row in rows if row[PART] == part and row.l is not None]
        counts[part] = LabelCounts(
            rows=sum(row[PART] == part for row in rows),
            labelled=len(labelled_rows),
            refused_weights=sum(row.weight is None for row in labelled_rows),
            most_weight=max(row.weight or 0 for row in labelled_rows),
        )
    return counts


def sorted_row(row):
    return dict(sorted(row.items()))


LATER = FittedLabel(name="y", type="binary", classes=("false", "true"))


@pytest.mark.parametrize(
    ("column", "counts"),
    [
        ({}, {}),
        ({"y": ["perhaps", "maybe"]}, {"refused": {"y": 2}, "examples": {"y": "perhaps"}}),
        ({"w": [1.0, float("nan")]}, {"refused_weights": 1}),
        ({"w": [1.0, float("inf")]}, {"refused_weights": 1}),
        ({"w": [1.0, 1e39]}, {"refused_weights": 1}),
        ({"w": [1.0, None]}, {"refused_weights": 1}),
        ({"w": [1.0, -1.0]}, {"refused_weights": 1}),
    ],
    ids=["nothing", "class", "nan", "infinite", "too large", "missing", "negative"],
)
def test_what_no_loss_takes_is_counted_and_handed_on_as_zero(column, counts):
    rows = {"y": ["true", "false"], "w": [1.0, 0.0]} | column | {PART: ["validate", "validate"]}
    labels, parts = Labels(labels=(LATER,)), {"train": ["train"], "validate": ["validate"]}
    task = _LabelledRows(told, ("y", "w", VALIDATES), labels, "w", parts, PART)
    [report] = task([pa.RecordBatch.from_pydict(rows)])
    y = 0.0 if "y" in column else 1.0
    assert pickle.loads(report.column(0)[0].as_py()) == [
        {"y": y, "w": 1.0, VALIDATES: True}, {"y": 0.0, "w": 0.0, VALIDATES: True},
    ]  # fmt: skip
    told_counts = msgspec.json.decode(report.column(1)[0].as_py(), type=dict[str, LabelCounts])
    assert told_counts == {
        "train": LabelCounts(),
        "validate": LabelCounts(rows=2, labelled=2, most_weight=1.0, **counts),
    }
    unlabelled = rows | {"y": [None, None]}
    [report] = task([pa.RecordBatch.from_pydict(unlabelled, pa.schema([("y", pa.string()), *typed(unlabelled)]))])
    assert pickle.loads(report.column(0)[0].as_py()) == []
    told_counts = msgspec.json.decode(report.column(1)[0].as_py(), type=dict[str, LabelCounts])
    assert told_counts == {"train": LabelCounts(), "validate": LabelCounts(rows=2)}


@pytest.mark.parametrize("source", ["files", "spark"])
@pytest.mark.parametrize(
    ("split", "windows"), [(HASH, ["one", "two"]), (TIME, ["two"])],
    ids=["hash", "days"],
)  # fmt: skip
def test_rows_of_one_part_are_counted_without_being_written(spark, table, split, windows, source, monkeypatch):
    if source == "spark":
        monkeypatch.setattr(file_rows, "_file_rows", lambda *_: None)
    project, clean = project_of(table, split), table.read(spark)
    labels = Labels(labels=(FLAG, FittedLabel(name="text", type="multiclass", classes=("row ", "row x"))))
    rows = rows_of(clean, project.spec, "validate", windows)
    refused = rows.where("y IS NOT NULL AND text = 'row xx'").count()
    assert refused
    counting = shard_rows(project, clean, {"validate": windows}, (), labels)
    with pytest.raises(DataError, match=f"label 'text': {refused} of the rows to validate .* such as 'row xx'"):
        counting.count()
    assert counting.counts == {
        "validate": LabelCounts(
            rows=rows.count(), labelled=rows.where("y IS NOT NULL").count(), most_weight=1.0,
            refused={"text": refused}, examples={"text": "row xx"},
        )
    }  # fmt: skip
    known = shard_rows(project, clean, {"validate": windows}, (), Labels(labels=(FLAG, TEXT))).count()
    assert known["validate"].labelled == rows.where("y IS NOT NULL").count()


def typed(rows):
    return [("w", pa.float64()), (PART, pa.string())]


@pytest.mark.parametrize(
    ("overrides", "windows", "labels"),
    [
        (["train.spread_rows=false"], BOTH, [FLAG]),
        (["train.partitions_per_process=2"], BOTH, [FLAG]),
        (["weight=note"], BOTH, [FLAG]),
        ([], DAYS, [FLAG]),
        ([], BOTH, [FittedLabel(name="single", type="multiclass", classes=tuple(f"{n}.0" for n in range(900)))]),
    ],
    ids=["order", "partitions", "weight", "windows", "fractions"],
)
def test_spark_hands_on_what_it_alone_can(spark, table, features, overrides, windows, labels):
    project, clean = project_of(table, HASH, *overrides), table.read(spark)
    assert reads_files(shard_rows(project_of(table, HASH), clean, BOTH, features.columns, Labels(labels=(FLAG,))))
    shards = shard_rows(project, clean, windows, features.columns, Labels(labels=tuple(labels)))
    if "weight=note" in overrides:
        with pytest.raises(DataError, match="weight 'note' is missing, negative or not finite in"):
            shards.reports(told)
        assert all(counts.refused_weights == counts.labelled > 0 for counts in shards.counts.values())
        return
    found = [row for report in shards.reports(told) for row in pickle.loads(report)]
    rows = rows_of_parts(clean, project.spec, windows)
    numbers = {label.name: encoded(label) for label in labels}
    expected = rows.where(F.col(PART).isNotNull()).withColumns(numbers).select(*numbers).dropna().collect()
    assert Counter(tuple(row[name] for name in numbers) for row in found) == Counter(map(tuple, expected))
    partitions = shards.mapped(told, "report binary").rdd.getNumPartitions()
    assert "train.partitions_per_process=2" not in overrides or partitions == 2 * spark.sparkContext.defaultParallelism


@pytest.mark.parametrize(
    ("layout", "config", "message"),
    [(Layout(), ShardConfig(), "come without layout.prepare"), (None, ShardConfig(repartition=2), "repartition=2")],
    ids=["unprepared", "partitions"],
)
def test_what_rows_of_tasks_do_not_take_is_refused(spark, table, features, tmp_path, layout, config, message):
    rows = shard_rows(project_of(table, HASH), table.read(spark), BOTH, features.columns, Labels(labels=(FLAG,)))
    with pytest.raises(ConfigError, match=message):
        write_split(
            rows, VALIDATES, (tmp_path / "a", tmp_path / "b"), labels=["y"],
            layout=layout or Layout(prepare=features), config=config,
        )  # fmt: skip
    with pytest.raises(ConfigError, match="held_out='y' is not the last column of the rows that tasks read"):
        write_split(rows, "y", (tmp_path / "a", tmp_path / "b"), labels=["y"], layout=Layout(prepare=features),
                    config=ShardConfig())  # fmt: skip
    assert list(tmp_path.iterdir()) == []
