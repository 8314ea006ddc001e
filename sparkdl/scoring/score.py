"""Predictions for a DataFrame: a plan on the driver, one ``mapInArrow`` stage, no eager job."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_type
from torch import nn

from sparkdl.columns.frames import map_row
from sparkdl.columns.names import check_listed, check_names, folded, tells_cases_apart
from sparkdl.compat.pickles import dumps
from sparkdl.compat.spark_errors import map_task_errors_of_actions
from sparkdl.compat.worker_python import use_drivers_python
from sparkdl.config import ScoreConfig
from sparkdl.errors import ConfigError, SchemaError
from sparkdl.features.fitted import Features
from sparkdl.models.calling import check_batch_norm
from sparkdl.models.folder import BundleInfo, read_bundle
from sparkdl.models.preprocessing import features_of
from sparkdl.models.signature import Signature, TensorField
from sparkdl.models.trust import allowed_imports, checked_packages
from sparkdl.scoring.models import BundleSource, ModelSource, ModuleSource, WithFeatures
from sparkdl.scoring.outputs import output_type
from sparkdl.scoring.transport import Transport
from sparkdl.scoring.worker import Scorer
from sparkdl.storage import Configuration, sha256_hex

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LARGEST_MODULE = 512 << 20


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A model and how it is asked: what ``score`` takes beside rows, and says more of.

    Attributes:
        model: a bundle's folder, what ``read_bundle`` says of one, or a module, alone or with its features.
        signature: of a module.
        output_columns: names of the predictions; None takes the outputs' own.
        config: batch size, nulls, vectors, device, threads.
        allow_pickle: accept a bundle that holds a pickle.
        trusted: packages that workers may import.
    """

    model: str | BundleInfo | nn.Module | WithFeatures
    signature: Signature | None = None
    output_columns: Sequence[str] | None = None
    config: ScoreConfig = field(default_factory=ScoreConfig)
    allow_pickle: bool = False
    trusted: Sequence[str] = ()


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

    The schema of the result is known up front; the frame may be batch or streaming, of classic Spark or Spark Connect.

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
        SchemaError: a column is missing, there twice, has a type that no tensor can hold, or a new name is taken.
        ConfigError: settings contradict each other, or a module comes without signature.
        BundleError: there is no bundle, or it holds a pickle.
        DataError: when the result is used: nulls, or rows of a shape that the model does not take.
    """
    predictor = Predictor(
        model=model,
        signature=signature,
        output_columns=output_columns,
        config=config or ScoreConfig(),
        allow_pickle=allow_pickle,
        trusted=trusted,
    )
    plan = plan_scoring(frame, predictor, keep, packed=True)
    return map_row(frame, plan.transport.row, plan.scorer, plan.schema)


@dataclass(frozen=True, kw_only=True)
class ScoringPlan:
    """What scores, and what it needs and gives.

    Attributes:
        scorer: the function of every task.
        transport: which columns it gets, and as what.
        schema: of the result.
    """

    scorer: Scorer
    transport: Transport
    schema: T.StructType


def plan_scoring(frame: DataFrame, predictor: Predictor, keep: Sequence[str] | None, *, packed: bool) -> ScoringPlan:
    """Check a model against the columns of a frame, and plan how it scores them.

    Args:
        frame: the rows; only their schema and session are looked at.
        predictor: the model.
        keep: columns of the result beside the predictions; None for all.
        packed: see ``Transport``.

    Raises:
        SparkdlError: as ``score``.
    """
    map_task_errors_of_actions()
    use_drivers_python(frame.sparkSession)
    imports = (*checked_packages(predictor.trusted), *allowed_imports(frame.sparkSession))
    source, saved_signature, features = _source(predictor.model, predictor.allow_pickle, imports)
    if (signature := predictor.signature or saved_signature) is None:
        raise ConfigError("the model has no signature: give signature=, or save the bundle with one")
    names = _output_names(signature, predictor.output_columns)
    kept_names = _kept(frame, keep, names)
    transport = Transport.of(frame.schema, signature, kept_names, features, packed=packed)
    used = [*itertools.chain.from_iterable(transport.packs.values()), *transport.columns]
    check_names(frame.columns, used, cases=tells_cases_apart(frame))
    scorer = Scorer(
        source=source,
        signature=signature,
        inputs=transport.inputs,
        columns=tuple(names),
        kept=transport.kept,
        config=predictor.config,
        features=features,
        raw=transport.raw,
    )
    outputs = [
        T.StructField(name, _spark_type(field, predictor.config.vectors), nullable=True)
        for name, field in zip(names, signature.outputs, strict=True)
    ]
    schema = T.StructType([frame.schema[name] for name in kept_names] + outputs)
    return ScoringPlan(scorer=scorer, transport=transport, schema=schema)


def _source(
    model: str | BundleInfo | nn.Module | WithFeatures, allow_pickle: bool, trusted: tuple[str, ...]
) -> tuple[ModelSource, Signature | None, Features | None]:
    if isinstance(model, WithFeatures):
        return *_source(model.model, allow_pickle, trusted)[:2], model.features
    if isinstance(model, nn.Module):
        check_batch_norm(model)
        payload = dumps(model)
        if len(payload) > _LARGEST_MODULE:
            raise ConfigError(
                f"the model has {len(payload) >> 20} MiB, a task carries {_LARGEST_MODULE >> 20} at most: "
                "save_bundle it to a folder that all workers can read, and give that"
            )
        return ModuleSource(payload, sha256_hex(payload)), None, None
    info = model if isinstance(model, BundleInfo) else read_bundle(model)
    if info.model["kind"] == "pickle" and not allow_pickle:
        raise ConfigError(f"the bundle {info.uri} holds a pickle, which can run any code: give allow_pickle=True")
    configuration = Configuration.here()
    source = BundleSource(info.folder, info.content_hash, allow_pickle, trusted, configuration)
    return source, info.signature, features_of(info, trusted)


def _output_names(signature: Signature, given: Sequence[str] | None) -> list[str]:
    check_listed("output_columns", given)
    names = [field.name for field in signature.outputs] if given is None else list(given)
    if len(names) != len(signature.outputs):
        raise ConfigError(
            f"output_columns={names} are {len(names)} names, the model has the outputs "
            f"{[field.name for field in signature.outputs]}: give one name each"
        )
    return names


def _kept(frame: DataFrame, keep: Sequence[str] | None, new: Sequence[str]) -> list[str]:
    check_listed("keep", keep)
    kept_names = list(frame.columns if keep is None else keep)
    absent = [name for name in kept_names if name not in frame.columns]
    if absent:
        raise SchemaError(f"keep names {absent}, the rows have {frame.columns}: name columns that they have")
    cases = tells_cases_apart(frame)
    names = [folded(name, cases=cases) for name in [*kept_names, *new]]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise SchemaError(
            f"the columns {double} would appear twice in the result: choose other output_columns, or keep fewer"
        )
    return kept_names


def _spark_type(field: TensorField, vectors: bool) -> T.DataType:
    kind = output_type(field, vectors)
    return VectorUDT() if pa.types.is_struct(kind) else from_arrow_type(kind)
