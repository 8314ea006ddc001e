"""Statistics by Spark are those of rows in memory, and what is rare stays on the cluster."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import functions as F

from sparkdl.errors import DataError, SchemaError
from sparkdl.features.fitted import fit
from sparkdl.features.spec import Category, DateParts, Ids, Number
from sparkdl.features.statistics import KNOTS, PROBABILITIES, Statistics, statistics_of
from sparkdl.pipeline.work import statistics
from sparkdl.pipeline.work.file_rows import FileRows
from sparkdl.pipeline.work.statistics import spark_statistics, window_statistics
from sparkdl.tables.table import Table
from tests.features.conftest import FEATURES, VOWELS, rows_of
from tests.pipeline.judging.conftest import counted_between


def test_spark_counts_what_memory_counts(spark):
    rows = rows_of(300)
    frame = spark.createDataFrame(rows).repartition(3)
    by_spark, in_memory = spark_statistics(frame, FEATURES, VOWELS), statistics_of(rows, FEATURES, VOWELS)
    assert list(by_spark) == list(in_memory)
    for name in FEATURES:
        for field in Statistics.__dataclass_fields__:
            one, two = getattr(by_spark[name], field), getattr(in_memory[name], field)
            assert one == two or one == pytest.approx(two, rel=1e-12), (name, field)


def test_workers_that_read_files_count_what_memory_counts(spark, tmp_path):
    rows = rows_of(300)
    parts = pa.array(np.repeat(["a", "b", "c"], 100))
    frame = spark.createDataFrame(rows.append_column("part", parts))
    Table(str(tmp_path)).write(frame, "overwrite", partition_by=["part"])
    files = FileRows(spark, Table(str(tmp_path)).scan([("part", "in", ["a", "c"])]))
    assert len(files.scan.files) == 2
    chosen = pa.concat_tables([rows.slice(0, 100), rows.slice(200, 100)])
    found, wanted = spark_statistics(frame, FEATURES, VOWELS, files), statistics_of(chosen, FEATURES, VOWELS)
    assert list(found) == list(wanted)
    for name in FEATURES:
        for field in Statistics.__dataclass_fields__:
            one, two = getattr(found[name], field), getattr(wanted[name], field)
            assert one == two or one == pytest.approx(two, rel=1e-12), (name, field)


@pytest.mark.parametrize("by", ["spark", "files"])
def test_the_driver_counts_a_small_table_as_memory_does(spark, tmp_path, monkeypatch, by):
    features = {name: one for name, one in FEATURES.items() if isinstance(one, Number | Category | DateParts)}
    rows = rows_of(300)
    frame, files = spark.createDataFrame(rows).repartition(3), None
    if by == "files":
        Table(str(tmp_path)).write(frame.coalesce(1), "overwrite")
        files = FileRows(spark, Table(str(tmp_path)).scan([]))
    with monkeypatch.context() as patch:
        patch.setattr(statistics, "_quantiles", None)  # no pass by Spark's tasks
        found = spark_statistics(frame, features, VOWELS, files, rows=300)
    wanted = statistics_of(rows, features, VOWELS)
    assert list(found) == list(wanted)
    for name in features:
        for field in Statistics.__dataclass_fields__:
            one, two = getattr(found[name], field), getattr(wanted[name], field)
            assert one == two or one == pytest.approx(two, rel=1e-12), (name, field)
    monkeypatch.setattr(statistics, "DRIVER_VALUES", 300)
    monkeypatch.setattr(statistics, "statistics_of", None)
    assert spark_statistics(frame, features, VOWELS, rows=300).keys() == wanted.keys()


def test_workers_find_quantiles_without_pandas():
    program = (
        "import sys, numpy as np, pyarrow as pa; from sparkdl.columns.numpy_arrow import from_numpy; "
        "from sparkdl.pipeline.work.statistics import _merged_points, _points; "
        "numbers = [from_numpy(np.arange(101.0)), from_numpy(np.arange(101) * 2)]; "
        "[points] = _points(iter([pa.RecordBatch.from_arrays(numbers, ['a', 'b'])])); "
        "second = _merged_points(pa.Table.from_batches([points.slice(101)])); "
        "print(second['column'].to_pylist(), max(second['quantiles'].to_pylist()[0]), 'pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[1] 198.0 False\n"


def test_quantiles_of_many_rows_are_numbers_of_the_rows_however_few_a_column_has(monkeypatch):
    monkeypatch.setattr(statistics, "POINTS", 500)
    monkeypatch.setattr(statistics, "BLOCK_NUMBERS", 21_000)
    random = np.random.default_rng(0)
    many = random.permutation(100_000).astype(np.float64)
    few = np.where(np.arange(100_000) % 20_000 == 0, np.arange(100_000), np.nan)
    batches = pa.table({"many": many, "few": few, "none": np.full(100_000, np.inf)}).to_batches(3_000)
    points = pa.Table.from_batches(list(statistics._points(iter(batches))))
    assert points.num_rows < 15 * 500 + 10
    by_column = {
        column: statistics._merged_points(points.filter(pc.equal(points["column"], column)))["quantiles"][0].as_py()
        for column in (0, 1)
    }
    for found, share in zip(by_column[0], PROBABILITIES + KNOTS, strict=True):
        assert found in many
        assert found == pytest.approx(share * 100_000, abs=100)
    assert by_column[1] == np.nanquantile(few, PROBABILITIES + KNOTS, method="inverted_cdf").tolist()
    assert 2 not in points["column"].to_pylist()


def test_many_columns_behind_a_condition_on_all_of_them_are_counted(spark):
    """Renamed one by one, they would take Spark's optimizer 2^40 conditions."""
    names = [f"n{number}" for number in range(40)]
    frame = spark.range(100).select("id", *[(F.col("id") * number).alias(name) for number, name in enumerate(names)])
    rows = frame.where(F.pmod(F.xxhash64(*names), F.lit(2)) == 0)
    found = spark_statistics(rows, {name: Number() for name in names})
    assert {each.rows for each in found.values()} == {rows.count()}


