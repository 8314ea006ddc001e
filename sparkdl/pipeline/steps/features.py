"""The step ``features``: statistics, vocabularies and classes of the training rows, or of the champion's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.documents.typed import Source
from sparkdl.features.fitted import Features, token_functions
from sparkdl.pipeline.code import imported
from sparkdl.pipeline.rows.parts import Parts
from sparkdl.pipeline.state.context import Context
from sparkdl.pipeline.state.evaluator import Stale, Step
from sparkdl.pipeline.state.receipts import Receipt, content_key
from sparkdl.pipeline.steps.learning import part_rows, parts_to_learn, unless_labels_are_missing, windows_and_key
from sparkdl.pipeline.work.labels import FittedLabel, Labels

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["VERSION", "FeaturesStep", "FittedFeatures", "features_key", "features_of", "fitted_key"]

VERSION = 2
"""Of how features are fitted and shards cut; raise it when that changes."""


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


class FeaturesStep(Step):
    """Features and labels fitted to the training rows, once for these rows.

    A training that goes on from the champion keeps the champion's, so that an id means what it meant. Which champion
    that is is settled here: after a kill the training goes on from the same one, and a champion that it became itself
    is none to start from again.
    """

    name = "features"
    learns = True

    def wanted(self, context: Context) -> Mapping[str, str | None]:
        """The one key of the training rows."""
        parts, _ = parts_to_learn(context)
        return {} if parts is None else {str(key := features_key(context, parts)): key}

    def exists(self, context: Context, receipt: Receipt) -> bool:
        """Whether they can be read, and the bundle that they were taken from is there."""
        fitted = context.receipts.result(self.name, receipt.key, FittedFeatures)
        return fitted is not None and (fitted.start is None or context.places.file(fitted.start))

    def why(self, context: Context, partition: str, receipt: Receipt | None) -> str:
        """What differs."""
        return "features, label, split or the training windows differ, or the champion of then is gone"

    def make(self, context: Context, spark: SparkSession, stale: Stale) -> bool:
        """Fit them, or take the champion's."""
        from sparkdl.pipeline.work.prepare import champions_features, fit_features

        parts, key = windows_and_key(context, stale)
        champion = context.champion() if context.spec.train.start == "champion" else None
        with unless_labels_are_missing(context, parts):
            if champion is not None:
                features, labels = champions_features(context.spec, champion)
                fitted = FittedFeatures(features=features.to_json(), labels=labels.labels, start=champion.uri)
            else:
                features, labels = fit_features(context, context.clean(spark), parts.train)
                fitted = FittedFeatures(features=features.to_json(), labels=labels.labels)
            context.receipts.keep(self.name, key, fitted)
        return True

    def tell(self, context: Context) -> None:
        """The windows of each part."""
        parts, _ = parts_to_learn(context)
        if parts is not None:
            learnt = {part: list(parts.windows(part)) for part in ("train", "validate", "test")}
            context.record.windows |= {part: windows for part, windows in learnt.items() if windows}


def features_key(context: Context, parts: Parts) -> str | None:
    """What decides features that are fitted to the training rows, or taken from who is the champion then."""
    inputs = _inputs(context, parts)
    return None if inputs is None else content_key("features", inputs)


def fitted_key(context: Context, parts: Parts) -> str | None:
    """The key of fitted features, with the address of the bundle that they were taken from, if any."""
    inputs = _inputs(context, parts)
    if inputs is None or context.spec.train.start != "champion":
        return None if inputs is None else content_key("features", inputs)
    fitted = context.receipts.result("features", content_key("features", inputs), FittedFeatures)
    if fitted is None:
        return None
    return content_key("features", inputs if fitted.start is None else {**inputs, "from": fitted.start})


def _inputs(context: Context, parts: Parts) -> dict[str, Any] | None:
    settings, rows = context.settings, part_rows(context, parts.train)
    if rows is None:
        return None
    return {
        "version": VERSION,
        "features": settings["features"],
        "label": settings["label"],
        "split": settings["split"],
        "start": context.spec.train.start,
        "rows": rows,
        "code": {name: context.code[name] for name in token_functions(context.spec.features)},
    }


def features_of(context: Context, parts: Parts) -> tuple[Features, Labels, str | None]:
    """The fitted features, the labels, and the address of the bundle that they are from."""
    fitted = context.receipts.result("features", str(features_key(context, parts)), FittedFeatures)
    assert fitted is not None
    functions = {name: imported(name, "tokens") for name in token_functions(context.spec.features)}
    features = Features.from_json(fitted.features, Source("the result of the step 'features'"), functions.__getitem__)
    return features, Labels(labels=fitted.labels), fitted.start
