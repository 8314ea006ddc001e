"""The settings that a search tries, and what speaks against its space.

Of a grid these are all combinations, the last name changing fastest; at random and to be halved as many as were asked
for, drawn from the seed and therefore the same each time. Neither Spark nor torch is loaded: arguments of a model are
read from its source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, get_args, get_type_hints

import msgspec

from sparkdl.errors import ConfigError
from sparkdl.estimator.space import Range as NumberRange
from sparkdl.estimator.space import Settings, Space, all_settings, drawn_settings, settings_text
from sparkdl.pipeline.code import arguments_of
from sparkdl.pipeline.file.problems import Path, choices
from sparkdl.pipeline.spec import Model, PipelineSpec, Range, Search, Train
from sparkdl.pipeline.spec.training import NOT_DECIDING

OWN_NETWORK = "sparkdl.models.networks:TabularEnsemble"
"""The network where the file names none."""
MAX_TRIALS = 1000
_FIXED = {
    **dict.fromkeys(("start", "partitions_per_process", "spread_rows"), "it decides what all trials have in common"),
    "num_proc": "all trials run on as many ranks",
    "min_num_proc": "all trials run on as many ranks",
    **dict.fromkeys(NOT_DECIDING, "it changes no weights"),
}


def trials_of(spec: PipelineSpec) -> list[Settings]:
    """The settings of every trial, by ``train.NAME`` or ``model.ARGUMENT``; one without any where nothing is searched.

    Those of ``tpe`` are empty: they follow from what the trials before came to.

    Raises:
        ConfigError: the space has fewer settings than are to be drawn.
    """
    search = spec.search
    if search is None:
        return [{}]
    if search.method == "grid":
        return all_settings(space_of(spec, search))
    count = search.trials or 0
    if search.method == "tpe":
        return [{} for _ in range(count)]
    trials = drawn_settings(space_of(spec, search), count, search.seed)
    if len(trials) < count:
        raise ConfigError(f"={count}, and the space has no more than {len(trials)} settings: give so many, or grid")
    return trials


def space_of(spec: PipelineSpec, search: Search) -> Space:
    """What a search may try, as ``sparkdl.tune`` takes it: numbers as their parameters take them."""
    kinds = {name: _kind(spec, name) for name in search.space}
    return {
        name: NumberRange(values.low, values.high, log=values.log, whole=kinds[name] is int)
        if isinstance(values, Range)
        else [_typed(value, kinds[name]) for value in values]
        for name, values in search.space.items()
    }


def factory_of(model: Model) -> str:
    """The import path of the factory of a network."""
    return model.factory or OWN_NETWORK


def with_settings(spec: PipelineSpec, settings: Mapping[str, Any]) -> PipelineSpec:
    """The pipeline of one trial: the file with the trial's settings, and nothing to search.

    Raises:
        ConfigError: the settings do not fit each other.
    """
    train, arguments = _of_section(settings, "train"), {**spec.model.arguments, **_of_section(settings, "model")}
    replaced = msgspec.structs.replace
    model = replaced(spec.model, arguments=arguments)
    return replaced(spec, train=replaced(spec.train, **train), model=model, search=None)


def compared_by(spec: PipelineSpec) -> str | None:
    """The metric by which trials are compared, the one of the gate; None compares them by the loss.

    A training computes no other metric of several labels than ``train.metrics`` names, none of quantiles, and none of
    classes whose loss is a function of the user's, which does not say what the outputs are.
    """
    label = spec.label[spec.judged_label]
    computed = label.type == "regression" or (label.type != "quantiles" and ":" not in (label.loss or ""))
    metric = spec.judged_metric
    return metric if computed and (len(spec.label) == 1 or metric in spec.train.metrics) else None


def chosen_by(spec: PipelineSpec) -> str:
    """The column of a training's history by whose value trials are compared."""
    metric = compared_by(spec)
    if metric is None:
        return "val_loss"
    return f"val_{metric}" if len(spec.label) == 1 else f"val_{spec.judged_label}_{metric}"


def metrics_of_trials(spec: PipelineSpec) -> tuple[str, ...]:
    """What a training of a search computes: ``train.metrics``, and the one by which trials are compared."""
    metric, metrics = compared_by(spec), spec.train.metrics
    return metrics if metric is None or metric in metrics else (*metrics, metric)


