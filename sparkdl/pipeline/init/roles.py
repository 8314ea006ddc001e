"""Which columns of a table tell rows apart, say when they happened, and are to be predicted.

Enters: profiles of the columns, and the table where rows have to be counted. Leaves: a choice for each role, with what
it was made of in words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.names import quoted
from sparkdl.errors import ConfigError, DataError, SchemaError
from sparkdl.pipeline.file.problems import choices
from sparkdl.pipeline.init.count import count_hours
from sparkdl.pipeline.init.profile import Profile, count_of, share_of
from sparkdl.pipeline.init.table import Rows
from sparkdl.pipeline.spec import prediction_columns

__all__ = ["Key", "Label", "When", "find_key", "find_label", "find_time", "looks_like_an_id"]

_ID = re.compile(r"^(id|key|uuid|guid|index|row|rownum|row_?(id|number)|__index_level_0__|unnamed: ?0)$", re.IGNORECASE)
_SOME_ID = re.compile(r"([_ .-](id|key|uuid|guid|no|nr|number)|(?<=[a-z])(Id|ID|Key|UUID))$|^id[_ .-]|uuid|guid", re.I)
_LABELS = (
    *("label", "target", "y", "class", "outcome", "response", "churn", "churned", "clicked", "click", "converted"),
    *("conversion", "default", "defaulted", "fraud", "is_fraud", "survived", "returned", "price", "score", "rating"),
)
_WHEN = re.compile(r"(time|date|day|hour|_at|_ts|ts|timestamp|when|created|event|order|snapshot)", re.IGNORECASE)
_BIRTH = re.compile(r"birth|born|dob", re.IGNORECASE)
_TRUE = ("true", "yes", "y", "positive", "pos", "1", "1.0", "t", "churned", "fraud", "malignant")
_GRADE = re.compile(r"rating|score|stars?$|grade|quality|satisf|level|rank|count|^n_|^num", re.IGNORECASE)
_TASKS = ("regression", "binary", "multiclass")
_STEPS = 10
"""Whole numbers of a label up to which classes and steps of an order look alike."""
MAX_CLASSES = 50
_MOST_WINDOWS, _LEAST_WINDOWS = 2000, 5
_TRIED, _PAIRS = 4, 20


@dataclass(frozen=True, kw_only=True)
class Key:
    """The columns that tell rows apart; none where there are no such."""

    columns: tuple[str, ...]
    why: str


@dataclass(frozen=True, kw_only=True)
class When:
    """The column that says when a row happened.

    Attributes:
        column: None where there is none.
        partition: whether the table is partitioned by it.
        every: how long a window is.
        windows: rows of the sample by window.
        why: in words.
    """

    column: str | None = None
    partition: bool = False
    every: str = "day"
    windows: Mapping[str, int] = field(default_factory=dict)
    why: str = "no column says when a row happened"


@dataclass(frozen=True, kw_only=True)
class Label:
    """What is predicted.

    Attributes:
        name: of the column.
        options: as the file has them.
        type: among them.
        why: in words.
        cast: the SQL that makes classes of numbers that are stored as fractions; empty where none is needed.
        sound: the SQL condition that it is neither NaN nor infinite; empty where it cannot be.
        question: what its values leave open, in words; empty where nothing is.
    """

    name: str
    options: Mapping[str, Any]
    why: str
    cast: str = ""
    sound: str = ""
    question: str = ""

    @property
    def type(self) -> str:
        """Of the label."""
        return str(self.options["type"])


def looks_like_an_id(name: str) -> bool:
    """Whether a column's name says that it tells things apart."""
    return _ID.match(name) is not None or _SOME_ID.search(name) is not None


def find_key(rows: Rows, profiles: Mapping[str, Profile], when: When, label: Label) -> Key:
    """Find the key: a candidate by name and by the sample, and then by counting all rows."""
    own = prediction_columns({label.name: label.type})  # beside which the key stands
    may_be = [
        one for one in profiles.values()
        if _tells_apart(one) and one.name not in (label.name, when.column) and one.name.lower() not in own
    ]  # fmt: skip
    single = sorted((one for one in may_be if _is_unique(one)), key=lambda one: not _ID.match(one.name))
    tried: list[str] = []
    for one in single[:_TRIED]:
        counted = rows.count([one.name])
        if counted is None:
            why = f"{one.name} is unique in the rows that were looked at; there are too many to count them all"
            return Key(columns=(), why=why)
        if counted.unique:
            seen = f"{count_of(counted.rows, 'row')}, {count_of(counted.distinct, 'different value')}, none missing"
            return Key(columns=(one.name,), why=f"counted: {seen}")
        tried.append(f"{one.name} has {counted.distinct:,} different values in {counted.rows:,} rows")
    ids = [one for one in may_be if looks_like_an_id(one.name) and not one.missing and one.distinct > 1]
    for one in sorted(ids, key=lambda one: -one.distinct)[:2] if when.column and when.column.lower() not in own else ():
        counted = rows.count([one.name, str(when.column)])
        if counted is not None and counted.unique:
            return Key(columns=(one.name, str(when.column)), why=f"counted: together unique in {counted.rows:,} rows")
    found = "; ".join(tried) if tried else "no column, as far as was counted, tells rows apart"
    return Key(columns=(), why=f"{found}: without a key no row is a duplicate")


