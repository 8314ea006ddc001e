"""Prediction columns of a fitted model: the model as a file that workers load once, and the scored DataFrame."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl.columns.names import folded, quoted, tells_cases_apart
from sparkdl.compat.spark_master import is_connect
from sparkdl.config import ScoreConfig
from sparkdl.errors import SchemaError
from sparkdl.estimator.outputs import OutputModule, OutputSpec, Wanted, with_outputs
from sparkdl.estimator.user_code import is_loose, loose_by_value
from sparkdl.features.fitted import Features
from sparkdl.models.bundle import save_bundle
from sparkdl.models.folder import BundleInfo
from sparkdl.models.signature import Signature
from sparkdl.models.trust import never
from sparkdl.scoring.models import WithFeatures
from sparkdl.scoring.rows import score_rows
from sparkdl.scoring.score import Predictor, score
from sparkdl.scoring.temporary_files import keep
from sparkdl.storage import Storage
from sparkdl.storage.executors import on_one_machine
from sparkdl.train.checkpoint.identity import described


@dataclass(frozen=True)
class Published:
    """A model where scoring workers find it.

    Attributes:
        source: a bundle, or the module itself, which then travels with every task.
        signature: of its wanted outputs.
        trusted: the module that workers may import to rebuild it.
    """

    source: BundleInfo | torch.nn.Module
    signature: Signature
    trusted: tuple[str, ...] = ()


class Weights:
    """The weights of a model at one time, by which it is told whether they, its layers or settings were changed since.

    Args:
        model: the model; its tensors are kept, not copied.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = [(name, tensor, tensor._version) for name, tensor in _tensors(model)]
        self._structure = described(model)

    def are_those_of(self, model: torch.nn.Module) -> bool:
        """Whether ``model`` has the very same tensors, none of which was changed in place, in the same layers."""
        now = _tensors(model)
        same_tensors = len(now) == len(self._tensors) and all(
            (name, tensor._version) == (name_then, version_then) and tensor is tensor_then
            for (name, tensor), (name_then, tensor_then, version_then) in zip(now, self._tensors, strict=True)
        )
        return same_tensors and described(model) == self._structure


def _tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def publish(
    model: torch.nn.Module,
    signature: Signature,
    wanted: Sequence[OutputSpec],
    spark: SparkSession,
    home: Storage | None,
) -> Published:
    """Put a model where the workers of ``spark`` find it.

    Args:
        model: the model.
        signature: of the model.
        wanted: the wanted outputs.
        spark: the session.
        home: a folder that workers reach, of the estimator's store; None without.
    """
    chosen, answer = with_outputs(model, signature, wanted)
    root = _root(spark, home)
    if root is None:
        return Published(chosen, answer)
    module = type(chosen).__module__  # the driver has it, and says so itself
    if is_loose(module):  # workers cannot import it, whatever its bundle_arguments() say: it goes by value, in a pickle
        chosen = OutputModule(chosen, [field.name for field in signature.outputs], wanted)
    with loose_by_value(chosen):
        bundle = keep(root, lambda folder: save_bundle(chosen, folder, signature=answer, allow_pickle=True))
    return Published(bundle, answer, () if never(module) else (module,))


def _root(spark: SparkSession, home: Storage | None) -> Storage | None:
    """The place of models that all workers read: the store, or temporary files of the one machine; None if neither."""
    if home is not None:
        return home.child("models")
    shared_disk = not is_connect(spark) and on_one_machine(spark)
    return Storage.of(Path(tempfile.gettempdir())) if shared_disk else None


def predict_rows(
    rows: Any, model: torch.nn.Module, signature: Signature, wanted: Sequence[Wanted], batch_rows: int,
    features: Features | None,
) -> Any:  # fmt: skip
    """Add the prediction columns to a pandas frame, by what Spark's workers do, in this process.

    Args:
        rows: a pandas DataFrame.
        model: the model.
        signature: of it.
        wanted: the columns.
        batch_rows: rows that go through the model at once.
        features: that make the model's inputs of raw columns.

    Raises:
        SchemaError: the frame has a column of such a name already, or lacks one.
    """
    _check_free(wanted, getattr(rows, "columns", ()), cases=True)
    chosen, answer = with_outputs(model, signature, [column.output for column in wanted])
    scorer = chosen if features is None else WithFeatures(chosen, features)
    table = score_rows(scorer, rows, signature=answer, config=ScoreConfig(batch_rows=batch_rows, device="cpu"))
    predictions = {
        column.column: table.column(position).to_pandas().to_numpy() for position, column in enumerate(wanted)
    }
    return rows.assign(**predictions)


def score_frame(
    df: DataFrame, published: Published, wanted: Sequence[Wanted], batch_rows: int, features: Features | None = None
) -> DataFrame:
    """Add the prediction columns; nothing runs before an action does.

    Args:
        df: the rows.
        published: the model.
        wanted: the columns.
        batch_rows: rows that go through the model at once.
        features: that make the model's inputs of raw columns.

    Raises:
        SchemaError: the frame has a column of such a name already.
    """
    _check_free(wanted, df.columns, cases=tells_cases_apart(df))
    arrays = any(
        not column.vector and field.shape for column, field in zip(wanted, published.signature.outputs, strict=True)
    )
    vectors = any(column.vector for column in wanted) and not arrays
    source = published.source
    with loose_by_value(source) if isinstance(source, torch.nn.Module) else contextlib.nullcontext():
        scored = score(
            df,
            source if features is None else WithFeatures(source, features),
            signature=published.signature,
            output_columns=[column.column for column in wanted],
            config=ScoreConfig(batch_rows=batch_rows, vectors=vectors),
            allow_pickle=True,
            trusted=published.trusted,
        )
    if vectors or not any(column.vector for column in wanted):
        return scored
    turned = {column.column: array_to_vector(F.col(quoted(column.column))) for column in wanted if column.vector}
    return scored.withColumns(turned)


def predictor_of(
    published: Published,
    wanted: Sequence[Wanted],
    batch_rows: int,
    features: Features | None,
    config: ScoreConfig | None = None,
) -> Predictor:
    """The model as scoring takes it; its columns of several numbers are arrays, which tables hold."""
    return Predictor(
        model=published.source if features is None else WithFeatures(published.source, features),
        signature=published.signature,
        output_columns=[column.column for column in wanted],
        config=config or ScoreConfig(batch_rows=batch_rows),
        allow_pickle=True,
        trusted=published.trusted,
    )


def _check_free(wanted: Sequence[Wanted], columns: Iterable[str], *, cases: bool) -> None:
    """Refuse prediction columns that are there already."""
    existing = {folded(name, cases=cases) for name in columns}
    duplicates = [column.column for column in wanted if folded(column.column, cases=cases) in existing]
    if duplicates:
        raise SchemaError(
            f"the columns {duplicates} would appear twice in the result: name others by outputCols, or by "
            "predictionCol and its like, or drop those of the frame"
        )
