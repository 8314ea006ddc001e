"""From a DataFrame to the shards of one fit: training rows, and validation rows.

Enters: a DataFrame (or a pinned table version, or shard sets that exist) and the estimator's parameters. Leaves:
``Prepared``: the manifests and the plan by which the model finds its inputs in them.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.compat.quick_ack import promptly
from sparkdl.errors import ConfigError, ConflictError, DataError, SchemaError
from sparkdl.estimator.fit.column_plan import ColumnPlan, plan_columns
from sparkdl.estimator.fit.probe import Probe
from sparkdl.estimator.fit.settings import roles_of, seed_of, shard_config
from sparkdl.estimator.params.params import CheckedParams, value_of
from sparkdl.estimator.store import Store
from sparkdl.observe import span
from sparkdl.shards.manifest import WRITER_VERSION, Manifest, Source
from sparkdl.shards.write import write_shards

__all__ = ["Prepared", "data_key", "prepare", "prepare_existing"]

_BUCKETS = 1 << 30

_DATA_PARAMS = (
    *("continuous_cols", "categorical_cols", "input_shapes", "label_shapes", "feature_dtypes", "random_seed"),
    *("transformation_edit_fields", "transformation_removed_fields", "partitions_per_process", "compress_sparse_cols"),
)


_WRITING_PARAMS = (
    *("transformation_fn", "transformation_edit_fields", "transformation_removed_fields", "partitions_per_process"),
    *("continuous_cols", "categorical_cols", "feature_dtypes", "label_shapes", "compress_sparse_cols"),
)


@dataclass
class Prepared:
    """The shards of one fit.

    Attributes:
        plan: how columns lie in them.
        train: rows to train on.
        validation: rows to validate on; None without.
        store: where they lie.
        pinned: whether they come from a pinned table version, and may serve the next fit.
        ours: whether this fit wrote them, and so may delete them.
        seconds: spent on writing.
        probes: by ``id``, the models of fits on these shards, and how each is called.
    """

    plan: ColumnPlan
    train: Manifest
    validation: Manifest | None
    store: Store
    pinned: bool = False
    ours: bool = True
    seconds: dict[str, float] = field(default_factory=dict)
    probes: dict[int, tuple[Any, Probe]] = field(default_factory=dict)

    def discard(self) -> None:
        """Delete what the store's policy does not keep."""
        for manifest in (self.train, self.validation):
            if self.ours and manifest is not None and manifest.uri:
                self.store.discard_shards(manifest.uri, pinned=self.pinned)


def data_key(params: CheckedParams, num_proc: int) -> tuple[Any, ...]:
    """What the shards depend on besides the frame: fits with equal keys share them."""
    get = params.getOrDefault
    named = [value_of(params, name) for name in ("feature_cols", "label_cols", "sample_weight_col", "validation")]
    ranks = num_proc if get("partitions_per_process") else 0
    return (repr(named), *(repr(get(name)) for name in _DATA_PARAMS), id(get("transformation_fn")), ranks)


def prepare(
    params: CheckedParams, df: DataFrame, store: Store, *, num_proc: int, float_dtype: str, source: Source | None = None
) -> Prepared:
    """Write the shards of one fit.

    Args:
        params: the estimator's parameters.
        df: the rows; read once for training and once for validation.
        store: where shards go.
        num_proc: number of ranks.
        float_dtype: the model's floating dtype.
        source: the pinned table version behind ``df``; shards of it that exist are taken.

    Raises:
        SchemaError: a column is missing or of a type that cannot be used.
        DataError: there are no rows, or nulls.
    """
    roles = roles_of(params, float_dtype)
    rows = _transformed(params, df)
    plan = plan_columns(rows.schema, roles)
    marks = _marks(params, rows, plan)
    stem = uuid.uuid4().hex if source is None else _stem(source, params, num_proc, float_dtype)
    config = shard_config(params, num_proc)

    def write(part: str, condition: Column | None) -> Manifest:
        chosen = rows if condition is None else rows.filter(condition)
        pinned = source and replace(source, transformation=f"{source.transformation}|{part}")
        arguments: dict[str, Any] = {
            "labels": plan.packed_labels,
            "layout": plan.layout,
            "config": config,
            "source": pinned,
        }
        uri = store.shards_uri(f"{stem}-{part}")
        try:
            return write_shards(plan.select(chosen), uri, columns=plan.columns, **arguments)
        except ConflictError:
            if source is None:
                raise
            # Another fit on the same table version was faster; the content key makes its set ours.
            return write_shards(plan.select(chosen), uri, columns=plan.columns, **arguments)

    seconds: dict[str, float] = {}
    with span("shards", seconds):
        train, validation = _both(df, write, marks)
    return Prepared(plan, train, validation, store, pinned=source is not None, seconds=seconds)


def prepare_existing(
    params: CheckedParams, train: Manifest, validation: Manifest | None, store: Store, float_dtype: str
) -> Prepared:
    """Take shard sets that exist instead of writing any.

    Raises:
        SchemaError: they lack a column.
        ConfigError: a parameter asks for something that only writing could do.
    """
    for name in _WRITING_PARAMS:
        if params.isSet(name):
            raise ConfigError(
                f"{name} works while shards are written, and these exist already: drop it, or use fit(df)"
            )
    if value_of(params, "validation") is not None:
        raise ConfigError("validation chooses rows of a DataFrame: give fit_on_shards a validation set instead")
    roles = roles_of(params, float_dtype)
    held = {column for spec in train.tensors for column in spec.columns}
    for name in (*roles.features, *roles.labels, *([roles.weight] if roles.weight else [])):
        if name not in held:
            raise SchemaError(
                f"shard set {train.uri} holds no column {name!r}, only {sorted(held)}: choose among these"
            )
    for name in (*roles.labels, *([roles.weight] if roles.weight else [])):
        if name not in {spec.name for spec in train.tensors}:
            raise SchemaError(f"shard set {train.uri} packs {name!r} with others: write it with labels=[{name!r}]")
    if validation is not None and validation.schema_hash != train.schema_hash:
        raise SchemaError(f"{train.uri} and {validation.uri} hold different tensors: write both with the same layout")
    from sparkdl.columns.layout import Layout

    plan = ColumnPlan(roles=roles, casts={}, layout=Layout())
    return Prepared(plan, train, validation, store, ours=False)


