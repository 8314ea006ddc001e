"""What sections of a file say against each other.

A check names the sections that it needs as its parameters, and is asked where all of them are valid.
"""

from __future__ import annotations

import inspect as python_inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import inspect

from sparkdl.columns.names import quoted
from sparkdl.errors import ConfigError
from sparkdl.features.spec import Feature, check_features, input_names
from sparkdl.pipeline.file.decode import alternatives, fields_of, is_of_type, wanted
from sparkdl.pipeline.file.problems import Path, choices
from sparkdl.pipeline.spec import (
    Drift,
    Expectation,
    HashSplit,
    Label,
    Places,
    Publish,
    Range,
    Score,
    Search,
    SourceSection,
    Split,
    TimeSplit,
    Train,
    prediction_columns,
)
from sparkdl.pipeline.spec.base import hours_of, section_type
from sparkdl.pipeline.spec.data import OUTCOMES
from sparkdl.pipeline.spec.operation import MIN_GROUPS, Floor, least_groups, metrics_of

_TELLING_ADDRESS = re.compile(
    r"[?&;]\s*([\w.-]*(signature|token|secret|passw(or)?d|pwd|credential|access_?key(_?id)?)|sig|sas|pat)\s*="
    r"|://[^/\s@:]+:[^/\s@]*@",
    re.IGNORECASE,
)
"""A signed address (``?sv=...&sig=...``), or a password before its host."""

Mistakes = Iterator[tuple[Path, str]]


def contradictions(sections: Mapping[str, Any]) -> Mistakes:
    """Yield what the ``sections``, by name, say against each other; those that are not valid are left out of it."""
    for check in _CHECKS:
        needed = python_inspect.signature(check).parameters
        if needed.keys() <= sections.keys():
            yield from check(**{name: sections[name] for name in needed})


def _addresses_hold_no_secret(
    root: str, places: Places, source: SourceSection, publish: Publish, score: Score
) -> Mistakes:
    addresses: dict[Path, str | tuple[str, ...] | None] = {
        ("root",): root,
        **{("places", name): getattr(places, name) for name in places.__struct_fields__},
        **{("source", name): getattr(source, name, None) for name in source.addresses},
        ("publish", "registry"): publish.registry,
        ("score", "target"): score.target,
    }
    for path, address in addresses.items():
        if any(map(_TELLING_ADDRESS.search, (address,) if isinstance(address, str) else address or ())):
            yield (
                path,
                " holds a signature, a token or a password, and addresses stand in logs, records and messages: take it "
                "out, and give it as ${NAME} in spark.conf, or in fsspec's configuration",
            )


def _features_have_names_of_their_own(features: Mapping[str, Feature]) -> Mistakes:
    try:
        check_features(features)
    except ConfigError:
        compatible: dict[str, Feature] = {}
        for name, options in features.items():  # the first one that does not go with those before it
            compatible[name] = options
            try:
                check_features(compatible)
            except ConfigError as refused:
                yield ("features", name), f": {refused}"
                return


def _expectations_have_names_of_their_own(expect: Mapping[str, Expectation]) -> Mistakes:
    for name in expect:
        if name in OUTCOMES:
            yield ("expect", name), " is what runs say of rows of their own accord: give it another name"


def _columns_have_one_role(
    source: SourceSection, features: Mapping[str, Feature], label: Mapping[str, Label]
) -> Mistakes:
    for name, options in features.items():
        column = options.source(name)
        if column in label:
            yield ("features", name), f" is the label {column!r}, too, so the model would read the answer: remove it"
        elif (column,) == source.key:
            yield ("features", name), f" is source.key={column!r}, which tells rows apart only: remove it"
    for column in label:
        if column in source.key:
            yield ("label", column), f" is in source.key={list(source.key)}, too: a label cannot tell rows apart"


def _labels_and_weight_are_no_inputs(
    weight: str | None, label: Mapping[str, Label], features: Mapping[str, Feature]
) -> Mistakes:
    if weight is not None and weight in label:
        yield ("weight",), f"={weight!r} is the label, too: name another column, or leave it out"
    elif weight in {options.source(name) for name, options in features.items()}:
        yield ("weight",), f"={weight!r} is a feature, too: let the transform copy it under another name"
    owners = {input_name: name for name, options in features.items() for input_name in input_names(name, options)}
    columns: list[tuple[Path, str]] = [(("label", name), name) for name in label]
    if weight is not None and weight not in label:
        columns.append((("weight",), weight))
    for path, column in columns:
        owner = owners.get(column)
        if owner is not None and features[owner].source(owner) != column:  # which is told as such
            shown = "" if path[0] == "label" else f"={column!r}"
            yield path, f"{shown} is the name of an input, which the feature {owner!r} makes: {_renamed(column)}"


