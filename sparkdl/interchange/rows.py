"""What MLflow is told of a model's rows: types of the columns that it reads and makes, and a row that is made up.

Enters: what a bundle says of its signature, features, and the columns that it was trained on. Leaves: MLflow's schemas,
and an input example. A column's type is told where MLflow's check of it refuses nothing that the model takes. Integers,
decimals and instants stay open: MLflow refuses integers where a column has gaps, and times that have a zone.
"""

from __future__ import annotations

import datetime
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from sparkdl.features.fitted import Features, Fitted
from sparkdl.features.spec import Category, DateParts, Ids, Image, Number, Text, Vector
from sparkdl.features.statistics import PROBABILITIES
from sparkdl.models.signature import Signature, TensorField

__all__ = ["example_row", "input_schema", "output_schema"]

_CLOSED = {"float": "double", "double": "double", "string": "string", "boolean": "boolean", "binary": "binary"}
"""Spark's types that are told to MLflow, by its own names; it would not take a double for a float."""
_TIMES = dict.fromkeys(("date", "timestamp_ntz"), "datetime")
"""The same for parts of dates, which are taken as they are written."""

_OUTPUTS = {
    **dict.fromkeys(("float64",), "double"),
    **dict.fromkeys(("float32", "float16", "bfloat16"), "float"),
    **dict.fromkeys(("int64",), "long"),
    **dict.fromkeys(("int32", "int16", "int8", "uint8"), "integer"),
    "bool": "boolean",
}
_MEDIAN = PROBABILITIES.index(0.5)


def input_schema(signature: Signature, features: Features | None, types: Mapping[str, str]) -> Any:
    """MLflow's schema of the columns that a model reads.

    Args:
        signature: of the model.
        features: that make its inputs of raw columns; None if it takes columns as they are.
        types: by column, Spark's name of its type in training; of others what the features say.
    """
    from mlflow.types.schema import AnyType, ColSpec, DataType, Schema

    unknown: Any = AnyType

    names = list(signature.columns if features is None else features.columns)
    kinds = {name: _CLOSED.get(types.get(name, ""), "") for name in names}
    for one in () if features is None else features.fitted:
        source = one.options.source(one.name)
        kinds[source] = kinds[source] or _of_feature(one, types.get(source, ""))
    return Schema([ColSpec(DataType[kind] if kind else unknown(), name) for name, kind in kinds.items()])


def _of_feature(one: Fitted, kind: str) -> str:
    """What the raw column of a feature has to be; empty where it may be of several types."""
    if isinstance(one.options, DateParts):
        return _TIMES.get(kind, "")
    return "string" if isinstance(one.options, Text) else "binary" if isinstance(one.options, Image) else ""


def output_schema(fields: Sequence[TensorField], columns: Sequence[str]) -> Any:
    """MLflow's schema of the prediction columns.

    Args:
        fields: of the outputs, one a column.
        columns: their names.
    """
    from mlflow.types.schema import Array, ColSpec, DataType, Object, Property, Schema

    def kind(field: TensorField) -> Any:
        made: Any = DataType[_OUTPUTS[field.dtype]]
        for _ in field.shape:
            made = Array(made)
        return made

    kinds = {name: kind(field) for name, field in zip(columns, fields, strict=True)}
    if len(kinds) == 1 and fields[0].shape:  # whose arrays spark_udf finds only in a struct
        return Schema([ColSpec(Object([Property(name, made) for name, made in kinds.items()]))])
    return Schema([ColSpec(made, name) for name, made in kinds.items()])


def example_row(signature: Signature, features: Features | None, types: Mapping[str, str]) -> Any:
    """A row that the model takes, as a pandas frame: typical values where training has counted some, else zeros."""
    import pandas as pd

    if features is not None:
        row = {one.options.source(one.name): _typical(one, types) for one in features.fitted}
        return pd.DataFrame([{name: row[name] for name in features.columns}])
    owners = {column: field for field in signature.inputs for column in field.columns}
    return pd.DataFrame([{name: _zero(owners[name], types.get(name, "")) for name in signature.columns}])


def _typical(one: Fitted, types: Mapping[str, str]) -> Any:
    """The median of a number, the most frequent value of a category."""
    options, found = one.options, one.statistics
    words = list(found.values[:2]) or ["value"]
    if isinstance(options, Number):
        median = found.quantiles[_MEDIAN]
        whole = types.get(options.source(one.name), "") in ("tinyint", "smallint", "int", "bigint")
        return int(median) if whole else median
    if isinstance(options, Category):
        return words[0]
    if isinstance(options, Ids):
        return words
    if isinstance(options, Text):
        return " ".join(words)
    if isinstance(options, Vector):
        return [found.mean or 0.0] * (options.size or 1)
    if isinstance(options, Image):
        return _PICTURE
    assert isinstance(options, DateParts)
    zone = datetime.UTC if types.get(options.source(one.name)) == "timestamp" else None
    return datetime.datetime(min(9999, max(1, int(found.maximum or 2000))), 1, 1, tzinfo=zone)


def _zero(field: TensorField, kind: str) -> Any:
    """Zeros as a column of a model without features has them."""
    if kind == "binary":
        return bytes(max(1, _length(field)))
    if kind == "boolean":
        return False
    if field.logical in ("date", "timestamp", "timestamp_ntz"):
        epoch = datetime.datetime(1970, 1, 1)
        return epoch.date() if field.logical == "date" else epoch
    number: Any = 0.0 if kind in ("float", "double") or field.dtype.startswith(("float", "bfloat")) else 0
    if len(field.columns) > 1 or not field.shape:
        return number
    return [number] * _length(field)


def _length(field: TensorField) -> int:
    """Numbers of a row; one of an element whose length varies."""
    total = 1
    for size in field.shape:
        total *= size or 1
    return total


def _bitmap() -> bytes:
    """A picture of one grey point (BMP)."""
    point = bytes([127, 127, 127, 0])
    header = struct.pack("<IiiHHIIiiII", 40, 1, 1, 1, 24, 0, len(point), 2835, 2835, 0, 0)
    return struct.pack("<2sIHHI", b"BM", 14 + len(header) + len(point), 0, 0, 14 + len(header)) + header + point


_PICTURE = _bitmap()
