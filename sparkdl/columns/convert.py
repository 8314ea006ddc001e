"""Arrow columns as they arrive -> the tensors of a shard, by numpy and Arrow kernels, never row by row.

Enters: record batches of source columns. Leaves: for every tensor an array of its rows, nulls treated by policy, and
the statistics of every column.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.layout import mask_name
from sparkdl.columns.numpy_arrow import from_numpy, to_numpy
from sparkdl.columns.spec import TensorSpec
from sparkdl.columns.statistics import RunningStats, add_matrix
from sparkdl.columns.types import UNKNOWN, is_vector
from sparkdl.errors import DataError, SchemaError

__all__ = ["Converter", "Rows"]

Array = np.ndarray[Any, Any]

Rows = dict[str, Any]
"""By tensor: an (n, *shape) numpy array, or an Arrow array of n lists or byte strings."""


class Converter:
    """Turns the batches of one partition into tensors.

    Args:
        tensors: as planned.
        packed_already: packed tensors that arrive as one array column of their name, not as their columns.

    Attributes:
        tensors: as planned; a length that was unknown is filled in by the first row that has one.
        statistics: by source column, of all batches so far.
        unseen: by string column, how many values its dictionary does not hold.
        refused: whether a null came where the policy is ``"error"``: what follows is counted only.
    """

    def __init__(self, tensors: Sequence[TensorSpec], packed_already: Collection[str] = ()) -> None:
        self.tensors = list(tensors)
        self._packed_already = frozenset(packed_already)
        columns = [column for spec in tensors if spec.mask_of is None for column in spec.columns]
        self.statistics = {column: RunningStats() for column in columns}
        self.unseen: dict[str, int] = {}
        self.refused = False
        self._codes = {
            spec.name: {value: code for code, value in enumerate(spec.dictionary)}
            for spec in tensors
            if spec.logical == "string"
        }

    def convert(self, batch: pa.RecordBatch) -> Rows:
        """The tensors of a batch's rows.

        Raises:
            DataError: a value does not fit its dtype, or a row not its shape.
            SchemaError: rows of a vector or nested array differ in shape.
        """
        rows: Rows = {}
        for position, spec in enumerate(self.tensors):
            if spec.mask_of is None:
                values, valid = self._tensor(batch, position, spec)
                rows[spec.name] = values
                if spec.nulls == "mask":
                    rows[mask_name(spec.name)] = valid
        return rows

    def _tensor(self, batch: pa.RecordBatch, position: int, spec: TensorSpec) -> tuple[Any, Array | None]:
        if spec.name in self._packed_already:
            return self._matrix(batch.column(spec.name), spec)
        column = spec.columns[0]
        array = batch.column(column)
        if spec.shape and not pa.types.is_nested(array.type):
            return self._packed(batch, spec)
        if pa.types.is_nested(array.type):
            values, valid = self._array(array, position, spec)
        elif spec.dtype == "binary":
            values, valid = self._binary(array, spec)
        else:
            values, valid = self._scalar(array, spec, column, spec.fill[0])
        if spec.nulls != "mask":
            return values, None
        rows = len(array)
        shape = (rows, *self.tensors[position].shape) if isinstance(values, np.ndarray) else (rows,)
        if valid is None:
            return values, np.ones(shape, np.uint8)
        if valid.ndim < len(shape):
            valid = np.broadcast_to(valid.reshape(rows, *[1] * (len(shape) - 1)), shape)
        return values, valid.astype(np.uint8)

    def _matrix(self, rows: pa.Array, spec: TensorSpec) -> tuple[Array, Array | None]:
        """Columns that Spark packed into arrays of equal length: their elements are the tensor already."""
        shape = (len(rows), len(spec.columns))
        elements = rows.flatten()
        statistics = [self.statistics[column] for column in spec.columns]
        if not elements.null_count:
            matrix = to_numpy(elements).reshape(shape)
            add_matrix(statistics, matrix)
            return _cast_matrix(matrix, spec), np.ones(shape, np.uint8) if spec.nulls == "mask" else None
        self._count_nulls(elements.null_count, spec)
        valid = to_numpy(elements.is_valid()).reshape(shape)
        matrix = to_numpy(_zero_filled(elements)).reshape(shape)
        for position, stats in enumerate(statistics):
            present = valid[:, position]
            stats.add(matrix[present, position], len(rows) - int(present.sum()))
        fill = _cast(np.array(spec.fill), spec, spec.name)
        return np.where(valid, _cast_matrix(matrix, spec), fill), valid.astype(np.uint8)

    def _packed(self, batch: pa.RecordBatch, spec: TensorSpec) -> tuple[Array, Array | None]:
        packed = np.empty((batch.num_rows, len(spec.columns)), _storage_dtype(spec))
        mask = np.ones(packed.shape, np.uint8) if spec.nulls == "mask" else None
        for position, column in enumerate(spec.columns):
            values, valid = self._scalar(batch.column(column), spec, column, spec.fill[position])
            packed[:, position] = values
            if mask is not None and valid is not None:
                mask[:, position] = valid
        return packed, mask

    def _scalar(self, array: pa.Array, spec: TensorSpec, column: str, fill: float) -> tuple[Array, Array | None]:
        """A column of numbers, and where it has them (None: everywhere)."""
        array = self._encode(array, spec) if spec.logical == "string" else _plain(array, column)
        nulls = array.null_count
        if not nulls:
            values = to_numpy(array)
            return self._take_in(values, spec, column), None
        self._count_nulls(nulls, spec)
        valid = to_numpy(array.is_valid())
        present = self._take_in(to_numpy(array.drop_null()), spec, column, nulls)
        values = np.full(len(array), _cast(np.array([fill]), spec, column)[0], present.dtype)
        values[valid] = present
        return values, valid

    def _take_in(self, values: Array, spec: TensorSpec, column: str, nulls: int = 0) -> Array:
        """Count non-null numbers into the statistics, and cast them."""
        self.statistics[column].add(values, nulls)
        return _cast(values, spec, column)

    def _count_nulls(self, nulls: int, spec: TensorSpec) -> None:
        if nulls and spec.nulls == "error":
            self.refused = True

    def _encode(self, array: pa.Array, spec: TensorSpec) -> pa.Array:
        """Strings as codes; work is done once a distinct value, not once a row."""
        encoded = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
        codes = self._codes[spec.name]
        known = [codes.get(value) for value in encoded.dictionary.to_pylist()]
        translated = pa.array(known, pa.int32()).take(encoded.indices)
        unseen = translated.null_count - array.null_count
        if unseen:
            self.unseen[spec.name] = self.unseen.get(spec.name, 0) + unseen
        return translated

    def _binary(self, array: pa.Array, spec: TensorSpec) -> tuple[pa.Array, Array | None]:
        nulls = array.null_count
        self._count_nulls(nulls, spec)
        lengths = to_numpy(pc.binary_length(array).drop_null())
        statistics = self.statistics[spec.name]
        statistics.add(lengths, nulls)
        valid = to_numpy(array.is_valid()) if nulls else None
        array = array.cast(pa.large_binary())
        return (array.fill_null(b"") if nulls else array), valid

    def _array(self, array: pa.Array, position: int, spec: TensorSpec) -> tuple[Any, Array | None]:
        """A column of arrays or vectors, and which rows (elements, if they have one shape) have values."""
        rows, nulls = len(array), array.null_count
        valid = to_numpy(array.is_valid()) if nulls else None
        present = array.drop_null() if nulls else array
        statistics = self.statistics[spec.name]
        statistics.null_count += nulls
        if is_vector(array.type):
            values, lengths, shape = _vectors(present, spec)
            holes: Array | None = None
        else:
            values, holes, lengths, shape = self._elements(present, spec)
        statistics.add_lengths(lengths if valid is None else np.append(lengths, 0))
        missing = 0 if holes is None else int(holes.sum())
        statistics.add(values if holes is None else values[~holes], missing)
        self._count_nulls(nulls + missing, spec)
        flat = _cast(values, spec, spec.name)
        if holes is not None:
            flat = np.where(holes, _cast(np.array([spec.fill[0]]), spec, spec.name), flat)
        if spec.ragged:
            if holes is not None and spec.nulls == "mask":
                raise DataError(
                    f"column {spec.name!r} is ragged and has {missing} nulls inside its arrays, which a mask by row "
                    f"cannot mark: use nulls='fill' or declare its shape"
                )
            return _ragged(flat, lengths, valid, rows), valid
        shape = self._settle(position, spec, shape, len(present))
        dense = flat.reshape(len(present), *shape)
        if holes is not None:
            marks = np.zeros((rows, *shape), bool)
            marks[slice(None) if valid is None else valid] = ~holes.reshape(dense.shape)
            valid_elements: Array | None = marks
        else:
            valid_elements = valid
        if valid is None:
            return dense, valid_elements
        whole = np.full((rows, *shape), _cast(np.array([spec.fill[0]]), spec, spec.name)[0], dense.dtype)
        whole[valid] = dense
        return whole, valid_elements

    def _elements(
        self, present: pa.Array, spec: TensorSpec
    ) -> tuple[Array, Array | None, Array, tuple[int, ...] | None]:
        """The elements of non-null lists: values, which are null, the rows' lengths, and the rows' shape if even."""
        lengths = to_numpy(pc.list_value_length(present))
        shape: tuple[int, ...] | None = None
        inner = present.flatten()
        if pa.types.is_nested(inner.type):
            if inner.null_count:
                raise DataError(
                    f"column {spec.name!r} has {inner.null_count} null arrays inside its rows: fill them first"
                )
            inner_lengths = to_numpy(pc.list_value_length(inner))
            if len(present):
                shape = (_even(lengths, spec), _even(inner_lengths, spec))
            inner = inner.flatten()
        elif not spec.ragged and len(present):
            shape = (_even(lengths, spec),)
        holes = None
        if inner.null_count:
            holes = to_numpy(inner.is_null())
            inner = _zero_filled(inner)
        return to_numpy(inner), holes, lengths, shape

    def _settle(self, position: int, spec: TensorSpec, shape: tuple[int, ...] | None, rows: int) -> tuple[int, ...]:
        """Compare the shape of a batch's rows with the one planned, and learn it where it was unknown."""
        planned = spec.shape
        if shape is None or not rows:
            if UNKNOWN in planned:
                raise DataError(
                    f"column {spec.name!r} is null in all rows of a batch, so its shape is unknown: "
                    f"declare it in shapes, or leave the column out"
                )
            return planned
        if UNKNOWN in planned:
            self.tensors[position] = replace(spec, shape=shape)
            for other, mask in enumerate(self.tensors):
                if mask.mask_of == spec.name:
                    self.tensors[other] = replace(mask, shape=shape)
            return shape
        if int(np.prod(shape)) != int(np.prod(planned)) or (len(shape) == len(planned) and shape != planned):
            raise SchemaError(
                f"column {spec.name!r} has a row of shape {shape}, expected {planned}: correct the shape given, or "
                "declare it as ragged"
            )
        return planned


