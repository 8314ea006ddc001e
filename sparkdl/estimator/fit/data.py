"""From a DataFrame to the shards of one fit: training rows, and validation rows.

Enters: a DataFrame (or a pinned table version, or shard sets that exist) and the estimator's parameters. Leaves:
``Prepared``: the manifests and the plan by which the model finds its inputs in them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import traceback
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle
import numpy as np
import torch
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.columns.layout import Layout
from sparkdl.columns.names import check_names, quoted, tells_cases_apart
from sparkdl.compat.quick_ack import promptly
from sparkdl.config import ShardConfig
from sparkdl.errors import ConfigError, ConflictError, NoRowsError, SchemaError
from sparkdl.estimator.fit.checks import built
from sparkdl.estimator.fit.settings import ranks_wanted, roles_of, seed_of, shard_config
from sparkdl.estimator.inputs.column_plan import ColumnPlan, Roles, plan_columns
from sparkdl.estimator.inputs.probe import Probe, floating_dtype, probe
from sparkdl.estimator.inputs.row_lengths import check_forms
from sparkdl.estimator.params.params import CheckedParams, value_of
from sparkdl.estimator.store import Store
from sparkdl.observe import span
from sparkdl.shards.manifest import WRITER_VERSION, Manifest, Source
from sparkdl.shards.write import write_shards, write_split
from sparkdl.storage import Storage

__all__ = ["Prepared", "held_out_rows", "prepare", "prepare_existing", "sharing_key"]

_BUCKETS = 1 << 30
_HELD_OUT = "_sparkdl_validation"

_DATA_PARAMS = (
    *("continuous_cols", "categorical_cols", "input_shapes", "label_shapes", "feature_dtypes", "random_seed"),
    *("transformation_edit_fields", "transformation_removed_fields", "partitions_per_process", "compress_sparse_cols"),
    *("spread_rows", "shuffle", "shuffle_buffer_size"),
)


_WRITING_PARAMS = (
    *("transformation_fn", "transformation_edit_fields", "transformation_removed_fields", "partitions_per_process"),
    *("continuous_cols", "categorical_cols", "feature_dtypes", "label_shapes", "compress_sparse_cols", "spread_rows"),
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
        probes: by ``id``, the models of fits on these shards, and how each is called; see ``probe``.
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
            if self.ours and manifest is not None and manifest.folder is not None:
                self.store.discard_shards(manifest.folder, pinned=self.pinned)

    def probe(self, given: Any, model: torch.nn.Module) -> Probe:
        """How ``model``, a copy of ``given``, is called on these shards; found out once for all fits of ``given``.

        Raises:
            ConfigError: it cannot be called with these inputs.
            DataError: an id lies beyond an embedding's table.
        """
        known = self.probes.get(id(given))
        if known is None or not isinstance(given, torch.nn.Module):
            inputs, by_column = self.plan.views(self.train), self.plan.views(self.train, by_column=True)
            manifests = [self.train, *([self.validation] if self.validation else [])]
            known = given, probe(model, inputs, by_column, manifests, self.plan.roles.labels, written=self.ours)
            self.probes[id(given)] = known  # which keeps ``given`` alive, and so its id its own
        return known[1]


def sharing_key(params: CheckedParams) -> tuple[Any, ...]:
    """What the shards of an estimator depend on besides the frame: fits with equal keys share them."""
    ranks = ranks_wanted(params) or 0
    return (*_data_key(params, ranks), _float_dtype(params), repr(params.getOrDefault("store")))


def _float_dtype(params: CheckedParams) -> str:
    """The floating dtype of the model, which its features take."""
    model = params.getOrDefault("model")
    return floating_dtype(model) if isinstance(model, torch.nn.Module) else "float32"


def _data_key(params: CheckedParams, num_proc: int) -> tuple[Any, ...]:
    get = params.getOrDefault
    named = [value_of(params, name) for name in ("feature_cols", "label_cols", "sample_weight_col", "validation")]
    ranks = num_proc if get("partitions_per_process") else 0
    return (repr(named), *(repr(get(name)) for name in _DATA_PARAMS), id(get("transformation_fn")), ranks)


def prepare(
    params: CheckedParams,
    df: DataFrame,
    store: Store,
    *,
    num_proc: int,
    held_out: DataFrame | None = None,
    source: Source | None = None,
) -> Prepared:
    """Write the shards of one fit.

    Args:
        params: the estimator's parameters.
        df: the rows, which are read once; those of a pinned table version once for training, once for validation.
        store: where shards go.
        num_proc: number of ranks.
        held_out: rows to validate on; None takes those of ``df`` that the parameter ``validation`` chooses.
        source: the pinned table version behind ``df``; shards of it that exist are taken.

    Raises:
        SchemaError: a column is missing or of a type that cannot be used.
        ConfigError: the model cannot tell elements from padding.
        DataError: there are no rows, or nulls.
    """
    float_dtype = _float_dtype(params)
    roles = roles_of(params, float_dtype)
    rows = _transformed(params, df)
    plan = _planned(params, rows, roles)
    marks = held_out_rows(rows, value_of(params, "validation"), plan.sources, seed_of(params))
    parts = {"all": rows} if marks is None else {"train": rows.filter(~marks), "validation": rows.filter(marks)}
    if held_out is not None:
        parts["validation"] = _transformed(params, held_out)
        plan_columns(parts["validation"].schema, roles, cases=tells_cases_apart(rows))
    stem = uuid.uuid4().hex if source is None else _stem(source, params, num_proc, float_dtype)
    config, uris = shard_config(params, num_proc), {part: store.shards(f"{stem}-{part}") for part in parts}

    def write(part: str) -> Manifest:
        pinned = source and replace(source, transformation=f"{source.transformation}|{part}")
        return _written(plan, parts[part], uris[part], config, pinned)

    seconds: dict[str, float] = {}
    with span("shards", seconds):
        if marks is not None and held_out is None and source is None:  # who knows whether a second reading is the same
            written = _divided(plan, rows, marks, (uris["train"], uris["validation"]), config)
        else:
            written = _at_once(df, write, list(parts))
    validation = written[1] if len(written) > 1 else None
    return Prepared(plan, written[0], validation, store, pinned=source is not None, seconds=seconds)


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
    both = write_split(
        plan.select(rows, marks.alias(_HELD_OUT)),
        _HELD_OUT,
        uris,
        columns=plan.columns,
        labels=plan.packed_labels,
        layout=plan.layout,
        config=config,
    )
    return [_or_empty(one) for one in both]


def _planned(params: CheckedParams, rows: DataFrame, roles: Roles) -> ColumnPlan:
    """Plan the columns; refuse, before a shard is written, a model that cannot take what input_shapes says."""
    plan = plan_columns(rows.schema, roles, cases=tells_cases_apart(rows))
    if plan.varying and roles.shapes is not None:  # without, the statistics of the shards tell whether lengths vary
        check_forms(built(params.getOrDefault("model")), plan.varying)
    return plan


def prepare_existing(params: CheckedParams, train: Manifest, validation: Manifest | None, store: Store) -> Prepared:
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
    roles = roles_of(params, _float_dtype(params))
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
    plan = ColumnPlan(roles=roles, casts={}, layout=Layout())
    return Prepared(plan, train, validation, store, ours=False)


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
            return F.coalesce(column > 0, F.lit(False))
        raise SchemaError(
            f"the validation column {validation!r} is a {kind.simpleString()}: make it boolean or a number"
        )
    hashed = F.xxhash64(*(F.col(quoted(name)) for name in columns), F.lit(seed))
    return F.pmod(hashed, F.lit(_BUCKETS)) < F.lit(int(validation * _BUCKETS))


def _stem(source: Source, params: CheckedParams, num_proc: int, float_dtype: str) -> str:
    *described, _, ranks = _data_key(params, num_proc)
    code = _code_of(params.getOrDefault("transformation_fn"))
    known = (source.uri, source.version, source.table_id, source.transformation, described, code, ranks, float_dtype)
    text = repr((WRITER_VERSION, *known))
    return "pinned-" + hashlib.sha256(text.encode()).hexdigest()[:32]


def _code_of(function: Any) -> str:
    """What tells a transformation from another: its pickle, and the source of one that pickles as a mere name."""
    source = ""
    with contextlib.suppress(OSError, TypeError):
        source = inspect.getsource(function)
    return hashlib.sha256(cloudpickle.dumps(function) + source.encode()).hexdigest()


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
    unknown = [name for name in removed if name not in df.columns]
    if unknown:
        raise SchemaError(
            f"transformation_removed_fields names {unknown}, the frame has {df.columns}: correct the name"
        )
    fields = {one.name: one for one in df.schema.fields if one.name not in removed}
    for edit in edits or ():
        name, dtype, shape, nullable = edit
        fields[name] = T.StructField(name, _spark_type(name, dtype, tuple(shape or ())), bool(nullable))
    given, names = df.columns, list(fields)

    def apply(frames: Any) -> Any:
        for frame in promptly(frames):
            frame.columns = given
            yield _made(function, frame, names)

    # Spark's mapInPandas takes a dot in a name for a path into a struct.
    plain = df.toDF(*(f"column_{n}" for n in range(len(given))))
    return plain.mapInPandas(apply, T.StructType(list(fields.values())))


def _made(function: Callable[[Any], Any], frame: Any, names: list[str]) -> Any:
    """What a user's transformation makes of some rows, on a worker.

    Raises:
        ConfigError: it raised; names where.
        SchemaError: it returned no frame with all the columns.
    """
    try:
        made = function(frame)
    except Exception as error:
        _, own, *_ = *traceback.extract_tb(error.__traceback__), None  # the first frame is this one
        place = f" at {own.filename}:{own.lineno}" if own else ""
        raise ConfigError(f"transformation_fn raised {type(error).__name__}: {error}{place}: correct it") from error
    lacking = [name for name in names if name not in getattr(made, "columns", ())]
    if lacking:
        found = list(made.columns) if hasattr(made, "columns") else f"a {type(made).__name__}"
        raise SchemaError(
            f"transformation_fn returned {found} without {lacking}: return them, or name in "
            "transformation_removed_fields what it removes"
        )
    return made[names]


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
