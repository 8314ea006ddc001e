"""DataFrame -> predictions: a plan on the driver, one ``mapInArrow`` stage, no eager job.

Enters: a DataFrame, and a bundle or a module with its signature. Leaves: the DataFrame with one column an output, its
schema known up front; batch or streaming, classic or Spark Connect.

Most of the cost of scoring is moving columns between the JVM and Python, so scalar feature columns of one type travel
as one array column: Python sees a ready ``(rows, n)`` matrix. Those of them that the caller keeps go back as plain
columns, which Spark reads faster than it takes an array apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import cloudpickle
import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_type
from torch import nn

from sparkdl.columns.names import folded, quoted, tells_cases_apart
from sparkdl.columns.types import tensor_kind
from sparkdl.compat.spark_errors import map_task_errors_of_actions
from sparkdl.compat.worker_python import use_drivers_python
from sparkdl.config import ScoreConfig
from sparkdl.errors import ConfigError, SchemaError
from sparkdl.features.fitted import Features
from sparkdl.models.bundle import BundleInfo, Signature, TensorField, read_bundle
from sparkdl.models.calling import check_batch_norm
from sparkdl.models.preprocessing import features_of
from sparkdl.models.trust import allowed_imports, checked_packages
from sparkdl.scoring.inputs import InputPlan
from sparkdl.scoring.models import BundleSource, ModelSource, ModuleSource, WithFeatures
from sparkdl.scoring.outputs import Kept, output_type
from sparkdl.scoring.plan import plan_input, plan_inputs
from sparkdl.scoring.worker import Scorer
from sparkdl.storage import Configuration, sha256_hex

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["score"]

_PACK = "__sparkdl_pack_"
_PLAIN = "__sparkdl_column_"
_LARGEST_MODULE = 512 << 20
_PACKABLE = (T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.FloatType, T.DoubleType, T.BooleanType)
_MEANT = {
    "": "plain numbers",
    "date": "dates",
    "timestamp": "moments (timestamp)",
    "timestamp_ntz": "times on the clock (timestamp_ntz)",
    "string": "codes of strings",
}


def score(
    frame: DataFrame,
    model: str | BundleInfo | nn.Module | WithFeatures,
    *,
    signature: Signature | None = None,
    output_columns: Sequence[str] | None = None,
    keep: Sequence[str] | None = None,
    config: ScoreConfig | None = None,
    allow_pickle: bool = False,
    trusted: Sequence[str] = (),
) -> DataFrame:
    """Add a model's predictions to a DataFrame; nothing runs until the result is used.

    Args:
        frame: holds the columns that the signature names, or those of the model's features; may be a stream.
        model: a bundle's folder that all workers can read, what ``read_bundle`` says of one, or a module, alone or with
            its features, which then travels with every task.
        signature: of a module; a bundle brings its own, which this overrides.
        output_columns: names of the new columns, one an output; by default the outputs' own.
        keep: columns of ``frame`` in the result; all by default. Fewer cost less.
        config: batch size, nulls, vectors, device, threads.
        allow_pickle: accept a bundle that holds a pickle.
        trusted: packages that workers may import to rebuild a bundle's model, besides those that ``allow_imports`` and
            the session name; without, only torch's own layers are rebuilt.

    Returns:
        ``keep`` and the predictions, in the order of the rows of each partition.

    Raises:
        SchemaError: a column is missing, has a type that no tensor can hold, or a new name is taken.
        ConfigError: settings contradict each other, or a module comes without signature.
        BundleError: there is no bundle, or it holds a pickle.
        DataError: when the result is used: nulls, or rows of a shape that the model does not take.
    """
    map_task_errors_of_actions()
    use_drivers_python(frame.sparkSession)
    config = config or ScoreConfig()
    imports = (*checked_packages(trusted), *allowed_imports(frame.sparkSession))
    source, known, features = _source(model, allow_pickle, imports)
    if (signature := signature or known) is None:
        raise ConfigError("the model has no signature: give signature=, or save the bundle with one")
    names = _output_names(signature, output_columns)
    kept = _kept(frame, keep, names)
    transport = _Transport.of(frame.schema, signature, kept, features)
    scorer = Scorer(
        source=source,
        signature=signature,
        inputs=transport.inputs,
        columns=tuple(names),
        kept=transport.kept,
        config=config,
        features=features,
        raw=transport.raw,
    )
    outputs = [
        T.StructField(name, _spark_type(field, config.vectors), nullable=True)
        for name, field in zip(names, signature.outputs, strict=True)
    ]
    schema = T.StructType([frame.schema[name] for name in kept] + outputs)
    return frame.select(*transport.select).mapInArrow(scorer, schema)


def _source(
    model: str | BundleInfo | nn.Module | WithFeatures, allow_pickle: bool, trusted: tuple[str, ...]
) -> tuple[ModelSource, Signature | None, Features | None]:
    if isinstance(model, WithFeatures):
        return *_source(model.model, allow_pickle, trusted)[:2], model.features
    if isinstance(model, nn.Module):
        check_batch_norm(model)
        payload = cloudpickle.dumps(model)
        if len(payload) > _LARGEST_MODULE:
            raise ConfigError(
                f"the model has {len(payload) >> 20} MiB, a task carries {_LARGEST_MODULE >> 20} at most: "
                "save_bundle it to a folder that all workers can read, and give that"
            )
        return ModuleSource(payload, sha256_hex(payload)), None, None
    info = model if isinstance(model, BundleInfo) else read_bundle(model)
    if info.model["kind"] == "pickle" and not allow_pickle:
        raise ConfigError(f"the bundle {info.uri} holds a pickle, which can run any code: give allow_pickle=True")
    here = Configuration.here()
    source = BundleSource(info.folder, info.content_hash, allow_pickle, trusted, here)
    return source, info.signature, features_of(info, trusted)


def _output_names(signature: Signature, given: Sequence[str] | None) -> list[str]:
    names = [field.name for field in signature.outputs] if given is None else list(given)
    if len(names) != len(signature.outputs):
        raise ConfigError(
            f"output_columns={names} are {len(names)} names, the model has the outputs "
            f"{[field.name for field in signature.outputs]}: give one name each"
        )
    return names


def _kept(frame: DataFrame, keep: Sequence[str] | None, new: Sequence[str]) -> list[str]:
    kept = list(frame.columns if keep is None else keep)
    absent = [name for name in kept if name not in frame.columns]
    if absent:
        raise SchemaError(f"keep names {absent}, the DataFrame has {frame.columns}: name columns that it has")
    cases = tells_cases_apart(frame)
    names = [folded(name, cases=cases) for name in [*kept, *new]]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise SchemaError(
            f"the columns {double} would appear twice in the result: choose other output_columns, or keep fewer"
        )
    return kept


def _spark_type(field: TensorField, vectors: bool) -> T.DataType:
    kind = output_type(field, vectors)
    return VectorUDT() if pa.types.is_struct(kind) else from_arrow_type(kind)


@dataclass(frozen=True, kw_only=True)
class _Transport:
    """Which columns travel to Python, and how inputs and kept columns are found in them.

    Attributes:
        select: expressions over the caller's frame.
        inputs: of the model.
        kept: columns of the result.
        raw: the columns of features, as they are called on the way.
    """

    select: list[Column]
    inputs: tuple[InputPlan, ...]
    kept: tuple[Kept, ...]
    raw: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, schema: T.StructType, signature: Signature, kept: Sequence[str], features: Features | None
    ) -> _Transport:
        """Plan the transport of a signature's columns, or of the raw ones of its features.

        Raises:
            SchemaError: a column is missing or of a type that no tensor can hold.
        """
        if features is not None:
            return cls._of_features(schema, signature, kept, features)
        types = {field.name: field for field in schema.fields}
        for field in signature.inputs:
            _check_meaning(field, types)
        packs = _packs(signature, types)
        where = {name: (pack, place) for pack, names in packs.items() for place, name in enumerate(names)}
        single = [name for name in signature.columns if name not in where]
        passed = [name for name in kept if name not in where and name not in single]
        select = [F.array(*[F.col(quoted(name)) for name in names]).alias(pack) for pack, names in packs.items()]
        # Spark's mapInArrow takes a dot in a name for a path into a struct, and a backtick for a quote.
        called = {name: f"{_PLAIN}{n}" if {".", "`"} & set(name) else name for n, name in enumerate([*single, *passed])}
        select += [F.col(quoted(name)).alias(alias) for name, alias in called.items()]
        returned = tuple(Kept(name, *where[name]) if name in where else Kept(name, called[name]) for name in kept)
        for field in signature.inputs:
            _check_numbers(field, types)
        plans = tuple(plan_input(field, signature, where, packs, called) for field in signature.inputs)
        return cls(select=select, inputs=plans, kept=returned)

    @classmethod
    def _of_features(
        cls, schema: T.StructType, signature: Signature, kept: Sequence[str], features: Features
    ) -> _Transport:
        """The same for raw columns, which the worker turns into those of the signature."""
        absent = [name for name in features.columns if name not in schema.names]
        if absent:
            raise SchemaError(
                f"the model's features need the columns {absent}, the DataFrame has {schema.names}: add or rename them"
            )
        called = {name: f"{_PLAIN}{place}" for place, name in enumerate(dict.fromkeys([*features.columns, *kept]))}
        return cls(
            select=[F.col(quoted(name)).alias(alias) for name, alias in called.items()],
            inputs=plan_inputs(signature, features),
            kept=tuple(Kept(name, called[name]) for name in kept),
            raw=tuple(called[name] for name in features.columns),
        )


def _packs(signature: Signature, types: Mapping[str, T.StructField]) -> dict[str, list[str]]:
    """Scalar feature columns by type, where there is more than one of it."""
    groups: dict[str, list[str]] = {}
    for name in signature.columns:
        if name not in types:
            raise SchemaError(
                f"the model needs the column {name!r}, the DataFrame has {sorted(types)}: add or rename it"
            )
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
        found = _logical(kind) or ""
        codes = field.logical == "string"
        if codes and found == "string":
            raise SchemaError(
                f"column {name!r} holds strings, and the model was trained on their codes, which the manifest of its "
                "shards lists and the model does not carry: give a column with the codes"
            )
        if found != ("" if codes else field.logical):
            raise SchemaError(
                f"column {name!r} is of type {kind.simpleString()}, and the model was trained on "
                f"{_MEANT[field.logical or '']}: cast the column to what it was in training"
            )


def _logical(kind: T.DataType) -> str | None:
    """What the numbers of a column stand for, ``""`` for themselves; None where no tensor can hold its type."""
    try:
        return str(tensor_kind("", to_arrow_type(kind, timezone="UTC"), None).get("logical", ""))
    except (PySparkTypeError, SchemaError):
        return None


def _check_numbers(field: TensorField, types: Mapping[str, T.StructField]) -> None:
    """Refuse columns that hold more or fewer numbers a row than an input takes, as far as their types tell."""
    found = [_numbers(types[name]) for name in field.columns]
    known = [count for count in found if count is not None]
    if not found or len(known) < len(found) or None in field.shape:
        return
    wanted = math.prod(size or 1 for size in field.shape)
    if sum(known) != wanted:
        raise SchemaError(
            f"input {field.name!r} gets {sum(known)} numbers a row from {list(field.columns)}, its shape {field.shape} "
            f"holds {wanted}: give the columns that the model was trained with"
        )


def _numbers(column: T.StructField) -> int | None:
    """The numbers in a row of a column; None where only the rows tell."""
    if isinstance(column.dataType, VectorUDT):
        count = column.metadata.get("ml_attr", {}).get("num_attrs")  # as Spark's own transformers note it
        return count if isinstance(count, int) else None
    return None if isinstance(column.dataType, T.ArrayType | T.BinaryType) else 1
