"""Numbers between numpy and Arrow: the same values, the same memory, and no pandas."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.columns.numpy_arrow import from_numpy, one_value, to_numpy

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
