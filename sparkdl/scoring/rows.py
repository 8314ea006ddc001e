"""Predictions for rows in this process's memory, without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pyarrow as pa
import torch
from torch import nn

from sparkdl.columns.types import tensor_kind
from sparkdl.config import ScoreConfig
from sparkdl.errors import BundleError, ConfigError, SchemaError
from sparkdl.features.fitted import Features
from sparkdl.models.folder import BundleInfo, read_bundle
from sparkdl.models.preprocessing import features_of
from sparkdl.models.signature import Signature
from sparkdl.models.trust import allowed_imports, checked_packages
from sparkdl.nn.modes import mode_of
from sparkdl.scoring.models import BundleSource, HeldModule, ModelSource, WithFeatures
from sparkdl.scoring.outputs import output_type
from sparkdl.scoring.plan import check_meaning, plan_inputs
from sparkdl.scoring.worker import Scorer


def score_rows(
    model: str | BundleInfo | nn.Module | WithFeatures,
    rows: Any,
    *,
    signature: Signature | None = None,
    config: ScoreConfig | None = None,
    allow_pickle: bool = False,
    trusted: Sequence[str] = (),
) -> pa.Table:
    """Score rows that lie in memory.

    The outputs are those that the scoring of a DataFrame would give, since the same function makes both.

    Args:
        model: a bundle's folder, what ``read_bundle`` says of one, or a module on the CPU, alone or with its features;
            it is asked in evaluation mode, and is in its own again afterwards.
        rows: a pandas DataFrame, or an Arrow table or record batch.
        signature: of a module; a bundle brings its own.
        config: batch size, nulls, vectors, device, threads.
        allow_pickle: accept a bundle that holds a pickle.
        trusted: packages that may be imported to rebuild the model and its features.

    Returns:
        one column an output, in the order of the rows.

    Raises:
        SchemaError: a column is missing, there twice, or of a type that the model cannot take.
        DataError: a value is missing or wrong where the model or a feature refuses that.
        BundleError: there is no bundle, it holds a pickle, or it needs what is not allowed.
        ConfigError: it was saved without a signature.
    """
    config = config or ScoreConfig()
    source, saved_signature, features = _source(model, allow_pickle, (*checked_packages(trusted), *allowed_imports()))
    if (signature := signature or saved_signature) is None:
        raise ConfigError("the model has no signature: give signature=, or save the bundle with one")
    names = list(signature.columns if features is None else features.columns)
    scorer = Scorer(
        source=source,
        signature=signature,
        inputs=plan_inputs(signature, features),
        columns=tuple(field.name for field in signature.outputs),
        kept=(),
        config=config,
        features=features,
        raw=() if features is None else features.columns,
    )
    table = _table(rows, names)
    for field in signature.inputs if features is None else ():
        for name in field.columns:
            kind = table.schema.field(name).type
            check_meaning(field, name, _meaning(kind), str(kind))
    fields = [pa.field(field.name, output_type(field, config.vectors)) for field in signature.outputs]
    batches = table.combine_chunks().to_batches(max_chunksize=config.batch_rows)
    threads = torch.get_num_threads()
    try:
        with mode_of(source.model, training=False) if isinstance(source, HeldModule) else nullcontext():
            return pa.Table.from_batches(list(scorer.score(batches)), pa.schema(fields))
    finally:
        torch.set_num_threads(threads)  # this process goes on as it was


def _source(
    model: str | BundleInfo | nn.Module | WithFeatures, allow_pickle: bool, allowed: tuple[str, ...]
) -> tuple[ModelSource, Signature | None, Features | None]:
    if isinstance(model, WithFeatures):
        return *_source(model.model, allow_pickle, allowed)[:2], model.features
    if isinstance(model, nn.Module):
        return HeldModule(model), None, None
    info = model if isinstance(model, BundleInfo) else read_bundle(model)
    if info.recipe.kind == "pickle" and not allow_pickle:
        raise BundleError(f"the bundle {info.uri} holds a pickle, which can run any code: give allow_pickle=True")
    source = BundleSource(info.folder, info.content_hash, allow_pickle, allowed)
    return source, info.signature, features_of(info, allowed)


def _meaning(kind: pa.DataType) -> str:
    """What the numbers of a column stand for; empty for themselves, and where no tensor can hold its type."""
    try:
        return str(tensor_kind("", kind, None).get("logical", ""))
    except SchemaError:
        return ""


def _table(rows: Any, names: list[str]) -> pa.Table:
    """The needed columns of rows, as a table."""
    columns = (
        list(getattr(rows, "columns", ())) if not isinstance(rows, pa.Table | pa.RecordBatch) else rows.schema.names
    )
    absent = [name for name in names if name not in columns]
    if absent:
        raise SchemaError(f"the model needs the columns {absent}, the rows have {columns}: add or rename them")
    twice = [name for name in names if columns.count(name) > 1]
    if twice:
        raise SchemaError(f"the rows have the columns {twice} more than once: keep one of each, or rename the others")
    if isinstance(rows, pa.RecordBatch):
        rows = pa.Table.from_batches([rows])
    if isinstance(rows, pa.Table):
        return rows.select(names)
    try:
        return pa.Table.from_pandas(rows[names], preserve_index=False)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as cause:
        raise SchemaError(f"a column of the rows mixes types ({cause}): give each one type") from cause
    except pa.ArrowNotImplementedError as cause:
        raise SchemaError(f"a column of the rows is of a type that Arrow has not ({cause}): convert it") from cause
