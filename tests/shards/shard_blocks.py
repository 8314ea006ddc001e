"""The tensors of a block of a shard file, as the files hold them: how tests read what was written, without a loader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.columns.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Ragged:
    """A ragged tensor of a block: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``.

    Attributes:
        values: (elements, *shape) array; uint8 for binary columns.
        offsets: (rows + 1,) array of int32 or int64, not starting at 0 for a slice.
    """

    values: np.ndarray[Any, Any]
    offsets: np.ndarray[Any, Any]


def tensor_arrays(batch: pa.RecordBatch, tensors: Sequence[TensorSpec]) -> dict[str, np.ndarray[Any, Any] | Ragged]:
    """View a block of a shard file as numpy arrays, without a copy.

    Args:
        batch: one record batch of a shard file, or a slice of it.
        tensors: those to view.

    Returns:
        by name, ``(rows, *shape)`` arrays, or ``Ragged`` for ragged tensors and byte strings. A bool is uint8.
    """
    return {spec.name: _view(batch.column(spec.name), spec) for spec in tensors}


def _view(array: Any, spec: TensorSpec) -> Any:
    rows = len(array)
    if spec.dtype == "binary":
        # a Parquet file hands back what it was given; 32-bit offsets come from other writers
        width = np.int64 if pa.types.is_large_binary(array.type) else np.int32
        _, offsets, data = array.buffers()
        values = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
        return Ragged(values, np.frombuffer(offsets, width)[array.offset : array.offset + rows + 1])
    if not pa.types.is_nested(array.type):
        return array.to_numpy(zero_copy_only=True)
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        values = array.values.slice(array.offset * size, rows * size)
        return values.to_numpy(zero_copy_only=True).reshape(rows, *spec.shape)
    inner = array.values.values if pa.types.is_fixed_size_list(array.values.type) else array.values
    offsets, values = array.offsets.to_numpy(), inner.to_numpy(zero_copy_only=True)
    if spec.ragged and spec.shape:
        return Ragged(values.reshape(-1, *spec.shape), offsets)
    if spec.ragged:
        return Ragged(values, offsets)
    return values[offsets[0] : offsets[-1]].reshape(rows, *spec.shape)
