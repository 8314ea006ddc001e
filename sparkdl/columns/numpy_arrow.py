"""Numbers between numpy and Arrow, without a copy and without pandas.

An array of one library becomes one of the other on the same memory. Arrow's own ``to_numpy``, ``pa.array`` and
``pa.scalar`` import pandas at their first call: 0.3 s in every worker that writes its first shard.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["from_numpy", "one_value", "to_numpy"]


def to_numpy(array: pa.Array) -> np.ndarray[Any, Any]:
    """The values of ``array`` as numpy's; numbers without a null share their memory, read-only."""
    kind = array.type
    if not array.null_count and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return np.from_dlpack(array)
    return array.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def from_numpy(values: np.ndarray[Any, Any]) -> pa.Array:
    """The numbers ``values``, ``(n,)``, as an Arrow array on the same memory; bools become bits."""
    if values.dtype.kind not in "iuf":
        return pa.array(values)
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def one_value(data: bytes) -> pa.Array:
    """A binary array of one row, ``data``."""
    offsets = np.array([0, len(data)], np.int32)
    return pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