def _both(
    df: DataFrame, write: Callable[[str, Column | None], Manifest], marks: Column | None
) -> tuple[Manifest, Manifest | None]:
    """Write both parts at once: their stages share the slots, and neither waits for the other's last task."""
    if marks is None:
        return write("all", None), None
    results: dict[str, Manifest | BaseException] = {}
    with ThreadPoolExecutor(2, thread_name_prefix="sparkdl-shards") as pool:
        parts = {
            "train": pool.submit(_inheriting(df, write), "train", ~marks),
            "validation": pool.submit(_inheriting(df, write), "validation", marks),
        }
    for part, future in parts.items():
        error = future.exception()
        results[part] = error if error is not None else future.result()
    return _or_empty(results["train"]), _or_empty(results["validation"])


def _or_empty(written: Manifest | BaseException) -> Manifest:
    """What was written; a part without rows is refused later, by an error that knows of the split."""
    if isinstance(written, DataError) and "0 rows" in str(written):
        return Manifest(rows=0, bytes=0, shards=(), tensors=())
    if isinstance(written, BaseException):
        raise written
    return written


def _inheriting(df: DataFrame, function: Callable[..., Any]) -> Callable[..., Any]:
    """Carry job groups, pools and tags of this thread over to another one."""
    from pyspark import inheritable_thread_target

    return inheritable_thread_target(df.sparkSession)(function)  # type: ignore[no-any-return]


def _marks(params: CheckedParams, df: DataFrame, plan: ColumnPlan) -> Column | None:
    """The condition of validation rows: a column, or a hash of the row's content that no partitioning changes."""
    validation = value_of(params, "validation")
    if validation is None or validation == 0:
        return None
    if isinstance(validation, str):
        if validation not in df.columns:
            raise SchemaError(
                f"validation names the column {validation!r}, the frame has {df.columns}: correct the name"
            )
        kind = df.schema[validation].dataType
        column = F.col(f"`{validation}`")
        if isinstance(kind, T.BooleanType):
            return F.coalesce(column, F.lit(False))
        if isinstance(kind, T.NumericType):
            return F.coalesce(column > 0, F.lit(False))
        raise SchemaError(
            f"the validation column {validation!r} is a {kind.simpleString()}: make it boolean or a number"
        )
    hashed = F.xxhash64(*(F.col(f"`{name}`") for name in plan.columns), F.lit(seed_of(params)))
    return F.pmod(hashed, F.lit(_BUCKETS)) < F.lit(int(validation * _BUCKETS))


def _stem(source: Source, params: CheckedParams, num_proc: int, float_dtype: str) -> str:
    key = data_key(params, num_proc)
    text = repr((WRITER_VERSION, source.uri, source.version, source.transformation, key[:-2], key[-1], float_dtype))
    return "pinned-" + hashlib.sha256(text.encode()).hexdigest()[:32]


def _transformed(params: CheckedParams, df: DataFrame) -> DataFrame:
    """Apply transformation_fn, with the schema that its two companions describe."""
    function = params.getOrDefault("transformation_fn")
    edits = params.getOrDefault("transformation_edit_fields")
    removed = params.getOrDefault("transformation_removed_fields") or []
    if function is None:
        if edits or removed:
            raise ConfigError(
                "transformation_edit_fields and _removed_fields describe a transformation_fn: give one, too"
            )
        return df
    fields = {one.name: one for one in df.schema.fields if one.name not in removed}
    for edit in edits or ():
        name, dtype, shape, nullable = edit
        fields[name] = T.StructField(name, _spark_type(name, dtype, tuple(shape or ())), bool(nullable))
    given, names = df.columns, list(fields)

    def apply(frames: Any) -> Any:
        for frame in promptly(frames):
            frame.columns = given
            yield function(frame)[names]

    # Spark's mapInPandas takes a dot in a name for a path into a struct.
    plain = df.toDF(*(f"column_{n}" for n in range(len(given))))
    return plain.mapInPandas(apply, T.StructType(list(fields.values())))


def _spark_type(name: str, dtype: Any, shape: tuple[Any, ...]) -> T.DataType:
    kinds: dict[str, T.DataType] = {
        "bool": T.BooleanType(),
        "int8": T.ByteType(),
        "int16": T.ShortType(),
        "int32": T.IntegerType(),
        "int64": T.LongType(),
        "float32": T.FloatType(),
        "float64": T.DoubleType(),
        "bytes": T.BinaryType(),
    }
    called = np.dtype(dtype).name
    called = "bytes" if called.startswith("bytes") else called
    if called not in kinds:
        raise ConfigError(
            f"transformation_edit_fields gives {name!r} the dtype {dtype!r}: choose among {sorted(kinds)}"
        )
    kind = kinds[called]
    for _ in shape:
        kind = T.ArrayType(kind)
    return kind
