"""Numbers between numpy and Arrow on the same memory, and Python's values to Arrow, all without pandas."""

from __future__ import annotations

import array
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

_EPOCH, _INSTANT = datetime(1970, 1, 1, tzinfo=UTC), pa.timestamp("us", "UTC")
_CODES = {
    pa.int8(): "b", pa.int16(): "h", pa.int32(): "i", pa.int64(): "q", pa.float32(): "f",
    pa.uint8(): "B", pa.uint16(): "H", pa.uint32(): "I", pa.uint64(): "Q", pa.float64(): "d",
}  # fmt: skip
"""The type codes of ``array.array``, which refuses what does not fit; numpy would cut a fraction off."""


# Arrow's own ``to_numpy``, ``pa.array`` and ``pa.scalar`` import pandas at their first call, and so does a comparison
# of an array with a plain value: 0.3 to 1 s in every process.
def to_numpy(values: pa.Array) -> np.ndarray[Any, Any]:
    """The values as numpy's; numbers without a null share their memory, read-only."""
    kind = values.type
    if not values.null_count and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return np.from_dlpack(values)
    if not values.null_count and pa.types.is_boolean(kind):
        return np.from_dlpack(values.cast(pa.uint8())).view(bool)
    return values.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def filled(values: pa.Array, value: str | float) -> pa.Array:
    """The values with ``value`` in place of nulls."""
    return values.fill_null(from_values([value], values.type)[0]) if values.null_count else values


def from_numpy(values: np.ndarray[Any, Any], missing: np.ndarray[Any, Any] | None = None) -> pa.Array:
    """The numbers ``values``, ``(n,)``, as an Arrow array on the same memory; bools become bits.

    Args:
        values: numbers or bools.
        missing: of each whether it is null.
    """
    if values.dtype.kind not in "iufb":
        return pa.array(values, mask=missing)
    validity = None if missing is None else pa.py_buffer(np.packbits(~missing, bitorder="little"))
    data = np.packbits(values, bitorder="little") if values.dtype.kind == "b" else np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [validity, pa.py_buffer(data)])


def one_value(data: bytes) -> pa.Array:
    """A binary array of one row, ``data``."""
    offsets = np.array([0, len(data)], np.int32)
    return pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def from_values(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Python values, None among them, as an array of texts, bytes, numbers, booleans, or instants in microseconds.

    Args:
        values: as ``pa.array`` takes them; ``from_values([value], kind)[0]`` is the scalar of one.
        kind: of the array; what is of any other type, ``pa.array`` makes.
    """
    valid = np.array([value is not None for value in values], bool)
    validity = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        encoded = [value.encode() if isinstance(value, str) else value or b"" for value in values]
        offsets = np.cumsum([0, *map(len, encoded)])
        if offsets[-1] <= np.iinfo(np.int32).max:
            data = [validity, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(b"".join(encoded))]
            return pa.Array.from_buffers(kind, len(values), data)
    if pa.types.is_boolean(kind):
        bits = np.packbits(np.array([bool(value) for value in values], bool), bitorder="little")
        return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(bits)])
    if kind == _INSTANT:
        values = [None if value is None else (value - _EPOCH) // timedelta(microseconds=1) for value in values]
    elif kind not in _CODES:
        return pa.array(values, kind)
    numbers = array.array(_CODES.get(kind, "q"), [0 if value is None else value for value in values])
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(numbers.tobytes())])


def to_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows as ``to_pylist`` gives them, which imports pandas where there are instants: 0.2 s."""
    columns = [instants(column) if column.type == _INSTANT else column.to_pylist() for column in table.columns]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def instants(values: pa.Array | pa.ChunkedArray) -> list[datetime | None]:
    """Instants in microseconds as ``to_pylist`` gives them, in their time zone.

    Raises:
        OverflowError: Python's datetime has no such year.
    """
    zone = pa.lib.string_to_tzinfo(values.type.tz)
    numbers = values.cast(pa.int64()).to_pylist()
    return [None if n is None else (_EPOCH + timedelta(microseconds=n)).astimezone(zone) for n in numbers]


def from_rows(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Rows as a table, None in a column that one of them lacks."""
    columns = [from_values([row.get(field.name) for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)
