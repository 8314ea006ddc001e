"""Numbers cast to the dtype of their tensor; what it cannot hold is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparkdl.errors import DataError

Array = np.ndarray[Any, Any]


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """What elements of a tensor are kept as: a bool is a uint8 of 0 or 1, a byte string uint8."""
    return np.dtype("uint8" if dtype in ("bool", "binary") else dtype)


def cast(values: Array, dtype: str, column: str) -> Array:
    """Cast numbers; those that have the dtype already are returned as they are.

    No number comes out wrapped, truncated or newly infinite.

    Args:
        values: of any shape.
        dtype: of a tensor (``types.DTYPES``, or ``"binary"``).
        column: for messages.

    Raises:
        DataError: a number does not fit.
    """
    target = storage_dtype(dtype)
    if values.dtype == target and dtype != "bool":
        return values
    if not values.size:
        return values.astype(target)
    if dtype == "bool" and values.dtype != np.bool_:
        _require_fit(values, (values == 0) | (values == 1), dtype, column)
    elif target.kind in "iu" and values.dtype.kind == "f":
        low, high = np.iinfo(target).min, float(np.iinfo(target).max) + 1  # as a float, 2**63 - 1 would be 2**63
        _require_fit(values, (values >= low) & (values < high) & (values == np.trunc(values)), dtype, column)
    elif target.kind in "iu" and values.dtype.kind in "iu":
        extremes = np.array([values.min(), values.max()])
        limits = np.iinfo(target)
        _require_fit(extremes, np.array([limits.min <= int(v) <= limits.max for v in extremes]), dtype, column)
    with np.errstate(over="ignore", invalid="ignore"):
        result = values.astype(target)
    if target.kind == "f" and (target.itemsize < values.dtype.itemsize or target == np.float16):
        _require_fit(values, np.isfinite(result) | ~np.isfinite(values), dtype, column)
    return result


def cast_columns(matrix: Array, dtype: str, columns: Sequence[str]) -> Array:
    """Cast a matrix; an error names the column.

    Args:
        matrix: ``(rows, columns)``, or ``(rows, elements)`` of one column.
        dtype: of the tensor.
        columns: names of its columns.

    Raises:
        DataError: a number does not fit.
    """
    try:
        return cast(matrix, dtype, columns[0])
    except DataError:
        if len(columns) == 1:
            raise
        for position, column in enumerate(columns):
            cast(matrix[:, position], dtype, column)
        raise


def _require_fit(values: Array, fits: Array, dtype: str, column: str) -> None:
    if not fits.all():
        raise DataError(
            f"column {column!r} holds {values[~fits][0]}, which {dtype} cannot hold: choose another dtype for it"
        )
