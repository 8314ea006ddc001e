"""The shards of one fit, made of a DataFrame, a table version or existing shard sets."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from sparkdl.columns.layout import Layout
from sparkdl.columns.names import check_names, quoted, tells_cases_apart
from sparkdl.compat.pickles import dumps
from sparkdl.compat.quick_ack import promptly
from sparkdl.compat.worker_errors import encodable_errors
from sparkdl.config import ShardConfig
from sparkdl.errors import ConfigError, ConflictError, NoRowsError, SchemaError, StorageError, first_line
from sparkdl.estimator.column_plan import ColumnPlan, plan_columns
from sparkdl.estimator.fit_spec import FitSpec, Transformation
from sparkdl.estimator.model_call import check_forms
from sparkdl.estimator.params.converters import validation as share_or_column
from sparkdl.estimator.store import Store
from sparkdl.estimator.user_code import built, registry_lock
from sparkdl.observe import span
from sparkdl.shards.manifest import WRITER_VERSION, Manifest, Source
from sparkdl.shards.write import write_shards, write_split
from sparkdl.storage import Storage

_BUCKETS = 1 << 30
_HELD_OUT = "_sparkdl_validation"


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
    """

    plan: ColumnPlan
    train: Manifest
    validation: Manifest | None
    store: Store
    pinned: bool = False
    ours: bool = True
    seconds: dict[str, float] = field(default_factory=dict)

    def discard(self) -> None:
        """Delete what the store's policy does not keep."""
        for manifest in (self.train, self.validation):
            if self.ours and manifest is not None and manifest.folder is not None:
                self.store.discard_shards(manifest.folder, pinned=self.pinned)


def prepare(
    spec: FitSpec, df: DataFrame, *, held_out: DataFrame | None = None, source: Source | None = None
) -> Prepared:
    """Write the shards of one fit.

    Args:
        spec: of the fit.
        df: the rows, which are read once; those of a pinned table version once for training, once for validation.
        held_out: rows to validate on; None takes those of ``df`` that the parameter ``validation`` chooses.
        source: the pinned table version behind ``df``; shards of it that exist are taken.

    Raises:
        SchemaError: a column is missing or of a type that cannot be used.
        ConfigError: the model cannot tell elements from padding.
        DataError: there are no rows, or nulls.
    """
    rows = _transformed(spec.transformation, df)
    weight = (spec.roles.weight,) if spec.roles.weight else ()
    _check_made(spec.transformation, df, rows, (*spec.roles.features, *spec.roles.labels, *weight))
    plan = plan_columns(rows.schema, spec.roles, cases=tells_cases_apart(rows))
    if plan.varying and spec.roles.shapes is not None:  # without, the statistics of the shards tell what varies
        check_forms(built(spec.objects.model), plan.varying)
    marks = held_out_rows(rows, spec.validation, plan.sources, spec.seed)
    parts = {"all": rows} if marks is None else {"train": rows.filter(~marks), "validation": rows.filter(marks)}
    if held_out is not None:
        parts["validation"] = _transformed(spec.transformation, held_out)
        plan_columns(parts["validation"].schema, spec.roles, cases=tells_cases_apart(rows))
    stem = uuid.uuid4().hex if source is None else _stem(source, spec)
    uris = {part: spec.store.shards(f"{stem}-{part}") for part in parts}

    def write(part: str) -> Manifest:
        pinned = source and replace(source, transformation=f"{source.transformation}|{part}")
        return _written(plan, parts[part], uris[part], spec.shards, pinned)

    seconds: dict[str, float] = {}
    try:
        with span("shards", seconds):
            if marks is not None and held_out is None and source is None:  # a second reading may not be the same
                written = _divided(plan, rows, marks, (uris["train"], uris["validation"]), spec.shards)
            else:
                written = _at_once(df, write, list(parts))
    except BaseException:
        for uri in uris.values() if source is None else ():  # a part that was written is nobody's
            with contextlib.suppress(StorageError):
                spec.store.discard_shards(uri, pinned=False)
        raise
    validation = written[1] if len(written) > 1 else None
    return Prepared(plan, written[0], validation, spec.store, pinned=source is not None, seconds=seconds)


