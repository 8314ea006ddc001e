"""Arrow columns become matrices: compared with the plain Python values of every row."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.columns.matrices import matrix_of
from sparkdl.errors import DataError, SchemaError

VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)


def vector(values, sparse):
    if values is None:
        return None
    if not sparse:
        return {"type": 1, "size": None, "indices": None, "values": values}
    kept = [(i, value) for i, value in enumerate(values) if value]
    return {
        "type": 0,
        "size": len(values),
        "indices": [i for i, _ in kept],
        "values": [value for _, value in kept],
    }


@settings(deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda width: st.lists(
            st.tuples(
                st.none() | st.lists(st.sampled_from([0.0, 1.5, -2.0]), min_size=width, max_size=width), st.booleans()
            ),
            max_size=12,
        )
    ),
    st.integers(0, 3),
)
def test_vectors_of_any_kind_equal_their_values(rows, start):
    column = pa.array([vector(values, sparse) for values, sparse in rows], VECTOR)[start:]
    rows = rows[start:]
    found = matrix_of("v", column)
    for i, (values, _) in enumerate(rows):
        assert (found.missing is not None and bool(found.missing[i])) == (values is None)
        if values is not None:
            assert found.values[i].tolist() == values


@settings(deadline=None)
@given(
    st.lists(st.none() | st.lists(st.none() | st.integers(-5, 5), max_size=4), max_size=12),
    st.integers(0, 3),
    st.sampled_from([pa.list_(pa.int64()), pa.large_list(pa.int16())]),
)
def test_ragged_rows_equal_their_values_and_their_mask(rows, start, kind):
    found = matrix_of("l", pa.array(rows, kind)[start:], ragged=True)
    longest = max((len(row) for row in rows[start:] if row), default=0)
    assert found.values.shape == (len(rows[start:]), longest)
    for i, row in enumerate(rows[start:]):
        assert found.valid[i].tolist() == [j < len(row or []) for j in range(longest)]
        for j, value in enumerate(row or []):
            assert found.values[i, j] == (value or 0)
            assert (found.holes is not None and bool(found.holes[i, j])) == (value is None)
        assert (found.missing is not None and bool(found.missing[i])) == (row is None or None in row)


@settings(deadline=None)
@given(st.lists(st.none() | st.binary(max_size=5), max_size=8), st.integers(0, 2))
def test_bytes_equal_their_values(rows, start):
    found = matrix_of("b", pa.array(rows, pa.binary())[start:], ragged=True)
    assert found.values.dtype == np.uint8 or not rows[start:]
    for i, row in enumerate(rows[start:]):
        assert bytes(found.values[i][found.valid[i]].tolist()) == (row or b"")


@pytest.mark.parametrize(
    ("values", "kind", "wanted"),
    [
        ([True, None, False], pa.bool_(), [True, False, False]),
        ([2**62 + 1, None, -1], pa.int64(), [2**62 + 1, 0, -1]),
        ([1.5, float("nan"), None], pa.float32(), [1.5, float("nan"), 0.0]),
        ([dt.date(1970, 1, 3), None], pa.date32(), [2, 0]),
        ([dt.datetime(1970, 1, 1, 0, 0, 1)], pa.timestamp("us", "UTC"), [1_000_000]),
        ([Decimal("1.25"), None], pa.decimal128(10, 2), [1.25, 0.0]),
    ],
)
def test_scalars_equal_their_values(values, kind, wanted):
    found = matrix_of("s", pa.array(values, kind))
    np.testing.assert_array_equal(found.values[:, 0], wanted)
    nulls = [value is None for value in values]
    assert (found.missing.tolist() if found.missing is not None else [False] * len(values)) == nulls


def test_numbers_without_nulls_are_not_copied():
    column = pa.array(np.arange(6, dtype=np.float32))
    assert np.shares_memory(matrix_of("s", column).values, column.to_numpy())
    packed = pa.FixedSizeListArray.from_arrays(column, 3)
    assert np.shares_memory(matrix_of("p", packed).values, column.to_numpy())


def test_what_is_no_number_or_has_no_one_length_is_refused_by_name():
    with pytest.raises(SchemaError, match="'s' has the type string"):
        matrix_of("s", pa.array(["a"]))
    with pytest.raises(SchemaError, match=r"'s' has the type list<.*string>"):
        matrix_of("s", pa.array([["a"]]))
    with pytest.raises(DataError, match=r"'l' has rows of 1 and of 2"):
        matrix_of("l", pa.array([[1], [1, 2]]))
    with pytest.raises(DataError, match=r"'v' has vectors of 1 and of 2"):
        matrix_of("v", pa.array([vector([1.0], False), vector([1.0, 2.0], True)], VECTOR))
    with pytest.raises(DataError, match=r"'m' has rows of 1 and of 2"):
        matrix_of("m", pa.array([[[1], [1, 2]]]))


@pytest.mark.parametrize(
    "kind", [VECTOR, pa.list_(pa.float32()), pa.list_(pa.float32(), 6), pa.list_(pa.list_(pa.float64()))], ids=str
)
def test_a_column_of_nulls_alone_is_as_wide_as_its_reader_expects(kind):
    found = matrix_of("v", pa.array([None, None], kind), width=6)
    assert found.values.tolist() == [[0.0] * 6] * 2
    assert found.missing.tolist() == [True, True]
    assert found.holes.shape == (2, 6)
    assert matrix_of("v", pa.array([[1.0], None]), width=6).values.shape == (2, 1)  # rows that tell are believed
    assert matrix_of("x", pa.array([None, None], pa.float64()), width=6).values.shape == (2, 1)
