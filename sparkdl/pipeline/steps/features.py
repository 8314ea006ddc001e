"""The step ``features``: statistics, vocabularies and classes of the training rows, or of the champion's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.documents.typed import Source
from sparkdl.features.fitted import Features, token_functions
from sparkdl.pipeline.code import imported
from sparkdl.pipeline.state.evaluator import UnknownKeyError
from sparkdl.pipeline.state.receipts import content_key
from sparkdl.pipeline.state.run import Run
from sparkdl.pipeline.steps.learning import LearningStep, part_rows
from sparkdl.pipeline.windows import Parts
from sparkdl.pipeline.work.labels import FittedLabel, Labels

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VERSION = 3
"""The version of how features are fitted and shards cut; raise it when that changes."""


@dataclass(frozen=True, kw_only=True)
class FittedFeatures:
    """What the training rows made of features and labels.

    Attributes:
        features: as JSON.
        labels: fitted.
        start: address of the bundle that they were taken from, and that training starts from; None starts from scratch.
    """

    features: Mapping[str, Any]
    labels: tuple[FittedLabel, ...]
    start: str | None = None


class FeaturesStep(LearningStep):
    """Features and labels fitted to the training rows, once for these rows.

    A training that goes on from the champion keeps the champion's, so that an id means what it meant. Which champion
    that is is settled here: after a kill the training goes on from the same one, and a champion that it became itself
    is none to start from again.
    """

    name = "features"
    result = FittedFeatures
    part = "train"
    cause = "features, label, split or the training windows differ, or the champion of then is gone"

    def key(self, run: Run, parts: Parts) -> str:
        """What decides features that are fitted to the training rows, or taken from who is the champion then."""
        return content_key("features", _inputs(run, parts))

    def is_there(self, run: Run, result: FittedFeatures) -> bool:
        """Whether the bundle that they were taken from is there."""
        return result.start is None or run.places.file(result.start)

    def result_of(self, run: Run, spark: SparkSession, parts: Parts, key: str) -> FittedFeatures:
        """Fit them, or take the champion's."""
        from sparkdl.pipeline.work.prepare import champions_features, fit_features

        champion = run.champion() if run.spec.train.start == "champion" else None
        if champion is not None:
            features, labels = champions_features(run.spec, champion)
            return FittedFeatures(features=features.to_json(), labels=labels.labels, start=champion.uri)
        windows = {name: run.windows()[name] for name in parts.train}
        features, labels = fit_features(run.project, run.clean_to_divide(spark), windows)
        return FittedFeatures(features=features.to_json(), labels=labels.labels)

    def tell_result(self, run: Run, parts: Parts) -> None:
        """The windows of each part."""
        for part in ("train", "validate", "test"):
            if windows := parts.windows(part):
                run.record.windows[part] = list(windows)


def fitted_key(run: Run, parts: Parts) -> str:
    """The key of fitted features, with the address of the bundle that they were taken from, if any."""
    inputs = _inputs(run, parts)
    if run.spec.train.start == "champion":
        fitted = FeaturesStep().kept(run, parts)
        if fitted is None:
            raise UnknownKeyError
        inputs |= {} if fitted.start is None else {"from": fitted.start}
    return content_key("features", inputs)


def _inputs(run: Run, parts: Parts) -> dict[str, Any]:
    settings = run.project.settings
    return {
        "version": VERSION,
        "features": settings["features"],
        "label": settings["label"],
        "split": settings["split"],
        "start": run.spec.train.start,
        "rows": part_rows(run, parts.train),
        "code": {name: run.project.code[name] for name in token_functions(run.spec.features)},
    }


def features_of(run: Run, parts: Parts) -> tuple[Features, Labels, str | None]:
    """The fitted features, the labels, and the address of the bundle that they are from."""
    fitted = FeaturesStep().kept(run, parts)
    functions = {name: imported(name, "tokens") for name in token_functions(run.spec.features)}
    features = Features.from_json(fitted.features, Source("the result of the step 'features'"), functions.__getitem__)
    return features, Labels(labels=fitted.labels), fitted.start
