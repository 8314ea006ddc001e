"""The columns of a result: what the model returned, and the columns that the caller keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from sparkdl.columns.matrices import Matrix, matrix_of
from sparkdl.columns.numpy_arrow import from_numpy
from sparkdl.errors import BundleError, SchemaError
from sparkdl.models.signature import TensorField

Array = npt.NDArray[Any]

_ARROW = {
    "float64": pa.float64(),
    "float32": pa.float32(),
    "float16": pa.float32(),  # Spark has no half
    "bfloat16": pa.float32(),
    "int64": pa.int64(),
    "int32": pa.int32(),
    "int16": pa.int16(),
    "int8": pa.int8(),
    "uint8": pa.int16(),
    "bool": pa.bool_(),
}


@dataclass(frozen=True, slots=True)
class Kept:
    """One of the caller's columns in the result.

    Attributes:
        name: of it.
        column: of the record batch that holds it.
        place: its position in the rows of a packed column; None if it is that column.
    """

    name: str
    column: str
    place: int | None = None


def output_type(field: TensorField, as_vectors: bool) -> pa.DataType:
    """The Arrow type of an output's column."""
    kind = _ARROW[field.dtype]
    if as_vectors and len(field.shape) == 1 and pa.types.is_floating(kind):
        return pa.struct(
            [
                ("type", pa.int8()),
                ("size", pa.int32()),
                ("indices", pa.list_(pa.int32())),
                ("values", pa.list_(pa.float64())),
            ]
        )
    for _ in field.shape:
        kind = pa.list_(kind)
    return kind


def columns_of(
    answer: Any, fields: Sequence[TensorField], rows: int, missing: Array | None, *, as_vectors: bool
) -> list[pa.Array]:
    """Turn what the model returned for ``rows`` rows into one column an output.

    Args:
        answer: a tensor, a tuple of them, or a dict by name.
        fields: the outputs of the signature.
        rows: of the batch.
        missing: which rows (bool, ``(rows,)``) get nulls; None if none does.
        as_vectors: whether outputs of several floats become Spark ML vectors.

    Raises:
        BundleError: it returned other outputs than its signature says.
        SchemaError: one is not of the shape that the signature says.
    """
    if isinstance(answer, torch.Tensor):
        answer = (answer,)
    if isinstance(answer, dict):
        absent = [field.name for field in fields if field.name not in answer]
        if absent:
            raise BundleError(f"the model returns {sorted(answer)}, not the outputs {absent}: correct its signature")
        answer = [answer[field.name] for field in fields]
    if len(answer) != len(fields):
        names = [field.name for field in fields]
        raise BundleError(f"the model returns {len(answer)} outputs, {names} are declared: correct its signature")
    return [
        _column(field, tensor, rows, missing, as_vectors=as_vectors)
        for field, tensor in zip(fields, answer, strict=True)
    ]


def _column(field: TensorField, tensor: Any, rows: int, missing: Array | None, *, as_vectors: bool) -> pa.Array:
    if not isinstance(tensor, torch.Tensor):
        raise BundleError(
            f"the model returns a {type(tensor).__name__} as output {field.name!r}: let it return one tensor each"
        )
    width = math.prod(size or 1 for size in field.shape)
    if len(tensor) != rows or tensor.numel() != rows * width:
        raise SchemaError(
            f"the model returns {tuple(tensor.shape)} for {rows} rows as output {field.name!r}, its signature says "
            f"{(rows, *field.shape)}: correct the signature"
        )
    tensor = tensor.detach().to("cpu")
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    kind = output_type(field, as_vectors)
    null = from_numpy(missing) if missing is not None else None
    if pa.types.is_struct(kind):
        return _vector_column(tensor.double().contiguous().numpy(), kind, null)
    flat = np.ascontiguousarray(tensor.numpy()).reshape(-1)
    try:
        values = from_numpy(flat, None if field.shape else missing).cast(_ARROW[field.dtype])
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as cause:
        raise SchemaError(
            f"the model returns {str(tensor.dtype).removeprefix('torch.')} as output {field.name!r}, which its "
            f"signature says is {field.dtype} ({cause}): correct the signature"
        ) from cause
    for level, size in enumerate(reversed(field.shape)):
        outer = level == len(field.shape) - 1
        offsets = from_numpy(np.arange(0, len(values) + 1, size, dtype=np.int32))
        values = pa.ListArray.from_arrays(offsets, values, mask=null if outer else None)
    return values


def _vector_column(values: Array, kind: pa.StructType, null: pa.Array | None) -> pa.Array:
    rows, width = values.shape
    offsets = from_numpy(np.arange(0, rows * width + 1, width, dtype=np.int32))
    parts = [
        from_numpy(np.ones(rows, dtype=np.int8)),
        pa.nulls(rows, pa.int32()),
        pa.nulls(rows, kind.field("indices").type),
        pa.ListArray.from_arrays(offsets, from_numpy(values.reshape(-1))),
    ]
    return pa.StructArray.from_arrays(parts, fields=list(kind), mask=null)


def kept_columns(batch: pa.RecordBatch, kept: Sequence[Kept]) -> list[pa.Array]:
    """The caller's columns; packed ones as columns again, since Spark reads these several times faster than arrays."""
    packs: dict[str, Matrix] = {}
    turned: dict[str, Array] = {}
    out: list[pa.Array] = []
    for column in kept:
        if column.place is None:
            out.append(batch.column(column.column))
            continue
        if column.column not in packs:
            packs[column.column] = matrix_of(column.column, batch.column(column.column))
            turned[column.column] = np.ascontiguousarray(packs[column.column].values.T)
        holes = packs[column.column].holes
        mask = None if holes is None else holes[:, column.place]
        out.append(from_numpy(turned[column.column][column.place], mask))
    return out
