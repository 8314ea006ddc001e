"""Preparation: clean rows to fitted features and labels, and to the shards that a training reads.

Enters: clean rows, the parts they are divided into. Leaves: ``Prepared``. Statistics, vocabularies and classes come
from the training rows alone; a training that goes on from the champion keeps the champion's, so that an id means what
it meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from sparkdl.columns.layout import Layout
from sparkdl.columns.names import quoted
from sparkdl.config import ShardConfig
from sparkdl.documents.typed import Source, convert
from sparkdl.errors import ConfigError, IntegrityError, StorageError
from sparkdl.features.fitted import Features, fit, token_functions
from sparkdl.features.spec import Image
from sparkdl.launch.driver.slots import slots_of
from sparkdl.models.bundle import read_bundle
from sparkdl.models.registry import ModelVersion
from sparkdl.observe import logger
from sparkdl.pipeline.code import imported
from sparkdl.pipeline.rows.parts import Part, Parts, rows_of
from sparkdl.pipeline.session import start_torch_daemon
from sparkdl.pipeline.sources.base import WINDOW
from sparkdl.pipeline.spec import PipelineSpec, TimeSplit
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.keys import features_inputs, fitted_key, shards_are_there, shards_inputs, spreads
from sparkdl.pipeline.state.results import Shards
from sparkdl.pipeline.state.steps import content_key
from sparkdl.pipeline.work.file_rows import FileRows
from sparkdl.pipeline.work.labels import (
    FittedLabel,
    Labels,
    check_labels,
    check_weight,
    encoded,
    fit_labels,
    labelled,
    same_label,
)
from sparkdl.pipeline.work.statistics import spark_statistics
from sparkdl.shards.manifest import Manifest
from sparkdl.shards.manifest import Source as ShardSource
from sparkdl.shards.write import write_shards
from sparkdl.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Fitted", "Prepared", "cut_shards", "fit_features", "labels_of"]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a training needs.

    Attributes:
        features: fitted.
        labels: fitted.
        train: address of the training shards.
        validate: address of the validation shards.
        train_rows: in the first.
        validate_rows: in the second.
        train_unlabelled: training rows that were left out since they have no label yet.
        validate_unlabelled: likewise.
        start: address of the bundle that they are from, and that training starts from; None starts from scratch.
        key: of all of it.
        types: by raw column that the features read, Spark's name of its type.
    """

    features: Features
    labels: Labels
    train: str
    validate: str
    train_rows: int
    validate_rows: int
    train_unlabelled: int
    validate_unlabelled: int
    start: str | None
    key: str
    types: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Fitted:
    """Result of the step ``features``."""

    features: Mapping[str, Any]
    labels: tuple[FittedLabel, ...]
    start: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Features and labels as the training rows made them.

    Attributes:
        features: fitted.
        labels: fitted.
        start: address of the bundle that they are from, and that training starts from; None starts from scratch.
        key: of all of it, with that bundle: where it is gone, the next champion's features are others.
    """

    features: Features
    labels: Labels
    start: str | None
    key: str


def cut_shards(context: Context, clean: DataFrame, rows: tuple[Parts, Mapping[str, str]], fitted: Fitted) -> Prepared:
    """Cut the shards of training and validation rows, unless that was done.

    Args:
        context: of the run.
        clean: the clean rows.
        rows: the windows of each part, and a hash of the rows of each window.
        fitted: that make the inputs of a model.

    Raises:
        NoLabelsError: no row of a part has a label yet.
        DataError: the rows cannot be trained on: labels that cannot be, weights that are missing or cannot be.
        SchemaError: columns are missing, or of types that their use does not fit.
    """
    (parts, content), spec = rows, context.spec
    inputs = shards_inputs(context, parts, content, fitted.key)
    own = content_key("shards", inputs)

    def work() -> Shards:
        start_torch_daemon(clean.sparkSession)  # a training follows
        made: dict[Part, tuple[Manifest, int]] = {}
        table = context.tables.table("clean")
        version = str(table.version())
        for part in ("train", "validate"):
            chosen = rows_of(clean, spec, part, parts.windows(part))
            source = ShardSource(uri=table.uri, version=version, transformation=f"{own} {part}")
            made[part] = _cut(context, chosen, fitted, part, (f"{spec.places.shards}/{part}-{own}", source))
        return Shards(
            train=made["train"][0].uri,
            validate=made["validate"][0].uri,
            train_rows=made["train"][0].rows,
            validate_rows=made["validate"][0].rows,
            train_unlabelled=made["train"][1],
            validate_unlabelled=made["validate"][1],
        )

    shards = context.steps.do("shards", inputs, Shards, work, shards_are_there)
    read = set(fitted.features.columns)
    types = {field.name: field.dataType.simpleString() for field in clean.schema if field.name in read}
    return Prepared(
        features=fitted.features, labels=fitted.labels, start=fitted.start, key=own, types=types, **vars(shards)
    )


def labels_of(bundle: str) -> Labels:
    """The labels that a bundle's model was trained with.

    Raises:
        IntegrityError: it describes none that could be.
    """
    source = Source(bundle, "it was altered, or not published by a pipeline: publish it again")
    return Labels(labels=convert(read_bundle(bundle).preprocessing.get("labels"), tuple[FittedLabel, ...], source))


def fit_features(context: Context, clean: DataFrame, rows: tuple[Parts, Mapping[str, str]]) -> Fitted:
    """Fit features and labels to the training rows, or take those of the champion that a training starts from.

    Which champion that is is settled once for its rows, here: after a kill the training goes on from the same one, and
    a champion that it became itself is none to start from again.

    Args:
        context: of the run.
        clean: the clean rows.
        rows: the windows of each part, and a hash of the rows of each window.

    Raises:
        NoLabelsError: no training row has a label yet.
        DataError: the rows cannot be learned from: labels that are constant, features without a value.
        SchemaError: columns are missing, or of types that their use does not fit.
        ConfigError: the champion was trained with other features.
    """
    (parts, content), spec = rows, context.spec
    functions = {name: imported(name, "tokens") for name in token_functions(spec.features)}
    inputs = features_inputs(context, parts, content)

    def work() -> _Fitted:
        champion = context.champion() if spec.train.start == "champion" else None
        if champion is not None:
            kept = _champions(spec, champion, functions)
            return _Fitted(features=kept[0].to_json(), labels=kept[1].labels, start=champion.uri)
        # Not kept in memory: each pass reads its own columns of the table, at a pinned version.
        chosen = rows_of(clean, spec, "train", parts.train)
        labels = fit_labels(chosen, spec.label)
        known = labelled(chosen, spec.label)
        books = context.tables.ledger.windows()
        most = sum(books[name].kept for name in parts.train)
        files = _files(context, parts.train, clean.sparkSession)
        found = spark_statistics(known, spec.features, functions, files, most)
        features = fit(spec.features, found, functions)
        return _Fitted(features=features.to_json(), labels=labels.labels)

    def there(found: _Fitted) -> bool:
        return found.start is None or Storage.of(found.start).exists()

    done = context.steps.do("features", inputs, _Fitted, work, there)
    features = Features.from_json(done.features, Source("the result of the step 'features'"), functions.__getitem__)
    key = fitted_key(inputs, done.start)
    return Fitted(features=features, labels=Labels(labels=done.labels), start=done.start, key=key)


def _files(context: Context, windows: Sequence[str], spark: SparkSession) -> FileRows | None:
    """The labelled rows of whole windows, as workers read them from files; None where Spark alone can tell which.

    Of pictures Spark reads the first byte, and whoever reads files all of them: a batch would not fit into memory.
    """
    pictures = any(isinstance(options, Image) for options in context.spec.features.values())
    if pictures or not isinstance(context.spec.split, TimeSplit):
        return None
    labels = [(name, "is not", None) for name in context.spec.label]
    try:
        return FileRows(spark, context.tables.table("clean").scan([(WINDOW, "in", list(windows)), *labels]))
    except IntegrityError:
        raise
    except StorageError as why:
        logger.info("Spark reads the rows to fit features to: %s", why)
        return None


def _champions(spec: PipelineSpec, champion: ModelVersion, functions: Mapping[str, Any]) -> tuple[Features, Labels]:
    """The champion's features and labels, if they are those of the file."""
    source = Source(champion.uri, "it was altered, or not published by a pipeline: publish it again")
    features = Features.from_json(
        read_bundle(champion.uri).preprocessing.get("features"), source, functions.__getitem__
    )
    labels = labels_of(champion.uri)
    known = {one.name: _without_size(one.options) for one in features.fitted}
    wanted = {name: _without_size(options) for name, options in spec.features.items()}
    other = sorted(name for name in known.keys() | wanted.keys() if known.get(name) != wanted.get(name))
    learned = {label.name: label for label in labels}
    kept = {name for name, label in spec.label.items() if name in learned and same_label(learned[name], label)}
    other += sorted(f"label {name}" for name in (learned.keys() | spec.label.keys()) - kept)
    if other:
        raise ConfigError(
            f"train.start=champion: version {champion.version} was trained with other features or labels than the "
            f"file names ({', '.join(other[:5])}): train from scratch once"
        )
    return features, labels


