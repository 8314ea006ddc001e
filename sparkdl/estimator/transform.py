"""From a fitted model to prediction columns.

Enters: a model, how it is called, and which columns are wanted. Leaves: the model as a file that workers load once, and
a DataFrame with the predictions, whose schema is known before anything runs.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl.columns.layout import plan_tensors
from sparkdl.columns.names import quoted
from sparkdl.config import ScoreConfig
from sparkdl.errors import ConfigError, SchemaError
from sparkdl.estimator.fit.column_plan import Roles, plan_columns, source_column
from sparkdl.estimator.fit.probe import Probe, floating_dtype, probe
from sparkdl.estimator.fit.row_lengths import check_forms
from sparkdl.estimator.fit.shipping import loose_by_value
from sparkdl.estimator.outputs import OutputModule, OutputSpec
from sparkdl.estimator.params.params import CheckedParams
from sparkdl.estimator.prediction_columns import Wanted
from sparkdl.launch.driver.session import is_connect
from sparkdl.models.bundle import save_bundle
from sparkdl.models.calling import COMPANIONS
from sparkdl.models.signature import Signature, TensorField
from sparkdl.models.trust import never
from sparkdl.scoring.score import score
from sparkdl.scoring.temporary_files import keep
from sparkdl.shards.manifest import Manifest
from sparkdl.shards.write import spark_arrow_schema
from sparkdl.storage import Storage

if TYPE_CHECKING:
    from sparkdl.estimator.fit.views import InputView

__all__ = ["Published", "publish", "score_frame", "signature_for", "signature_of"]


@dataclass(frozen=True)
class Published:
    """A model where scoring workers find it.

    Attributes:
        source: a bundle's URI, or the module itself, which then travels with every task.
        signature: of its wanted outputs.
        trusted: the module that workers may import to rebuild it.
    """

    source: str | torch.nn.Module
    signature: Signature
    trusted: tuple[str, ...] = ()


def publish(
    model: torch.nn.Module, signature: Signature, wanted: Sequence[OutputSpec], spark: SparkSession, home: str | None
) -> Published:
    """Put a model where the workers of ``spark`` find it.

    Args:
        model: the model.
        signature: of the model.
        wanted: the wanted outputs.
        spark: the session.
        home: a folder that workers reach, of the estimator's store; None without.
    """
    labels = [field.name for field in signature.outputs]
    plain = [OutputSpec(label) for label in labels]
    chosen = model if list(wanted) == plain else OutputModule(model, labels, wanted)
    chosen.eval()
    answer = replace(signature, outputs=tuple(_output(signature, one) for one in wanted))
    root = _root(spark, home)
    if root is None:
        return Published(chosen, answer)
    own = type(chosen).__module__  # the driver has it, and says so itself
    with loose_by_value(chosen):
        uri = keep(root, lambda uri: save_bundle(chosen, uri, signature=answer, allow_pickle=True))
    return Published(uri, answer, () if never(own) else (own,))


def _root(spark: SparkSession, home: str | None) -> str | None:
    """Where models lie that all workers read: the store, or the temporary files of the one machine; None if neither."""
    if home is not None:
        return Storage.of(home).child("models").uri
    one_machine = not is_connect(spark) and str(spark.conf.get("spark.master", "")).startswith("local")
    return Storage.of(Path(tempfile.gettempdir())).uri if one_machine else None


def _output(signature: Signature, wanted: OutputSpec) -> TensorField:
    field = next(field for field in signature.outputs if field.name == wanted.label)
    name = f"{wanted.label}__{wanted.kind}"
    if wanted.kind == "class":
        return TensorField(name=name, dtype="float64", shape=())
    if wanted.kind != "output" and wanted.meaning != "classes":
        return TensorField(name=name, dtype="float64", shape=(2,))
    return replace(field, name=name if wanted.kind != "output" else field.name)


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
    return TensorField(name=view.name, dtype=dtype, shape=row, columns=columns, form=view.form)


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
    plan = plan_columns(df.schema, roles)
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


def score_frame(df: DataFrame, published: Published, wanted: Sequence[Wanted], batch_rows: int) -> DataFrame:
    """Add the prediction columns; nothing runs before an action does.

    Raises:
        SchemaError: the frame has a column of such a name already.
    """
    there = {name.lower() for name in df.columns}
    taken = [one.column for one in wanted if one.column.lower() in there]
    if taken:
        raise SchemaError(
            f"the columns {taken} would appear twice in the result: name others by outputCols, or by predictionCol and "
            "its like, or drop those of the frame"
        )
    arrays = any(not one.vector and field.shape for one, field in zip(wanted, published.signature.outputs, strict=True))
    vectors = any(one.vector for one in wanted) and not arrays
    scored = score(
        df,
        published.source,
        signature=published.signature,
        output_columns=[one.column for one in wanted],
        config=ScoreConfig(batch_rows=batch_rows, vectors=vectors),
        allow_pickle=True,
        trusted=published.trusted,
    )
    if vectors or not any(one.vector for one in wanted):
        return scored
    turned = {one.column: array_to_vector(F.col(quoted(one.column))) for one in wanted if one.vector}
    return scored.withColumns(turned)
