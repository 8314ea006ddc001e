"""A file that is read by ranges: Arrow sees a file, the storage only requests for bytes that are there."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.storage import RangeReader


def test_parquet_is_read_through_requests_that_lie_in_the_file():
    table = pa.table({"x": np.random.default_rng(0).random(100_000), "y": ["a", "b"] * 50_000})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=10_000)
    data, requests = sink.getvalue(), []

    def read_range(start, length):
        requests.append((start, length))
        return data[start : start + length]

    with RangeReader(len(data), read_range) as file, pq.ParquetFile(file) as parquet:
        assert parquet.read_row_group(3).equals(table.slice(30_000, 10_000))
    assert all(start >= 0 and length > 0 and start + length <= len(data) for start, length in requests)
    assert sum(length for _, length in requests) < len(data) / 2


def test_beyond_its_end_there_is_nothing_and_nothing_is_asked_for():
    file = RangeReader(5, lambda start, length: b"abcde"[start : start + length])
    assert (file.read(2), file.read(), file.read(1)) == (b"ab", b"cde", b"")
    assert (file.seek(-1, io.SEEK_END), file.read(10), file.tell()) == (4, b"e", 5)
    never = RangeReader(5, lambda start, length: 1 // 0)
    never.seek(7)
    assert never.read(1) == b""
