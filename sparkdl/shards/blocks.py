"""Rows cut into blocks, permuted, and laid out as a shard file's record batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.columns.convert import Rows
from sparkdl.columns.numpy_arrow import from_numpy, to_numpy
from sparkdl.columns.spec import TensorSpec
from sparkdl.columns.types import arrow_schema
from sparkdl.config import ShardConfig


class BlockCutter:
    """Cuts the stream of a partition's rows into blocks of ``block_rows`` rows, or fewer where rows are large.

    The cuts depend on the rows alone, not on how they come in batches.
    """

    def __init__(self, config: ShardConfig) -> None:
        self._rows, self._bytes = config.block_rows, config.block_bytes
        self._pending: list[Rows] = []
        self._room: tuple[int, int] = (config.block_rows, config.block_bytes)

    def add(self, rows: Rows, count: int) -> Iterator[Rows]:
        """Take in ``count`` rows; the blocks that are full with them."""
        ends = row_ends(rows, count)
        start = 0
        while start < count:
            fitting_rows = self._fitting(ends, start, count)
            self._pending.append(_slice(rows, start, fitting_rows))
            used = int(ends[start + fitting_rows] - ends[start])
            self._room = (self._room[0] - fitting_rows, self._room[1] - used)
            start += fitting_rows
            if self._room[0] <= 0 or self._room[1] <= 0:
                yield from self.rest()

    def _fitting(self, ends: np.ndarray[Any, Any], start: int, count: int) -> int:
        """How many rows from ``start`` close the block, or are left: the row that reaches a limit is the last one."""
        most = min(self._room[0], count - start)
        closing = int(np.searchsorted(ends[start + 1 : start + most + 1], ends[start] + self._room[1]))
        return min(most, closing + 1)

    def rest(self) -> Iterator[Rows]:
        """The block that is open, if it has rows."""
        if self._pending:
            yield concatenate(self._pending)
        self._pending, self._room = [], (self._rows, self._bytes)


def row_ends(rows: Rows, count: int) -> np.ndarray[Any, Any]:
    """Bytes up to the start of each row, and of all: (count + 1,)."""
    ends = np.zeros(count + 1, np.int64)
    for values in rows.values():
        if isinstance(values, np.ndarray):
            ends += np.arange(count + 1) * (values.nbytes // count)
        else:
            offsets, _ = _parts(values)
            ends += (offsets.astype(np.int64) - offsets[0]) * _item_bytes(values) + np.arange(
                count + 1
            ) * offsets.itemsize
    return ends


def _parts(array: pa.Array) -> tuple[np.ndarray[Any, Any], pa.Array | pa.Buffer]:
    """The offsets of a list or binary array, slices included, and what they point into."""
    if isinstance(array, pa.ListArray):
        return to_numpy(array.offsets), array.values
    _, offsets, data = array.buffers()
    return np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1], data


def _item_bytes(array: pa.Array) -> int:
    if not isinstance(array, pa.ListArray):
        return 1
    kind, count = array.type.value_type, 1
    if pa.types.is_fixed_size_list(kind):
        kind, count = kind.value_type, kind.list_size
    return int(count * kind.bit_width // 8)


def _slice(rows: Rows, start: int, count: int) -> Rows:
    return {
        name: values[start : start + count] if isinstance(values, np.ndarray) else values.slice(start, count)
        for name, values in rows.items()
    }


def concatenate(chunks: list[Rows]) -> Rows:
    """All rows of the chunks, one behind the other."""
    if len(chunks) == 1:
        return chunks[0]
    joined = {}
    for name, first in chunks[0].items():
        parts = [chunk[name] for chunk in chunks]
        joined[name] = np.concatenate(parts) if isinstance(first, np.ndarray) else pa.concat_arrays(parts)
    return joined


def permuted(rows: Rows, order: np.ndarray[Any, Any]) -> Rows:
    """The rows in the order of the (n,) positions ``order``."""
    return {
        name: np.take(values, order, axis=0) if isinstance(values, np.ndarray) else values.take(from_numpy(order))
        for name, values in rows.items()
    }


def to_batch(rows: Rows, tensors: Sequence[TensorSpec]) -> pa.RecordBatch:
    """The rows as a record batch of a shard file."""
    schema = arrow_schema(tensors)
    return pa.RecordBatch.from_arrays([_to_arrow(rows[f.name], f.type) for f in schema], schema=schema)


def from_batch(batch: pa.RecordBatch, tensors: Sequence[TensorSpec]) -> Rows:
    """The rows of a record batch, without a copy: what ``to_batch`` was given."""
    rows: Rows = {}
    for spec in tensors:
        array = batch.column(spec.name)
        if pa.types.is_fixed_size_list(array.type):
            rows[spec.name] = to_numpy(array.flatten()).reshape(len(array), *spec.shape)
        else:
            rows[spec.name] = array if pa.types.is_nested(array.type) or spec.dtype == "binary" else to_numpy(array)
    return rows


def _to_arrow(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, np.ndarray):
        flat = from_numpy(values.reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, type=kind) if pa.types.is_fixed_size_list(kind) else flat
    return values
