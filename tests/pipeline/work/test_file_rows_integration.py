"""Workers that read and hash rows themselves give each part the rows that Spark gives it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from pyspark.errors import PythonException
from pyspark.sql import functions as F

from sparkdl.errors import DataError
from sparkdl.features.fitted import fit
from sparkdl.features.spec import Category, Number
from sparkdl.features.statistics import statistics_of
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.rows.parts import PART, rows_of, rows_of_parts, with_slots
from sparkdl.pipeline.windows import WINDOW
from sparkdl.pipeline.work import boosting, file_rows
from sparkdl.pipeline.work.file_rows import FileRows, part_files, part_frame
from sparkdl.pipeline.work.labels import FittedLabel
from sparkdl.tables.table import Table

TEXT = """
source: {kind: parquet, path: /none}
features: {x: number}
label: {y: binary}
split: {by: hash, train: 0.5, validate: 0.2, test: 0.1, score: 0.1}
"""
COLUMNS = (
    "IF(id % 7 = 0, NULL, id) AS x",
    "IF(id % 11 = 0, NULL, id % 2 = 0) AS y",
    "CAST(IF(id % 5 = 0, 'NaN', id / 3) AS DOUBLE) AS `a.b`",
    "CAST(id AS FLOAT) AS single",
    "CAST(id % 100 AS BYTE) AS byte",
    "concat('row ', repeat('x', CAST(id % 40 AS INT))) AS text",
    "timestamp_seconds(id) AS at",
    "CAST(timestamp_seconds(id) AS DATE) AS day",
    "CAST(id AS DECIMAL(12, 2)) AS price",
    f"IF(id % 3 = 0, 'one', 'two') AS {WINDOW}",
)
GROUP = ["split.group=text"]
PARTS = ("train", "validate", "test", "score")


@pytest.fixture(scope="module")
def table(spark, tmp_path_factory):
    table = Table(str(tmp_path_factory.mktemp("parts") / "clean"))
    table.write(spark.range(0, 900, 1, 3).selectExpr(*COLUMNS), partition_by=[WINDOW])
    return table


@pytest.fixture(autouse=True)
def small_files_are_worth_it(monkeypatch):
    monkeypatch.setattr(file_rows, "LEAST_BYTES", 0)


def project_of(spec, table):
    return SimpleNamespace(spec=spec, table={"clean": table}.__getitem__)


def counted(frame, columns=None):
    return Counter(map(str, frame.select(*(f"`{name}`" for name in columns or frame.columns)).collect()))


@pytest.mark.parametrize(
    ("override", "windows"),
    [
        ("split.seed=3000000000", ["one", "two"]),
        pytest.param("split.seed=0", ["two"], marks=pytest.mark.slow),
        pytest.param("split.seed=0", ["one", "two"], marks=pytest.mark.slow),
        pytest.param("split.seed=3000000000", ["two"], marks=pytest.mark.slow),
    ],
)
def test_a_part_has_the_rows_that_spark_gives_it(spark, table, override, windows):
    spec, clean = loads(TEXT, [override]).spec, table.read(spark)
    slotted = with_slots(clean, spec)
    assert rows_of(clean, spec, "train", windows).count() > 100
    for part in PARTS:
        of_spark, of_files = (
            rows_of(clean, spec, part, windows),
            part_frame(project_of(spec, table), slotted, {part: windows}),
        )
        assert of_files.schema == of_spark.schema
        assert "MapInArrow" in of_files._jdf.queryExecution().toString()  # else Spark is compared with itself
        assert counted(of_files) == counted(of_spark)
        some = part_frame(project_of(spec, table), slotted, {part: windows}, ["a.b", WINDOW])
        assert some.columns == ["a.b", WINDOW]
        assert counted(some) == counted(of_spark, ["a.b", WINDOW])
    several = dict.fromkeys(("train", "score"), windows)
    of_spark, of_files = rows_of_parts(clean, spec, several), part_frame(project_of(spec, table), slotted, several)
    assert of_files.columns == of_spark.columns
    assert counted(of_files) == counted(of_spark.where(F.col(PART).isNotNull()))


@pytest.mark.parametrize(
    "override",
    [
        "split.seed=5",
        "split={by: time, train: 1 day, validate: 1 day}",
        *(pytest.param(override, marks=pytest.mark.slow) for override in ("split.group=text", "source.key=[x, a.b]")),
    ],
)
def test_the_driver_reads_the_labelled_rows_of_a_part(spark, table, override):
    text = TEXT.replace("path: /none", "path: /none, partition: p") if "time" in override else TEXT
    spec, clean = loads(text, [override]).spec, table.read(spark)
    for part in ("train", "validate"):
        files = part_files(project_of(spec, table), part, ["one"], spark)
        of_spark = rows_of(clean, spec, part, ["one"]).where("y IS NOT NULL")
        expected = [str(row) for row in of_spark.select("x", "text").collect()]
        assert sorted(str(row) for row in spark.createDataFrame(files.collected(["x", "text"])).collect()) == sorted(
            expected
        )
        sums = files.map(["x"], [], "x long").agg(F.sum("x")).first()[0]
        assert sums == of_spark.agg(F.sum("x")).first()[0]


@pytest.mark.parametrize("override", ["split.copies=spread", "split.group=text", "source.key=text"])
def test_spark_reads_what_is_divided_otherwise(spark, table, override, monkeypatch):
    monkeypatch.setattr(FileRows, "map", None)
    spec, clean = loads(TEXT, [override]).spec, table.read(spark)
    windows = {"train": ["one", "two"]}
    assert counted(part_frame(project_of(spec, table), clean, windows)) == counted(
        rows_of(clean, spec, "train", ["one", "two"])
    )


@pytest.mark.parametrize("column", ["array(id) AS z", "CAST('a' AS BINARY) AS z", "CAST(id AS DECIMAL(20, 2)) AS z"])
def test_spark_hashes_what_workers_do_not_know(spark, tmp_path, column, monkeypatch):
    monkeypatch.setattr(FileRows, "map", None)
    table, spec = Table(str(tmp_path / "clean")), loads(TEXT).spec
    table.write(spark.range(50).selectExpr("id AS x", "id % 2 = 0 AS y", column, f"'all' AS {WINDOW}"))
    clean = table.read(spark)
    assert part_files(project_of(spec, table), "train", ["all"], spark) is None
    assert counted(part_frame(project_of(spec, table), clean, {"train": ["all"]})) == counted(
        rows_of(clean, spec, "train", ["all"])
    )


def test_spark_hashes_texts_that_it_compares_by_their_collation(spark, tmp_path, monkeypatch):
    table, spec = Table(str(tmp_path / "clean")), loads(TEXT, GROUP).spec
    table.write(spark.range(50).selectExpr("id AS x", "id % 2 = 0 AS y", "'a' AS text", f"'all' AS {WINDOW}"))
    assert part_files(project_of(spec, table), "train", ["all"], spark) is not None
    scan = table.scan([])
    marked = replace(scan, schema_json=scan.schema_json.replace('"metadata": {}', '"metadata": {"__COLLATIONS": {}}'))
    assert marked != scan
    monkeypatch.setattr(Table, "scan", lambda *given: marked)
    assert part_files(project_of(spec, table), "train", ["all"], spark) is None


def test_spark_keeps_the_rows_of_small_files(spark, table, monkeypatch):
    monkeypatch.setattr(FileRows, "map", None)
    spec, clean, windows = loads(TEXT).spec, table.read(spark), {"train": ["one"]}
    files = table.scan([(WINDOW, "in", ["one"])]).files
    monkeypatch.setattr(file_rows, "LEAST_BYTES", 1 + sum(file.bytes for file in files) // len(files))
    assert part_files(project_of(spec, table), "train", ["one"], spark) is None
    assert counted(part_frame(project_of(spec, table), clean, windows)) == counted(
        rows_of(clean, spec, "train", ["one"])
    )
    by_group = loads(TEXT, GROUP).spec  # of which Spark keeps nothing
    assert part_files(project_of(by_group, table), "train", ["one"], spark) is not None


def test_a_part_without_rows_has_the_columns(spark, table):
    spec = loads(TEXT, ["split={by: hash, train: 0.5, validate: 0.000001, score: 0}"]).spec
    assert part_frame(project_of(spec, table), table.read(spark), {"validate": ["one"]}).count() == 0
    empty = part_files(project_of(spec, table), "validate", ["one"], spark).collected(["text", "x"])
    assert (empty.num_rows, empty.column_names) == (0, ["text", "x"])


@pytest.mark.parametrize(
    ("label", "name", "weight"),
    [
        (FittedLabel(name="y", type="binary", classes=("false", "true")), "y", None),
        (FittedLabel(name="y", type="binary", classes=("true", "false")), "y", "byte"),
        (FittedLabel(name="byte", type="multiclass", classes=("7", "12", "3")), "byte", "single"),
        (FittedLabel(name="text", type="multiclass", classes=("row ", "row xx")), "text", None),
        (FittedLabel(name="single", type="regression"), "single", "byte"),
    ],
    ids=["booleans", "the other way", "whole numbers", "texts", "numbers"],
)
def test_trees_get_the_labels_and_weights_that_spark_makes(spark, table, label, name, weight):
    spec = loads(TEXT.replace("{y: binary}", f"{{{name}: {label.type}}}"), [f"weight={weight}"] if weight else []).spec
    options = {"x": Number(), "kind": Category(column="text")}
    features = fit(options, statistics_of(table.read(spark).toArrow(), options))
    files = part_files(project_of(spec, table), "train", ["one", "two"], spark)
    rows = rows_of(table.read(spark), spec, "train", ["one", "two"]).where(f"{name} IS NOT NULL")
    of_spark, of_files = (
        boosting._collected(rows, spec, features, label),
        boosting._collected_of_files(files, spec, features, label),
    )
    assert of_files.column_names == of_spark.column_names
    assert Counter(map(str, of_files.to_pylist())) == Counter(map(str, of_spark.to_pylist()))


def test_spark_writes_fractions_that_are_classes(spark, table):
    spec = loads(TEXT.replace("{y: binary}", "{single: multiclass}")).spec
    options = {"x": Number()}
    features = fit(options, statistics_of(table.read(spark).toArrow(), options))
    label = FittedLabel(name="single", type="multiclass", classes=("1.0", "2.0"))
    files = part_files(project_of(spec, table), "train", ["one"], spark)
    assert boosting._collected_of_files(files, spec, features, label) is None


def test_who_reads_some_columns_knows_how_many_a_hash_is_of(spark, table):
    whole, group = (
        part_files(project_of(loads(TEXT, more).spec, table), "train", ["one"], spark) for more in ([], GROUP)
    )
    assert (whole.width(["x"]), whole.width(["x", "y"]), group.width(["x"])) == (8, 9, 2)


def test_of_pictures_spark_reads_the_first_byte(spark, table):
    spec = loads(TEXT, ["features.picture={type: image, column: text, height: 8, width: 8}"]).spec
    assert file_rows.part_files(project_of(spec, table), "train", ["one"], spark) is None


def test_an_error_whose_text_is_no_utf_8_reaches_the_driver(spark, table):
    """Java waits for ever for one that pyspark cannot encode."""

    def fails(batches):
        raise DataError(f"no column 'caf\udce9' among {next(batches).schema.names}")
        yield

    files = part_files(project_of(loads(TEXT, GROUP).spec, table), "train", ["one"], spark)
    with pytest.raises((PythonException, DataError), match=r"no column 'caf\\udce9' among \['x'\]"):
        files.map(["x"], [fails], "x long").collect()
