"""The columns of a table that travel to a model, and those that it cannot take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.errors import PySparkTypeError
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from sparkdl.columns.frames import row_of
from sparkdl.columns.types import tensor_kind
from sparkdl.errors import SchemaError
from sparkdl.features.fitted import Features
from sparkdl.models.signature import Signature, TensorField
from sparkdl.scoring.inputs import InputPlan
from sparkdl.scoring.outputs import Kept
from sparkdl.scoring.plan import check_meaning, plan_input, plan_inputs

if TYPE_CHECKING:
    from pyspark.sql import Column

_PACK = "__sparkdl_pack_"
_PACKABLE = (T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.FloatType, T.DoubleType, T.BooleanType)


@dataclass(frozen=True, kw_only=True)
class Transport:
    """Which columns travel to Python, and how inputs and kept columns are found in them.

    Most of the cost of scoring a DataFrame is moving columns between the JVM and Python, so scalar feature columns of
    one type travel as one array column: Python sees a ready ``(rows, n)`` matrix. Those of them that the caller keeps
    go back as plain columns, which Spark reads faster than it takes an array apart. Workers that read files themselves
    have each column as it is.

    Attributes:
        packs: columns that travel together as one array column, by its name.
        columns: that travel each by itself.
        inputs: of the model.
        kept: columns of the result.
        raw: the columns of features.
    """

    packs: Mapping[str, list[str]]
    columns: tuple[str, ...]
    inputs: tuple[InputPlan, ...]
    kept: tuple[Kept, ...]
    raw: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, schema: T.StructType, signature: Signature, kept: Sequence[str], features: Features | None, *, packed: bool
    ) -> Transport:
        """Plan the transport of a signature's columns, or of the raw ones of its features.

        Args:
            schema: of the rows.
            signature: of the model.
            kept: columns of the result.
            features: of the model, if it has any.
            packed: whether Spark sends the columns; else they come one by one.

        Raises:
            SchemaError: a column is missing or of a type that no tensor can hold.
        """
        if features is not None:
            return cls._of_features(schema, signature, kept, features)
        types = {field.name: field for field in schema.fields}
        for field in signature.inputs:
            _check_meaning(field, types)
        packable = _packs(signature, types)
        packs = packable if packed else {}
        where = {name: (pack, position) for pack, names in packs.items() for position, name in enumerate(names)}
        single = [name for name in signature.columns if name not in where]
        passed = [name for name in kept if name not in where and name not in single]
        returned = tuple(Kept(name, *where.get(name, (name,))) for name in kept)
        for field in signature.inputs:
            _check_numbers(field, types)
        plans = tuple(plan_input(field, signature, where, packs) for field in signature.inputs)
        return cls(packs=packs, columns=(*single, *passed), inputs=plans, kept=returned)

    @classmethod
    def _of_features(
        cls, schema: T.StructType, signature: Signature, kept: Sequence[str], features: Features
    ) -> Transport:
        """The transport of raw columns, which the worker turns into those of the signature."""
        absent = [name for name in features.columns if name not in schema.names]
        if absent:
            raise SchemaError(
                f"the model's features need the columns {absent}, the rows have {schema.names}: add or rename them"
            )
        return cls(
            packs={},
            columns=tuple(dict.fromkeys([*features.columns, *kept])),
            inputs=plan_inputs(signature, features),
            kept=tuple(Kept(name, name) for name in kept),
            raw=features.columns,
        )

    @property
    def row(self) -> Column:
        """What to ask of Spark: a struct of packs and columns."""
        return row_of(self.columns, self.packs)


def _packs(signature: Signature, types: Mapping[str, T.StructField]) -> dict[str, list[str]]:
    """Scalar feature columns by type, where there is more than one of it."""
    groups: dict[str, list[str]] = {}
    for name in signature.columns:
        if name not in types:
            raise SchemaError(f"the model needs the column {name!r}, the rows have {sorted(types)}: add or rename it")
        kind = types[name].dataType
        if isinstance(kind, _PACKABLE):
            groups.setdefault(kind.simpleString(), []).append(name)
        elif _logical(kind) in (None, "string"):
            raise SchemaError(
                f"column {name!r} has the type {kind.simpleString()}, which no tensor can hold: "
                "cast it to a number, an array of numbers or a vector"
            )
    return {f"{_PACK}{kind}": names for kind, names in groups.items() if len(names) > 1}


def _check_meaning(field: TensorField, types: Mapping[str, T.StructField]) -> None:
    """Refuse columns whose numbers stand for something else than those that the model was trained on."""
    for name in field.columns if field.logical is not None else ():
        if name not in types:
            continue
        kind = types[name].dataType
        check_meaning(field, name, _logical(kind) or "", kind.simpleString())


def _logical(kind: T.DataType) -> str | None:
    """What the numbers of a column stand for, ``""`` for themselves; None where no tensor can hold its type."""
    try:
        return str(tensor_kind("", to_arrow_type(kind, timezone="UTC"), None).get("logical", ""))
    except (PySparkTypeError, SchemaError):
        return None


def _check_numbers(field: TensorField, types: Mapping[str, T.StructField]) -> None:
    """Refuse columns that hold more or fewer numbers a row than an input takes, as far as their types tell."""
    counts = [_numbers(types[name]) for name in field.columns]
    known_counts = [count for count in counts if count is not None]
    if not counts or len(known_counts) < len(counts) or None in field.shape:
        return
    needed = math.prod(size or 1 for size in field.shape)
    if sum(known_counts) != needed:
        raise SchemaError(
            f"input {field.name!r} gets {sum(known_counts)} numbers a row from {list(field.columns)}, its shape "
            f"{field.shape} holds {needed}: give the columns that the model was trained with"
        )


def _numbers(column: T.StructField) -> int | None:
    """The numbers in a row of a column; None where only the rows tell."""
    if isinstance(column.dataType, VectorUDT):
        count = column.metadata.get("ml_attr", {}).get("num_attrs")  # as Spark's own transformers note it
        return count if isinstance(count, int) else None
    return None if isinstance(column.dataType, T.ArrayType | T.BinaryType) else 1
