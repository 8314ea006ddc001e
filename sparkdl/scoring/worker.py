"""What a Spark worker does to score its rows: Arrow batches in, the same rows with predictions out.

Enters: record batches whose feature columns came packed (``score.py`` says how). Leaves: the batches with one column an
output; at most ``batch_rows`` rows go through the model at once. The model is loaded once a process and kept between
tasks. No Spark: the function runs inside a Spark worker, and in a test without one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import nn

from sparkdl.columns.cast import cast_columns
from sparkdl.columns.matrices import Matrix, matrix_of
from sparkdl.compat.quick_ack import promptly
from sparkdl.config import ScoreConfig
from sparkdl.errors import BundleError, DataError, SchemaError
from sparkdl.models.calling import Arguments, formed
from sparkdl.models.signature import Signature, TensorField
from sparkdl.scoring.models import ModelSource, loaded, place

__all__ = ["InputPlan", "Kept", "Part", "Scorer", "merge_small", "split_evenly"]

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


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """The function that every Spark task of a scoring stage runs.

    Attributes:
        source: of the model.
        signature: of the model.
        inputs: how its tensors are put together.
        columns: names of the output columns, one an output.
        kept: the caller's columns to pass on.
        config: batch size, nulls, device, threads.
    """

    source: ModelSource
    signature: Signature
    inputs: tuple[InputPlan, ...]
    columns: tuple[str, ...]
    kept: tuple[Kept, ...]
    config: ScoreConfig

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Score what Spark sends; yield ``kept`` and the outputs of each batch."""
        device, threads = place(self.config)
        torch.set_num_threads(threads)
        model: nn.Module | None = None
        names = [*(kept.name for kept in self.kept), *self.columns]
        for batch in merge_small(promptly(batches), self.config.batch_rows):
            if model is None:  # a task without rows loads nothing
                model = loaded(self.source, device)
            answers = [self._score(model, chunk, device) for chunk in split_evenly(batch, self.config.batch_rows)]
            outputs = [pa.concat_arrays(parts) for parts in zip(*answers, strict=True)]
            # one batch out for one in: each costs Spark and Arrow a fixed time a column
            yield pa.RecordBatch.from_arrays([*self._passed_on(batch), *outputs], names=names)

    def _score(self, model: nn.Module, batch: pa.RecordBatch, device: str) -> list[pa.Array]:
        """One column an output, for one batch."""
        seen: dict[tuple[str, bool], Matrix] = {}
        tensors: dict[str, torch.Tensor] = {}
        valid: dict[str, torch.Tensor | None] = {}
        missing: Array | None = None
        for plan in self.inputs:
            if plan.of is not None:
                continue
            found = _matrices(plan, batch, seen)
            self._check_missing(plan, found)
            matrix = _side_by_side(plan, found)
            if matrix.missing is not None and self.config.nulls == "null":
                missing = matrix.missing if missing is None else missing | matrix.missing
            tensors[plan.field.name] = self._tensor(plan, matrix).to(device)
            valid[plan.field.name] = None if matrix.valid is None else torch.from_numpy(matrix.valid).to(device)
        with torch.inference_mode():
            named = {plan.field.name: _argument(plan, tensors, valid) for plan in self.inputs}
            arguments = Arguments.of(self.signature.call, named, [one.name for one in self.signature.inputs if one.of])
            answer = model(*arguments.positional, **arguments.named)
        return self._columns_of(answer, batch.num_rows, missing)

    def _tensor(self, plan: InputPlan, matrix: Matrix) -> torch.Tensor:
        field, rows = plan.field, len(matrix.values)
        tensor = _tensor_of(matrix.values, field.dtype)
        if matrix.holes is not None and self.config.nulls == "nan":
            tensor[torch.from_numpy(matrix.holes)] = float("nan")
        shape, wanted = field.shape, math.prod(size or 1 for size in field.shape)
        if None in shape:
            longest = tensor.shape[1] // wanted  # not -1, which torch refuses where rows have no element
            return tensor.reshape(rows, *(longest if size is None else size for size in shape))
        if tensor.shape[1] != wanted:
            raise DataError(
                f"input {field.name!r} gets {tensor.shape[1]} numbers a row from {list(field.columns)}, its shape "
                f"{shape} holds {wanted}: give the columns and the shape that the model was trained with"
            )
        return tensor.reshape(rows, *shape)  # type: ignore[arg-type]

    def _check_missing(self, plan: InputPlan, found: Sequence[Matrix]) -> None:
        missing = _missing(found)
        if missing is None:
            return
        if self.config.nulls == "error":
            names = list(plan.field.columns)
            raise DataError(f"{int(missing.sum())} rows have a null among {names}: fill them or drop these rows before")
        if self.config.nulls == "nan" and not getattr(torch, plan.field.dtype).is_floating_point:
            raise DataError(
                f"input {plan.field.name!r} of {plan.field.dtype} has nulls and cannot hold NaN: fill them or drop "
                "these rows before"
            )

    def _columns_of(self, answer: Any, rows: int, missing: Array | None) -> list[pa.Array]:
        fields = self.signature.outputs
        if isinstance(answer, torch.Tensor):
            answer = (answer,)
        if isinstance(answer, dict):
            absent = [field.name for field in fields if field.name not in answer]
            if absent:
                raise BundleError(
                    f"the model returns {sorted(answer)}, not the outputs {absent}: correct its signature"
                )
            answer = [answer[field.name] for field in fields]
        if len(answer) != len(fields):
            names = [field.name for field in fields]
            raise BundleError(f"the model returns {len(answer)} outputs, {names} are declared: correct its signature")
        return [
            _column(field, tensor, rows, missing, as_vector=self.config.vectors)
            for field, tensor in zip(fields, answer, strict=True)
        ]

    def _passed_on(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """The kept columns; packed ones as columns again, since Spark reads these several times faster than arrays."""
        packs: dict[str, Matrix] = {}
        turned: dict[str, Array] = {}
        out: list[pa.Array] = []
        for kept in self.kept:
            if kept.place is None:
                out.append(batch.column(kept.column))
                continue
            if kept.column not in packs:
                packs[kept.column] = matrix_of(kept.column, batch.column(kept.column))
                turned[kept.column] = np.ascontiguousarray(packs[kept.column].values.T)
            holes = packs[kept.column].holes
            mask = None if holes is None else holes[:, kept.place]
            out.append(pa.array(turned[kept.column][kept.place], mask=mask))
        return out


def _argument(plan: InputPlan, tensors: Mapping[str, torch.Tensor], valid: Mapping[str, torch.Tensor | None]) -> Any:
    """An input in the form that the model asks for."""
    if plan.of is None:
        form = plan.field.form or ("padded" if None in plan.field.shape else "")
        return formed(form, tensors[plan.field.name], valid[plan.field.name])
    return formed(plan.field.form or "mask", tensors[plan.of], valid[plan.of])


def _cast(part: Part, matrix: Matrix, dtype: str) -> Matrix:
    """The part in its tensor's dtype, as training cast it: each column from its own type, and never a wrong number."""
    values = cast_columns(matrix.values, "float32" if dtype == "bfloat16" else dtype, part.names)
    return replace(matrix, values=values.copy() if values is matrix.values else values)


def _tensor_of(values: Array, dtype: str) -> torch.Tensor:
    """The tensor over memory of its own: the model may write into its input, Arrow's memory stays as it is."""
    tensor = torch.from_numpy(values)
    if dtype == "bool":
        return tensor.view(torch.bool)
    return tensor.bfloat16() if dtype == "bfloat16" else tensor


def merge_small(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Merge small batches to at most ``rows`` rows; larger ones pass as they are, empty ones are left out."""
    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        if waiting and count + batch.num_rows > rows:
            yield waiting[0] if len(waiting) == 1 else pa.concat_batches(waiting)
            waiting, count = [], 0
        if batch.num_rows:
            waiting.append(batch)
            count += batch.num_rows
    if waiting:
        yield waiting[0] if len(waiting) == 1 else pa.concat_batches(waiting)


def split_evenly(batch: pa.RecordBatch, rows: int) -> list[pa.RecordBatch]:
    """Split a batch into chunks of at most ``rows`` rows and of nearly equal size, without a copy."""
    chunks = math.ceil(batch.num_rows / rows)
    size = math.ceil(batch.num_rows / chunks)
    return [batch.slice(start, size) for start in range(0, batch.num_rows, size)]


def _matrices(plan: InputPlan, batch: pa.RecordBatch, seen: dict[tuple[str, bool], Matrix]) -> list[Matrix]:
    """The parts of an input, each in the type of its column."""
    ragged = None in plan.field.shape
    total = math.prod(size or 1 for size in plan.field.shape)
    others = sum(len(part.picked or part.names) for part in plan.parts)
    found: list[Matrix] = []
    for part in plan.parts:
        where = (part.column, ragged)
        if where not in seen:
            width = max(0, total - others + len(part.names))  # of an array among numbers, where all its rows are null
            seen[where] = matrix_of(part.names[0], batch.column(part.column), ragged=ragged, width=width)
        found.append(seen[where] if part.picked is None else _picked(part, seen[where]))
    return found


def _missing(found: Sequence[Matrix]) -> Array | None:
    """Rows that have a null in any of the parts; None if none has."""
    masks = [one.missing for one in found if one.missing is not None]
    return np.logical_or.reduce(masks) if masks else None


def _side_by_side(plan: InputPlan, parts: Sequence[Matrix]) -> Matrix:
    """The parts in the input's dtype, as one matrix."""
    found = [_cast(part, one, plan.field.dtype) for part, one in zip(plan.parts, parts, strict=True)]
    if len(found) == 1:
        return found[0]
    values = np.concatenate([one.values for one in found], axis=1)
    missing = _missing(found)
    if missing is None:
        return Matrix(values)
    holes = [np.zeros(one.values.shape, dtype=bool) if one.holes is None else one.holes for one in found]
    return Matrix(values, np.concatenate(holes, axis=1), missing)


def _picked(part: Part, whole: Matrix) -> Matrix:
    """Some of the packed columns; a null in another one is none of this input's business."""
    assert part.picked is not None
    first, last = part.picked[0], part.picked[-1]
    run = part.picked == tuple(range(first, last + 1))
    picked: Any = slice(first, last + 1) if run else list(part.picked)
    if whole.holes is None:
        return Matrix(whole.values[:, picked])
    holes = whole.holes[:, picked]
    missing = np.asarray(holes.any(axis=1))
    return Matrix(whole.values[:, picked], holes, missing) if missing.any() else Matrix(whole.values[:, picked])


def _output_type(field: TensorField, as_vector: bool) -> pa.DataType:
    """The Arrow type of an output's column."""
    kind = _ARROW[field.dtype]
    if as_vector and len(field.shape) == 1 and pa.types.is_floating(kind):
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


def _column(field: TensorField, tensor: Any, rows: int, missing: Array | None, *, as_vector: bool) -> pa.Array:
    if not isinstance(tensor, torch.Tensor):
        raise BundleError(
            f"the model returns a {type(tensor).__name__} as output {field.name!r}: let it return one tensor each"
        )
    width = math.prod(size or 1 for size in field.shape)
    if len(tensor) != rows or (None not in field.shape and tensor.numel() != rows * width):
        raise SchemaError(
            f"the model returns {tuple(tensor.shape)} for {rows} rows as output {field.name!r}, its signature says "
            f"{(rows, *field.shape)}: correct the signature"
        )
    tensor = tensor.detach().to("cpu")
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    kind = _output_type(field, as_vector)
    null = pa.array(missing) if missing is not None else None
    if pa.types.is_struct(kind):
        return _vector_column(tensor.double().contiguous().numpy(), kind, null)
    sizes = tensor.shape[1:] if None in field.shape else field.shape
    leaf = _ARROW[field.dtype]
    flat = np.ascontiguousarray(tensor.numpy()).reshape(-1)
    if not field.shape:
        return pa.array(flat, mask=missing).cast(leaf)
    values = pa.array(flat).cast(leaf)
    for level, size in enumerate(reversed(sizes)):
        outer = level == len(sizes) - 1
        offsets = pa.array(np.arange(0, len(values) + 1, size, dtype=np.int32))
        values = pa.ListArray.from_arrays(offsets, values, mask=null if outer else None)
    return values


def _vector_column(values: Array, kind: pa.StructType, null: pa.Array | None) -> pa.Array:
    rows, width = values.shape
    offsets = pa.array(np.arange(0, rows * width + 1, width, dtype=np.int32))
    parts = [
        pa.array(np.ones(rows, dtype=np.int8)),
        pa.nulls(rows, pa.int32()),
        pa.nulls(rows, kind.field("indices").type),
        pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1))),
    ]
    return pa.StructArray.from_arrays(parts, fields=list(kind), mask=null)
