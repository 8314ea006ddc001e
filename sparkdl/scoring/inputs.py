"""The arguments of one call of a model, made of a record batch; no Spark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from sparkdl.columns.cast import cast_columns
from sparkdl.columns.matrices import Matrix, matrix_of
from sparkdl.errors import DataError
from sparkdl.models.calling import Arguments, formed
from sparkdl.models.signature import Signature, TensorField

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Part:
    """Some columns of one input tensor, as they travel.

    Attributes:
        column: of the record batch.
        picked: positions in that column's rows, in order; None takes them all.
        names: the table's columns behind it, for messages.
    """

    column: str
    picked: tuple[int, ...] | None
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InputPlan:
    """How one input tensor is put together: its parts side by side, then its shape.

    Attributes:
        field: of the signature.
        parts: at least one.
        of: for what comes beside another input, such as its mask: that input's name.
    """

    field: TensorField
    parts: tuple[Part, ...]
    of: str | None = None


def arguments_of(
    batch: pa.RecordBatch, signature: Signature, inputs: Sequence[InputPlan], nulls: str, device: str
) -> tuple[Arguments, Array | None]:
    """Put the inputs of a model together.

    Returns:
        The arguments, and which rows (bool, ``(rows,)``) miss a value where ``nulls`` is ``"null"``; None if none does.

    Raises:
        DataError: a null where none may be, or numbers that do not fit the shape of an input.
    """
    matrices_by_column: dict[tuple[str, int | None], Matrix] = {}
    tensors: dict[str, torch.Tensor] = {}
    valid: dict[str, torch.Tensor | None] = {}
    missing: Array | None = None
    for plan in inputs:
        if plan.of is not None:
            continue
        matrices = _matrices(plan, batch, matrices_by_column)
        _check_missing(plan, matrices, nulls)
        matrix = _side_by_side(plan, matrices)
        if matrix.missing is not None and nulls == "null":
            missing = matrix.missing if missing is None else missing | matrix.missing
        tensors[plan.field.name] = _tensor(plan, matrix, nulls).to(device)
        inner = _inner(plan.field)  # an element of a row of arrays is there as a whole
        valid[plan.field.name] = None if matrix.valid is None else torch.from_numpy(matrix.valid[:, ::inner]).to(device)
    with torch.inference_mode():
        named = {plan.field.name: _argument(plan, tensors, valid) for plan in inputs}
    return Arguments.of(signature.call, named, [field.name for field in signature.inputs if field.of]), missing


def _inner(field: TensorField) -> int:
    """The numbers in each element of a row that has as many elements as it likes."""
    return math.prod(size or 1 for size in field.shape)


def _matrices(plan: InputPlan, batch: pa.RecordBatch, seen: dict[tuple[str, int | None], Matrix]) -> list[Matrix]:
    """The parts of an input, each in the type of its column."""
    ragged, inner = None in plan.field.shape, _inner(plan.field)
    total = math.prod(size or 1 for size in plan.field.shape)
    column_count = sum(len(part.picked or part.names) for part in plan.parts)
    matrices: list[Matrix] = []
    for part in plan.parts:
        where = (part.column, inner if ragged else None)
        if where not in seen:
            # Of an array among numbers, where all its rows are null.
            width = max(0, total - column_count + len(part.names))
            seen[where] = matrix_of(part.names[0], batch.column(part.column), ragged=ragged, width=width, inner=inner)
        matrices.append(seen[where] if part.picked is None else _picked(part, seen[where]))
    return matrices


def _picked(part: Part, matrix: Matrix) -> Matrix:
    """Some of the packed columns; a null in another one is none of this input's business."""
    assert part.picked is not None
    first, last = part.picked[0], part.picked[-1]
    run = part.picked == tuple(range(first, last + 1))
    picked: Any = slice(first, last + 1) if run else list(part.picked)
    if matrix.holes is None:
        return Matrix(matrix.values[:, picked])
    holes = matrix.holes[:, picked]
    missing = np.asarray(holes.any(axis=1))
    return Matrix(matrix.values[:, picked], holes, missing) if missing.any() else Matrix(matrix.values[:, picked])


