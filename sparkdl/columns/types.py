"""The type table: which column type becomes which tensor, and how a tensor lies in a shard file."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.columns.spec import TensorSpec
from sparkdl.errors import SchemaError

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
UNKNOWN = -1
"""A length that the first row will tell (vectors and nested arrays without a declared shape)."""

_VECTOR_FIELDS = ["type", "size", "indices", "values"]


def is_vector(kind: pa.DataType) -> bool:
    """Whether an Arrow type is how Spark ML's VectorUDT travels."""
    return pa.types.is_struct(kind) and [kind.field(i).name for i in range(kind.num_fields)] == _VECTOR_FIELDS


def is_list(kind: pa.DataType) -> bool:
    """Whether an Arrow type is a list of anything, of fixed or varying length."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether an Arrow type holds strings, dictionary-encoded or not."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def held_by(kind: pa.DataType) -> str:
    """What a column of an Arrow type holds, in a word; of a list, with what its elements are."""
    types = pa.types
    if is_vector(kind):
        return "vector"
    if is_list(kind):
        return f"list of {held_by(kind.value_type)}"
    if is_text(kind):
        return "text"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return "bytes"
    tests = {
        "truth value": types.is_boolean, "whole number": types.is_integer, "date": types.is_date,
        "timestamp": types.is_timestamp, "nested": types.is_nested,
    }  # fmt: skip
    for word, has_type in tests.items():
        if has_type(kind):
            return word
    return "other" if number_dtype(kind) is None else "fraction"


def tensor_kind(name: str, kind: pa.DataType, shape: Sequence[int] | str | None) -> dict[str, Any]:
    """What the type of a column says about its tensor.

        column                          tensor                     in the shard file
        byte .. long, float, double     same dtype, ()             primitive; packed: fixed_size_list
        bool                            bool, ()                   uint8, 0 or 1
        half (dtypes=... or Arrow)      float16, ()                halffloat
        decimal                         float64, ()                double: the nearest one to the value
        date, timestamp                 int64, ()                  days, microseconds since 1970
        string                          int32, (), codes           int32; the dictionary is in the manifest
        binary                          bytes                      binary
        array<T>, declared shape        T, (k,)                    fixed_size_list       (T: a number or bool)
        array<T>                        T, ragged; (k,) if even    list
        array<array<T>>                 T, (r, c)                  fixed_size_list of r * c
        array<array<T>>, "ragged"       T, ragged rows of (c,)     list of fixed_size_list of c
        VectorUDT, dense or sparse      float64, (k,)              fixed_size_list
        anything else                   SchemaError

    Args:
        name: of the column, for messages.
        kind: its Arrow type.
        shape: as declared for it, if it is.

    Returns:
        the fields of a ``TensorSpec`` that follow: dtype, shape, ragged, logical.

    Raises:
        SchemaError: no tensor can hold the type.
    """
    types = pa.types
    if is_vector(kind):
        return {"dtype": "float64", "shape": _declared(name, shape, 1) or (UNKNOWN,)}
    if is_list(kind):
        inner = kind.value_type
        nested = is_list(inner)
        dtype = number_dtype(inner.value_type if nested else inner)
        if dtype is None:
            raise SchemaError(f"column {name!r} is {kind}, no array of numbers: cast it or leave it out")
        if nested and shape == "ragged":
            return {"dtype": dtype, "shape": (UNKNOWN,), "ragged": True}
        if nested:
            return {"dtype": dtype, "shape": _declared(name, shape, 2) or (UNKNOWN, UNKNOWN)}
        fixed = (kind.list_size,) if types.is_fixed_size_list(kind) else ()
        declared = _declared(name, shape, None) or fixed
        return {"dtype": dtype, "shape": declared, "ragged": not declared}
    if types.is_date(kind):
        return {"dtype": "int64", "logical": "date"}
    if types.is_timestamp(kind):
        return {"dtype": "int64", "logical": "timestamp" if kind.tz else "timestamp_ntz"}
    if is_text(kind):
        return {"dtype": "int32", "logical": "string"}
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return {"dtype": "binary"}
    number = number_dtype(kind)
    if number is None:
        raise SchemaError(f"column {name!r} is {kind}, which no tensor can hold: cast it or leave it out")
    return {"dtype": number}


@functools.lru_cache(maxsize=256)
def number_dtype(kind: pa.DataType) -> str | None:
    """The dtype of a tensor of numbers of an Arrow type; None if it holds no plain numbers."""
    if pa.types.is_decimal(kind):
        return "float64"
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return str(np.dtype(kind.to_pandas_dtype()).name)
    return None


def _declared(name: str, shape: Sequence[int] | str | None, dimensions: int | None) -> tuple[int, ...]:
    """The declared shape of an array column, empty if there is none."""
    if shape is None or isinstance(shape, str):
        if isinstance(shape, str) and dimensions is not None:
            raise SchemaError(f"column {name!r} has rows of one shape, not 'ragged': take it out of shapes")
        return ()
    if dimensions == 2 and len(shape) < 2:
        raise SchemaError(f"column {name!r} is nested twice but has shape {tuple(shape)}: give its rows and columns")
    return tuple(shape)


def arrow_schema(tensors: Sequence[TensorSpec]) -> pa.Schema:
    """The schema of the shard files that hold ``tensors``; every length must be known."""
    return pa.schema([pa.field(spec.name, _arrow_type(spec), nullable=False) for spec in tensors])


def _arrow_type(spec: TensorSpec) -> pa.DataType:
    if spec.dtype == "binary":
        return pa.large_binary()
    element = pa.uint8() if spec.dtype == "bool" else pa.from_numpy_dtype(np.dtype(spec.dtype))
    item = pa.field("item", element, nullable=False)
    if spec.ragged and spec.shape:
        return pa.list_(pa.field("item", pa.list_(item, math.prod(spec.shape)), nullable=False))
    if spec.ragged or spec.stored_as_list:
        return pa.list_(item)
    return pa.list_(item, int(np.prod(spec.shape))) if spec.shape else element
