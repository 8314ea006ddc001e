"""The signature of a model: how it is fed from a table's columns, and what it returns.

Enters: what the probe found out, and the manifest of the shards; for a model that was trained elsewhere, a frame.
Leaves: a ``Signature``, by which scoring feeds it.
"""

from __future__ import annotations

import math
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
from sparkdl.models.signature import COMPANIONS, Signature, TensorField
from sparkdl.shards.manifest import Manifest
from sparkdl.shards.write import spark_arrow_schema

__all__ = ["signature_for", "signature_of"]


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
            if spec.columns[0] not in sizes:
                raise ConfigError(f"the size of {spec.columns[0]!r} is not known without input_shapes: set it")
            spec = replace(spec, shape=(math.prod(sizes[spec.columns[0]][1:]),))
        tensors.append(spec)
    manifest = Manifest(rows=2, bytes=0, shards=(), tensors=tuple(tensors))
    inputs, by_column = plan.views(manifest), plan.views(manifest, by_column=True)
    return signature_of(probe(model, inputs, by_column, [manifest], labels), manifest)
