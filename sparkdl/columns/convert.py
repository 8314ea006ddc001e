"""The converter of source columns to the tensors of a shard, by numpy and Arrow kernels, never row by row."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.columns.cast import cast, cast_columns, storage_dtype
from sparkdl.columns.decode import Values, decode
from sparkdl.columns.layout import mask_name
from sparkdl.columns.numpy_arrow import from_numpy
from sparkdl.columns.spec import TensorSpec
from sparkdl.columns.statistics import RunningStats, add_matrix
from sparkdl.columns.types import UNKNOWN
from sparkdl.errors import DataError, SchemaError

Array = np.ndarray[Any, Any]

Rows = dict[str, Any]
"""The rows of each tensor: an (n, *shape) numpy array, or an Arrow array of n lists or byte strings."""


class Converter:
    """Turns the batches of one partition into tensors.

    Nulls are treated by policy, and the statistics of every column are gathered on the way.

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
            DataError: a value does not fit its dtype, a row not its shape, or rows of a vector or nested array differ.
            SchemaError: rows do not have the declared shape.
        """
        rows: Rows = {}
        for position, spec in enumerate(self.tensors):
            if spec.mask_of is None:
                values, nulls = self._tensor(batch, position, spec)
                rows[spec.name] = values
                if spec.nulls == "mask":
                    shape = values.shape if isinstance(values, np.ndarray) else (batch.num_rows,)
                    valid = np.ones(shape, np.uint8) if nulls is None else (~nulls).astype(np.uint8)
                    rows[mask_name(spec.name)] = valid
        return rows

    def _tensor(self, batch: pa.RecordBatch, position: int, spec: TensorSpec) -> tuple[Any, Array | None]:
        """The rows of a tensor, and which of them, or of their elements, are null (None: none)."""
        if spec.name in self._packed_already:
            return self._packed_array(decode(spec.name, batch.column(spec.name)), spec)
        array = batch.column(spec.columns[0])
        if pa.types.is_nested(array.type) or spec.dtype == "binary":
            return self._array(array, position, spec)
        if spec.shape:
            return self._packed(batch, spec)
        return self._scalar(array, spec, spec.columns[0], spec.fill[0])

    def _packed_array(self, decoded: Values, spec: TensorSpec) -> tuple[Array, Array | None]:
        """Columns that Spark packed into arrays of equal length: their elements are the tensor already."""
        shape = (len(spec.columns),)
        matrix = decoded.dense(decoded.elements, shape, 0)
        statistics = [self.statistics[column] for column in spec.columns]
        nulls = decoded.nulls_by_element(shape)
        if nulls is None:
            add_matrix(statistics, matrix)
            return cast_columns(matrix, spec.dtype, spec.columns), None
        self._refuse_nulls(spec)
        for position, stats in enumerate(statistics):
            absent = nulls[:, position]
            stats.add(matrix[~absent, position], int(absent.sum()))
        fill = cast(np.array(spec.fill), spec.dtype, spec.name)
        return np.where(nulls, fill, cast_columns(matrix, spec.dtype, spec.columns)), nulls

    def _packed(self, batch: pa.RecordBatch, spec: TensorSpec) -> tuple[Array, Array | None]:
        packed = np.empty((batch.num_rows, len(spec.columns)), storage_dtype(spec.dtype))
        missing = np.zeros(packed.shape, np.bool_) if spec.nulls == "mask" else None
        for position, column in enumerate(spec.columns):
            packed[:, position], nulls = self._scalar(batch.column(column), spec, column, spec.fill[position])
            if missing is not None and nulls is not None:
                missing[:, position] = nulls
        return packed, missing

    def _scalar(self, array: pa.Array, spec: TensorSpec, column: str, fill: float) -> tuple[Array, Array | None]:
        decoded = decode(column, array, codes=self._codes.get(spec.name))
        if decoded.unseen:
            self.unseen[spec.name] = self.unseen.get(spec.name, 0) + decoded.unseen
        self.statistics[column].add(decoded.elements, decoded.nulls)
        if decoded.nulls:
            self._refuse_nulls(spec)
        elements = cast(decoded.elements, spec.dtype, column)
        return decoded.dense(elements, (), _as_held(fill, spec) if decoded.nulls else 0), decoded.missing

    def _array(self, array: pa.Array, position: int, spec: TensorSpec) -> tuple[Any, Array | None]:
        """A column of arrays, vectors or byte strings."""
        by_row = spec.ragged or spec.dtype == "binary"
        decoded = decode(spec.name, array, ragged=by_row)
        if spec.ragged and spec.shape:
            self._check_width(position, spec, decoded)
        self._count_array(decoded, spec)
        elements, fill = cast(decoded.elements, spec.dtype, spec.name), 0
        if decoded.nulls and spec.dtype != "binary":  # a null byte string is empty, whatever fills numbers
            fill = _as_held(spec.fill[0], spec)
        if decoded.holes is not None:
            elements = np.where(decoded.holes, fill, elements)
        if by_row:
            if decoded.holes is not None and spec.nulls == "mask":
                raise DataError(
                    f"column {spec.name!r} is ragged and has {int(decoded.holes.sum())} nulls inside its arrays, which "
                    f"a mask by row cannot mark: use nulls='fill' or declare its shape"
                )
            width = self.tensors[position].shape[0] if spec.shape else None
            return _lists(elements, decoded, binary=spec.dtype == "binary", width=width), decoded.missing
        some = decoded.missing is None or not decoded.missing.all()
        shape = self._checked_shape(position, spec, decoded.shape if some and decoded.rows else None)
        return decoded.dense(elements, shape, fill), decoded.nulls_by_element(shape)

    def _count_array(self, decoded: Values, spec: TensorSpec) -> None:
        assert decoded.lengths is not None
        statistics = self.statistics[spec.name]
        if spec.dtype == "binary":
            statistics.add(decoded.lengths, decoded.nulls)
        else:
            statistics.add_lengths(decoded.row_lengths() // (decoded.width or 1))
            statistics.add(
                decoded.elements if decoded.holes is None else decoded.elements[~decoded.holes], decoded.nulls
            )
        if decoded.nulls:
            self._refuse_nulls(spec)

    def _refuse_nulls(self, spec: TensorSpec) -> None:
        if spec.nulls == "error":
            self.refused = True

    def _check_width(self, position: int, spec: TensorSpec, decoded: Values) -> None:
        """Compare the length of the arrays inside ragged rows with the one planned; learn it where it was unknown."""
        if spec.shape == (UNKNOWN,) and decoded.width:
            self.tensors[position] = replace(spec, shape=(decoded.width,))
        elif spec.shape == (UNKNOWN,):
            raise DataError(
                f"column {spec.name!r} is null or empty in all rows of a batch, so the length of the arrays inside its "
                "rows is unknown: drop such rows, or repartition the frame"
            )
        elif decoded.width not in (0, *spec.shape):
            raise DataError(
                f"column {spec.name!r} has arrays of {spec.shape[0]} and of {decoded.width} numbers inside its rows, "
                "where a tensor needs one length: pad or cut them to one"
            )

    def _checked_shape(self, position: int, spec: TensorSpec, shape: tuple[int, ...] | None) -> tuple[int, ...]:
        """Compare the shape of a batch's rows with the one planned, and learn it where it was unknown."""
        planned = spec.shape
        if shape is None:
            if UNKNOWN in planned:
                raise DataError(
                    f"column {spec.name!r} is null in all rows of a batch, so its shape is unknown: "
                    f"declare it in shapes, or leave the column out"
                )
            return planned
        if UNKNOWN in planned:
            self.tensors[position] = replace(spec, shape=shape)
            for position_of_mask, mask in enumerate(self.tensors):
                if mask.mask_of == spec.name:
                    self.tensors[position_of_mask] = replace(mask, shape=shape)
            return shape
        if int(np.prod(shape)) != int(np.prod(planned)) or (len(shape) == len(planned) and shape != planned):
            raise SchemaError(
                f"column {spec.name!r} has a row of shape {shape}, expected {planned}: correct the shape given, or "
                "declare it as ragged"
            )
        return planned


def _as_held(fill: float, spec: TensorSpec) -> Any:
    """What stands for null, in the dtype that the tensor is kept in."""
    return cast(np.array([fill]), spec.dtype, spec.name)[0]


def _lists(elements: Array, decoded: Values, *, binary: bool, width: int | None = None) -> pa.Array:
    """Lists, or byte strings, of the elements, or of arrays of ``width`` of them; rows that are null become empty."""
    offsets = np.zeros(decoded.rows + 1, np.int64 if binary else np.int32)
    np.cumsum(decoded.row_lengths() // (decoded.width or 1), out=offsets[1:])
    if binary:
        return pa.Array.from_buffers(
            pa.large_binary(), decoded.rows, [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(elements))]
        )
    values = from_numpy(elements)
    if width is not None:
        array_type = pa.list_(pa.field("item", values.type, nullable=False), width)
        values = pa.Array.from_buffers(array_type, len(values) // width, [None], children=[values])
    kind = pa.list_(pa.field("item", values.type, nullable=False))
    return pa.Array.from_buffers(kind, decoded.rows, [None, pa.py_buffer(offsets)], children=[values])
