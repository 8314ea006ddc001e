"""The feature that each column becomes, with its options, or the reason why it becomes none."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.names import quoted
from sparkdl.errors import SchemaError
from sparkdl.features.spec import CATEGORIES, NUMBERS, Feature, input_names
from sparkdl.pipeline.init.profile import SKEWED, Kind, Profile, has_value, profiles_of
from sparkdl.pipeline.init.roles import Key, Label, When, looks_like_an_id
from sparkdl.pipeline.init.strength import Labelled, near_duplicates, too_good
from sparkdl.pipeline.spec.base import count_of

MAX_FEATURES = 2000
_CODE = re.compile(
    r"(code|type|kind|class|category|status|zip|plz|postcode|channel|region|country|store|group|department|dept|state|fips|industry|occupation|sector|rater)",
    re.I,
)
_AMOUNT = re.compile(
    r"(^|[^a-z])(age|years?|yrs|count|counts|num|n|number|amount|price|cost|size|days|hours|minutes|total|qty|quantity)"
    r"([^a-z]|$)",
    re.I,
)
"""What is counted or measured, by its name."""
_VOCABULARY, _TRAIN_SHARE = 10_000, 0.7
_OTHER_DATE = re.compile(r"\d{1,2}([./-])\d{1,2}\1\d{4}(?!\d)")
"""How a text begins that is a date, but not as ISO 8601 has it: day and month may change places."""
_LONG = 3
"""Words from which on a text is more than a name."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What becomes of a column.

    Attributes:
        column: its name.
        name: of the feature.
        options: as the file has them; empty where it is left out.
        why: in words.
        warning: why it may be no fair feature; it is one all the same, until the user takes it out.
        suspect: whether that is because it predicts the label.
    """

    column: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    warning: str = ""
    suspect: bool = False


def choose(profiles: Mapping[str, Profile], rows: pa.Table, label: Label, key: Key, when: When) -> list[Choice]:
    """Choose for every column but the label, by the rows that have one.

    Args:
        profiles: of the columns, in order.
        rows: of the table.
        label: what is predicted.
        key: whose columns are no features.
        when: rows happened; the parts of that time are features.

    Raises:
        SchemaError: no column is a feature, or the label has the name of an input that features make.
    """
    taken = {name: "part of the key" if len(key.columns) > 1 else "the key" for name in key.columns}
    if when.column is not None and profiles[when.column].kind == "when":
        taken.pop(when.column, None)  # part of the key, and its weekday may say something all the same
    elif when.column is not None:
        taken[when.column] = "says when a row happened"
    with_label = rows.filter(has_value(rows.column(label.name)))
    if len(with_label) < len(rows):
        profiles = profiles_of(with_label)
    labelled = Labelled.of(with_label, label.name, label.type)
    free = [profile for profile in profiles.values() if profile.name != label.name and profile.name not in taken]
    duplicates = near_duplicates(with_label, free)
    leaks = {} if labelled is None else dict(too_good(labelled, free, label.name))
    choices: list[Choice] = []
    names = {label.name}
    inner: set[tuple[str, str]] = set()
    for profile in profiles.values():
        if profile.name == label.name:
            continue
        options, why = ({}, taken[profile.name]) if profile.name in taken else _chosen(profile, labelled)
        if options and len(names) > MAX_FEATURES:
            options, why = {}, f"the first {MAX_FEATURES:,} columns are taken"
        if not options:
            choices.append(Choice(column=profile.name, name=profile.name, why=why))
            continue
        name = _name(profile.name, options, names, inner)
        names.add(name)
        inner |= _inner(name, options)
        choices.append(
            Choice(
                column=profile.name,
                name=name,
                options=options,
                why=f"{why}; the split is by this column" if profile.name == when.column else why,
                warning=leaks.get(profile.name) or duplicates.get(profile.name, ""),
                suspect=profile.name in leaks,
            )
        )
    if not any(choice.options for choice in choices):
        reasons = "; ".join(f"{choice.column}: {choice.why}" for choice in choices[:5])
        raise SchemaError(f"no column can tell anything about {label.name!r}: {reasons}")
    if label.name in {name for name, _ in inner}:
        raise SchemaError(
            f"the label {label.name!r} has the name of an input of the model, in which features of several columns "
            "stand: rename the column in the table, or name another label with --label"
        )
    return choices


def _name(column: str, options: Mapping[str, Any], names: Collection[str], inner: Set[tuple[str, str]]) -> str:
    """The feature's name: the column's, unless the file or the model means something else by it, or by a part of it."""
    special = "," in column or ".." in column or column != column.strip() or not column
    shared = column in (NUMBERS, CATEGORIES) and options["type"] in ("ids", "text", "vector", "image")
    if not special and not shared and column not in names and not _inner(column, options) & inner:
        return column
    plain = re.sub(r"\W+", "_", column).strip("_") or "column"
    number = 1
    while f"{plain}_{number}" in names or _inner(f"{plain}_{number}", options) & inner:
        number += 1
    return f"{plain}_{number}"


def _inner(name: str, options: Mapping[str, Any]) -> set[tuple[str, str]]:
    """The names inside of the model's inputs that a feature takes."""
    parts_by_input = input_names(name, msgspec.convert(options, Feature))
    return {(input_name, part) for input_name, parts in parts_by_input.items() for part in parts}