def _tells_apart(one: Profile) -> bool:
    return one.kind == "text" or (one.kind == "number" and pa.types.is_integer(one.type))


def _is_unique(one: Profile) -> bool:
    """Whether a column is unique in the sample, and not by chance, as a measured number may be in a few rows."""
    if one.missing or one.distinct < max(2, one.rows):
        return False
    running = one.kind == "number" and one.high - one.low < 2 * one.rows
    # so many pairs of equal values were to be expected if they were drawn at random between the least and the greatest
    drawn = one.kind == "number" and one.rows**2 / (2 * (one.high - one.low + 1)) > _PAIRS
    words = one.kind == "text" and one.lengths[2] <= 2
    return looks_like_an_id(one.name) or running or drawn or words


def find_time(
    profiles: Mapping[str, Profile],
    partitions: Collection[str],
    label: str | None,
    count: Callable[[str], Mapping[str, int] | None] | None = None,
) -> When:
    """Find the column that says when a row happened.

    Args:
        profiles: of all columns.
        partitions: those that the table is partitioned by.
        label: the column that is predicted.
        count: counts all rows by the hour in a column, None where there are too many; None if the sample is the table.
    """
    found: list[tuple[tuple[bool, bool, int], When]] = []
    why = []
    for place, one in enumerate(profiles.values()):
        if one.name == label or not one.there:
            continue
        divided = one.name in partitions
        if one.kind != "when" and not (divided and _names_days(one)) and not _is_dated(one):
            continue
        when = _windows(one, divided, count)
        if when.column is None:
            why.append(when.why)
        else:
            found.append(((not divided, not _WHEN.search(one.name), place), when))
    if found:
        return min(found, key=lambda each: each[0])[1]
    return When(why="; ".join(why)) if why else When()


def _names_days(one: Profile) -> bool:
    return one.kind == "text" and all(re.fullmatch(r"\d{4}-\d{2}-\d{2}([ T]\d{2})?", str(text)) for text, _ in one.top)


def _is_dated(one: Profile) -> bool:
    """Whether a column of texts holds nothing but dates or times that begin as ISO 8601 writes them."""
    dated = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}(:.*)?)?$"
    return one.kind == "text" and bool(pc.all(pc.match_substring_regex(one.values, dated)).as_py())


def _windows(one: Profile, divided: bool, count: Callable[[str], Mapping[str, int] | None] | None) -> When:
    """The windows of a column, or why it is none to divide by."""
    if _BIRTH.search(one.name):
        return When(why=f"{one.name} is a birthday by its name")
    if one.missing > 0.01 * one.rows:
        return When(why=f"{one.name} is missing in {share_of(one.missing, one.rows)} of the rows")
    hour = count(one.name) if count is not None and not divided else None
    hour = _by_hour(one, divided) if hour is None else dict(hour)
    day: dict[str, int] = {}
    for name, rows in hour.items():
        day[name[:10]] = day.get(name[:10], 0) + rows
    by_hour = len(day) < _LEAST_WINDOWS <= len(hour) and not divided
    windows = hour if by_hour else day
    unit = "hour" if by_hour else "day"
    if not _LEAST_WINDOWS <= len(windows) <= _MOST_WINDOWS:
        bound = f"below {_LEAST_WINDOWS}" if len(windows) < _LEAST_WINDOWS else f"above {_MOST_WINDOWS:,}"
        return When(why=f"{one.name} has {count_of(len(windows), unit)}, {bound}: not split by it")
    first, last = min(windows), max(windows)
    return When(
        column=one.name, partition=divided, every=unit, windows=windows,
        why=f"{count_of(len(windows), unit)} with rows, {first} to {last}" + (f", {one.gap}" if one.gap else ""),
    )  # fmt: skip


def _by_hour(one: Profile, divided: bool) -> dict[str, int]:
    """Rows of the sample by the hour; of partitions by the day, by the day."""
    if one.kind == "text" and divided:
        return {str(text).replace(" ", "T"): rows for text, rows in one.top}
    return count_hours([pa.table({"when": one.values})])


def find_label(profiles: Mapping[str, Profile], given: str | None, task: str | None = None) -> Label:
    """Find what is to be predicted.

    Args:
        profiles: of all columns.
        given: the column that the user names; None guesses.
        task: the label's type, if the user says it.

    Raises:
        SchemaError: there is no such column.
        ConfigError: there is no such type.
        DataError: its values cannot be predicted, or nothing can be guessed.
    """
    if task not in (None, *_TASKS):
        raise ConfigError(f"--label-type {task} is not known: write one of {', '.join(_TASKS)}")
    if given is not None:
        if given not in profiles:
            raise SchemaError(f"--label {given}: there is no such column: {choices(given, profiles, columns=True)}")
        return _label_of(profiles[given], "as you said", task)
    names = {name.lower(): name for name in profiles}
    named = [names[name] for name in _LABELS if name in names]
    rest = [name for name in reversed(list(profiles)) if not looks_like_an_id(name) and name not in named]
    for name in [*named, *rest]:
        why = "by its name" if name in named else "the last column that can be one: say --label if another is meant"
        try:
            return _label_of(profiles[name], why, task)
        except DataError:
            continue
    raise DataError("no column has values that can be predicted: say --label, or name another table")


