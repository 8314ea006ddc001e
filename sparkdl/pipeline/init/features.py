"""What becomes of each column: a feature of a type with options, or nothing, and why.

Enters: profiles of the columns, the sample, and the roles that some of them have. Leaves: a ``Choice`` a column.
"""

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

from sparkdl.errors import SchemaError
from sparkdl.features.spec import CATEGORIES, NUMBERS, Feature, input_names
from sparkdl.pipeline.init.profile import Profile, count_of
from sparkdl.pipeline.init.roles import Label, looks_like_an_id
from sparkdl.pipeline.init.strength import Labelled, near_duplicates, too_good

__all__ = ["MAX_FEATURES", "Choice", "choose"]

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
_VOCABULARY = 10_000
_SKEWED = 2.0
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


def choose(
    profiles: Mapping[str, Profile], sample: pa.Table, label: Label, taken: Mapping[str, str], time: str | None
) -> list[Choice]:
    """Choose for every column but the label.

    Args:
        profiles: of the columns, in order.
        sample: rows of the table.
        label: what is predicted.
        taken: why a column is no feature, by column, for those that have another role.
        time: the column that says when a row happened; its parts are features.

    Raises:
        SchemaError: the label has the name of an input that features make.
    """
    found: list[Choice] = []
    labelled = Labelled.of(sample, label.name, label.type)
    free = [one for one in profiles.values() if one.name != label.name and one.name not in taken]
    warnings = dict(near_duplicates(sample, free))
    leaks = {} if labelled is None else dict(too_good(labelled, sample, free, label.name))
    names = {label.name}
    inner: set[tuple[str, str]] = set()
    for one in profiles.values():
        if one.name == label.name:
            continue
        options, why = ({}, taken[one.name]) if one.name in taken else _chosen(one, labelled, sample)
        if options and len(names) > MAX_FEATURES:
            options, why = {}, f"the first {MAX_FEATURES:,} columns are taken"
        if options and one.name == time:
            why = f"{why}; the split is by this column"
        name = _name(one.name, options, names, inner) if options else one.name
        if options:
            names.add(name)
            inner |= _inner(name, options)
        warning = leaks.get(one.name) or warnings.get(one.name, "") if options else ""
        suspect = bool(options) and one.name in leaks
        found.append(Choice(column=one.name, name=name, options=options, why=why, warning=warning, suspect=suspect))
    if label.name in {name for name, _ in inner}:
        raise SchemaError(
            f"the label {label.name!r} has the name of an input of the model, in which features of several columns "
            "stand: rename the column in the table, or name another label with --label"
        )
    return found


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
    made = input_names(name, msgspec.convert(options, Feature))
    return {(one, part) for one, parts in made.items() for part in parts}


def _chosen(one: Profile, labelled: Labelled | None, sample: pa.Table) -> tuple[dict[str, Any], str]:
    if not one.there:
        return {}, "missing in every row that was looked at"
    if one.missing > 0.99 * one.rows:
        return {}, one.gap
    if one.distinct == 1:
        gap = f", {one.gap}" if one.gap else ""
        return {}, f"one value, {str(one.top[0][0])[:40]!r}, in every row that was looked at{gap}"
    if one.kind == "number" and (code := _is_code(one, labelled, sample)):
        options, why = _category(one, f"{code}, {count_of(one.distinct, 'value')}, {one.span}")
        return options, ", ".join(filter(None, [one.gap, why]))
    makers: dict[str, Callable[[Profile], tuple[dict[str, Any], str]]] = {
        "number": _number, "bool": _bool, "text": _text, "when": _when, "list": _list, "vector": _vector,
        "bytes": _image, "other": lambda one: ({}, f"{one.type}: take what you need of it in transform"),
    }  # fmt: skip
    options, why = makers[one.kind](one)
    return options, ", ".join(filter(None, [one.gap, why]))


def _number(one: Profile) -> tuple[dict[str, Any], str]:
    integer = pa.types.is_integer(one.type)
    repeated = one.there / max(1, one.distinct)
    if integer and looks_like_an_id(one.name):
        if repeated < 2:
            return {}, f"an id by its name: {count_of(one.distinct, 'value')} in {one.there:,} rows"
        return _category(one, "an id by its name")
    running = integer and one.distinct == one.there and one.high - one.low == one.there - 1 and one.there > 20
    if running:
        return {}, f"counts the rows, {one.span}"
    options: dict[str, Any] = {"type": "number"}
    why = [one.span]
    if abs(one.skew) > _SKEWED and abs(one.log_skew) < abs(one.skew) / 2:
        options["log"] = True
        why.append(f"skewed ({one.skew:.1f}): log")
    elif abs(one.skew) > 10 * _SKEWED:
        options["clip"] = "quantiles"
        why.append(f"a few values far out (skew {one.skew:.0f}): clipped at 1 % and 99 %")
    if one.missing:
        options["fill"] = "median" if abs(one.skew) > _SKEWED else "mean"
        if one.missing > 0.01 * one.rows:
            options["missing_indicator"] = True
    return options, ", ".join(why)


def _bool(one: Profile) -> tuple[dict[str, Any], str]:
    return {"type": "category"}, "true or false"