def _check_missing(plan: InputPlan, matrices: Sequence[Matrix], nulls: str) -> None:
    missing = _missing(matrices)
    if missing is None:
        return
    if nulls == "error":
        names = list(plan.field.columns)
        raise DataError(f"{int(missing.sum())} rows have a null among {names}: fill them or drop these rows before")
    if nulls == "nan" and not getattr(torch, plan.field.dtype).is_floating_point:
        raise DataError(
            f"input {plan.field.name!r} of {plan.field.dtype} has nulls and cannot hold NaN: fill them or drop "
            "these rows before"
        )


def _missing(matrices: Sequence[Matrix]) -> Array | None:
    """Rows that have a null in any of the parts; None if none has."""
    masks = [matrix.missing for matrix in matrices if matrix.missing is not None]
    return np.logical_or.reduce(masks) if masks else None


def _side_by_side(plan: InputPlan, parts: Sequence[Matrix]) -> Matrix:
    """The parts in the input's dtype, as one matrix."""
    matrices = [_cast(part, matrix, plan.field.dtype) for part, matrix in zip(plan.parts, parts, strict=True)]
    if len(matrices) == 1:  # a matrix of its own, as several side by side are: the model may write into it
        same = matrices[0].values is parts[0].values
        return replace(matrices[0], values=matrices[0].values.copy()) if same else matrices[0]
    values = np.concatenate([matrix.values for matrix in matrices], axis=1)
    missing = _missing(matrices)
    if missing is None:
        return Matrix(values)
    holes = [np.zeros(matrix.values.shape, dtype=bool) if matrix.holes is None else matrix.holes for matrix in matrices]
    return Matrix(values, np.concatenate(holes, axis=1), missing)


def _cast(part: Part, matrix: Matrix, dtype: str) -> Matrix:
    """The part in its tensor's dtype, as training cast it: each column from its own type, and never a wrong number."""
    values = cast_columns(matrix.values, "float32" if dtype == "bfloat16" else dtype, part.names)
    return matrix if values is matrix.values else replace(matrix, values=values)


def _tensor(plan: InputPlan, matrix: Matrix, nulls: str) -> torch.Tensor:
    """The tensor in its shape, over memory of its own: the model may write into it, Arrow's memory stays as it is."""
    field, rows = plan.field, len(matrix.values)
    tensor = torch.from_numpy(matrix.values)
    if field.dtype in ("bool", "bfloat16"):
        tensor = tensor.view(torch.bool) if field.dtype == "bool" else tensor.bfloat16()
    if matrix.holes is not None and nulls == "nan":
        tensor[torch.tensor(matrix.holes)] = float("nan")  # a copy: of Arrow's read-only memory torch warns
    shape, row_elements = field.shape, math.prod(size or 1 for size in field.shape)
    if None in shape:
        longest = tensor.shape[1] // row_elements  # not -1, which torch refuses where rows have no element
        return tensor.reshape(rows, *(longest if size is None else size for size in shape))
    if tensor.shape[1] != row_elements:
        raise DataError(
            f"input {field.name!r} gets {tensor.shape[1]} numbers a row from {list(field.columns)}, its shape "
            f"{shape} holds {row_elements}: give the columns and the shape that the model was trained with"
        )
    return tensor.reshape(rows, *shape)  # type: ignore[arg-type]


def _argument(plan: InputPlan, tensors: Mapping[str, torch.Tensor], valid: Mapping[str, torch.Tensor | None]) -> Any:
    """An input in the form that the model asks for."""
    if plan.of is None:
        form = plan.field.form or ("padded" if None in plan.field.shape else "")
        return formed(form, tensors[plan.field.name], valid[plan.field.name])
    return formed(plan.field.form or "mask", tensors[plan.of], valid[plan.of])
