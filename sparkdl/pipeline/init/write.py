"""The text of a pipeline file for a table, every choice with what was seen.

It is data and comments alone: what a stranger called his columns cannot become a key, a line or a variable of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import Any

import yaml

from sparkdl.columns.names import quoted, stands_in_sql
from sparkdl.pipeline.file.tree import typed
from sparkdl.pipeline.init.features import Choice
from sparkdl.pipeline.init.profile import Profile
from sparkdl.pipeline.init.roles import Key, Label, When
from sparkdl.pipeline.init.split import Plan
from sparkdl.pipeline.init.table import Rows
from sparkdl.pipeline.recipe import SMOOTHING, recipe_of, with_recipe
from sparkdl.pipeline.spec import Train, prediction_columns
from sparkdl.pipeline.spec.operation import DEFAULT_METRICS
from sparkdl.pipeline.spec.training import RULES

_RANGES, _READ = 5, 20
_PLAIN = re.compile(r"[^\W\d_](?:[\w ()%/+-]*[\w)%])?", re.ASCII)
_RESERVED = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))
_WIDTH = 160
_LONGEST = 240


_FLOORS = {"regression": "r2 >= 0.2", "binary": "auc >= 0.7", "multiclass": "accuracy >= 0.7"}


def pipeline_text(
    *,
    name: str,
    table: str,
    rows: Rows,
    coverage: str,
    profiles: Mapping[str, Profile],
    choices: Sequence[Choice],
    key: Key,
    when: When,
    label: Label,
    plan: Plan,
    casts: Mapping[str, str],
    factory: str,
    with_model: bool,
) -> str:
    """Write the file.

    Args:
        name: of the pipeline.
        table: as the user called it.
        rows: of it, which say the section of the source.
        coverage: what was looked at, in words.
        profiles: of the columns.
        choices: of every column but the label.
        key: that tells rows apart.
        when: rows happened.
        label: what is predicted.
        plan: split and training.
        casts: by column of texts that are numbers and that the pipeline reads, the SQL that makes these.
        factory: of the model beside the file, as module:function.
        with_model: whether the file names it.
    """
    head = [
        comment(f"Written by `sparkdl init {name} --from {table}`; yours from now on."),
        comment(f"Looked at: {coverage}. Every choice says what was seen: change what you know better,"),
        f"# then `sparkdl check {name}.yaml`, `plan` and `run`.",
        line("name", name),
        line("root", "sparkdl-data", "beside this file: name a place that every worker of your cluster reaches"),
    ]
    features = [choice for choice in choices if choice.options]
    sections = (
        head,
        _source(rows, key, when),
        _transform(casts, label),
        _expect(rows, profiles, features, key, label, casts),
        _features(features, [choice for choice in choices if not choice.options]),
        _label(label),
        [line("split", plan.split, plan.why)],
        _model(factory, with_model=with_model),
        _train(plan, label, with_model=with_model),
        _publish(plan, label),
        _rest(profiles, features, key, label),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _source(rows: Rows, key: Key, when: When) -> list[str]:
    lines = ["source:", *(line(name, value, rows.notes.get(name, ""), 2) for name, value in rows.source.items())]
    if key.columns:
        lines.append(line("key", key.columns[0] if len(key.columns) == 1 else key.columns, key.why, 2))
    else:
        lines.append(f"  {comment(f'no key: {key.why}')}")
    if when.column is None:
        return [*lines, f"  {comment(f'no time: {when.why}')}"]
    lines.append(line("partition" if when.partition else "time", when.column, when.why, 2))
    return lines if when.every == "day" else [*lines, line("every", when.every, spaces=2)]


def _transform(casts: Mapping[str, str], label: Label) -> list[str]:
    expressions, reasons = dict(casts), []
    if casts:
        reasons.append(f"numbers that stand as texts: {', '.join(casts)}; missing where one is none")
    if label.is_cast:
        expressions[label.name] = f"try_cast({casts.get(label.name, quoted(label.name))} AS BIGINT)"
        reasons.append(f"{label.name} is stored as a number with fractions, and classes are whole numbers")
    if not expressions:
        return []
    columns = ", ".join(map(quoted, expressions))
    values = ", ".join(f"{value} AS {quoted(name)}" for name, value in expressions.items())
    return ["transform:", line("sql", f"SELECT * EXCEPT ({columns}), {values} FROM source", "; ".join(reasons), 2)]


def _expect(
    rows: Rows,
    profiles: Mapping[str, Profile],
    features: Sequence[Choice],
    key: Key,
    label: Label,
    casts: Mapping[str, str],
) -> list[str]:
    lines = []
    if key.columns:
        lines.append(line("key is there", _all_there(key.columns), spaces=2))
    if label.is_finite:
        lines.append(line("label is a number", label.is_finite, "NaN and infinities are put aside", 2))
    without_gaps = [name for name in casts if not profiles[name].missing][:_READ]
    if without_gaps:
        check = {"check": _all_there(without_gaps), "action": "warn"}
        lines.append(line("numbers can be read", check, "a text that is none is missing, and so far none was", 2))
    columns = [choice.column for choice in features]
    texts = [name for name in columns if profiles[name].kind == "text" and stands_in_sql(name)]
    if texts and rows.source["kind"] == "csv" and "encoding" not in rows.source["options"]:
        joined = f"concat_ws(' ', {', '.join(map(quoted, texts))})"
        check = {"check": f"NOT contains({joined}, '\ufffd')", "action": "warn"}
        lines.append(line("texts are UTF-8", check, "Spark puts this in the place of bytes that are not", 2))
    numbers = [profile for profile in profiles.values() if profile.kind == "number" and profile.low is not None]
    suggested = [profile for profile in numbers[:_RANGES] if profile.name in columns and not profile.missing]
    head = "expect:" if lines else "# expect:"
    if suggested:
        lines.append("  # seen so far; take the # away from what has to hold:")
    for profile in suggested:
        between = f"{quoted(profile.name)} BETWEEN {profile.low} AND {profile.high}"
        lines.append(f"  # {line(f'{profile.name} in range', between)}")
    return [head, *lines] if lines else []


def _all_there(columns: Sequence[str]) -> str:
    return " AND ".join(f"{quoted(name)} IS NOT NULL" for name in columns)


def _features(features: Sequence[Choice], left_out: Sequence[Choice]) -> list[str]:
    lines = ["features:"]
    for choice in features:
        options = dict(choice.options) | ({} if choice.name == choice.column else {"column": choice.column})
        warning = f"WARNING, {choice.warning}; " if choice.warning else ""
        shortest = options if len(options) > 1 else options["type"]
        lines.append(line(choice.name, shortest, f"{warning}{choice.why}", 2))
    lines += ["  # left out:"] if left_out else []
    return [*lines, *(f"  # {key_text(choice.column)}  {comment(choice.why)}" for choice in left_out)]


def _label(label: Label) -> list[str]:
    lines = ["label:", line(label.name, label.options if len(label.options) > 1 else label.type, label.why, 2)]
    if label.type == "multiclass":
        lines += [
            f"  # left out: smoothing {SMOOTHING} of the labels, whose loss is above 0 therefore even where all is",
            "  # right, and calibrate temperature for probabilities; `publish: {metric: log_loss}` leaves both away",
        ]
    return lines


def _model(factory: str, *, with_model: bool) -> list[str]:
    if with_model:
        return [line("model", factory, "sparkdl's own network, written out beside this file: change it there")]
    return [
        "# The network: an ensemble of small ones over embeddings of ids and of numbers. `sparkdl init --with-model`",
        "# writes it out, and `model: {arguments: {width: 256}}` makes it wider. For one of your own, begin with",
        f"# {factory.partition(':')[0]}.py and take the # away:",
        f"# model: {factory}",
    ]


def _train(plan: Plan, label: Label, *, with_model: bool) -> list[str]:
    """What a training follows from the number of rows as comments; the file says no more than its network needs."""
    left_out = Train()
    accuracy = "val_accuracy" if label.type == "multiclass" else None
    settled = with_recipe(left_out, plan.train_rows, default_network=True, accuracy=accuracy)
    recipe = recipe_of(left_out, settled)
    lines = ["train:"] if with_model else ["# train:"]
    for name in ("learning_rate", "num_proc"):
        if with_model and name in recipe:
            lines.append(line(name, recipe.pop(name), f"as for sparkdl's own network: {RULES[name]}", 2))
    lines.append(f"  # left out, and so by the number of training rows; of about {plan.train_rows:,} as here:")
    return [*lines, *(indent(line(name, value, RULES[name]), "  # ") for name, value in recipe.items())]


def _publish(plan: Plan, label: Label) -> list[str]:
    why = f"about {plan.held_out:,} rows are held out; a hundred or more would decide better"
    gate = ["  # gate:"] if plan.min_rows is None else ["  gate:", line("min_rows", plan.min_rows, why, 4)]
    return [
        "publish:",
        line("metric", DEFAULT_METRICS[label.type], "what a new model must be better in than the champion", 2),
        *gate,
        f"    # floors: [{_FLOORS[label.type]}]  # what a model must reach whatever the champion does",
    ]


def _rest(profiles: Mapping[str, Profile], features: Sequence[Choice], key: Key, label: Label) -> list[str]:
    lines = []
    if not key.columns and label.name.lower() not in prediction_columns({label.name: label.type}):
        lines.append(line("score", {"keep": [label.name]}, "there is no key that tells predictions apart"))
    columns = {choice.column for choice in features if not choice.suspect}
    slices = [
        profile.name
        for profile in profiles.values()
        if profile.name in columns and profile.kind in ("text", "bool") and 2 <= profile.distinct <= 20
    ]
    return [*lines, line("report", {"slices": slices[:3]}, "the error, by values of these")] if slices else lines


# Values and comments as YAML that reads back as the same values, whoever wrote the texts in them


def key_text(text: str) -> str:
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
        return "{" + ", ".join(f"{key_text(name)}: {flow(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    return key_text(value.replace("${", "$${")) if isinstance(value, str) else repr(value)


def comment(text: str) -> str:
    """A text behind a ``#``: one line, whatever stands in it."""
    one_line = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
    return f"# {one_line if len(one_line) <= _LONGEST else one_line[: _LONGEST - 3] + '...'}"


def line(name: str, value: Any, why: str = "", spaces: int = 0) -> str:
    """``name: value  # why``, the comment above where the line would be too long."""
    text = f"{' ' * spaces}{key_text(name)}: {flow(value)}"
    remark = comment(why) if why else ""
    if remark and len(text) + 2 + len(remark) > _WIDTH:
        return f"{' ' * spaces}{remark}\n{text}"
    return f"{text}  {remark}" if remark else text