def _label_of(one: Profile, why: str, task: str | None) -> Label:
    """The label's type by its values.

    Raises:
        DataError: they cannot be predicted.
    """
    column = quoted(one.name)
    if one.kind not in ("number", "bool", "text") or one.distinct < 2:
        shown = (
            f"is {one.top[0][0]!r} in every row" if one.distinct == 1 else f"is {one.type} and {one.there} rows have it"
        )
        raise DataError(f"the label {one.name!r} {shown}: name a column with numbers or classes with --label")
    fractions = one.kind == "number" and not pa.types.is_integer(one.type)
    values = ", ".join(f"{value!s:.30} ({share_of(rows, one.there)})" for value, rows in one.top[:5])
    gap = f", {one.gap}: such rows are predicted, and not learned from" if one.gap else ""
    seen = f"{why}: {count_of(one.distinct, 'value')}{gap}"
    classes_fit = one.whole or one.kind != "number"
    if (task == "regression" and one.kind != "number") or (task in ("binary", "multiclass") and not classes_fit):
        raise DataError(f"the label {one.name!r} is {one.type}, {seen}: it cannot be {task}, leave --label-type out")
    if (task == "binary") != (one.distinct == 2) and task in ("binary", "multiclass"):
        raise DataError(
            f"the label {one.name!r} has {one.distinct} values, and cannot be {task}: leave --label-type out"
        )
    if one.distinct == 2 and classes_fit and task != "regression":
        return Label(
            name=one.name, options=_binary(one), why=f"{seen}: {values}",
            cast=f"try_cast({column} AS BIGINT)" if fractions else "",
        )  # fmt: skip
    few = one.distinct <= MAX_CLASSES and one.top[-1][1] >= 2
    ordered = few and one.whole and 3 <= one.distinct <= _STEPS and one.high - one.low < 2 * _STEPS
    question = "" if task is not None or not ordered else (
        f"{one.name} is {one.span} in {one.distinct} steps: regression where 4 is twice 2, multiclass where numbers "
        "are names; say --label-type, or change `type` in the file"
    )  # fmt: skip
    by_values = few and one.whole and _classes_by_name(one)
    if one.kind == "text" or task == "multiclass" or (by_values and task is None):
        if one.kind == "text" and one.distinct > 1000:
            raise DataError(
                f"the label {one.name!r} has {one.distinct:,} different texts: name a column with numbers or fewer "
                "classes with --label"
            )
        classes = sorted(int(value) if fractions else value for value, _ in one.top)
        options = {"type": "multiclass", "classes": classes} if one.distinct <= MAX_CLASSES else {"type": "multiclass"}
        return Label(
            name=one.name, options=options, why=f"{seen}: {values}{', ...' if one.distinct > 5 else ''}",
            cast=f"try_cast({column} AS BIGINT)" if fractions else "", question=question,
        )  # fmt: skip
    sound = f"{column} IS NULL OR NOT (isnan({column}) OR abs({column}) = double('inf'))"
    other = "; write multiclass if they are classes" if one.whole and one.distinct <= MAX_CLASSES else ""
    why = f"{seen}, {one.span}{other}"
    return Label(
        name=one.name, options={"type": "regression"}, why=why, question=question,
        sound=sound if pa.types.is_floating(one.type) and "${" not in one.name else "",  # Spark fills it in
    )  # fmt: skip


def _classes_by_name(one: Profile) -> bool:
    """Whether a few whole numbers are classes: they begin at 0 or 1 and leave none out, or are called so."""
    if _GRADE.search(one.name):
        return False
    called = re.search(r"class|label|target|category|kind|type|species", one.name, re.IGNORECASE) is not None
    return called or (one.low in (0, 1) and one.high - one.low + 1 == one.distinct <= 20)


def _binary(one: Profile) -> dict[str, Any]:
    values = [value for value, _ in one.top]
    if one.kind == "bool" or {float(value) for value in values if one.kind == "number"} == {0.0, 1.0}:
        return {"type": "binary"}
    if one.kind == "number":
        return {"type": "binary", "positive": int(max(values))}
    known = [value for value in values if str(value).strip().lower() in _TRUE]
    return {"type": "binary", "positive": known[0] if len(known) == 1 else values[-1]}


def in_time(windows: Mapping[str, int], now: datetime) -> dict[str, int]:
    """Windows that do not begin after ``now``."""
    return {name: rows for name, rows in windows.items() if name <= f"{now:%Y-%m-%dT%H}"}
