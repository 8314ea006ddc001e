"""The step ``features``: statistics, vocabularies and classes of the training rows, or of the champion's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.documents.typed import Source
from sparkdl.features.fitted import Features, token_functions
from sparkdl.pipeline.code import imported
from sparkdl.pipeline.state.evaluator import Stale, Step
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import Receipt, content_key
from sparkdl.pipeline.state.run import Run, State
from sparkdl.pipeline.steps.learning import (
    key_to_learn,
    part_rows,
    parts_to_learn,
    unless_labels_are_missing,
    windows_and_key,
)
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


class FeaturesStep(Step):
    """Features and labels fitted to the training rows, once for these rows.

    A training that goes on from the champion keeps the champion's, so that an id means what it meant. Which champion
    that is is settled here: after a kill the training goes on from the same one, and a champion that it became itself
    is none to start from again.
    """

    name = "features"
    learns = True
    cause = "features, label, split or the training windows differ, or the champion of then is gone"

    def wanted(self, run: Run) -> Mapping[str, str | None]:
        """The one key of the training rows."""
        return key_to_learn(run, features_key)

    def exists(self, run: Run, receipt: Receipt) -> bool:
        """Whether they can be read, and the bundle that they were taken from is there."""
        fitted = run.state.receipts.result(self.name, receipt.key, FittedFeatures)
        return fitted is not None and (fitted.start is None or run.state.places.file(fitted.start))

    def make(self, run: Run, spark: SparkSession, stale: Stale) -> bool:
        """Fit them, or take the champion's."""
        from sparkdl.pipeline.work.prepare import champions_features, fit_features

        project, state = run.project, run.state
        parts, key = windows_and_key(run, stale)
        champion = state.champion() if project.spec.train.start == "champion" else None
        with unless_labels_are_missing(project, state, parts):
            if champion is not None:
                features, labels = champions_features(project.spec, champion)
                fitted = FittedFeatures(features=features.to_json(), labels=labels.labels, start=champion.uri)
            else:
                receipts = state.windows()
                windows = {name: receipts[name] for name in parts.train}
                features, labels = fit_features(project, state.clean(spark), windows)
                fitted = FittedFeatures(features=features.to_json(), labels=labels.labels)
            state.receipts.keep(self.name, key, fitted)
        return True

    def tell(self, run: Run) -> None:
        """The windows of each part."""
        parts, _ = parts_to_learn(run)
        if parts is not None:
            learnt = {part: list(parts.windows(part)) for part in ("train", "validate", "test")}
            run.record.windows |= {part: windows for part, windows in learnt.items() if windows}


def features_key(project: Project, state: State, parts: Parts) -> str | None:
    """What decides features that are fitted to the training rows, or taken from who is the champion then."""
    inputs = _inputs(project, state, parts)
    return None if inputs is None else content_key("features", inputs)


def fitted_key(project: Project, state: State, parts: Parts) -> str | None:
    """The key of fitted features, with the address of the bundle that they were taken from, if any."""
    inputs = _inputs(project, state, parts)
    if inputs is None or project.spec.train.start != "champion":
        return None if inputs is None else content_key("features", inputs)
    fitted = state.receipts.result("features", content_key("features", inputs), FittedFeatures)
    if fitted is None:
        return None
    return content_key("features", inputs if fitted.start is None else {**inputs, "from": fitted.start})


def _inputs(project: Project, state: State, parts: Parts) -> dict[str, Any] | None:
    settings, rows = project.settings, part_rows(state, parts.train)
    if rows is None:
        return None
    return {
        "version": VERSION,
        "features": settings["features"],
        "label": settings["label"],
        "split": settings["split"],
        "start": project.spec.train.start,
        "rows": rows,
        "code": {name: project.code[name] for name in token_functions(project.spec.features)},
    }


def features_of(project: Project, state: State, parts: Parts) -> tuple[Features, Labels, str | None]:
    """The fitted features, the labels, and the address of the bundle that they are from."""
    fitted = state.receipts.result("features", str(features_key(project, state, parts)), FittedFeatures)
    assert fitted is not None
    functions = {name: imported(name, "tokens") for name in token_functions(project.spec.features)}
    features = Features.from_json(fitted.features, Source("the result of the step 'features'"), functions.__getitem__)
    return features, Labels(labels=fitted.labels), fitted.start
