"""The text of a pipeline file for a table, every choice with what was seen.

Enters: a ``Draft``: what was chosen. Leaves: YAML. It is data and comments alone: what a stranger called his columns
cannot become a key, a line or a variable of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from sparkdl.columns.names import quoted
from sparkdl.pipeline.file.tree import typed
from sparkdl.pipeline.init.features import Choice
from sparkdl.pipeline.init.profile import Profile
from sparkdl.pipeline.init.roles import Key, Label, When
from sparkdl.pipeline.init.split import Plan
from sparkdl.pipeline.spec import prediction_columns

__all__ = ["Draft", "pipeline_text"]

_RANGES = 5
_PLAIN = re.compile(r"[^\W\d_](?:[\w ()%/+-]*[\w)%])?", re.ASCII)
_RESERVED = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))
_WIDTH = 160
_LONGEST = 240


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What was chosen for a table.

    Attributes:
        name: of the pipeline.
        table: as the user called it.
        seen: what was looked at, in words.
        source: the section, without key and time.
        notes: of its keys.
        profiles: of the columns.
        choices: of every column but the label.
        key: that tells rows apart.
        when: rows happened.
        label: what is predicted.
        plan: split and training.
        factory: of the model stub, as module:function.
    """

    name: str
    table: str
    seen: str
    source: Mapping[str, Any]
    notes: Mapping[str, str]
    profiles: Mapping[str, Profile]
    choices: Sequence[Choice]
    key: Key
    when: When
    label: Label
    plan: Plan
    factory: str


def pipeline_text(draft: Draft) -> str:
    """Write the file."""
    parts = (_head, _source, _transform, _expect, _features, _label, _split, _model, _train, _publish, _rest)
    return "\n\n".join("\n".join(part(draft)) for part in parts if part(draft)) + "\n"


def _head(draft: Draft) -> list[str]:
    return [
        comment(f"Written by `sparkdl init {draft.name} --from {draft.table}`; yours from now on."),
        comment(f"Looked at: {draft.seen}. Every choice says what was seen: change what you know better,"),
        f"# then `sparkdl check {draft.name}.yaml`, `plan` and `run`.",
        *line("name", draft.name),
        *line("root", "sparkdl-data", "beside this file: name a place that every worker of your cluster reaches"),
    ]


def _source(draft: Draft) -> list[str]:
    found = ["source:"]
    for name, value in draft.source.items():
        if value not in ({}, None):
            found += line(name, value, draft.notes.get(name, ""), 2)
    columns = list(draft.key.columns)
    if columns:
        found += line("key", columns[0] if len(columns) == 1 else columns, draft.key.why, 2)
    else:
        found.append(f"  {comment(f'no key: {draft.key.why}')}")
    if draft.when.column is not None:
        found += line("partition" if draft.when.partition else "time", draft.when.column, draft.when.why, 2)
        found += line("every", draft.when.every, indent=2) if draft.when.every != "day" else []
    else:
        found.append(f"  {comment(f'no time: {draft.when.why}')}")
    return found


def _transform(draft: Draft) -> list[str]:
    if not draft.label.cast:
        return []
    column = quoted(draft.label.name)
    sql = f"SELECT * EXCEPT ({column}), {draft.label.cast} AS {column} FROM source"
    why = f"{draft.label.name} is stored as a number with fractions, and classes are whole numbers"
    return ["transform:", *line("sql", sql, why, 2)]


def _expect(draft: Draft) -> list[str]:
    found = []
    if draft.key.columns:
        there = " AND ".join(f"{quoted(name)} IS NOT NULL" for name in draft.key.columns)
        found += line("key is there", there, indent=2)
    if draft.label.sound:
        found += line("label is a number", draft.label.sound, "NaN and infinities are put aside", 2)
    ranges = [one for one in draft.profiles.values() if one.kind == "number" and one.low is not None][:_RANGES]
    features = {choice.column for choice in draft.choices if choice.options}
    suggested = [one for one in ranges if one.name in features and not one.missing]
    if suggested:
        found.append("  # seen so far; take the # away from what has to hold:")
    for one in suggested:
        (text,) = line(f"{one.name} in range", f"{quoted(one.name)} BETWEEN {one.low} AND {one.high}")
        found.append(f"  # {text}")
    said = any(not text.lstrip().startswith("#") for text in found)
    return ["expect:" if said else "# expect:", *found] if found else []