def _chosen(profile: Profile, labelled: Labelled | None) -> tuple[Mapping[str, Any], str]:
    """The options of a column's feature, empty where there is none, and why."""
    if not profile.present:
        return {}, "missing in every row with a label that was looked at"
    if profile.missing > 0.99 * profile.rows:
        return {}, profile.gap
    if profile.distinct == 1:
        why = f"one value, {str(profile.top[0][0])[:40]!r}, in every row with a label that was looked at"
        return {}, ", ".join(filter(None, [why, profile.gap]))
    code = _is_code(profile, labelled) if profile.kind == "number" else ""
    evidence = f"{code}, {count_of(profile.distinct, 'value')}, {profile.span}"
    options, why = _category(profile, evidence) if code else _BY_KIND[profile.kind](profile)
    return options, ", ".join(filter(None, [profile.gap, why]))


def _number(profile: Profile) -> tuple[dict[str, Any], str]:
    if profile.is_whole and looks_like_an_id(profile.name):
        if profile.present < 2 * profile.distinct:
            return {}, f"an id by its name: {count_of(profile.distinct, 'value')} in {profile.present:,} rows"
        return _category(profile, "an id by its name")
    is_running = profile.distinct == profile.present == profile.high - profile.low + 1
    if profile.is_whole and is_running and profile.present > 20:
        return {}, f"counts the rows, {profile.span}"
    options: dict[str, Any] = {"type": "number"}
    why = [profile.span]
    if profile.is_of_products:
        options["log"] = True
        why.append(f"skewed ({profile.skew:.1f}): log")
    elif abs(profile.skew) > 10 * SKEWED:
        options["clip"] = "quantiles"
        why.append(f"a few values far out (skew {profile.skew:.0f}): clipped at 1 % and 99 %")
    if profile.missing:
        options["fill"] = "median" if abs(profile.skew) > SKEWED else "mean"
        if profile.missing > 0.01 * profile.rows:
            options["missing_indicator"] = True
    return options, ", ".join(why)


def _category(profile: Profile, why: str) -> tuple[dict[str, Any], str]:
    if profile.distinct > _VOCABULARY:
        buckets = 1 << min(20, max(14, int(profile.distinct - 1).bit_length()))
        return {"type": "category", "buckets": buckets}, f"{why} in these rows alone: hashed"
    least = 2 if profile.rows < 10_000 else 5 if profile.rows < 50_000 else 10
    if profile.top[0][1] * _TRAIN_SHARE < least:  # nothing would be left to fit
        return {}, f"{why}: none is in {least} of the training rows or more"
    rare = sum(rows < least for _, rows in profile.top)
    options: dict[str, Any] = {"type": "category"} | ({"min_count": least} if least != 2 else {})
    return options, why + (f", {rare:,} of them in fewer than {least} rows: unknown" if rare else "")


