"""Batches that are merged and cut hold every row, in order."""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.columns.batches import merge_small, split_evenly


def numbered(sizes):
    numbers = iter(range(sum(sizes)))
    return [
        pa.RecordBatch.from_pydict({"x": pa.array([next(numbers) for _ in range(size)], pa.int64())}) for size in sizes
    ]


def rows_of(batches):
    return [value for batch in batches for value in batch.column("x").to_pylist()]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 12))
def test_joining_keeps_every_row_in_order_and_leaves_no_two_that_fit_together(sizes, rows):
    out = list(merge_small(iter(numbered(sizes)), rows))
    assert rows_of(out) == list(range(sum(sizes)))
    assert all(one.num_rows + two.num_rows > rows for one, two in pairwise(out))
    assert all(0 < batch.num_rows <= max(rows, *sizes) for batch in out)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 12), st.integers(1, 100))
def test_what_is_joined_is_bounded_in_bytes_too(sizes, rows, most_bytes):
    out = list(merge_small(iter(numbered(sizes)), rows, most_bytes))
    assert rows_of(out) == list(range(sum(sizes)))
    bound = min(rows, most_bytes // 8)
    assert all(one.num_rows + two.num_rows > bound for one, two in pairwise(out))
    assert all(0 < batch.num_rows <= max(bound, *sizes) for batch in out)


@given(st.integers(1, 50), st.integers(1, 12))
def test_cutting_keeps_every_row_in_order_in_even_pieces(size, rows):
    pieces = split_evenly(numbered([size])[0], rows)
    assert rows_of(pieces) == list(range(size))
    assert len(pieces) <= -(-size // rows)
    assert all(0 < piece.num_rows <= rows for piece in pieces)
