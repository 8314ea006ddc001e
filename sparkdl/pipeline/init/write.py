"""The text of a pipeline file for a table, every choice with what was seen.

It is data and comments alone: what a stranger called his columns cannot become a key, a line or a variable of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from sparkdl.columns.names import quoted, stands_in_sql
from sparkdl.pipeline.file.tree import typed
from sparkdl.pipeline.init.features import Choice
from sparkdl.pipeline.init.profile import Profile
from sparkdl.pipeline.init.roles import Key, Label, When
from sparkdl.pipeline.init.split import Plan
from sparkdl.pipeline.recipe import SMOOTHING, recipe_of, with_recipe
from sparkdl.pipeline.spec import Train, prediction_columns
from sparkdl.pipeline.spec.training import RULES

_RANGES, _READ = 5, 20
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
        coverage: what was looked at, in words.
        source: the section, without key and time.
        notes: of its keys.
        profiles: of the columns.
        choices: of every column but the label.
        key: that tells rows apart.
        when: rows happened.
        label: what is predicted.
        plan: split and training.
        casts: by column of texts that are numbers, the SQL that makes these.
        factory: of the model beside the file, as module:function.
        with_model: whether the file names it.
    """

    name: str
    table: str
    coverage: str
    source: Mapping[str, Any]
    notes: Mapping[str, str]
    profiles: Mapping[str, Profile]
    choices: Sequence[Choice]
    key: Key
    when: When
    label: Label
    plan: Plan
    casts: Mapping[str, str]
    factory: str
    with_model: bool = False


def pipeline_text(draft: Draft) -> str:
    """Write the file."""
    parts = (_head, _source, _transform, _expect, _features, _label, _split, _model, _train, _publish, _rest)
    return "\n\n".join("\n".join(part(draft)) for part in parts if part(draft)) + "\n"


def _head(draft: Draft) -> list[str]:
    return [
        comment(f"Written by `sparkdl init {draft.name} --from {draft.table}`; yours from now on."),
        comment(f"Looked at: {draft.coverage}. Every choice says what was seen: change what you know better,"),
        f"# then `sparkdl check {draft.name}.yaml`, `plan` and `run`.",
        *line("name", draft.name),
        *line("root", "sparkdl-data", "beside this file: name a place that every worker of your cluster reaches"),
    ]


def _source(draft: Draft) -> list[str]:
    lines = ["source:"]
    for name, value in draft.source.items():
        if value not in ({}, None):
            lines += line(name, value, draft.notes.get(name, ""), 2)
    columns = list(draft.key.columns)
    if columns:
        lines += line("key", columns[0] if len(columns) == 1 else columns, draft.key.why, 2)
    else:
        lines.append(f"  {comment(f'no key: {draft.key.why}')}")
    if draft.when.column is not None:
        lines += line("partition" if draft.when.partition else "time", draft.when.column, draft.when.why, 2)
        lines += line("every", draft.when.every, indent=2) if draft.when.every != "day" else []
    else:
        lines.append(f"  {comment(f'no time: {draft.when.why}')}")
    return lines


def _transform(draft: Draft) -> list[str]:
    expressions = dict(draft.casts)
    reasons = (
        [f"numbers that stand as texts: {', '.join(draft.casts)}; missing where one is none"] if draft.casts else []
    )
    if draft.label.cast:
        column = quoted(draft.label.name)
        value = draft.casts.get(draft.label.name, column)
        expressions[draft.label.name] = draft.label.cast.replace(column, value)
        reasons.append(f"{draft.label.name} is stored as a number with fractions, and classes are whole numbers")
    if not expressions:
        return []
    columns = ", ".join(map(quoted, expressions))
    values = ", ".join(f"{value} AS {quoted(name)}" for name, value in expressions.items())
    return ["transform:", *line("sql", f"SELECT * EXCEPT ({columns}), {values} FROM source", "; ".join(reasons), 2)]


def _expect(draft: Draft) -> list[str]:
    lines = []
    if draft.key.columns:
        present = " AND ".join(f"{quoted(name)} IS NOT NULL" for name in draft.key.columns)
        lines += line("key is there", present, indent=2)
    if draft.label.sound:
        lines += line("label is a number", draft.label.sound, "NaN and infinities are put aside", 2)
    columns_without_gaps = [name for name in draft.casts if not draft.profiles[name].missing][:_READ]
    if columns_without_gaps:
        condition = " AND ".join(f"{quoted(name)} IS NOT NULL" for name in columns_without_gaps)
        check = {"check": condition, "action": "warn"}
        lines += line("numbers can be read", check, "a text that is none is missing, and so far none was", 2)
    texts = [
        choice.column
        for choice in draft.choices
        if choice.options and draft.profiles[choice.column].kind == "text" and stands_in_sql(choice.column)
    ]
    if texts and draft.source["kind"] == "csv" and "encoding" not in draft.source.get("options", {}):
        joined = f"concat_ws(' ', {', '.join(map(quoted, texts))})"
        check = {"check": f"NOT contains({joined}, '\ufffd')", "action": "warn"}
        lines += line("texts are UTF-8", check, "Spark puts this in the place of bytes that are not", 2)
    ranges = [profile for profile in draft.profiles.values() if profile.kind == "number" and profile.low is not None][
        :_RANGES
    ]
    features = {choice.column for choice in draft.choices if choice.options}
    suggested = [profile for profile in ranges if profile.name in features and not profile.missing]
    if suggested:
        lines.append("  # seen so far; take the # away from what has to hold:")
    for profile in suggested:
        (text,) = line(f"{profile.name} in range", f"{quoted(profile.name)} BETWEEN {profile.low} AND {profile.high}")
        lines.append(f"  # {text}")
    active = any(not text.lstrip().startswith("#") for text in lines)
    return ["expect:" if active else "# expect:", *lines] if lines else []