def _zero_filled(array: pa.Array) -> pa.Array:
    return array.fill_null(pa.scalar(0).cast(array.type))


def _plain(array: pa.Array, column: str) -> pa.Array:
    """Dates, times and decimals as the integers they are stored as; numbers as they are."""
    kind = array.type
    if pa.types.is_date32(kind):
        return array.view(pa.int32())
    if pa.types.is_date64(kind):
        return array.cast(pa.date32()).view(pa.int32())
    if pa.types.is_timestamp(kind):
        try:
            return array.cast(pa.timestamp("us", kind.tz)).view(pa.int64())
        except pa.ArrowInvalid as cause:
            raise DataError(
                f"column {column!r} has times finer than microseconds ({cause}): round them first"
            ) from cause
    if pa.types.is_decimal(kind):
        return _unscaled(array.cast(pa.decimal128(kind.precision, kind.scale)))
    return array


def _unscaled(array: pa.Array) -> pa.Array:
    """The integers behind 128-bit decimals of up to 18 digits: the lower half of each, which holds the sign too."""
    data = array.buffers()[1]
    halves = np.frombuffer(data, np.int64)[2 * array.offset : 2 * (array.offset + len(array))]
    integers = from_numpy(halves[::2])
    return integers if not array.null_count else pc.if_else(array.is_valid(), integers, pa.scalar(None, pa.int64()))


