"""Rows hash alike if and only if their values are equal, wherever in a batch they lie."""

from __future__ import annotations

import datetime as dt
import decimal
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.columns.row_hash import column_hashes
from sparkdl.errors import SchemaError

TEXT = st.text(max_size=600) | st.text("ab\0", max_size=20)
VALUES = {
    pa.int8(): st.integers(-128, 127),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.bool_(): st.booleans(),
    pa.date32(): st.dates(),
    pa.timestamp("us", "UTC"): st.datetimes(timezones=st.just(dt.UTC)),
    pa.decimal128(20, 3): st.decimals(-(10**15), 10**15, places=3),
    pa.string(): TEXT,
    pa.large_string(): TEXT,
    pa.binary(): st.binary(max_size=40),
    pa.list_(pa.int32()): st.lists(st.none() | st.integers(-3, 3), max_size=4),
    pa.list_(pa.list_(pa.string())): st.lists(st.none() | st.lists(TEXT, max_size=2), max_size=3),
    pa.struct({"a": pa.int16(), "b": pa.string()}): st.fixed_dictionaries(
        {"a": st.none() | st.integers(-2, 2), "b": st.none() | st.text(max_size=2)}
    ),
    pa.map_(pa.string(), pa.int64()): st.lists(
        st.tuples(st.text(max_size=2), st.none() | st.integers(0, 2)), max_size=3
    ),
}


def hashes(array):
    return column_hashes({"x": array})["x"].tolist()


def plain(value):
    """A value as two equal ones compare equal, NaN included."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value + 0.0
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    if isinstance(value, dict):
        return tuple((name, plain(inner)) for name, inner in value.items())
    return value


@pytest.mark.parametrize("kind", VALUES, ids=str)
def test_values_hash_alike_exactly_where_they_are_equal(kind):
    @settings(deadline=None)
    @given(st.lists(st.none() | VALUES[kind], max_size=12), st.integers(0, 12), st.integers(0, 3))
    def check(values, start, lead):
        array = pa.array([None] * lead + values, kind).slice(lead)
        found = hashes(array)
        by_value = {}
        for value, hashed in zip(array.to_pylist(), found, strict=True):
            assert by_value.setdefault(plain(value), hashed) == hashed
        assert len(set(by_value.values())) == len(by_value), "two values have one hash"
        assert hashes(array.slice(start)) == found[start:]
        assert [hashed for part in (array[:start], array[start:]) for hashed in hashes(part)] == found
        assert hashes(pa.concat_arrays([array.slice(start), array])) == found[start:] + found

    check()


@pytest.mark.parametrize("kind", [pa.struct({"a": pa.int16(), "b": pa.string()}), pa.map_(pa.int16(), pa.string())])
def test_zeros_in_one_field_and_nothing_in_the_other_are_told_apart(kind):
    pairs = [(0, ""), (0, "\0"), (1, ""), (0, "\0\0"), (2, ""), (0, "\0" * 9), (9, "")]
    array = pa.array([[pair] if pa.types.is_map(kind) else dict(zip("ab", pair, strict=True)) for pair in pairs], kind)
    assert len({*hashes(array)}) == len(pairs)


def test_what_is_missing_is_no_value_and_columns_are_told_apart_by_name():
    assert len({*hashes(pa.array([None, [], [None], [None, None], [0]], pa.list_(pa.int8())))}) == 5
    assert len({*hashes(pa.array([None, "", "\0", "\0\0"]))}) == 4
    assert hashes(pa.array([-0.0])) == hashes(pa.array([0.0]))
    assert hashes(pa.array([float("nan")])) == hashes(pa.array(np.array([-1], np.int64).view(np.float64)))
    both = column_hashes({"a": pa.array([1, 2]), "b": pa.array([1, 2])})
    assert len({*both["a"].tolist(), *both["b"].tolist()}) == 4
    assert hashes(pa.nulls(2)) == hashes(pa.array([None, None], pa.string()))


def test_hashes_stay_what_they_are():
    """Books of earlier runs hold them: where this changes, so does the version of the step."""
    columns = {
        "n": pa.array([1, None]),
        "t": pa.array(["sparkdl", "x" * 300]),
        "d": pa.array([decimal.Decimal("1.50"), None]),
        "l": pa.array([[1.5], []]),
    }
    assert {name: [f"{one:016x}" for one in found.tolist()] for name, found in column_hashes(columns).items()} == {
        "n": ["707c706957c3a6ce", "147d1fbbb71c53ad"],
        "t": ["3056219528c5f330", "1eece3de38c6ae07"],
        "d": ["8323602e22e48776", "f4060a0e045979cd"],
        "l": ["4895b0ce0efa9630", "7b6a28c6bfad60e7"],
    }


def test_a_type_that_it_does_not_know_is_refused_by_name():
    with pytest.raises(SchemaError, match=r"column 'x' is dictionary<.*cast it"):
        hashes(pa.array(["a"]).dictionary_encode())
