"""The step ``train``: shards to a model in a bundle; of a search, the best of its trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdl.pipeline.recipe import accuracy_column
from sparkdl.pipeline.rows.expect import columns_of
from sparkdl.pipeline.spec.training import NOT_DECIDING
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import Receipt, content_key
from sparkdl.pipeline.state.results import Trained, Tried
from sparkdl.pipeline.state.run import Run
from sparkdl.pipeline.steps.learning import LearningStep, parts_to_learn
from sparkdl.pipeline.steps.shards import ShardsStep, prepared_of
from sparkdl.pipeline.trials import chosen_by, chosen_settings, metrics_of_trials, trials_of
from sparkdl.pipeline.windows import Parts
from sparkdl.pipeline.work.labels import labelled

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VERSION = 7
"""The version of how a model is trained; raise it when that changes."""


class TrainStep(LearningStep):
    """One model of the shards, which becomes the challenger."""

    name = "train"
    loads_torch = True
    result = Trained

    def key(self, run: Run, parts: Parts) -> str:
        """What decides a training on these windows, or a search among several."""
        project = run.project
        inputs = _inputs(project, ShardsStep().key(run, parts), {})
        if run.spec.search is not None:
            inputs |= {"search": _searched(project), "chosen by": [chosen_by(run.spec), run.spec.publish.label]}
        return content_key("train", inputs)

    def is_there(self, run: Run, result: Trained) -> bool:
        """Whether the whole bundle is there."""
        return run.places.bundle(result.bundle)

    def why(self, run: Run, partition: str, receipt: Receipt | None) -> str:
        """What differs; of a search, how much of it was done."""
        parts, _ = parts_to_learn(run)
        if run.spec.search is None or parts is None:
            return "model, train, label, what judges its classes, or their code differ"
        trials, receipts = trials_by_key(run.project, ShardsStep().key(run, parts)), run.receipts.of("trial")
        return f"{sum(key in receipts for key in trials)} of {len(trials)} trials of the search are done"

    def result_of(self, run: Run, spark: SparkSession, parts: Parts, key: str) -> Trained:
        """Train, or take the best of the trials."""
        from sparkdl.pipeline.work.evaluate import MOST_SUMMED, label_summaries
        from sparkdl.pipeline.work.file_rows import part_frame
        from sparkdl.pipeline.work.search import best_of
        from sparkdl.pipeline.work.training import train

        spec, prepared = run.spec, prepared_of(run, parts, spark)
        if spec.search is None:
            trained = train(spark, spec, prepared, key)
        else:
            tried = [
                (settings, run.receipts.result("trial", trial, Tried) or Tried(trained=None))
                for trial, settings in trials_by_key(run.project, prepared.key).items()
            ]
            trained = best_of(spec, tried)
        clean, content = run.clean_to_divide(spark), run.content()
        names, count = prepared.labels.names, prepared.shards.train_rows
        used = [*names, *filter(None, [spec.weight])] if count <= MOST_SUMMED else None  # more are drawn by a hash
        rows = part_frame(run.project, clean, {"train": parts.train}, used)
        return replace(
            trained,
            windows={name: str(content[name]) for name in parts.train},
            split=run.project.settings["split"],
            columns=columns_of(clean),
            origin=_with_parent(run, trained.origin, prepared.start),
            labels=label_summaries(labelled(rows, names), spec, prepared.labels, count),
        )

    def tell_result(self, run: Run, parts: Parts) -> None:
        """What the training showed, and what became of the training that drift asked for."""
        record = run.record
        record.trained = self.kept(run, parts)
        if record.drift is not None and record.drift.action == "retrain":
            newest = (parts.test or parts.validate)[-1]
            text = (
                f"trained again, with all rows up to {newest}"
                if self.name in run.made
                else f"nothing can change, since a model was trained on all rows up to {newest} already"
            )
            record.drift = replace(record.drift, reason=f"{record.drift.reason}; {text}")


def _searched(project: Project) -> dict[str, Any]:
    """What decides which trials there are, and which are stopped."""
    search = project.settings["search"]
    names = ["space", "method", "trials", "seed"]
    if search["method"] == "halving":
        names += ["min_epochs", "reduction"]
    return {name: search[name] for name in names}


def trials_by_key(project: Project, shards: str) -> dict[str, dict[str, Any]]:
    """The settings of each trial by its key, in order.

    What a trial comes to that others decide, by stopping it or by what is drawn next, is of this search alone.
    """
    search = project.spec.search
    if search is not None and search.method in ("halving", "tpe"):
        inputs = {**_inputs(project, shards, {}), "search": _searched(project), "chosen by": chosen_by(project.spec)}
        return {
            content_key("trial", {**inputs, "number": number}): settings
            for number, settings in enumerate(trials_of(project.spec))
        }
    return {trial_key(project, shards, settings): settings for settings in trials_of(project.spec)}


def trial_key(project: Project, shards: str, settings: Mapping[str, Any]) -> str:
    """What decides one trial on the shards of that key."""
    return content_key("trial", _inputs(project, shards, settings))


def _inputs(project: Project, shards: str, trial: Mapping[str, Any]) -> dict[str, Any]:
    """What decides one training, with the settings of a trial; how it is watched and kept alive does not."""
    settings = {**project.settings, **chosen_settings(project.settings, trial)} if trial else project.settings
    deciding = {name: value for name, value in settings["train"].items() if name not in NOT_DECIDING}
    if trial:  # which the best is told by
        deciding["metrics"] = metrics_of_trials(project.spec)
    several_classes = project.spec.label[project.spec.judged_label].type == "multiclass"
    return {
        "version": VERSION,
        "shards": shards,
        "model": settings["model"],
        "train": deciding,
        "label": settings["label"],
        "code": project.code,
        **({"accuracy": accuracy_column(project.spec)} if several_classes else {}),  # decides smoothing and epochs
    }


def _with_parent(run: Run, origin: Mapping[str, Any], start: str | None) -> dict[str, Any]:
    """What a fit has noted of itself, and the version whose weights it began with."""
    if start is None:
        return dict(origin)
    versions = run.registry.list(str(run.spec.publish.name))
    parent = next((version.version for version in reversed(versions) if version.uri == start), None)
    return {**origin, "lineage": {**origin.get("lineage", {}), "parent": parent}}
