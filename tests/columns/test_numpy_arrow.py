"""Numbers between numpy and Arrow: the same values, the same memory, and no pandas."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from datetime import UTC, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.columns.numpy_arrow import (
    filled,
    from_numpy,
    from_rows,
    from_values,
    instants,
    one_value,
    to_numpy,
    to_rows,
)

DTYPES = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_numbers_come_back_from_the_same_memory(dtype, rows):
    values = np.arange(rows + 2).astype(dtype)[1:-1]
    array = from_numpy(values)
    array.validate(full=True)
    assert array.type == pa.from_numpy_dtype(np.dtype(dtype))
    assert array.equals(pa.array(values))
    for offset in (0, rows // 2):
        back = to_numpy(array.slice(offset))
        np.testing.assert_array_equal(back, values[offset:], strict=True)
        assert not rows or (np.shares_memory(back, values) and not back.flags.writeable)


def test_strided_numbers_are_copied():
    values = np.arange(12, dtype=np.float32).reshape(3, 4)[:, 1]
    assert from_numpy(values).to_pylist() == [1.0, 5.0, 9.0]


def test_other_values_go_the_way_of_arrow():
    assert from_numpy(np.array([True, False])).equals(pa.array([True, False]))
    for array in (pa.array([True, None]), pa.array([1, None, 3]), pa.array([1, 2], pa.date32()), pa.array(["a"])):
        np.testing.assert_array_equal(to_numpy(array), array.to_numpy(zero_copy_only=False), strict=True)


def test_bytes_become_one_row():
    for data in (b"", b"report"):
        assert one_value(data).equals(pa.array([data], pa.binary()))


INSTANTS = [datetime(1, 1, 1, tzinfo=UTC), None, datetime(2026, 3, 2, 5, 6, 7, 89, tzinfo=UTC)]
VALUES = [
    (["", None, "\u00e9"], pa.string()),
    ([b"", None, b"\0"], pa.binary()),
    ([-(2**63), None, 2**63 - 1], pa.int64()),
    ([0.1, None, -0.0, float("inf")], pa.float64()),
    ([0.5, 3], pa.float32()),
    ([True, None, False] * 5, pa.bool_()),
    (INSTANTS, pa.timestamp("us", "UTC")),
    ([None, Decimal("1.5")], pa.decimal128(5, 2)),
    ([[1], None, [2, 3]], pa.list_(pa.int64())),
    ([None, None], pa.float64()),
    ([], pa.string()),
    ([], pa.int8()),
]


@pytest.mark.parametrize(("values", "kind"), VALUES)
def test_values_become_what_arrow_makes_of_them(values, kind):
    made = from_values(values, kind)
    made.validate(full=True)
    assert made.equals(pa.array(values, kind))
    assert made.null_count == values.count(None)


@pytest.mark.parametrize(
    ("value", "kind"), [(300, pa.uint8()), (1.5, pa.int64()), ("1", pa.int32()), (2**63, pa.int64())]
)
def test_values_that_do_not_fit_are_refused(value, kind):
    with pytest.raises((TypeError, OverflowError)):
        from_values([value], kind)


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York", "+02:30"])
def test_instants_are_those_of_arrow_in_their_zone(zone):
    numbers = [0, None, -1, 1_774_746_000_123_456, 1_792_890_000_000_000]
    values = pa.array(numbers, pa.int64()).cast(pa.timestamp("us", zone))
    assert list(map(str, instants(values))) == list(map(str, values.to_pylist()))


def test_rows_are_those_of_arrow():
    moments = pa.array([0, None, 1_774_746_000_123_456], pa.int64()).cast(pa.timestamp("us", "UTC"))
    facts = pa.array([[("a", "b")], None, []], pa.map_(pa.string(), pa.string()))
    table = pa.table({"time": moments, "name": ["x", None, "z"], "facts": facts})
    for rows in (table, table.slice(1), table.slice(0, 0), pa.concat_tables([table, table])):
        assert to_rows(rows) == rows.to_pylist()


@pytest.mark.parametrize("number", [-62_135_596_800_000_001, 253_402_300_800_000_000])
def test_an_instant_without_a_year_of_pythons_is_refused(number):
    with pytest.raises(OverflowError):
        instants(pa.array([number], pa.int64()).cast(pa.timestamp("us", "UTC")))


def test_nulls_are_filled_and_set():
    for values, value in (([1, None], -1), (["a", None], ""), ([0.5, None], 0), ([True, None], False)):
        array = pa.array(values)
        assert filled(array, value).equals(array.fill_null(value))
    for numbers in (np.array([1.5, 2.5]), np.array([1, 2], np.int8), np.array([True, True])):
        missing = np.array([False, True])
        made = from_numpy(numbers, missing)
        made.validate(full=True)
        assert made.equals(pa.array(numbers, mask=missing))


def test_rows_become_a_table_with_nulls_where_they_lack_a_column():
    schema = pa.schema([("a", pa.string()), ("b", pa.int32())])
    rows = [{"a": "x", "b": 1}, {"b": None}, {"a": "y"}]
    assert from_rows(rows, schema).equals(pa.Table.from_pylist(rows, schema=schema))
    assert from_rows([], schema).equals(schema.empty_table())


def test_bools_and_python_values_need_no_pandas():
    program = """
        import sys
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc
        from sparkdl.columns.numpy_arrow import from_numpy, from_values, to_numpy

        texts = from_values(["a", None], pa.string())
        assert to_numpy(pc.equal(texts.drop_null(), from_values(["a"], pa.string())[0])).tolist() == [True]
        assert texts.filter(from_numpy(np.array([False, True]))).to_pylist() == [None]
        assert "pandas" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_numbers_are_written_without_what_only_others_need(tmp_path):
    batch = pa.record_batch(
        {
            "features": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32())),
            "ids": pa.array([[1], [2, 3]], pa.list_(pa.int64())),
            "image": pa.array([b"a", b"bc"]),
            "label": pa.array([0, 1], pa.int32()),
            "x": pa.array([0.5, 1.5]),
        }
    )
    with pa.ipc.new_file(tmp_path / "rows.arrow", batch.schema) as file:
        file.write_batch(batch)
    program = """
        import json, sys
        import pyarrow as pa
        from sparkdl.config import ShardConfig
        from sparkdl.shards.files import PartWriter
        from sparkdl.columns.layout import Layout, plan_tensors
        from sparkdl.shards.write import _report
        from sparkdl.storage import Storage

        batch = pa.ipc.open_file(sys.argv[1] + "/rows.arrow").get_batch(0)
        layout = Layout(shapes={"ids": "ragged"})
        tensors = plan_tensors(batch.schema, columns=None, labels=["label"], layout=layout)
        writer = PartWriter(Storage.of(sys.argv[1]), tensors, ShardConfig(), partition=0, tag="tag")
        writer.write(batch)
        report = writer.finish()
        assert sum(run.rows for run in report.runs) == 2
        _report(report.to_json())
        assert not {"pandas", "fsspec", "pyarrow.parquet"} & set(sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
