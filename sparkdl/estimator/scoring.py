"""From a fitted model to prediction columns.

Enters: a model, how it is called, and which columns are wanted. Leaves: the model as a file that workers load once, and
a DataFrame with the predictions, whose schema is known before anything runs.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from pyspark.sql import DataFrame

from sparkdl.errors import ConfigError, SchemaError
from sparkdl.estimator.columns import Roles, plan_columns
from sparkdl.estimator.params import CheckedParams
from sparkdl.estimator.probe import Probe, floating_dtype, probe
from sparkdl.estimator.shipping import loose_by_value
from sparkdl.lakehouse.bundle import save_bundle
from sparkdl.lakehouse.signature import Signature, TensorField
from sparkdl.shards.layout import plan_tensors
from sparkdl.shards.manifest import Manifest
from sparkdl.shards.write import spark_arrow_schema

if TYPE_CHECKING:
    from sparkdl.estimator.model import TorchModel
    from sparkdl.estimator.views import InputView

__all__ = ["PublishedModel", "score_frame", "signature_for", "signature_of"]


@dataclass(frozen=True)
class PublishedModel:
    """A model as a bundle that workers can read.

    Attributes:
        uri: of the bundle.
        signature: how it is fed, and what it returns.
    """

    uri: str
    signature: Signature

    @staticmethod
    def write(model: torch.nn.Module, signature: Signature) -> PublishedModel:
        """Write the bundle into a temporary folder of this process."""
        folder = tempfile.mkdtemp(prefix="sparkdl-model-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        with loose_by_value(model):
            save_bundle(model, f"{folder}/bundle", signature=signature, allow_pickle=True)
        published = PublishedModel(f"{folder}/bundle", signature)
        weakref.finalize(published, shutil.rmtree, folder, ignore_errors=True)
        return published


def signature_of(found: Probe, manifest: Manifest) -> Signature:
    """Describe how a fitted model is fed from a table's columns."""
    return Signature(
        inputs=tuple(_field(view, manifest) for view in found.views.inputs),
        outputs=tuple(TensorField(name=one.label, dtype=one.dtype, shape=one.shape) for one in found.outputs),
        call=found.views.style,
        labels=tuple(one.label for one in found.outputs),
    )


def _field(view: InputView, manifest: Manifest) -> TensorField:
    spec = manifest.tensor(view.tensor)
    row: tuple[int | None, ...] = (None, *spec.shape) if spec.ragged or spec.dtype == "binary" else spec.shape
    columns = spec.columns
    if view.index is not None:
        row, columns = (), (spec.columns[view.index],)
    if view.shape is not None:
        row = view.shape[1:]
    dtype = view.dtype or ("uint8" if spec.dtype == "binary" else spec.dtype)
    return TensorField(name=view.name, dtype=dtype, shape=row, columns=columns)


def signature_for(model: TorchModel, df: DataFrame | None) -> Signature:
    """Find out how a model that sparkdl did not fit is fed, from the frame's schema and two rows of zeros.

    Raises:
        ConfigError: feature_columns or label_columns are not set, or a column's size needs input_shapes.
    """
    features, labels = model.getOrDefault("feature_columns"), model.getOrDefault("label_columns")
    if not features or not labels:
        raise ConfigError("feature_columns and label_columns are not set: name the model's inputs and outputs")
    if df is None:
        raise ConfigError("this model was not fitted here, so its inputs are unknown before the first transform(df)")
    shapes = model.getOrDefault("input_shapes")
    roles = Roles(
        features=tuple(features),
        labels=(),
        shapes=tuple(tuple(shape) for shape in shapes) if shapes else None,
        float_dtype=floating_dtype(model.getModel()),
    )
    plan = plan_columns(df.schema, roles)
    schema = spark_arrow_schema(plan.select(df), plan.columns)
    sizes = dict(zip(features, shapes or (), strict=False))
    tensors = []
    for spec in plan_tensors(schema, columns=plan.columns, layout=plan.layout):
        if -1 in spec.shape or spec.ragged:
            if spec.columns[0] not in sizes:
                raise ConfigError(f"the size of {spec.columns[0]!r} is not known without input_shapes: set it")
            count = 1
            for size in sizes[spec.columns[0]][1:]:
                count *= size
            spec = type(spec)(name=spec.name, dtype=spec.dtype, shape=(count,), columns=spec.columns)
        tensors.append(spec)
    manifest = Manifest(rows=2, bytes=0, shards=(), tensors=tuple(tensors))
    inputs, by_column = plan.views(manifest), plan.views(manifest, by_column=True)
    return signature_of(probe(model.getModel(), inputs, by_column, manifest, labels), manifest)


def score_frame(model: CheckedParams, published: PublishedModel, df: DataFrame) -> DataFrame:
    """Add the prediction columns that the model's parameters ask for."""
    from sparkdl.lakehouse.score import score

    names = output_names(model, published.signature)
    taken = sorted(set(names) & set(df.columns))
    if taken:
        raise SchemaError(f"the frame has the column {taken[0]!r} already: drop it, or name the output otherwise")
    return score(df, published.uri)


def output_names(model: CheckedParams, signature: Signature) -> list[str]:
    """Names of the output columns, one a label."""
    get = model.getOrDefault
    labels = [field.name for field in signature.outputs]
    given = get("outputCols")
    if given is not None and len(given) != len(labels):
        raise ConfigError(
            f"outputCols names {len(given)} columns for {len(labels)} outputs {labels}: name one an output"
        )
    return list(given) if given else [f"{label}__output" for label in labels]
