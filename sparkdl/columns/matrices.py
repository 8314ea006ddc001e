"""The matrix of a column in scoring, which must not loop over rows; no Spark, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.columns.decode import Values, decode
from sparkdl.columns.numpy_arrow import to_numpy
from sparkdl.errors import DataError

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


def matrix_of(name: str, column: pa.Array, *, ragged: bool = False, width: int | None = None, inner: int = 1) -> Matrix:
    """Turn a column into a matrix.

    The result is a view of Arrow's memory where that allows it.

    Args:
        name: for messages.
        column: of any type of the type table; nested arrays are laid out flat.
        ragged: whether rows of different lengths are padded with zeros to the longest, instead of refused.
        width: elements of a row, for an array column whose rows are all null here and do not tell.
        inner: of ragged rows of arrays: the numbers in each of these.

    Raises:
        SchemaError: no tensor can hold the type.
        DataError: rows differ in length, or the arrays inside ragged rows have another one than ``inner``.
    """
    if not column.null_count and (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return Matrix(to_numpy(column)[:, None])  # as decode does, in a quarter of the time: tables have many
    decoded = decode(name, column, ragged=ragged)
    if ragged and decoded.width not in (0, inner):
        raise DataError(
            f"column {name!r} has {decoded.width} numbers in each element of its rows, and the model was trained with "
            f"{inner}: give the column that it was trained with"
        )
    if decoded.shape is None:
        return _padded(decoded)
    untold = decoded.lengths is not None and not decoded.lengths.size
    size = width if untold and width is not None else math.prod(decoded.shape)
    values, holes = decoded.dense(decoded.elements, (size,), 0), decoded.nulls_by_element((size,))
    return Matrix(values, holes, _missing(decoded, holes))


def _padded(decoded: Values) -> Matrix:
    """Rows of different lengths, zeros behind the shorter ones."""
    lengths = decoded.row_lengths()
    longest = int(lengths.max(initial=0))
    valid = np.arange(longest) < lengths[:, None]
    if valid.all():
        even = None if decoded.holes is None else decoded.holes.reshape(valid.shape)
        return Matrix(decoded.elements.reshape(valid.shape), even, _missing(decoded, even), valid)
    values = np.zeros((decoded.rows, longest), decoded.elements.dtype)
    values[valid] = decoded.elements
    holes = None
    if decoded.holes is not None or decoded.missing is not None:
        holes = np.zeros(values.shape, np.bool_)
        if decoded.holes is not None:
            holes[valid] = decoded.holes
        if decoded.missing is not None:
            holes[decoded.missing] = True
    return Matrix(values, holes, _missing(decoded, holes), valid)


def _missing(decoded: Values, holes: Array | None) -> Array | None:
    """Which rows are null, or have a null element."""
    return decoded.missing if decoded.holes is None or holes is None else np.asarray(holes.any(axis=1))
