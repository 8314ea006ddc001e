"""What decides the result of each step of a run, and whether a result that was kept still holds.

Enters: the context of a run, the windows of each part with a hash of their rows. Leaves: the inputs that ``Steps``
makes a key of. The steps and the plan ask here, so that a plan says what a run does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkdl.errors import BundleError
from sparkdl.features.fitted import token_functions
from sparkdl.models.folder import read_bundle
from sparkdl.models.registry import ModelVersion
from sparkdl.pipeline.rows.parts import Parts
from sparkdl.pipeline.spec import TimeSplit, Train
from sparkdl.pipeline.spec.training import NOT_DECIDING
from sparkdl.pipeline.state.context import VERSIONS, Context
from sparkdl.pipeline.state.results import Published, Scored, ScoredWindows, Shards, Trained
from sparkdl.pipeline.state.steps import Steps, content_key
from sparkdl.pipeline.trials import chosen_by, chosen_settings, metrics_of_trials
from sparkdl.pipeline.windows import NO_TIME
from sparkdl.storage import Storage
from sparkdl.storage.address import looks_like_a_table
from sparkdl.tables.engine import spark_session
from sparkdl.tables.table import Table

__all__ = [
    "bundle_is_whole",
    "drift_inputs",
    "evaluate_inputs",
    "features_inputs",
    "fitted_key",
    "judged_against",
    "predictions_are_there",
    "publish_inputs",
    "published_is_there",
    "score_inputs",
    "score_is_there",
    "scored_place",
    "scored_windows",
    "shards_are_there",
    "shards_inputs",
    "train_inputs",
    "trained_of",
    "trained_on",
    "trial_inputs",
    "windows_to_score",
]

Content = Mapping[str, str]
Inputs = dict[str, Any]

_MOST_WINDOWS = 48
"""The newest windows that are compared with a champion, two days of hours; more where the file looks back upon more."""


def features_inputs(context: Context, parts: Parts, content: Content) -> Inputs:
    """What decides features that are fitted to the training rows, or taken from who is the champion then."""
    settings = context.settings
    return {
        "version": VERSIONS["prepare"],
        "features": settings["features"],
        "label": settings["label"],
        "split": settings["split"],
        "start": context.spec.train.start,
        "rows": {name: content[name] for name in parts.train},
        "code": {name: context.code[name] for name in token_functions(context.spec.features)},
    }


def fitted_key(features: Inputs, start: str | None) -> str:
    """The key of fitted features; of those that were taken from a champion, ``start`` is the address of its bundle."""
    return content_key("features", features if start is None else {**features, "from": start})


def shards_inputs(context: Context, parts: Parts, content: Content, fitted: str) -> Inputs:
    """What decides the shard sets, besides features with the key ``fitted``."""
    return {
        "version": VERSIONS["prepare"],
        "fitted": fitted,
        "split": context.settings["split"],
        "weight": context.spec.weight,
        "seed": context.spec.train.random_seed,
        "spread": spreads(context.spec.train),
        **_repartitioned(context.spec.train),
        "rows": {part: {name: content[name] for name in parts.windows(part)} for part in ("train", "validate")},
    }


def spreads(train: Train) -> bool:
    """Whether the rows of shards lie in random order."""
    return train.spread_rows and train.shuffle and train.shuffle_buffer_size != 0


def _repartitioned(train: Train) -> Inputs:
    return {"partitions": [train.partitions_per_process, train.num_proc]} if train.partitions_per_process else {}


def shards_are_there(found: Shards) -> bool:
    """Whether both sets still lie where the step left them."""
    return all(Storage.of(uri).child("manifest.json").exists() for uri in (found.train, found.validate))


def train_inputs(context: Context, shards: str) -> Inputs:
    """What decides a training on the shards of that key, or a search among several."""
    inputs, search = trial_inputs(context, shards, {}), context.spec.search
    if search is None:
        return inputs
    space = {name: context.settings["search"][name] for name in ("space", "method", "trials", "seed")}
    return {**inputs, "search": space, "chosen by": [chosen_by(context.spec), context.spec.publish.label]}


def trial_inputs(context: Context, shards: str, trial: Mapping[str, Any]) -> Inputs:
    """What decides one training, with the settings of a trial; how it is watched and kept alive does not."""
    settings = {**context.settings, **chosen_settings(context.settings, trial)} if trial else context.settings
    deciding = {name: value for name, value in settings["train"].items() if name not in NOT_DECIDING}
    if trial:  # which the best is told by
        deciding["metrics"] = metrics_of_trials(context.spec)
    return {
        "version": VERSIONS["train"],
        "shards": shards,
        "model": settings["model"],
        "train": deciding,
        "label": settings["label"],
        "code": context.code,
    }


def bundle_is_whole(uri: str) -> bool:
    """Whether a bundle lies there."""
    try:
        read_bundle(uri)
    except (BundleError, OSError):
        return False
    return True


def publish_inputs(context: Context, parts: Parts, content: Content, train: str) -> Inputs:
    """What decides the publication of the training of that key.

    The champion is not among it: a challenger is judged once, and does not come back by itself after a rollback. Nor is
    MLflow, which is told of what was decided.
    """
    tested = {"test": {name: content[name] for name in parts.test}} if parts.test else {}
    settings = {name: value for name, value in context.settings["publish"].items() if name != "mlflow"}
    if context.spec.publish.gate.baseline == "first":  # as keys were before there was a choice: nobody is judged again
        settings["gate"] = {name: value for name, value in settings["gate"].items() if name != "baseline"}
    units = {"units": context.spec.source.key}  # rows of one key are judged as one
    return {"version": VERSIONS["publish"], "train": train, "publish": settings, **units, **tested}


def published_is_there(context: Context) -> bool:
    """Whether the registry that a publication went to still knows the model; single versions may have been deleted."""
    return bool(context.registry.list(str(context.spec.publish.name)))


def judged_against(context: Context, publish: Inputs) -> int | None:
    """The version that a publication's model is compared with: the champion when it was first judged, or now.

    A model that is the champion itself is compared with the one that it followed.
    """
    before = context.steps.find("publish", publish, Published, lambda _: published_is_there(context))
    if before is not None:
        return before.against
    champion = context.champion()
    if champion is None or champion.publication != publish["train"]:
        return champion.version if champion is not None else None
    # it is this very model: a run ended once the alias had moved, or only the gate was changed since
    name, alias = str(context.spec.publish.name), context.spec.publish.alias
    moves = [each for each in context.registry.history(name) if each.kind == "aliased" and each.alias == alias]
    followed = [each.previous for each in moves if each.version == champion.version]
    there = {each.version for each in context.registry.list(name)}
    return followed[-1] if followed and followed[-1] in there else None


def evaluate_inputs(context: Context, publish: Inputs, against: int | None) -> Inputs:
    """What decides the evaluation of a publication's model against a version."""
    return {**publish, "report": context.settings["report"], "against": against}


