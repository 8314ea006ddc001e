"""Rows hash as Spark's ``xxhash64`` hashes them, wherever in a batch they lie."""

from __future__ import annotations

import datetime as dt
import decimal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from sparkdl.columns.spark_hash import hashes_as_spark, xxhash64

VALUES = {
    "flag": (pa.bool_(), [True, False]),
    "byte": (pa.int8(), [-128, 127, 0]),
    "short": (pa.int16(), [-(2**15), 2**15 - 1]),
    "whole": (pa.int32(), [-(2**31), 2**31 - 1, 5]),
    "long": (pa.int64(), [-(2**63), 2**63 - 1, 7]),
    "single": (pa.float32(), [0.0, -0.0, float("nan"), float("-inf"), 0.1]),
    "double": (pa.float64(), [0.0, -0.0, float("nan"), -float("nan"), float("inf"), 1e300]),
    "day": (pa.date32(), [dt.date(1, 1, 1), dt.date(2026, 3, 1)]),
    "at": (
        pa.timestamp("us", "UTC"),
        [dt.datetime(1960, 1, 1, 1, 2, 3, 4, dt.UTC), dt.datetime(2026, 3, 1, tzinfo=dt.UTC)],
    ),
    "local": (pa.timestamp("us"), [dt.datetime(1960, 1, 1, 1, 2, 3, 4), dt.datetime(2026, 3, 1)]),
    "price": (pa.decimal128(18, 3), [decimal.Decimal("-123456789012345.678"), decimal.Decimal("0.001")]),
    "text": (pa.string(), ["", "a", "\0", "Zürich", *(("0123456789" * 7)[:n] for n in range(70))]),
    "bytes": (pa.binary(), [bytes(range(255, 255 - n, -1)) for n in range(40)]),
}


def rows_of(count):
    rng = np.random.default_rng(3)
    columns = {
        name: pa.array([[*values, None][i] for i in rng.integers(0, len(values) + 1, count)], kind)
        for name, (kind, values) in VALUES.items()
    }
    return pa.table(columns)


def test_spark_gives_the_same_numbers(spark):
    table = rows_of(2_000)
    frame = spark.createDataFrame(table).repartition(1)
    by_column = {name: F.xxhash64(name) for name in VALUES}
    together = {
        "all": F.xxhash64(*VALUES),
        "with nulls": F.expr(f"xxhash64({', '.join(f'{name} IS NULL, {name}' for name in VALUES)})"),
        "seeded": F.xxhash64(F.lit(9), "text", "double"),
        "by a long": F.xxhash64(F.lit(2**31), "long"),
    }
    hashes = {f"hash of {name}": column for name, column in {**by_column, **together}.items()}
    said = frame.select(*VALUES, *[column.alias(name) for name, column in hashes.items()]).toArrow()
    said = said.cast(pa.schema([*table.schema, *((name, pa.int64()) for name in hashes)]))
    for first, count in ((0, 2_000), (3, 1_500), (1_999, 1), (5, 0)):  # batches that begin anywhere
        rows = pa.RecordBatch.from_struct_array(said.slice(first, count).to_struct_array().combine_chunks())
        given = {f"hash of {name}": [rows[name]] for name in VALUES} | {
            "hash of all": [rows[name] for name in VALUES],
            "hash of with nulls": [part for name in VALUES for part in (rows[name].is_null(), rows[name])],
            "hash of seeded": [9, rows["text"], rows["double"]],
            "hash of by a long": [2**31, rows["long"]],
        }
        for name in hashes:
            assert xxhash64(given[name], count).view(np.int64).tolist() == rows[name].to_pylist(), name


@pytest.mark.parametrize("kind", [kind for kind, _ in VALUES.values()], ids=str)
def test_it_knows_these_types(kind):
    assert hashes_as_spark(kind)


@pytest.mark.parametrize(
    "kind",
    [pa.decimal128(19, 0), pa.list_(pa.int64()), pa.struct([("a", pa.int8())]), pa.null(), pa.uint8(), pa.float16(),
     pa.timestamp("ns"), pa.timestamp("us", "Europe/Zurich"), pa.time64("us"), pa.map_(pa.string(), pa.int8())],
    ids=str,
)  # fmt: skip
def test_it_says_what_it_does_not_know(kind):
    assert not hashes_as_spark(kind)


def test_workers_hash_without_pandas():
    program = (
        "import sys, pyarrow as pa; from sparkdl.columns.numpy_arrow import from_values; "
        "from sparkdl.columns.spark_hash import xxhash64; "
        "values = {pa.bool_(): True, pa.int64(): 1, pa.float64(): 1.5, pa.string(): 'a'}; "
        "xxhash64([from_values([value, None], kind) for kind, value in values.items()], 2); "
        "print('pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
