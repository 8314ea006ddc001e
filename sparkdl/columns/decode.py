"""The numbers of one Arrow column: the only place that knows how each type lies in Arrow's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.numpy_arrow import filled, from_numpy, from_values, to_numpy
from sparkdl.columns.types import is_list, is_text, is_vector, number_dtype
from sparkdl.errors import DataError, SchemaError

Array = np.ndarray[Any, Any]

_EXACT_INTEGERS = 1 << 53
_EXACT_POWERS = 22
"""10**22 is the largest power of ten that a float64 holds exactly."""


@dataclass(frozen=True, slots=True)
class Values:
    """The numbers of one column of a batch.

    Attributes:
        rows: of the batch, null ones included.
        elements: ``(n,)`` numbers of the rows that are not null, row behind row; null elements hold 0.
        shape: of one row: ``()`` for a number, ``(k,)`` or ``(r, c)`` for arrays of one length; None where rows may
            differ in length.
        lengths: ``(rows that are not null,)`` elements of each, for arrays and byte strings; None for numbers.
        missing: ``(rows,)`` bool, True where a row is null; None if none is.
        holes: ``(n,)`` bool, True where an element inside a row is null; None if none is.
        unseen: rows whose string the dictionary does not hold; they count as null.
        width: of arrays of arrays whose rows may differ in length: numbers in each inner array, which all have as many;
            0 where there is none. Else 1.
    """

    rows: int
    elements: Array
    shape: tuple[int, ...] | None = ()
    lengths: Array | None = None
    missing: Array | None = None
    holes: Array | None = None
    unseen: int = 0
    width: int = 1

    @property
    def nulls(self) -> int:
        """Null rows, and null elements inside rows."""
        return sum(int(marks.sum()) for marks in (self.missing, self.holes) if marks is not None)

    def row_lengths(self) -> Array:
        """``(rows,)`` elements of each row of an array column, 0 where it is null."""
        assert self.lengths is not None
        if self.missing is None:
            return self.lengths
        lengths = np.zeros(self.rows, np.int64)
        lengths[~self.missing] = self.lengths
        return lengths

    def dense(self, elements: Array, shape: tuple[int, ...], fill: Any) -> Array:
        """Lay ``elements`` (these, or what they were cast to) out as ``(rows, *shape)``; null rows hold ``fill``."""
        if self.missing is None:
            return elements.reshape(self.rows, *shape)
        padded = np.full((self.rows, *shape), fill, elements.dtype)
        present = ~self.missing
        padded[present] = elements.reshape(int(present.sum()), *shape)
        return padded

    def nulls_by_element(self, shape: tuple[int, ...]) -> Array | None:
        """``(rows, *shape)`` bool, True where a row or an element of it is null; None if nothing is."""
        if self.holes is not None:
            return self.dense(self.holes, shape, True)
        if self.missing is None:
            return None
        by_row = self.missing.reshape(self.rows, *[1] * len(shape))
        return np.broadcast_to(by_row, (self.rows, *shape))


def decode(name: str, column: pa.Array, *, ragged: bool = False, codes: Mapping[str, int] | None = None) -> Values:
    """Read the numbers of a column.

    Shards and scoring both begin here, so that the tensor that training saw is the tensor that scoring sees.

    Args:
        name: for messages.
        column: of any type of the type table (``types.py``), dictionary-encoded strings included.
        ragged: whether rows of an array may differ in length.
        codes: of a string column: the number of each value.

    Raises:
        SchemaError: no tensor can hold the type.
        DataError: rows differ in length where they must not, or a time is finer than microseconds or too far off.
    """
    kind = column.type
    unseen = 0
    if codes is not None and is_text(kind):
        column, unseen = _codes(column, codes)
    missing = to_numpy(column.is_null()) if column.null_count else None
    present = column if missing is None else column.drop_null()
    rows = len(column)
    if is_vector(kind):
        elements, lengths, size = _vectors(name, present)
        return Values(rows, elements, (size,), lengths, missing)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        elements, lengths = _bytes(present)
        return Values(rows, elements, None if ragged else (_even(name, lengths),), lengths, missing)
    if is_list(kind):
        elements, lengths, shape, holes, width = _lists(name, present, ragged)
        return Values(rows, elements, shape, lengths, missing, holes, width=width)
    return Values(rows, _numbers(name, present), (), None, missing, unseen=unseen)


def _numbers(name: str, array: pa.Array) -> Array:
    """The numbers of an array without nulls, ``(n,)``."""
    kind = array.type
    if pa.types.is_date(kind):
        array = array.cast(pa.date32()).view(pa.int32())
    elif pa.types.is_timestamp(kind):
        try:
            array = array.cast(pa.timestamp("us", kind.tz)).view(pa.int64())
        except pa.ArrowInvalid as cause:
            if kind.unit == "ns":
                reason = f"finer than microseconds ({cause}): round them first"
            else:
                reason = f"that microseconds since 1970 cannot hold in 64 bits ({cause}): leave these out"
            raise DataError(f"column {name!r} has times {reason}") from cause
    elif pa.types.is_decimal(kind):
        return _decimals(array)
    elif number_dtype(kind) is None:
        raise SchemaError(
            f"column {name!r} has the type {kind}, which no tensor can hold: cast it to a number or an array"
        )
    return to_numpy(array)


def _decimals(array: pa.Array) -> Array:
    """The float64 nearest to each decimal, as Spark's own cast to double gives it.

    Arrow's cast multiplies by an inexact power of ten and is off by the last bit for every tenth number. An integer of
    up to 53 bits divided by an exact power is rounded once; the others go through their text.
    """
    scale = array.type.scale
    if array.type.precision <= 38 and 0 <= scale <= _EXACT_POWERS and len(array):
        wide = array.cast(pa.decimal128(array.type.precision, scale))
        halves = np.frombuffer(wide.buffers()[1], np.int64)[2 * wide.offset : 2 * (wide.offset + len(wide))]
        low, high = halves[::2], halves[1::2]
        if (high == low >> 63).all() and abs(int(low.min())) <= _EXACT_INTEGERS >= abs(int(low.max())):
            exact: Array = low / 10.0**scale
            return exact
    return to_numpy(array.cast(pa.string()).cast(pa.float64()))


def _codes(column: pa.Array, codes: Mapping[str, int]) -> tuple[pa.Array, int]:
    """Strings as numbers, and how many have none; work is done once a distinct value, not once a row."""
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    numbers = [codes.get(value) for value in encoded.dictionary.to_pylist()]
    translated = from_values(numbers, pa.int32()).take(encoded.indices)
    return translated, translated.null_count - np.count_nonzero(
        to_numpy(column.is_null())
    )  # nulls of a dictionary, too


def _bytes(present: pa.Array) -> tuple[Array, Array]:
    """The bytes of byte strings, and how many each has."""
    column = present.cast(pa.large_binary())  # int64 offsets, whatever it had
    _, offsets, data = column.buffers()
    if not len(column) or data is None:
        return np.empty(0, np.uint8), np.zeros(len(column), np.int64)
    ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(data, np.uint8)[ends[0] : ends[-1]], np.diff(ends)


def _lists(
    name: str, present: pa.Array, ragged: bool
) -> tuple[Array, Array, tuple[int, ...] | None, Array | None, int]:
    """Lists of numbers, or of lists of these: values, lengths, shape of a row, null elements, ``Values.width``."""
    width = 1
    lengths = to_numpy(pc.list_value_length(present)).astype(np.int64, copy=False)
    shape: tuple[int, ...] | None = None if ragged else (_even(name, lengths),)
    inner = present.flatten()
    if is_list(inner.type):
        if inner.null_count:
            raise DataError(f"column {name!r} has {inner.null_count} null arrays inside its rows: fill them first")
        width = _even(name, to_numpy(pc.list_value_length(inner)), "arrays inside its rows" if ragged else "rows")
        lengths = lengths * width
        shape = None if shape is None else (*shape, width)
        inner = inner.flatten()
    if number_dtype(inner.type) is None:
        raise SchemaError(f"column {name!r} has the type {present.type}, no array of numbers: cast it or leave it out")
    holes = None
    if inner.null_count:
        holes = to_numpy(inner.is_null())
        inner = filled(inner, 0)
    return _numbers(name, inner), lengths, shape, holes, width if ragged else 1


def _vectors(name: str, present: pa.Array) -> tuple[Array, Array, int]:
    """Dense and sparse vectors as numbers, their lengths, and the size of all."""
    rows = len(present)
    sparse = to_numpy(present.field("type")) == 0
    values, indices = present.field("values"), present.field("indices")
    stored = to_numpy(pc.list_value_length(values)).astype(np.int64, copy=False)
    lengths = stored
    if sparse.any():
        lengths = np.where(sparse, to_numpy(filled(present.field("size"), 0)), stored)
    k = _even(name, lengths, "vectors")
    numbers = to_numpy(values.flatten())
    if not sparse.any():
        return numbers, lengths, k
    row_of = np.repeat(np.arange(rows), stored)
    positions = np.arange(len(numbers)) - (np.cumsum(stored) - stored)[row_of]
    positions[sparse[row_of]] = to_numpy(indices.filter(from_numpy(sparse)).flatten())
    dense = np.zeros((rows, k))
    dense[row_of, positions] = numbers
    return dense.reshape(-1), lengths, k


def _even(name: str, lengths: Array, what: str = "rows") -> int:
    """The one length of all rows; 0 without rows."""
    if not lengths.size:
        return 0
    least, most = int(lengths.min()), int(lengths.max())
    if least != most:
        raise DataError(
            f"column {name!r} has {what} of {least} and of {most} elements where a tensor needs one length: pad or cut "
            "them to one"
        )
    return least
