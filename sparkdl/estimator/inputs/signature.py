"""The signature of a model: how it is fed from a table's columns, and what it returns.

Enters: what the probe found out, and the manifest of the shards; for a model that was trained elsewhere, a frame; later
on, other names of its columns. Leaves: a ``Signature``, by which scoring feeds it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from pyspark.sql import DataFrame

from sparkdl.columns.layout import plan_tensors
from sparkdl.columns.names import tells_cases_apart
from sparkdl.errors import ConfigError
from sparkdl.estimator.inputs.column_plan import Roles, plan_columns, source_column
from sparkdl.estimator.inputs.probe import Probe, floating_dtype, probe
from sparkdl.estimator.inputs.row_lengths import check_forms
from sparkdl.estimator.inputs.views import InputView
from sparkdl.estimator.params.params import CheckedParams
from sparkdl.features.fitted import Features
from sparkdl.models.signature import COMPANIONS, Signature, TensorField
from sparkdl.shards.manifest import Manifest
from sparkdl.shards.write import spark_arrow_schema

__all__ = ["renamed", "renaming", "signature_for", "signature_of"]


def signature_of(found: Probe, manifest: Manifest) -> Signature:
    """Describe how a fitted model is fed from a table's columns."""
    views = found.views.inputs
    owners = {view.tensor: view.name for view in views if view.form not in COMPANIONS}
    return Signature(
        inputs=tuple(
            _companion(view, owners[view.tensor]) if view.form in COMPANIONS else _field(view, manifest)
            for view in views
        ),
        outputs=tuple(TensorField(name=one.label, dtype=one.dtype, shape=_flat(one.shape)) for one in found.outputs),
        call=found.views.style,
        labels=tuple(one.label for one in found.outputs),
    )


def _companion(view: InputView, owner: str) -> TensorField:
    if view.form in ("lengths", "offsets"):
        return TensorField(name=view.name, dtype="int64", form=view.form, of=owner)
    return TensorField(name=view.name, dtype="bool", shape=(None,), form=view.form, of=owner)


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A single number a row is a number, not an array of one."""
    return () if shape == (1,) else shape


def _field(view: InputView, manifest: Manifest) -> TensorField:
    spec = manifest.tensor(view.tensor)
    row: tuple[int | None, ...] = (None, *spec.shape) if spec.ragged or spec.dtype == "binary" else spec.shape
    columns = spec.columns
    if view.index is not None:
        row, columns = (), (spec.columns[view.index],)
    columns = tuple(source_column(name) for name in columns)
    if view.shape is not None:
        row = view.shape[1:]
    dtype = view.dtype or ("uint8" if spec.dtype == "binary" else spec.dtype)
    return TensorField(name=view.name, dtype=dtype, shape=row, columns=columns, form=view.form, logical=spec.logical)


def signature_for(params: CheckedParams, model: torch.nn.Module, df: DataFrame) -> Signature:
    """Find out how a model that sparkdl did not fit is fed, from the frame's schema and two rows of zeros.

    Raises:
        ConfigError: feature_columns or label_columns are not set, or a column's size needs input_shapes.
    """
    features, labels = params.getOrDefault("feature_columns"), params.getOrDefault("label_columns")
    if not features or not labels:
        raise ConfigError("feature_columns and label_columns are not set: name the model's inputs and outputs")
    shapes = params.getOrDefault("input_shapes")
    roles = Roles(
        features=tuple(features),
        labels=(),
        shapes=tuple(tuple(shape) for shape in shapes) if shapes else None,
        float_dtype=floating_dtype(model),
    )
    plan = plan_columns(df.schema, roles, cases=tells_cases_apart(df))
    check_forms(model, plan.varying)
    schema = spark_arrow_schema(plan.select(df), plan.columns)
    sizes = dict(zip(features, shapes or (), strict=False))
    tensors = []
    for spec in plan_tensors(schema, columns=plan.columns, layout=plan.layout):
        if -1 in spec.shape:
            if spec.columns[0] not in sizes or spec.ragged:
                raise ConfigError(f"the size of {spec.columns[0]!r} is not known without input_shapes: set it")
            spec = replace(spec, shape=(math.prod(sizes[spec.columns[0]][1:]),))
        tensors.append(spec)
    manifest = Manifest(rows=2, bytes=0, shards=(), tensors=tuple(tensors))
    inputs, by_column = plan.views(manifest), plan.views(manifest, by_column=True)
    return signature_of(probe(model, inputs, by_column, [manifest], labels), manifest)


def renaming(
    params: CheckedParams, signature: Signature, order: Sequence[str] | None, features: Features | None
) -> dict[str, str]:
    """Which columns feature_columns names in the place of those that a model was made for, by position.

    Args:
        params: of the model.
        signature: as it was made.
        order: feature_columns when it was made; if these are no columns of the signature, its own order counts.
        features: that make the model's inputs of raw columns, which they know by name.

    Returns:
        by column of the signature, its other name; of those that keep theirs, nothing.

    Raises:
        ConfigError: feature_columns or input_shapes do not fit the signature.
    """
    own = signature.columns
    before = list(order) if order and sorted(order) == sorted(own) else own
    now = params.getOrDefault("feature_columns") or before
    _check_shapes(signature, before, params.getOrDefault("input_shapes"))
    if features is not None:
        raw = list(features.columns)
        if now not in (before, raw):
            raise ConfigError(
                f"feature_columns={now} cannot rename {raw}, which the model's features know by name: rename the "
                "columns of the rows instead"
            )
        return {}
    if len(now) != len(before):
        raise ConfigError(
            f"feature_columns={now} are {len(now)} names for the {len(before)} columns {before} that the model takes: "
            "name one for each, in this order"
        )
    return {old: new for old, new in zip(before, now, strict=True) if old != new}


def _check_shapes(signature: Signature, columns: Sequence[str], shapes: Sequence[Sequence[int]] | None) -> None:
    if shapes and len(shapes) != len(columns):
        raise ConfigError(
            f"input_shapes gives {len(shapes)} shapes for the {len(columns)} columns {list(columns)}: give one for each"
        )
    for column, shape in zip(columns, shapes or (), strict=False):
        field = next(one for one in signature.inputs if column in one.columns)
        wanted = [-1, -1] if None in field.shape else [-1, *field.shape]
        if list(shape) != wanted or len(field.columns) > 1:
            raise ConfigError(
                f"input_shapes gives {list(shape)} for {column!r}, and the model was made to take {wanted} of "
                f"{list(field.columns)}: leave it as it was, or fit again"
            )


def renamed(params: CheckedParams, signature: Signature, columns: Mapping[str, str]) -> Signature:
    """The same model, fed from other columns, its outputs called as label_columns says.

    What the model itself calls its inputs and outputs stays.

    Args:
        params: of the model.
        signature: as it was made.
        columns: by column, its other name.

    Raises:
        ConfigError: label_columns are not as many as the outputs.
    """
    labels = params.getOrDefault("label_columns") or signature.answers
    if len(labels) != len(signature.outputs):
        raise ConfigError(
            f"label_columns={labels} are {len(labels)} names for the {len(signature.outputs)} outputs "
            f"{signature.answers} of the model: name one for each, in this order"
        )
    inputs = tuple(
        replace(field, columns=tuple(columns.get(name, name) for name in field.columns)) for field in signature.inputs
    )
    return replace(signature, inputs=inputs, labels=tuple(labels))