def _category(one: Profile, why: str) -> tuple[dict[str, Any], str]:
    if one.distinct > _VOCABULARY:
        buckets = 1 << min(20, max(14, int(one.distinct - 1).bit_length()))
        return {"type": "category", "buckets": buckets}, f"{why} in these rows alone: hashed"
    least = 2 if one.rows < 10_000 else 5 if one.rows < 50_000 else 10
    rare = sum(rows < least for _, rows in one.top)
    options: dict[str, Any] = {"type": "category"} | ({"min_count": least} if least != 2 else {})
    return options, why + (f", {rare:,} of them in fewer than {least} rows: unknown" if rare else "")


def _text(one: Profile) -> tuple[dict[str, Any], str]:
    least, median, most, _ = one.lengths
    values = count_of(one.distinct, "value")
    dates = sum(rows for text, rows in one.top if re.fullmatch(r"\d{4}-\d{2}-\d{2}.*", str(text)))
    if dates and dates == sum(rows for _, rows in one.top):
        return {}, "dates as text: cast it to a date in transform, for date_parts"
    others = [_OTHER_DATE.match(str(text)) for text, _ in one.top]
    if others and others[0] and all(others):
        return {}, f"dates as text, such as {others[0][0]}: to_timestamp in transform makes a time of it, to split by"
    if median >= _LONG and one.distinct > 0.2 * one.there:
        length = min(256, max(8, -(-most // 8) * 8))
        return {"type": "text", "max_length": length}, f"texts of {least} to {most} words, {values}"
    if one.distinct > 0.9 * one.there and one.there > 20:
        return {}, f"nearly every row has its own, {values} in {one.there:,} rows: an id"
    shown = ", ".join(f"{text!s:.20}" for text, _ in one.top[:3])
    return _category(one, f"{values}: {shown}{', ...' if one.distinct > 3 else ''}")


def _when(one: Profile) -> tuple[dict[str, Any], str]:
    timed = pa.types.is_timestamp(one.type)
    years = one.high - one.low >= timedelta(days=365)
    hours = timed and any(value.hour for value, _ in one.top)
    parts = [*(["month"] if years else []), "weekday", *(["hour"] if hours else [])]
    why = f"{one.span}{'' if years else ', less than a year: no month'}"
    return {"type": "date_parts", "parts": parts}, why


def _list(one: Profile) -> tuple[dict[str, Any], str]:
    inner = one.type.value_type
    least, median, most, longest = one.lengths
    same = least == longest
    if pa.types.is_floating(inner) or pa.types.is_decimal(inner) or (pa.types.is_integer(inner) and same and least > 7):
        if not same:
            return {}, f"lists of {least} to {longest} numbers: a vector needs one length"
        holes = pc.any(pc.is_null(pc.list_flatten(one.values), nan_is_null=pa.types.is_floating(inner))).as_py()
        fill = {"fill": 0.0} if holes or one.missing else {}
        return {"type": "vector", "size": least, **fill}, f"{least} numbers in each row"
    if pa.types.is_integer(inner) or pa.types.is_string(inner) or pa.types.is_large_string(inner):
        distinct = len(pc.unique(pc.list_flatten(one.values)))
        hashed = {"buckets": 1 << min(20, int(distinct).bit_length())} if distinct > _VOCABULARY else {}
        length = max(4, 1 << max(0, most - 1).bit_length())
        why = f"lists of {least} to {longest} ids, {median} in the middle, {count_of(distinct, 'different one')}"
        return {"type": "ids", "max_length": length, **hashed}, why
    return {}, f"lists of {inner}: take what you need of them in transform"


def _vector(one: Profile) -> tuple[dict[str, Any], str]:
    return {"type": "vector"}, "vectors of Spark ML"


def _image(one: Profile) -> tuple[dict[str, Any], str]:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        return {}, "bytes; whether they are pictures cannot be told without pillow: pip install 'sparkdl[images]'"
    sizes, grey = [], True
    for value in one.values[:20].to_pylist():
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


def _is_code(one: Profile, labelled: Labelled | None, sample: pa.Table) -> str:
    """Why whole numbers with many repeats are names of things, whose order says nothing; empty if they are numbers."""
    if not one.whole or not 3 <= one.distinct <= min(_VOCABULARY, one.there / 5):
        return ""
    if looks_like_an_id(one.name):
        return "an id by its name"
    if _CODE.search(one.name) and one.distinct <= 1000:
        return "a code by its name"
    if labelled is None or _AMOUNT.search(one.name):
        return ""
    by_value, by_order, error = labelled.value_and_order(sample.column(one.name).combine_chunks())
    values = [int(value) for value, _ in one.top]
    scattered = one.high - one.low + 1 >= 3 * one.distinct and np.gcd.reduce(np.subtract(values, values[0])) == 1
    needed = 0.0025 if scattered else 0.005
    if by_value - by_order > needed + 4 * error and by_order < 0.7 * by_value:
        gaps = " and numbers are left out" if scattered else ""
        return f"codes, of which each tells {by_value:.1%} of the label, and their order {by_order:.1%}{gaps}"
    return ""