def test_features_fitted_twice_to_one_frame_are_the_same(spark):
    frame = spark.createDataFrame(rows_of(100)).repartition(3, "plain")
    one, two = (fit(FEATURES, spark_statistics(frame, FEATURES, VOWELS), VOWELS) for _ in range(2))
    assert one.hash == two.hash


def test_a_long_tail_does_not_reach_the_driver(spark, monkeypatch):
    from sparkdl.pipeline.work import statistics

    monkeypatch.setattr(statistics, "HELD_VALUES", 1000)  # in this process; Spark's workers keep theirs
    collected = []

    def watched(counted, options):
        values = list(counted)
        collected.append(len(values))
        return statistics_top(values, options)

    statistics_top = statistics.top_values
    monkeypatch.setattr(statistics, "top_values", watched)
    identity = F.col("id")
    frame = spark.range(0, 30_000, 1, 4).select(
        F.when(identity % 3 == 0, identity % 90).otherwise(identity).cast("string").alias("c"),
        F.array(identity % 7, identity).alias("l"),
    )
    features = {"c": Category(min_count=3), "few": Category(column="c", max_size=5, min_count=1), "l": Ids(max_size=7)}
    found = spark_statistics(frame, features)
    assert collected == [30, 5, 7]
    assert found["c"].total == 30_000
    assert found["c"].others == 30_000 - sum(found["c"].value_counts)
    assert len(found["c"].values) == 30
    assert sorted(found["l"].values) == [str(n) for n in range(7)]


def test_quantiles_are_numbers_of_the_rows(spark):
    frame = spark.range(0, 100_000, 1, 3).select((F.col("id") * 2.0).alias("x"))
    found = spark_statistics(frame, {"x": Number()})["x"]
    for quantile, share in zip(found.quantiles, (0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99), strict=True):
        assert quantile == int(quantile / 2) * 2
        assert quantile / 200_000 == pytest.approx(share, abs=2e-4)
    assert np.array(found.knots) / 200_000 == pytest.approx(KNOTS, abs=2e-4)
    assert sum(found.counts) == found.rows == 100_000


def test_wrong_columns_and_values_are_one_sentence(spark):
    frame = spark.createDataFrame([("a", 1.5)], "s string, x double")
    with pytest.raises(SchemaError, match=r"the columns \['y'\] are missing"):
        spark_statistics(frame, {"y": Number()})
    with pytest.raises(SchemaError, match="column 's' is string, no number"):
        spark_statistics(frame, {"s": Number()})
    with pytest.raises(SchemaError, match="column 's' is string, no list"):
        spark_statistics(frame, {"s": Ids()})
    with pytest.raises(DataError, match="column 'x' is float and holds numbers that are not whole"):
        spark_statistics(frame, {"x": Category()})


def test_windows_are_counted_as_their_reference_was_in_one_pass(spark):
    rows = rows_of(300)
    reference = statistics_of(rows, FEATURES, VOWELS)
    later = {"a": rows_of(120), "b": rows_of(80, seed=5)}
    both = pa.concat_tables(
        [one.append_column("_window", pa.array([name] * len(one))) for name, one in later.items()],
        promote_options="default",
    )
    frame = spark.createDataFrame(both).repartition(2, "plain")
    found = window_statistics(frame, fit(FEATURES, reference, VOWELS))
    assert list(found) == ["a", "b"]
    for window, one in later.items():
        expected = counted_between(reference, FEATURES, one, VOWELS)
        for name in FEATURES:
            for field in Statistics.__dataclass_fields__:
                mine, wanted = getattr(found[window][name], field), getattr(expected[name], field)
                assert mine == wanted or mine == pytest.approx(wanted, rel=1e-12), (window, name, field)


def test_a_name_in_which_spark_would_put_a_variable_has_the_quantiles_of_its_numbers(spark):
    numbers = "CASE WHEN id % 9 = 0 THEN NULL WHEN id % 7 = 0 THEN double('nan') ELSE id END"
    frame = spark.range(5000).selectExpr(f"{numbers} AS x").withColumn("${HOME} x", F.col("x"))
    plain, strange = spark_statistics(frame, {"x": Number(), "${HOME} x": Number()}).values()
    assert plain == strange