def prepare_existing(spec: FitSpec, train: Manifest, validation: Manifest | None) -> Prepared:
    """Take shard sets that exist instead of writing any.

    Raises:
        SchemaError: they lack a column.
    """
    roles = spec.roles
    shard_columns = {column for tensor in train.tensors for column in tensor.columns}
    weight = (roles.weight,) if roles.weight else ()
    for name in (*roles.features, *roles.labels, *weight):
        if name not in shard_columns:
            raise SchemaError(
                f"shard set {train.uri} holds no column {name!r}, only {sorted(shard_columns)}: choose among these"
            )
    for name in (*roles.labels, *weight):
        if name not in {tensor.name for tensor in train.tensors}:
            raise SchemaError(f"shard set {train.uri} packs {name!r} with others: write it with labels=[{name!r}]")
    if validation is not None and validation.schema_hash != train.schema_hash:
        raise SchemaError(f"{train.uri} and {validation.uri} hold different tensors: write both with the same layout")
    return Prepared(ColumnPlan(roles=roles, casts={}, layout=Layout()), train, validation, spec.store, ours=False)


def _written(plan: ColumnPlan, rows: DataFrame, uri: Storage, config: ShardConfig, source: Source | None) -> Manifest:
    call = functools.partial(
        write_shards,
        plan.select(rows),
        uri,
        columns=plan.columns,
        labels=plan.packed_labels,
        layout=plan.layout,
        config=config,
        source=source,
    )
    try:
        return call()
    except ConflictError:
        if source is None:
            raise
        return call()  # another fit on the same table version was faster; the content key makes its set ours


def _divided(
    plan: ColumnPlan, rows: DataFrame, marks: Column, uris: tuple[Storage, Storage], config: ShardConfig
) -> list[Manifest]:
    """Write training and validation rows in one reading: no row is in both, also of a frame that is never the same."""
    manifests = write_split(
        plan.select(rows, marks.alias(_HELD_OUT)),
        _HELD_OUT,
        uris,
        columns=plan.columns,
        labels=plan.packed_labels,
        layout=plan.layout,
        config=config,
    )
    return [_or_empty(manifest) for manifest in manifests]


def _at_once(df: DataFrame, write: Callable[[str], Manifest], parts: list[str]) -> list[Manifest]:
    """Write all parts at once: their stages share the slots, and none waits for the other's last task."""
    if len(parts) == 1:
        return [write(parts[0])]
    with ThreadPoolExecutor(len(parts), thread_name_prefix="sparkdl-shards") as pool:
        futures = [pool.submit(_inheriting(df, write), part) for part in parts]
    return [_or_empty(future.exception() or future.result()) for future in futures]


def _or_empty(written: Manifest | BaseException) -> Manifest:
    """What was written; a part without rows is refused later, by an error that knows of the split."""
    if isinstance(written, NoRowsError):
        return Manifest(rows=0, bytes=0, shards=(), tensors=())
    if isinstance(written, BaseException):
        raise written
    return written


def _inheriting(df: DataFrame, function: Callable[..., Any]) -> Callable[..., Any]:
    """Carry job groups, pools and tags of this thread over to another one."""
    from pyspark import inheritable_thread_target

    return inheritable_thread_target(df.sparkSession)(function)  # type: ignore[no-any-return]


def held_out_rows(df: DataFrame, validation: str | float | None, columns: Sequence[str], seed: int) -> Column | None:
    """Return the condition of validation rows: a column, or a hash of ``columns`` that no partitioning changes.

    Raises:
        SchemaError: the column is missing, or neither boolean nor a number.
    """
    if validation is None or validation == 0:
        return None
    if isinstance(validation, str):
        if validation not in df.columns:
            raise SchemaError(
                f"validation names the column {validation!r}, the frame has {df.columns}: correct the name"
            )
        check_names(df.columns, [validation], cases=tells_cases_apart(df))
        kind = df.schema[validation].dataType
        column = F.col(quoted(validation))
        if isinstance(kind, T.BooleanType):
            return F.coalesce(column, F.lit(False))
        if isinstance(kind, T.NumericType):
            above = column > 0
            if isinstance(kind, T.FloatType | T.DoubleType):
                above &= ~F.isnan(column)  # which to Spark is above every number, and to pandas is a null
            return F.coalesce(above, F.lit(False))
        raise SchemaError(
            f"the validation column {validation!r} is a {kind.simpleString()}: make it boolean or a number"
        )
    hashed = F.xxhash64(*(F.col(quoted(name)) for name in columns), F.lit(seed))
    return F.pmod(hashed, F.lit(_BUCKETS)) < F.lit(int(validation * _BUCKETS))


