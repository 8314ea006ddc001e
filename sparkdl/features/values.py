"""Plain values of raw columns: what a column may be, what is missing, and when two values are one.

Statistics and ``apply`` both begin here, so that what was counted is what is looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.decode import decode
from sparkdl.columns.numpy_arrow import filled, from_numpy, to_numpy
from sparkdl.columns.types import is_list, is_text, is_vector
from sparkdl.errors import DataError, SchemaError

Array = np.ndarray[Any, Any]

_EXACT = float(1 << 53)


@dataclass(frozen=True, slots=True)
class Coded:
    """Values, each distinct one once.

    Attributes:
        distinct: texts in normal form C; two may be equal where the column holds two forms of one.
        codes: ``(n,)`` int64 position of each value in ``distinct``; -1 where it is missing.
    """

    distinct: list[str]
    codes: Array

    def translated(self, ids: Array) -> Array:
        """``(n,)`` the id of each value, where ``ids`` has those of the distinct ones; 0 where it is missing."""
        return np.append(ids, np.int64(0))[self.codes]  # a code of -1 takes the last


@dataclass(frozen=True, slots=True)
class Lists:
    """Rows of any number of values.

    Attributes:
        values: of all rows, row behind row.
        lengths: ``(rows,)`` int64 values of each row.
        missing: rows that are null, which have length 0.
    """

    values: Coded
    lengths: Array
    missing: int


def numbers_of(name: str, column: pa.Array) -> Array:
    """``(rows,)`` float64, NaN where a value is missing.

    Integers, floats, decimals (the nearest float64) and bools are numbers; null, NaN and infinities are missing;
    integers beyond 2**53 are the nearest float64.

    Raises:
        SchemaError: the column holds no numbers.
    """
    kind = _value_type(column)
    types = pa.types
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_boolean(kind)):
        if types.is_null(kind):
            return np.full(len(column), np.nan)
        raise SchemaError(f"column {name!r} is {kind}, no number: cast it, or make it another type of feature")
    decoded = decode(name, column)
    values = decoded.dense(decoded.elements.astype(np.float64), (), np.nan)
    return np.where(np.isfinite(values), values, np.nan)


def coded(name: str, column: pa.Array) -> Coded:
    """The values of a column.

    Strings, integers, bools and dates are values; each counts as its text (``42``, ``true``, ``2024-02-29``), so that a
    CSV file and a table agree. Integers are exact at any size; floats and decimals count where they are whole, as
    pandas makes floats of integers with gaps. NaN and infinities are missing; the empty string is a value. Strings are
    compared in Unicode's normal form C.

    Raises:
        SchemaError: its type has no values that could be told apart.
        DataError: it holds a fraction, or bytes that are no UTF-8.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        encoded = _texts(name, column).dictionary_encode()
        distinct = pc.utf8_normalize(encoded.dictionary, form="NFC").to_pylist()
    except (pa.ArrowInvalid, UnicodeDecodeError) as cause:
        raise DataError(f"column {name!r} holds strings that are no UTF-8 ({cause}): decode them first") from cause
    return Coded(distinct, to_numpy(filled(encoded.indices, -1)).astype(np.int64))


def lists_of(name: str, column: pa.Array) -> Lists:
    """The rows of a column of lists.

    A null list is an empty one; a null element is the unknown value.

    Raises:
        SchemaError: it is none, or its elements have no values that could be told apart.
        DataError: as ``coded``.
    """
    if pa.types.is_null(column.type):
        return Lists(Coded([], np.empty(0, np.int64)), np.zeros(len(column), np.int64), len(column))
    if not is_list(column.type):
        raise SchemaError(f"column {name!r} is {column.type}, no list: give a list, or make it a category")
    lengths = to_numpy(filled(pc.list_value_length(column), 0)).astype(np.int64)
    return Lists(coded(name, column.flatten()), lengths, column.null_count)


def vectors_of(name: str, column: pa.Array) -> tuple[Array, Array]:
    """``(rows, size)`` float64, NaN where a number is missing, and ``(rows,)`` bool, whether a row is null.

    Raises:
        SchemaError: the column holds no lists of numbers and no vectors.
        DataError: rows differ in length.
    """
    if pa.types.is_null(column.type):
        return np.empty((len(column), 0)), np.ones(len(column), np.bool_)
    if not (is_vector(column.type) or (is_list(column.type) and not is_list(column.type.value_type))):
        raise SchemaError(f"column {name!r} is {column.type}, no list of numbers and no vector: make it one")
    decoded = decode(name, column)
    assert decoded.shape is not None
    values = decoded.dense(decoded.elements.astype(np.float64), decoded.shape, np.nan)
    holes = decoded.nulls_by_element(decoded.shape)
    missing = np.zeros(len(column), np.bool_) if decoded.missing is None else decoded.missing
    bad = ~np.isfinite(values) if holes is None else holes | ~np.isfinite(values)
    return np.where(bad, np.nan, values), missing


def times_of(name: str, column: pa.Array, timezone: str) -> pa.Array:
    """A column of dates or of times without a zone: those of instants are taken in ``timezone``.

    Times with a zone are instants, whatever the zone; those without, and dates, are taken as they are written.

    Raises:
        SchemaError: it holds neither.
    """
    kind = column.type
    if pa.types.is_null(kind):
        return column.cast(pa.date32())
    if pa.types.is_date(kind):
        return column.cast(pa.date32())
    if not pa.types.is_timestamp(kind):
        raise SchemaError(f"column {name!r} is {kind}, no date and no time: cast it in Spark")
    if kind.tz is None:
        return column
    return pc.local_timestamp(column.cast(pa.timestamp(kind.unit, timezone)))


def _value_type(column: pa.Array) -> pa.DataType:
    return column.type.value_type if pa.types.is_dictionary(column.type) else column.type


def _texts(name: str, column: pa.Array) -> pa.Array:
    """Values as strings, null where they are missing."""
    kind, types = column.type, pa.types
    if is_text(kind):
        return column.cast(pa.string())
    if types.is_null(kind) or types.is_integer(kind) or types.is_boolean(kind):
        return column.cast(pa.string())
    if types.is_date(kind):
        return column.cast(pa.date32()).cast(pa.string())
    if types.is_floating(kind):
        return _whole(name, numbers_of(name, column)).cast(pa.string())
    if types.is_decimal(kind):
        try:
            return column.cast(pa.decimal128(38, 0)).cast(pa.string())
        except pa.ArrowInvalid as cause:
            raise _fraction(name, kind) from cause
    raise SchemaError(f"column {name!r} is {kind}, whose values are no ids: cast it to a string or an integer")


def _whole(name: str, values: Array) -> pa.Array:
    missing = np.isnan(values)
    numbers = np.where(missing, 0.0, values)
    if ((numbers != np.trunc(numbers)) | (np.abs(numbers) > _EXACT)).any():
        raise _fraction(name, "float")
    return from_numpy(numbers.astype(np.int64), missing)


def _fraction(name: str, kind: object) -> DataError:
    return DataError(
        f"column {name!r} is {kind} and holds numbers that are not whole, or above 2**53, which are no ids: make it a "
        "number, or cast it to a string or an integer"
    )
