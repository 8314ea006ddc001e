"""Clean rows to fitted features and labels, and to the shards that a training reads.

Statistics, vocabularies and classes come from the training rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from sparkdl.columns.layout import Layout
from sparkdl.config import ShardConfig
from sparkdl.errors import ConfigError, NoRowsError
from sparkdl.estimator.side_by_side import run_side_by_side
from sparkdl.features.fitted import Features, fit, token_functions
from sparkdl.models.registry import ModelVersion, bundle_of
from sparkdl.pipeline.code import imported
from sparkdl.pipeline.rows.parts import rows_of
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.results import Shards
from sparkdl.pipeline.windows import Part
from sparkdl.pipeline.work.file_rows import part_files, part_frame
from sparkdl.pipeline.work.labels import (
    Labels,
    bundle_source,
    fit_labels,
    labelled,
    labels_of,
    same_label,
)
from sparkdl.pipeline.work.shard_rows import VALIDATES, shard_rows
from sparkdl.pipeline.work.statistics import spark_statistics
from sparkdl.shards.manifest import Manifest
from sparkdl.shards.manifest import Source as ShardSource
from sparkdl.shards.write import write_split

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a training needs.

    Attributes:
        features: fitted.
        labels: fitted.
        shards: the two sets.
        start: address of the bundle that these are from, and that training starts from; None starts from scratch.
        key: of all of it.
        types: by raw column that the features read, Spark's name of its type.
    """

    features: Features
    labels: Labels
    shards: Shards
    start: str | None
    key: str
    types: Mapping[str, str]


def fit_features(project: Project, clean: DataFrame, windows: Mapping[str, WindowReceipt]) -> tuple[Features, Labels]:
    """Fit features and labels to the training rows.

    Args:
        project: the pipeline.
        clean: the clean rows.
        windows: of the training rows, with what is known of their rows.

    Raises:
        NoLabelsError: no training row has a label yet.
        DataError: the rows cannot be learned from: labels that are constant, features without a value.
        SchemaError: columns are missing, or of types that their use does not fit.
    """
    spec = project.spec
    functions = {name: imported(name, "tokens") for name in token_functions(spec.features)}
    # Not kept in memory: each pass reads its own columns of the table, at a pinned version.
    spark, most = clean.sparkSession, sum(receipt.kept for receipt in windows.values())

    def fit_to_rows() -> Features:
        rows = labelled(rows_of(clean, spec, "train", list(windows)), spec.label)
        files = part_files(project, "train", list(windows), spark)
        statistics = spark_statistics(rows, spec.features, functions, files, most)
        return fit(spec.features, statistics, functions)

    def fit_to_labels() -> Labels:
        return fit_labels(part_frame(project, clean, {"train": list(windows)}, list(spec.label)), spec.label)

    fits: list[Callable[[], Any]] = [fit_to_labels, fit_to_rows]
    labels, features = run_side_by_side(fits, spark, len(fits))
    return features, labels


def champions_features(spec: PipelineSpec, champion: ModelVersion) -> tuple[Features, Labels]:
    """The champion's features and labels, if they are those of the file.

    Raises:
        ConfigError: the champion was trained with other features or labels.
    """
    functions = {name: imported(name, "tokens") for name in token_functions(spec.features)}
    bundle = bundle_of(champion)
    features = Features.from_json(bundle.preprocessing.get("features"), bundle_source(bundle), functions.__getitem__)
    labels = labels_of(bundle)
    champion_options = {feature.name: _without_size(feature.options) for feature in features.fitted}
    file_options = {name: _without_size(options) for name, options in spec.features.items()}
    differing = sorted(
        name
        for name in champion_options.keys() | file_options.keys()
        if champion_options.get(name) != file_options.get(name)
    )
    their_labels = {label.name: label for label in labels}
    same_labels = {
        name for name, label in spec.label.items() if name in their_labels and same_label(their_labels[name], label)
    }
    differing += sorted(f"label {name}" for name in (their_labels.keys() | spec.label.keys()) - same_labels)
    if differing:
        raise ConfigError(
            f"train.start=champion: version {champion.version} was trained with other features or labels than the "
            f"file names ({', '.join(differing[:5])}): train from scratch once"
        )
    return features, labels


def _without_size(options: Any) -> Any:
    """Options, but for the length of a vector, which the training rows may have told."""
    return msgspec.structs.replace(options, size=None) if hasattr(options, "size") else options


def cut_shards(
    project: Project,
    clean: DataFrame,
    windows: Mapping[Part, Sequence[str]],
    features: Features,
    labels: Labels,
    key: str,
    before_commit: Callable[[], None],
) -> Shards:
    """Cut the shards of the rows to train and to validate, in one reading of them.

    Args:
        project: the pipeline.
        clean: the clean rows.
        windows: of the parts ``train`` and ``validate``.
        features: fitted.
        labels: fitted.
        key: of the shards.
        before_commit: called before each set is there, and raises where it is not to be.

    Raises:
        NoLabelsError: no row of a part has a label yet.
        DataError: the rows cannot be trained on: labels that cannot be, weights that are missing or cannot be.
        SchemaError: columns are missing, or of types that their use does not fit.
    """
    spec, table = project.spec, project.table("clean")
    weight = [spec.weight] if spec.weight else []
    rows = shard_rows(project, clean, windows, features.columns, labels)

    version = str(table.version())
    train, validate = (
        ShardSource(uri=table.uri, version=version, transformation=f"{key} {part}") for part in ("train", "validate")
    )
    config = ShardConfig(spread_rows=spec.train.spreads, seed=spec.train.random_seed or 0)
    written = write_split(
        rows,
        VALIDATES,
        (f"{spec.places.shards}/train-{key}", f"{spec.places.shards}/validate-{key}"),
        labels=[*labels.names, *weight],
        layout=Layout(prepare=features),
        config=config,
        sources=(train, validate),
        overwrite=True,
        before_commit=before_commit,
    )
    if not rows.counts:  # an earlier run, that was killed, wrote both sets
        rows.count()
    manifests: list[Manifest] = []
    for manifest in written:
        if isinstance(manifest, NoRowsError):
            raise manifest
        manifests.append(manifest)
    train_set, validation_set = manifests
    return Shards(
        train=train_set.uri,
        validate=validation_set.uri,
        train_rows=train_set.rows,
        validate_rows=validation_set.rows,
        train_unlabelled=rows.counts["train"].unlabelled,
        validate_unlabelled=rows.counts["validate"].unlabelled,
    )