def _stem(source: Source, spec: FitSpec) -> str:
    """The name of the shards of a pinned table version, by all that decides what lies in them."""
    *described, ranks = spec.data_key
    key = (
        *(WRITER_VERSION, source.uri, source.version, source.table_id, source.transformation),
        *(described, code_of(spec.transformation.function), ranks, spec.roles.float_dtype),
    )
    return "pinned-" + hashlib.sha256(repr(key).encode()).hexdigest()[:32]


def code_of(function: Any) -> str:
    """What tells a transformation from another: its pickle, and the source of one that pickles as a mere name.

    To the source belongs that of its module, whose helpers and constants it may use; those of a script are pickled.
    """
    source = ""
    defined = function.func if isinstance(function, functools.partial) else function
    module = inspect.getmodule(defined)
    parts: list[Any] = [defined] if module is sys.modules["__main__"] else [defined, module]
    for part in parts:
        with contextlib.suppress(OSError, TypeError):
            source += inspect.getsource(part)
    with registry_lock:  # of a module that travels by value meanwhile the pickle would be another one
        return hashlib.sha256(dumps(function) + source.encode()).hexdigest()


def _transformed(transformation: Transformation, df: DataFrame) -> DataFrame:
    """Apply transformation_fn, with the schema that its two companions describe."""
    function, removed = transformation.function, transformation.removed_fields
    if function is None:
        return df
    unknown = [name for name in removed if name not in df.columns]
    if unknown:
        raise SchemaError(
            f"transformation_removed_fields names {unknown}, the frame has {df.columns}: correct the name"
        )
    fields = {field.name: field for field in df.schema.fields if field.name not in removed}
    for name, dtype, shape, nullable in transformation.edit_fields:
        fields[name] = T.StructField(name, _spark_type(name, dtype, tuple(shape or ())), bool(nullable))
    columns = df.columns
    numbers = (T.IntegralType, T.FractionalType, T.BooleanType)
    types = {
        name: to_arrow_type(field.dataType) if isinstance(field.dataType, numbers) else None
        for name, field in fields.items()
    }

    def apply(frames: Any) -> Any:
        with encodable_errors():
            for frame in promptly(frames):
                frame.columns = columns
                yield _applied(function, frame, types)

    # Spark's mapInPandas takes a dot in a name for a path into a struct.
    plain = df.toDF(*(f"column_{n}" for n in range(len(columns))))
    return plain.mapInPandas(apply, T.StructType(list(fields.values())))


def _check_made(transformation: Transformation, df: DataFrame, rows: DataFrame, names: Sequence[str]) -> None:
    """Refuse columns that a transformation would have to make and is not said to.

    Raises:
        SchemaError: names the column.
    """
    if transformation.function is None:
        return
    for name in names:
        if name in rows.columns:
            continue
        if name in df.columns:
            raise SchemaError(
                f"column {name!r} is to be trained on, and transformation_removed_fields names it: drop it from one"
            )
        raise SchemaError(
            f"column {name!r} is neither in the frame, {df.columns}, nor in transformation_edit_fields: add it there "
            "with its dtype where transformation_fn makes it, or correct the name"
        )


def _applied(function: Callable[[Any], Any], frame: Any, types: dict[str, pa.DataType | None]) -> Any:
    """What a user's transformation makes of some rows, on a worker.

    Args:
        function: the transformation.
        frame: the rows.
        types: of the columns that it returns, by name; None of those that hold no numbers.

    Raises:
        ConfigError: it raised; names where.
        SchemaError: it returned no frame with all the columns, or values that are not of a column's type.
    """
    try:
        transformed = function(frame)
    except Exception as error:
        _, user_frame, *_ = *traceback.extract_tb(error.__traceback__), None  # the first frame is this one
        location = f" at {user_frame.filename}:{user_frame.lineno}" if user_frame else ""
        raise ConfigError(f"transformation_fn raised {type(error).__name__}: {error}{location}: correct it") from error
    if not isinstance(transformed, type(frame)):
        raise SchemaError(
            f"transformation_fn returned a {type(transformed).__name__}: let it return a pandas DataFrame, also where "
            "it changes its argument"
        )
    lacking = [name for name in types if name not in transformed.columns]
    if lacking:
        raise SchemaError(
            f"transformation_fn returned {list(transformed.columns)} without {lacking}: return them, or name in "
            "transformation_removed_fields what it removes"
        )
    for name, kind in types.items():
        if kind is not None and transformed[name].dtype != kind.to_pandas_dtype():
            _check_converts(name, transformed[name], kind)
    return transformed[list(types)]