def _vectors(present: pa.Array, spec: TensorSpec) -> tuple[Array, Array, tuple[int, ...] | None]:
    """Dense and sparse vectors as (rows * k,) numbers, their lengths, and their shape."""
    rows = len(present)
    kinds = to_numpy(present.field("type"))
    values, indices = present.field("values"), present.field("indices")
    stored = to_numpy(pc.list_value_length(values))
    sparse = kinds == 0
    lengths = stored.astype(np.int64)
    if sparse.any():
        lengths[sparse] = to_numpy(present.field("size").fill_null(0))[sparse]
    if not rows:
        return np.empty(0), lengths, None
    k = _even(lengths, spec)
    numbers = to_numpy(values.flatten())
    if not sparse.any():
        return numbers, lengths, (k,)
    row_of = np.repeat(np.arange(rows), stored)
    first = np.cumsum(stored) - stored
    place = np.arange(len(numbers)) - first[row_of]
    place[sparse[row_of]] = to_numpy(indices.filter(pa.array(sparse)).flatten())
    dense = np.zeros((rows, k))
    dense[row_of, place] = numbers
    return dense.reshape(-1), lengths, (k,)


def _even(lengths: Array, spec: TensorSpec) -> int:
    """The one length of all rows."""
    if not lengths.size:
        return 0
    least, most = int(lengths.min()), int(lengths.max())
    if least != most:
        raise SchemaError(
            f"column {spec.name!r} has rows of {least} and of {most} elements where one length is needed: "
            f"declare it as ragged, or make them equal"
        )
    return least