def _features(draft: Draft) -> list[str]:
    lines = ["features:"]
    for choice in draft.choices:
        if choice.options:
            warning = f"WARNING, {choice.warning}; " if choice.warning else ""
            lines += line(choice.name, _options(choice), f"{warning}{choice.why}", 2)
    omitted_choices = [choice for choice in draft.choices if not choice.options]
    if omitted_choices:
        lines.append("  # left out:")
    return [*lines, *(f"  # {key(choice.column)}  {comment(choice.why)}" for choice in omitted_choices)]


def _options(choice: Choice) -> Any:
    """The shortest way to say it: the type alone, if nothing else is chosen."""
    options = dict(choice.options)
    if choice.name != choice.column:
        options["column"] = choice.column
    return options if len(options) > 1 else options["type"]


def _label(draft: Draft) -> list[str]:
    options = dict(draft.label.options)
    lines = ["label:", *line(draft.label.name, options if len(options) > 1 else options["type"], draft.label.why, 2)]
    if options["type"] == "multiclass":
        lines += [
            f"  # left out: smoothing {SMOOTHING} of the labels, whose loss is above 0 therefore even where all is",
            "  # right, and calibrate temperature for probabilities; `publish: {metric: log_loss}` leaves both away",
        ]
    return lines


def _split(draft: Draft) -> list[str]:
    return line("split", draft.plan.split, draft.plan.why)


def _model(draft: Draft) -> list[str]:
    if draft.with_model:
        return line("model", draft.factory, "sparkdl's own network, written out beside this file: change it there")
    return [
        "# The network: an ensemble of small ones over embeddings of ids and of numbers. `sparkdl init --with-model`",
        "# writes it out, and `model: {arguments: {width: 256}}` makes it wider. For one of your own, begin with",
        f"# {draft.factory.partition(':')[0]}.py and take the # away:",
        f"# model: {draft.factory}",
    ]


def _train(draft: Draft) -> list[str]:
    """What a training follows from the number of rows as comments; the file says no more than its network needs."""
    rows, left_out = draft.plan.train_rows, Train()
    features = sum(bool(choice.options) for choice in draft.choices)
    accuracy = "val_accuracy" if draft.label.type == "multiclass" else None
    recipe = recipe_of(left_out, with_recipe(left_out, rows, features, default_network=True, accuracy=accuracy))
    lines = ["train:"] if draft.with_model else []
    if draft.with_model:
        for name in ("learning_rate", "num_proc"):
            if name in recipe:
                lines += line(name, recipe.pop(name), f"as for sparkdl's own network: {RULES[name]}", 2)
    lines.append(f"  # left out, and so by the number of training rows; of about {rows:,} as here:")
    for name, value in recipe.items():
        lines += [f"  # {text}" for text in line(name, value, RULES[name])]
    return lines if draft.with_model else ["# train:", *lines]


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
    lines = []
    is_keepable = draft.label.name.lower() not in prediction_columns({draft.label.name: draft.label.type})
    if not draft.key.columns and is_keepable:
        lines += line("score", {"keep": [draft.label.name]}, "there is no key that tells predictions apart")
    input_columns = {choice.column for choice in draft.choices if choice.options and not choice.suspect}
    categories = (
        profile
        for profile in draft.profiles.values()
        if profile.kind in ("text", "bool") and 2 <= profile.distinct <= 20
    )
    slices = [profile.name for profile in categories if profile.name in input_columns]
    if slices:
        lines += line("report", {"slices": slices[:3]}, "the error, by values of these")
    return lines


# Values and comments as YAML that reads back as the same values, whoever wrote the texts in them


def key(text: str) -> str:
    """A text as the key of a section."""
    plain = _PLAIN.fullmatch(text) and text.lower() not in _RESERVED and typed(text) == text
    if plain and not text.endswith(" "):
        return text
    quoted_text: str = yaml.safe_dump(text, default_style='"', allow_unicode=True, width=10**9)
    return quoted_text.strip("\n")


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
    one_line = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
    return f"# {one_line if len(one_line) <= _LONGEST else one_line[: _LONGEST - 3] + '...'}"


def line(name: str, value: Any, why: str = "", indent: int = 0) -> list[str]:
    """``name: value  # why``, the comment above where the line would be too long."""
    text = f"{' ' * indent}{key(name)}: {flow(value)}"
    remark = comment(why) if why else ""
    if remark and len(text) + 2 + len(remark) > _WIDTH:
        return [f"{' ' * indent}{remark}", text]
    return [f"{text}  {remark}" if remark else text]