def _check_converts(name: str, values: Any, kind: pa.DataType) -> None:
    """Refuse numbers that are not of the type that their column has in the frame or in transformation_edit_fields.

    Raises:
        SchemaError: names the column and both types.
    """
    with contextlib.suppress(pa.ArrowException):
        pa.Array.from_pandas(values, type=kind)
        return
    try:
        pa.Array.from_pandas(values).cast(kind)  # which Spark tries next: it reads texts of numbers
    except pa.ArrowException as error:
        raise SchemaError(
            f"transformation_fn returned {name!r} as {values.dtype}, which is not its type {kind} "
            f"({first_line(error)}): convert it, or name its new dtype in transformation_edit_fields"
        ) from error


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
    try:
        called = np.dtype(dtype).name
    except TypeError:  # torch's dtypes, and names that numpy does not know
        called = ""
    called = "bytes" if called.startswith("bytes") else called
    if called not in kinds:
        raise ConfigError(
            f"transformation_edit_fields gives {name!r} the dtype {dtype!r}: choose among {sorted(kinds)}"
        )
    kind = kinds[called]
    for _ in shape:
        kind = T.ArrayType(kind)
    return kind


@contextmanager
def prepare_data(
    num_processes: int,
    store: Store,
    df: DataFrame,
    label_columns: Sequence[str],
    feature_columns: Sequence[str] | None,
    validation: str | float | None = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,
    partitions_per_process: int = 10,
    verbose: int = 0,
) -> Iterator[int]:
    """Write training and validation rows into a store, for ``fit_on_parquet(dataset_idx=...)``; they stay there.

    Args:
        num_processes: number of ranks.
        store: where they go: ``get_train_data_path(idx)`` and ``get_val_data_path(idx)``.
        df: the rows, read once for training and once for validation.
        label_columns: at least one.
        feature_columns: None takes all others.
        validation: share of the rows by a hash of the row, or the column that marks them.
        sample_weight_col: is kept, too.
        compress_sparse: only False is taken: Parquet is compressed in any case.
        partitions_per_process: files a rank at most.
        verbose: above 0 says where the files lie.

    Yields:
        The number, which no earlier call on this store has had.

    Raises:
        SchemaError: a column is missing.
        ConfigError: an argument cannot be meant.
    """
    if num_processes < 1 or partitions_per_process < 1:
        raise ConfigError(
            f"num_processes={num_processes}, partitions_per_process={partitions_per_process}: give at least 1 of each"
        )
    label_columns = [label_columns] if isinstance(label_columns, str) else label_columns
    feature_columns = [feature_columns] if isinstance(feature_columns, str) else feature_columns
    if not label_columns:
        raise ConfigError("label_columns names no column: name at least one")
    if compress_sparse:
        raise ConfigError("compress_sparse=True has no effect on Parquet, which is compressed anyway: leave it out")
    validation = None if validation is None else share_or_column("validation", validation)
    other_columns = [name for name in df.columns if name not in (*label_columns, sample_weight_col, validation)]
    columns = [*(other_columns if feature_columns is None else feature_columns), *label_columns]
    columns += [sample_weight_col] if sample_weight_col else []
    columns = list(dict.fromkeys(columns))  # a label may be a feature as well
    missing = [name for name in columns if name not in df.columns]
    if missing:
        raise SchemaError(f"the frame has no column {missing[0]!r}, it has {df.columns}: correct the name")
    marks = held_out_rows(df, validation, columns, seed=0)
    idx = 0
    while store.parquet("train_path", idx).exists() or store.parquet("val_path", idx).exists():
        idx += 1
    parts = {"train_path": df} if marks is None else {"train_path": df.filter(~marks), "val_path": df.filter(marks)}
    for name, rows in parts.items():
        folder = store.parquet(name, idx)  # type: ignore[arg-type]
        selected = rows.select(*(F.col(quoted(column)) for column in columns))
        selected.coalesce(num_processes * partitions_per_process).write.parquet(folder.spark_uri)
        if verbose:
            print(f"{name.removesuffix('_path')} rows lie in {folder.spark_uri}", flush=True)
    yield idx