def _features(draft: Draft) -> list[str]:
    found = ["features:"]
    for choice in draft.choices:
        if choice.options:
            warning = f"WARNING, {choice.warning}; " if choice.warning else ""
            found += line(choice.name, _options(choice), f"{warning}{choice.why}", 2)
    left = [choice for choice in draft.choices if not choice.options]
    if left:
        found.append("  # left out:")
    return [*found, *(f"  # {key(choice.column)}  {comment(choice.why)}" for choice in left)]


def _options(choice: Choice) -> Any:
    """The shortest way to say it: the type alone, if nothing else is chosen."""
    options = dict(choice.options)
    if choice.name != choice.column:
        options["column"] = choice.column
    return options if len(options) > 1 else options["type"]


def _label(draft: Draft) -> list[str]:
    options = dict(draft.label.options)
    return ["label:", *line(draft.label.name, options if len(options) > 1 else options["type"], draft.label.why, 2)]


def _split(draft: Draft) -> list[str]:
    return line("split", draft.plan.split, draft.plan.why)


def _model(draft: Draft) -> list[str]:
    return [
        "# The network: embeddings and a residual MLP, sized by the features. For one of your own, begin with",
        f"# {draft.factory.partition(':')[0]}.py and take the # away:",
        f"# model: {draft.factory}",
    ]


def _train(draft: Draft) -> list[str]:
    found = ["train:"]
    for name, value in draft.plan.train.items():
        found += line(name, value, draft.plan.train_notes.get(name, ""), 2)
    return found


_FLOORS = {"regression": "r2 >= 0.2", "binary": "auc >= 0.7", "multiclass": "accuracy >= 0.7"}
_METRICS = {"regression": "rmse", "binary": "auc", "multiclass": "accuracy"}


def _publish(draft: Draft) -> list[str]:
    kind, gate = draft.label.type, []
    if draft.plan.min_rows is not None:
        why = f"about {draft.plan.held_out:,} rows are held out; a hundred or more would decide better"
        gate = ["  gate:", *line("min_rows", draft.plan.min_rows, why, 4)]
    return [
        "publish:",
        *line("metric", _METRICS[kind], "what a new model must be better in than the champion", 2),
        *(gate or ["  # gate:"]),
        f"    # floors: [{_FLOORS[kind]}]  # what a model must reach whatever the champion does",
    ]


def _rest(draft: Draft) -> list[str]:
    found = []
    kept = draft.label.name.lower() not in prediction_columns({draft.label.name: draft.label.type})
    if not draft.key.columns and kept:
        found += line("score", {"keep": [draft.label.name]}, "there is no key that tells predictions apart")
    seen = {choice.column for choice in draft.choices if choice.options and not choice.suspect}
    few = (one for one in draft.profiles.values() if one.kind in ("text", "bool") and 2 <= one.distinct <= 20)
    slices = [one.name for one in few if one.name in seen]
    if slices:
        found += line("report", {"slices": slices[:3]}, "the error, by values of these")
    return found


# Values and comments as YAML that reads back as the same values, whoever wrote the texts in them


def key(text: str) -> str:
    """A text as the key of a section."""
    plain = _PLAIN.fullmatch(text) and text.lower() not in _RESERVED and typed(text) == text
    if plain and not text.endswith(" "):
        return text
    found: str = yaml.safe_dump(text, default_style='"', allow_unicode=True, width=10**9)
    return found.strip("\n")


def flow(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key(name)}: {flow(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    return key(value.replace("${", "$${")) if isinstance(value, str) else repr(value)


def comment(text: str) -> str:
    """A text behind a ``#``: one line, whatever stands in it."""
    whole = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    return f"# {whole if len(whole) <= _LONGEST else whole[: _LONGEST - 3] + '...'}"


def line(name: str, value: Any, why: str = "", indent: int = 0) -> list[str]:
    """``name: value  # why``, the comment above where the line would be too long."""
    text = f"{' ' * indent}{key(name)}: {flow(value)}"
    said = comment(why) if why else ""
    if said and len(text) + 2 + len(said) > _WIDTH:
        return [f"{' ' * indent}{said}", text]
    return [f"{text}  {said}" if said else text]