def _ragged(flat: Array, lengths: Array, valid: Array | None, rows: int) -> pa.Array:
    """Lists of ``flat``'s elements; rows that are null become empty."""
    whole = lengths
    if valid is not None:
        whole = np.zeros(rows, np.int64)
        whole[valid] = lengths
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(whole, out=offsets[1:])
    values = from_numpy(flat)
    kind = pa.list_(pa.field("item", values.type, nullable=False))
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(offsets)], children=[values])


def _storage_dtype(spec: TensorSpec) -> np.dtype[Any]:
    return np.dtype("uint8" if spec.dtype == "bool" else spec.dtype)


def _cast(values: Array, spec: TensorSpec, column: str) -> Array:
    """Cast numbers to a tensor's dtype; what does not fit is an error, never a wrapped or infinite number."""
    target = _storage_dtype(spec)
    if values.dtype == target and spec.dtype != "bool":
        return values
    if not values.size:
        return values.astype(target)
    if spec.dtype == "bool":
        _require_fit(values, (values == 0) | (values == 1), spec, column)
    elif target.kind in "iu" and values.dtype.kind == "f":
        low, high = (
            np.iinfo(target).min,
            float(np.iinfo(target).max) + 1,
        )  # as floats, 2**63 - 1 would round up to 2**63
        _require_fit(values, (values >= low) & (values < high) & (values == np.trunc(values)), spec, column)
    elif target.kind in "iu" and values.dtype.kind in "iu":
        extremes = np.array([values.min(), values.max()])
        limits = np.iinfo(target)
        _require_fit(extremes, np.array([limits.min <= int(v) <= limits.max for v in extremes]), spec, column)
    with np.errstate(over="ignore", invalid="ignore"):
        result = values.astype(target)
    if target.kind == "f" and target.itemsize < values.dtype.itemsize:
        _require_fit(values, np.isfinite(result) | ~np.isfinite(values), spec, column)
    return result


def _cast_matrix(matrix: Array, spec: TensorSpec) -> Array:
    """Cast packed columns; an error names the column, not the tensor."""
    try:
        return _cast(matrix, spec, spec.name)
    except DataError:
        for position, column in enumerate(spec.columns):
            _cast(matrix[:, position], spec, column)
        raise


def _require_fit(values: Array, fits: Array, spec: TensorSpec, column: str) -> None:
    if not fits.all():
        raise DataError(
            f"column {column!r} holds {values[~fits][0]}, which {spec.dtype} cannot hold: choose another dtype for it"
        )