def chosen_settings(settings: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The sections ``train`` and ``model`` of resolved settings, with those of a trial in their place."""
    model = dict(settings["model"])
    model["arguments"] = {**(model.get("arguments") or {}), **_of_section(chosen, "model")}
    return {"train": {**settings["train"], **_of_section(chosen, "train")}, "model": model}


def _of_section(settings: Mapping[str, Any], section: str) -> Settings:
    """Those of one section, by the name that they have there."""
    prefix = f"{section}."
    return {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}


def search_problems(spec: PipelineSpec) -> list[tuple[Path, str]]:
    """Arguments that the model's function does not take, and what makes a search impossible: path and sentence."""
    problems = list(_unknown_arguments(spec))
    search = spec.search
    if search is None or problems:
        return problems
    for name, values in search.space.items():
        if (why := _FIXED.get(name.removeprefix("train."))) and name.startswith("train."):
            problems.append((("search", "space", name), f" is nothing to search, as {why}: leave it out"))
        elif isinstance(values, Range):
            ends = {end: _typed(getattr(values, end), _kind(spec, name)) for end in ("low", "high")}
            problems += [
                (("search", "space", name, end), sentence)
                for end, value in ends.items()
                if (sentence := _refused(spec, {name: value}))
            ]
    if search.method == "tpe" and find_spec("optuna") is None:
        sentence = "=tpe draws by Optuna, which is not installed: pip install optuna, or choose random"
        problems.append((("search", "method"), sentence))
    epochs = spec.train.epochs
    if search.method == "halving" and epochs is not None and search.min_epochs >= epochs:
        sentence = f"={search.min_epochs}, and train.epochs={epochs}: there is nothing to stop early, so give fewer"
        problems.append((("search", "min_epochs"), sentence))
    if search.slots is not None and search.slots < (spec.train.num_proc or 1):
        sentence = f"={search.slots} has no room for one trial, train.num_proc={spec.train.num_proc}: give at least so"
        problems.append((("search", "slots"), f"{sentence} many"))
    return problems or list(_impossible(spec, search))


def _impossible(spec: PipelineSpec, search: Search) -> Iterator[tuple[Path, str]]:
    sizes = [len(values) for values in search.space.values() if not isinstance(values, Range)]
    count = search.trials or math.prod(sizes)
    if count > MAX_TRIALS:
        key = "trials" if search.trials else "space"
        yield ("search", key), f" makes {count} trials, and {MAX_TRIALS} is the most: search fewer"
        return
    try:
        settings = trials_of(spec)
    except ConfigError as error:
        yield ("search", "trials"), str(error)
        return
    for trial in filter(None, settings):
        if sentence := _refused(spec, trial):
            yield ("search", "space"), f" holds {settings_text(trial)}, which cannot be: {sentence.lstrip()}"
            return


def _unknown_arguments(spec: PipelineSpec) -> Iterator[tuple[Path, str]]:
    """Arguments that the function does not take, as far as its source tells."""
    target = factory_of(spec.model)
    try:
        accepted = arguments_of(target)
    except ConfigError:  # said of model.factory already
        return
    searched = [name for name in (spec.search.space if spec.search else ()) if name.startswith("model.")]
    arguments: list[tuple[Path, str]] = [(("model", "arguments", name), name) for name in spec.model.arguments]
    arguments += [(("search", "space", name), name.removeprefix("model.")) for name in searched]
    for path, name in arguments:
        if accepted is not None and name not in accepted:
            possible_arguments = [argument for argument in accepted if argument != "features"]
            yield path, f" is no argument of {target}: {choices(name, possible_arguments)}"
        elif name == "features":
            yield path, " is what the pipeline itself gives: leave it out"


def _kind(spec: PipelineSpec, name: str) -> type | None:
    """The kind of number that a parameter takes, as its annotation says; None where that is none, or says nothing."""
    section, _, parameter = name.partition(".")
    if section == "train":
        kind = get_type_hints(Train).get(parameter)
        members = set(get_args(kind) or [kind]) - {type(None)}
        return next(iter(members)) if members in ({int}, {float}) else None
    try:
        accepted = arguments_of(factory_of(spec.model)) or {}
    except ConfigError:
        return None
    return {"int": int, "float": float}.get((accepted.get(parameter) or "").replace(" ", "").removesuffix("|None"))


def _typed(value: Any, kind: type | None) -> Any:
    """The value as its parameter takes it: in a file, 2 and 2.0 are the same."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return kind(value) if kind is not None and number and value == kind(value) else value


def _refused(spec: PipelineSpec, settings: Mapping[str, Any]) -> str | None:
    """What the sections say against a trial's settings."""
    try:
        with_settings(spec, settings)
    except ConfigError as error:
        text = str(error)
        first = next(iter(settings)).partition(".")[2]
        return text.removeprefix(first) if len(settings) == 1 else text
    return None