def _renamed(name: str) -> str:
    return f"rename the column in transform, such as SELECT *, {quoted(name)} AS {quoted(f'{name}_')} FROM source"


def _predictions_have_columns_of_their_own(
    source: SourceSection, split: Split | None, label: Mapping[str, Label], score: Score
) -> Mistakes:
    types = {name: options.type for name, options in label.items()}
    levels = {name: options.quantiles for name, options in label.items()}
    prediction_names = {name.lower() for name in prediction_columns(types, levels)}  # as in SQL
    key = source.key if score.window != "score" or not _scores_nothing(split) else ()
    for path, names in ((("score", "keep"), score.keep), (("source", "key"), key)):
        for position, name in enumerate(names):
            if name.lower() in prediction_names:
                select = f"SELECT {quoted(name)} AS {quoted(f'{name}_')}"
                in_source = f"rename it where it is read, with kind: sql and {select}, ..."
                remedy = in_source if names is key else f"{_renamed(name)}, or leave it out"
                yield (*path, position), f"={name!r} is a column that predictions have of their own: {remedy}"


def _scores_nothing(split: Split | None) -> bool:
    return (isinstance(split, HashSplit) and split.score == 0) or getattr(split, "score", None) == ()


def _labels_share_the_loss(label: Mapping[str, Label]) -> Mistakes:
    for name, options in label.items():
        if options.weight is not None and len(label) == 1:
            yield ("label", name, "weight"), f"={options.weight} has no meaning for one label: leave it out"


def _split_has_what_it_needs(source: SourceSection, split: Split | None, label: Mapping[str, Label]) -> Mistakes:
    if isinstance(split, TimeSplit):
        if source.when is None:
            yield ("split", "by"), "='time' needs source.time or source.partition: name the column, or split by hash"
            return
        for name in ("train", "validate", "test", "score"):
            length = getattr(split, name)
            if length not in ("all", None) and hours_of(length) % source.window_hours:
                yield (
                    ("split", name),
                    f"={length!r} is not a multiple of source.every={source.every!r}: change one of them",
                )
    if isinstance(split, HashSplit) and split.copies == "spread" and (split.group or source.key):
        by = "split.group" if split.group else "source.key"
        yield ("split", "copies"), f"='spread' is for rows without a key, and there is {by}: leave one of them out"
    column = getattr(split, "column", None)
    if column is not None and column in label:
        yield ("split", "column"), f"={column!r} is the label, too: rows cannot be split by what is to be predicted"
    for position, column in enumerate(getattr(split, "group", ())):
        if column in label:
            yield ("split", "group", position), f"={column!r} is the label, too: a part would lack whole labels"


def _metrics_fit_the_labels(label: Mapping[str, Label], publish: Publish) -> Mistakes:
    judged_label = label.get(publish.label or "") or next(iter(label.values()))
    if publish.label is not None and publish.label not in label:
        yield ("publish", "label"), f"={publish.label!r} is no label: {choices(publish.label, label, columns=True)}"
        return
    possible = metrics_of(judged_label.type)
    label_text = f"a label of type {judged_label.type!r}: choose one of {', '.join(possible)}"
    if len(label) > 1:
        label_text += f", or say publish.label, one of {', '.join(label)}"
    if publish.metric is not None and publish.metric not in possible:
        yield ("publish", "metric"), f"={publish.metric!r} cannot be computed of {label_text}"
    for position, text in enumerate(publish.gate.floors):
        if Floor.parse(text).metric not in possible:
            yield ("publish", "gate", "floors", position), f"={text!r} cannot be computed of {label_text}"