def _text(profile: Profile) -> tuple[dict[str, Any], str]:
    least, median, most, _ = profile.lengths
    values = count_of(profile.distinct, "value")
    dates = sum(rows for text, rows in profile.top if re.fullmatch(r"\d{4}-\d{2}-\d{2}.*", str(text)))
    if dates and dates == sum(rows for _, rows in profile.top):
        return {}, "dates as text: cast it to a date in transform, for date_parts"
    matches = [_OTHER_DATE.match(str(text)) for text, _ in profile.top]
    if matches and matches[0] and all(matches):
        sql = f"with source.kind=sql, to_timestamp({quoted(profile.name)}, ...) makes a column for source.time"
        return {}, f"dates as text, such as {matches[0][0]}: {sql}"
    if median >= _LONG and profile.distinct > 0.2 * profile.present:
        length = min(256, max(8, -(-most // 8) * 8))
        return {"type": "text", "max_length": length}, f"texts of {least} to {most} words, {values}"
    if profile.distinct > 0.9 * profile.present and profile.present > 20:
        texts = profile.values.cast(pa.string())
        is_number = pc.match_substring_regex(texts, r"^\s*[-+]?(\d+[.,]?\d*|[.,]\d+)\s*$")
        others = pc.unique(texts.filter(pc.invert(is_number)))[:3].to_pylist()
        if others and is_number.true_count > 0.8 * len(texts):
            such = ", ".join(f"{text!r:.30}" for text in others)
            return {}, f"numbers, but for such texts as {such}: make numbers of them in transform"
        return {}, f"nearly every row has its own, {values} in {profile.present:,} rows: an id"
    shown = ", ".join(f"{text!s:.20}" for text, _ in profile.top[:3])
    return _category(profile, f"{values}: {shown}{', ...' if profile.distinct > 3 else ''}")


def _when(profile: Profile) -> tuple[dict[str, Any], str]:
    timed = pa.types.is_timestamp(profile.type)
    years = profile.high - profile.low >= timedelta(days=365)
    hours = timed and any(value.hour for value, _ in profile.top)
    parts = [*(["month"] if years else []), "weekday", *(["hour"] if hours else [])]
    why = f"{profile.span}{'' if years else ', less than a year: no month'}"
    return {"type": "date_parts", "parts": parts}, why


def _list(profile: Profile) -> tuple[dict[str, Any], str]:
    inner = profile.type.value_type
    least, median, most, longest = profile.lengths
    same = least == longest
    if pa.types.is_floating(inner) or pa.types.is_decimal(inner) or (pa.types.is_integer(inner) and same and least > 7):
        if not same:
            return {}, f"lists of {least} to {longest} numbers: a vector needs one length"
        holes = pc.any(pc.is_null(pc.list_flatten(profile.values), nan_is_null=pa.types.is_floating(inner))).as_py()
        fill = {"fill": 0.0} if holes or profile.missing else {}
        return {"type": "vector", "size": least, **fill}, f"{least} numbers in each row"
    if pa.types.is_integer(inner) or pa.types.is_string(inner) or pa.types.is_large_string(inner):
        distinct = len(pc.unique(pc.list_flatten(profile.values)))
        hashed = {"buckets": 1 << min(20, int(distinct).bit_length())} if distinct > _VOCABULARY else {}
        length = max(4, 1 << max(0, most - 1).bit_length())
        why = f"lists of {least} to {longest} ids, {median} in the middle, {count_of(distinct, 'different one')}"
        return {"type": "ids", "max_length": length, **hashed}, why
    return {}, f"lists of {inner}: take what you need of them in transform"


def _image(profile: Profile) -> tuple[dict[str, Any], str]:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        return {}, "bytes; whether they are pictures cannot be told without pillow: pip install 'sparkdl[images]'"
    sizes, grey = [], True
    for value in profile.values[:20].to_pylist():
        try:
            with Image.open(io.BytesIO(value)) as picture:
                sizes.append(picture.size)
                grey = grey and picture.mode in ("1", "L", "LA")
        except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError):
            return {}, "bytes that are no pictures, at least not all of them"
    width, height = (int(min(64, np.median(side))) for side in zip(*sizes, strict=True))
    shown = ", ".join(sorted({f"{w} x {h}" for w, h in sizes})[:3])
    options = {"type": "image", "height": height, "width": width, "channels": 1 if grey else 3}
    return options, f"pictures of {shown} pixels, {'grey' if grey else 'in colour'}"


def _is_code(profile: Profile, labelled: Labelled | None) -> str:
    """Why whole numbers with many repeats are names of things, whose order says nothing; empty if they are numbers."""
    if not profile.integers or not 3 <= profile.distinct <= min(_VOCABULARY, profile.present / 5):
        return ""
    if looks_like_an_id(profile.name):
        return "an id by its name"
    if _CODE.search(profile.name) and profile.distinct <= 1000:
        return "a code by its name"
    if labelled is None or _AMOUNT.search(profile.name):
        return ""
    by_value, by_order, error = labelled.value_and_order(profile.name)
    values = [int(value) for value, _ in profile.top]
    scattered = (
        profile.high - profile.low + 1 >= 3 * profile.distinct and np.gcd.reduce(np.subtract(values, values[0])) == 1
    )
    needed = 0.0025 if scattered else 0.005
    if by_value - by_order > needed + 4 * error and by_order < 0.7 * by_value:
        gaps = " and numbers are left out" if scattered else ""
        return f"codes, of which each tells {by_value:.1%} of the label, and their order {by_order:.1%}{gaps}"
    return ""


_BY_KIND: Mapping[Kind, Callable[[Profile], tuple[Mapping[str, Any], str]]] = {
    "number": _number,
    "text": _text,
    "when": _when,
    "list": _list,
    "bytes": _image,
    "bool": lambda profile: ({"type": "category"}, "true or false"),
    "vector": lambda profile: ({"type": "vector"}, "vectors of Spark ML"),
    "other": lambda profile: ({}, f"{profile.type}: take what you need of it in transform"),
}