def _without_size(options: Any) -> Any:
    """Options, but for the length of a vector, which the training rows may have told."""
    return msgspec.structs.replace(options, size=None) if hasattr(options, "size") else options


def _cut(
    context: Context, rows: DataFrame, fitted: Fitted, part: Part, place: tuple[str, ShardSource]
) -> tuple[Manifest, int]:
    from pyspark.sql import functions as F

    (uri, source), spec = place, context.spec
    features, labels = fitted.features, fitted.labels
    unlabelled, rows = check_labels(rows, labels, part), labelled(rows, labels.names)
    if spec.weight is not None:
        check_weight(rows, spec.weight, part)
    weight = [spec.weight] if spec.weight else []
    raw = [F.col(quoted(name)) for name in features.columns if name not in labels.names]
    numbers = [encoded(label.name, label).alias(label.name) for label in labels]
    weights = [F.col(quoted(name)).cast("float").alias(name) for name in weight]
    manifest = write_shards(
        rows.select(*raw, *numbers, *weights),
        uri,
        source=source,
        labels=[*labels.names, *weight],
        layout=Layout(prepare=features),
        config=ShardConfig(
            spread_rows=spreads(spec.train), seed=spec.train.random_seed or 0, repartition=_partitions(spec, rows)
        ),
        overwrite=True,
        before_commit=context.check_lease,
    )
    return manifest, unlabelled


def _partitions(spec: PipelineSpec, rows: DataFrame) -> int | None:
    """How many partitions the rows of a part are written from; None leaves them as they are."""
    each = spec.train.partitions_per_process
    return each * (spec.train.num_proc or slots_of(rows.sparkSession)) if each else None