def _training_metrics_fit_a_label(label: Mapping[str, Label], train: Train) -> Mistakes:
    possible = {metric for options in label.values() for metric in metrics_of(options.type)}
    for position, metric in enumerate(train.metrics):
        if metric not in possible:
            kinds = " and ".join(sorted({options.type for options in label.values()}))
            remedy = f"choose from {', '.join(sorted(possible))}"
            yield ("train", "metrics", position), f"={metric!r} cannot be computed of {kinds} labels: {remedy}"


def _what_chooses_does_not_judge(search: Search | None, split: Split | None) -> Mistakes:
    if search is not None and not getattr(split, "test", None):
        yield (
            ("search",),
            " chooses by the rows of split.validate, and the gate would judge its choice by the same rows, on which it "
            "looks better than it is: give split.test rows of its own",
        )


def _gate_can_draw(source: SourceSection, split: Split | None, publish: Publish) -> Mistakes:
    path, over = ("publish", "gate", "over"), publish.gate.over
    split = split or (TimeSplit() if source.when else HashSplit())
    if over == "window" and isinstance(split, TimeSplit):
        name, length = ("test", split.test) if split.test else ("validate", split.validate)
        held_out = hours_of(length) // source.window_hours
        needed = max(MIN_GROUPS, least_groups(publish.gate.confidence))
        if held_out < needed:
            yield (
                path,
                f"='window' needs {needed} windows to tell a gain from chance, and split.{name}={length!r} "
                f"holds out {held_out}: hold out more, or leave over out",
            )
    elif over == "window":
        yield path, "='window' needs windows, and the split is not by time: write key"
    if over == "key" and not source.key:
        yield path, "='key' needs source.key, which is empty: name the columns, or leave over out"


def _registry_has_one_place(places: Places, publish: Publish) -> Mistakes:
    if places.registry is not None and publish.registry is not None:
        yield (
            ("publish", "registry"),
            f"={publish.registry!r} and places.registry={places.registry!r} both say where models lie: keep one",
        )


def _there_is_something_to_score(split: Split | None, score: Score, written: frozenset[str]) -> Mistakes:
    if _scores_nothing(split) and score.window == "score" and "score" in written:
        yield ("score",), " has nothing to score, since split.score is empty: give split.score rows, or window: all"


def _drift_knows_its_features(features: Mapping[str, Feature], drift: Drift) -> Mistakes:
    for position, name in enumerate(drift.ignore):
        if name not in features:
            yield ("drift", "ignore", position), f"={name!r} is no feature: {choices(name, features, columns=True)}"


def _search_varies_what_there_is(search: Search | None) -> Mistakes:
    options = fields_of(section_type(Train))
    for name, values in search.space.items() if search is not None else ():
        section, dot, parameter = name.partition(".")
        path: Path = ("search", "space", name)
        remedy = choices(name, [f"train.{option}" for option in options])
        if section not in ("train", "model") or not dot or not parameter:
            yield path, f" is no parameter: {remedy}, or model.ARGUMENT"
        elif section == "train" and parameter not in options:
            yield path, f" is no parameter: {remedy}"
        elif section == "train":
            yield from _values_fit(path, parameter, values, options[parameter].type)


def _values_fit(path: Path, parameter: str, values: Any, kind: inspect.Type) -> Mistakes:
    if isinstance(values, Range):
        if not any(isinstance(inner, inspect.IntType | inspect.FloatType) for inner in alternatives(kind)):
            yield path, f" is a range, and {path[-1]} is {wanted(kind)}: give a list of values"
        return
    for position, value in enumerate(values):
        if not is_of_type(value, kind):
            yield (*path, position), f"={value!r} is not what {path[-1]} takes: give {wanted(kind)}"
        else:
            try:
                Train(**{parameter: value})
            except ConfigError as refused:
                yield (*path, position), str(refused).removeprefix(parameter)


_CHECKS: tuple[Callable[..., Mistakes], ...] = (
    _addresses_hold_no_secret,
    _features_have_names_of_their_own,
    _expectations_have_names_of_their_own,
    _columns_have_one_role,
    _labels_and_weight_are_no_inputs,
    _predictions_have_columns_of_their_own,
    _labels_share_the_loss,
    _split_has_what_it_needs,
    _metrics_fit_the_labels,
    _training_metrics_fit_a_label,
    _what_chooses_does_not_judge,
    _gate_can_draw,
    _registry_has_one_place,
    _there_is_something_to_score,
    _drift_knows_its_features,
    _search_varies_what_there_is,
)