def score_inputs(context: Context, champion: ModelVersion, windows: Content) -> dict[str, Inputs]:
    """What decides the predictions of each window, by its name."""
    whole, settings = context.spec.score.window == "all", context.settings
    more = {"score": settings["score"], "split": None if whole else settings["split"], "key": context.spec.source.key}
    return {
        name: {"version": VERSIONS["score"], "artifact": champion.artifact, "window": name, "rows": rows, **more}
        for name, rows in windows.items()
    }


def trained_of(context: Context, version: ModelVersion | None) -> Trained | None:
    """What is kept of a version's training; None where that is not known any more."""
    return context.steps.result("train", version.publication, Trained) if version and version.publication else None


def trained_on(context: Context, version: ModelVersion) -> Content:
    """A hash of the rows of each window that a version was trained on; empty where that is not known any more."""
    trained = trained_of(context, version)
    return {} if trained is None else trained.windows


def windows_to_score(context: Context, parts: Parts, content: Content) -> tuple[str, ...]:
    """The windows that the file asks to score, and those that earlier runs owe, in order.

    Owed are, since the first window that was ever scored, those that no run came for, those whose rows have changed
    since, and, of any split, those that were scored and have no rows any more.
    """
    part = context.spec.score.window
    asked = tuple(name for name in content if content[name]) if part == "all" else parts.windows(part)
    known = context.steps.find("score", scored_windows(context), ScoredWindows)
    scored = known.content if known is not None else {}
    owed = {name for name, rows in content.items() if not rows and scored.get(name)}
    if scored and asked and isinstance(context.spec.split, TimeSplit) and NO_TIME not in asked:
        since = [name for name in content if min(scored) <= name < max(asked)]
        owed |= {name for name in since if scored.get(name, "") != content[name]}
    return tuple(sorted({*owed, *asked}))


def scored_windows(context: Context) -> Inputs:
    """Under what it is kept which rows of each window were scored: there is one, the last."""
    return {"target": Table(str(context.spec.score.target)).uri, "windows": "all"}


def drift_inputs(context: Context, champion: ModelVersion, parts: Parts, content: Content) -> dict[str, Inputs]:
    """What decides how each window compares with the champion's training rows, by its name, the oldest first.

    Windows are those that are not older than its training rows, and whose rows it was not trained on; where that is
    not known, those of the split that are held back from training.
    """
    known = trained_on(context, champion) or {name: content[name] for name in parts.train if name in content}
    first = min(known, default="")
    names = sorted(
        name for name, rows in content.items() if rows and name != NO_TIME and name >= first and known.get(name) != rows
    )
    given, settings = context.spec.drift, context.settings["drift"]
    deciding = {name: value for name, value in settings.items() if name not in ("action", "after", "of")}
    functions = token_functions(context.spec.features)
    more = {"settings": deciding, "code": {name: context.code[name] for name in functions}}
    return {
        name: {
            "version": VERSIONS["drift"],
            "artifact": champion.artifact,
            "window": name,
            "rows": content[name],
            **more,
        }
        for name in names[-max(given.of, _MOST_WINDOWS) :]
    }


def scored_place(target: str, window: str) -> Inputs:
    """Under what the result for a window is kept: there is one, the last, since each overwrites those before it."""
    return {"target": target, "window": window}


def score_is_there(steps: Steps, target: str, window: str, inputs: Mapping[str, Any]) -> bool:
    """Whether the table of predictions holds for a window what these inputs decide.

    A catalog is asked only where a session is: without one, for a plan, the result that was kept is believed.
    """
    done = steps.find("score", scored_place(target, window), Scored)
    return done is not None and done.inputs == content_key("score", inputs) and _is_there(target)


def predictions_are_there(context: Context) -> bool:
    """Whether the table of predictions still is where one was made; a catalog is asked as by ``score_is_there``."""
    return not context.steps.known("score", scored_windows(context)) or _is_there(str(context.spec.score.target))


def _is_there(target: str) -> bool:
    return (looks_like_a_table(target) and spark_session() is None) or Table(target).exists()
