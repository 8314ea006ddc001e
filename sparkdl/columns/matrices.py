"""Arrow columns as matrices: the part of scoring that must not loop over rows.

Enters: one column of a record batch. Leaves: ``(rows, width)`` of numpy and which rows miss a value. Views where
Arrow's memory allows it. No Spark, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.types import is_vector
from sparkdl.errors import DataError, SchemaError

__all__ = ["Matrix", "matrix_of"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One column of a batch.

    Attributes:
        values: (rows, width); rows that miss a value hold zeros there.
        holes: (rows, width) bool, True where an element is null; None if none is.
        missing: (rows,) bool, True where anything of the row is null; None if nothing is.
        valid: (rows, width) bool of a ragged column, True where the row has an element; None for even ones.
    """

    values: Array
    holes: Array | None = None
    missing: Array | None = None
    valid: Array | None = None


def matrix_of(name: str, column: pa.Array, *, ragged: bool = False) -> Matrix:
    """Turn a column into a matrix.

    Args:
        name: for messages.
        column: numbers, booleans, dates, instants, decimals, arrays of numbers (nested ones are laid out flat), or
            Spark ML vectors, dense and sparse, or bytes.
        ragged: whether rows of different lengths are padded with zeros to the longest, instead of refused.

    Raises:
        SchemaError: no tensor can hold the type.
        DataError: rows differ in length.
    """
    kind = column.type
    if is_vector(kind):
        return _vectors(name, column)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        kind, column = pa.list_(pa.uint8()), _bytes(column)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _lists(name, column, ragged)
    values, missing = _numbers(name, column)
    return Matrix(values[:, None], None if missing is None else missing[:, None], missing)


def _numbers(name: str, column: pa.Array) -> tuple[Array, Array | None]:
    """A flat column of numbers and where it is null; nulls become 0."""
    kind = column.type
    if pa.types.is_date(kind):
        column = column.cast(pa.int32()) if pa.types.is_date32(kind) else column.cast(pa.int64())
    elif pa.types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())
    elif pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise SchemaError(
            f"column {name!r} has the type {kind}, which no tensor can hold: cast it to a number or an array"
        )
    missing = None
    if column.null_count:
        missing = column.is_null().to_numpy(zero_copy_only=False)
        column = pc.fill_null(column, False if pa.types.is_boolean(column.type) else 0)
    return column.to_numpy(zero_copy_only=False), missing


def _bytes(column: pa.Array) -> pa.Array:
    """A binary column as lists of bytes, over the same memory."""
    column = column.cast(pa.large_binary())  # int64 offsets, whatever it had
    validity, offsets, data = column.buffers()
    count = len(data) if data is not None else 0
    values = pa.Array.from_buffers(pa.uint8(), count, [None, data])
    kind = pa.large_list(pa.uint8())
    return pa.Array.from_buffers(
        kind, len(column), [validity, offsets], column.null_count, column.offset, children=[values]
    )


def _lists(name: str, column: pa.Array, ragged: bool) -> Matrix:
    rows = len(column)
    missing = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    inner = column.flatten()  # leaves out null rows, whose length is counted as 0
    if pa.types.is_list(inner.type) or pa.types.is_large_list(inner.type):
        nested = _lists(f"{name}[]", inner, ragged=False)
        flat, holes = nested.values.reshape(-1), nested.missing
        width = nested.values.shape[1]
        lengths = lengths * width
        holes = np.repeat(holes, width) if holes is not None else None
    else:
        flat, holes = _numbers(name, inner)
    here = lengths if missing is None else lengths[~missing]
    longest = int(here.max()) if len(here) else 0
    even = not len(here) or int(here.min()) == longest
    if not even and not ragged:
        raise DataError(
            f"column {name!r} has rows of {int(here.min())} and of {longest} elements, a tensor needs one "
            "length: pad them, or declare the length as None"
        )
    if even and missing is None:
        shape = (rows, longest)
        where = None if holes is None else holes.reshape(shape)
        bad = None if where is None else np.asarray(where.any(axis=1))
        return Matrix(flat.reshape(shape), where, bad, np.ones(shape, dtype=bool) if ragged else None)
    valid = np.arange(longest) < lengths[:, None]
    values = np.zeros((rows, longest), dtype=flat.dtype)
    values[valid] = flat
    if holes is None and missing is None:
        return Matrix(values, valid=valid if ragged else None)
    where = np.zeros(values.shape, dtype=bool)
    if holes is not None:
        where[valid] = holes
    if missing is not None:
        where[missing] = True
    bad = np.asarray(where.any(axis=1))
    if missing is not None:
        bad |= missing
    return Matrix(values, where, bad, valid if ragged else None)


def _vectors(name: str, column: pa.Array) -> Matrix:
    rows = len(column)
    missing = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    kinds, sizes, indices, values = column.flatten()  # a null row is null in each of them
    dense = pc.fill_null(pc.equal(kinds, 1), True).to_numpy(zero_copy_only=False)
    counts = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    flat = values.flatten().to_numpy(zero_copy_only=False)
    present = ~missing if missing is not None else np.ones(rows, dtype=bool)
    known = np.where(dense, counts, pc.fill_null(sizes, 0).to_numpy(zero_copy_only=False))
    widths = known[present]
    width = int(widths.max()) if len(widths) else 0
    if len(widths) and int(widths.min()) != width:
        raise DataError(
            f"column {name!r} has vectors of {int(widths.min())} and of {width} elements: make them one length"
        )
    if missing is None and dense.all():
        return Matrix(flat.reshape(rows, width))
    out = np.zeros((rows, width), dtype=np.float64)
    row = np.repeat(np.arange(rows), counts)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    position = np.arange(len(flat)) - starts
    is_sparse = ~dense[row]
    position[is_sparse] = indices.flatten().to_numpy(zero_copy_only=False)
    out[row, position] = flat
    return Matrix(out, None if missing is None else np.repeat(missing[:, None], width, axis=1), missing)
