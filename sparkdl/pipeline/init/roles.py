"""Which columns of a table tell rows apart, say when they happened, and are to be predicted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.names import quoted, stands_in_sql
from sparkdl.errors import ConfigError, DataError, SchemaError
from sparkdl.pipeline.file.problems import choices
from sparkdl.pipeline.init.count import count_hours
from sparkdl.pipeline.init.profile import Profile, share_of
from sparkdl.pipeline.spec import prediction_columns
from sparkdl.pipeline.spec.base import count_of

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

Count = Callable[[Sequence[str]], tuple[int, int] | None]

_AS_NUMBERS = (
    ("yyyymmdd", 19000101, 21001231, "to_date(cast({} AS STRING), 'yyyyMMdd')"),
    ("seconds since 1970", 946_684_800, 4_102_444_800, "timestamp_seconds({})"),
    ("milliseconds since 1970", 946_684_800_000, 4_102_444_800_000, "timestamp_millis({})"),
    ("microseconds since 1970", 946_684_800_000_000, 4_102_444_800_000_000, "timestamp_micros({})"),
)
"""How whole numbers stand for times: in words, the least and the greatest, the SQL that makes times of them."""


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
        is_cast: whether it is stored as a number with fractions, of which SQL makes classes.
        is_finite: the SQL condition that it is neither NaN nor infinite; empty where it cannot be.
        question: what its values leave open, in words; empty where nothing is.
    """

    name: str
    options: Mapping[str, Any]
    why: str
    is_cast: bool = False
    is_finite: str = ""
    question: str = ""

    @property
    def type(self) -> str:
        """The type of the label."""
        return str(self.options["type"])


def looks_like_an_id(name: str) -> bool:
    """Whether a column's name says that it tells things apart."""
    return _ID.match(name) is not None or _SOME_ID.search(name) is not None


def find_key(count: Count, profiles: Mapping[str, Profile], when: When, label: Label) -> Key:
    """Find the key: a candidate by name and by the sample, and then by counting all rows.

    Args:
        count: counts all rows, and the different values of columns; None where there are too many.
        profiles: of all columns.
        when: rows happened.
        label: what is predicted.
    """
    reserved = prediction_columns({label.name: label.type})  # beside which the key stands
    candidates = [
        profile
        for profile in profiles.values()
        if (profile.kind == "text" or profile.is_whole)
        and profile.name not in (label.name, when.column)
        and profile.name.lower() not in reserved
    ]
    tried: list[str] = []
    unique = sorted(filter(_is_unique, candidates), key=lambda profile: not _ID.match(profile.name))
    for profile in unique[:_TRIED]:
        counted = count([profile.name])
        if counted is None:
            why = f"{profile.name} is unique in the rows that were looked at; there are too many to count them all"
            return Key(columns=(), why=why)
        rows, distinct = counted
        if distinct == rows:
            evidence = f"{count_of(rows, 'row')}, {count_of(distinct, 'different value')}, none missing"
            return Key(columns=(profile.name,), why=f"counted: {evidence}")
        tried.append(f"{profile.name} has {distinct:,} different values in {rows:,} rows")
    if when.column is not None and when.column.lower() not in reserved:
        ids = [p for p in candidates if looks_like_an_id(p.name) and not p.missing and p.distinct > 1]
        for profile in sorted(ids, key=lambda profile: -profile.distinct)[:2]:
            rows, distinct = count([profile.name, when.column]) or (1, 0)
            if distinct == rows:
                return Key(columns=(profile.name, when.column), why=f"counted: together unique in {rows:,} rows")
    reason = "; ".join(tried) if tried else "no column, as far as was counted, tells rows apart"
    return Key(columns=(), why=f"{reason}: without a key no row is a duplicate")


def _is_unique(profile: Profile) -> bool:
    """Whether a column is unique in the sample, and not by chance, as a measured number may be in a few rows."""
    if profile.missing or profile.distinct < max(2, profile.rows):
        return False
    if looks_like_an_id(profile.name) or profile.kind == "text":
        return looks_like_an_id(profile.name) or profile.lengths[2] <= 2
    span = profile.high - profile.low
    # a running number, or one of which so many equal pairs were to be expected if it were drawn at random from its span
    return bool(span < 2 * profile.rows or profile.rows**2 / (2 * (span + 1)) > _PAIRS)


def find_time(
    hours: Callable[[str], Mapping[str, int] | None],
    profiles: Mapping[str, Profile],
    partitions: Collection[str],
    label: str,
    now: datetime,
) -> When:
    """Find the column that says when a row happened.

    Args:
        hours: counts all rows by the hour in a column, None where there are too many.
        profiles: of all columns.
        partitions: those that the table is partitioned by.
        label: the column that is predicted.
        now: the time that it is; windows that begin later are left alone, and a column with many of them is none.
    """
    candidates, hints, reasons = [], [], []
    for index, profile in enumerate(profiles.values()):
        if profile.name == label or not profile.present:
            continue
        divided = profile.name in partitions
        if hint := _of_numbers(profile):
            hints.append(hint)
        if profile.kind == "when" or _is_dated(profile):
            when = _windows(profile, divided, hours)
            if when.column is None:
                reasons.append(when.why)
            else:
                candidates.append(((not divided, not _WHEN.search(profile.name), index), when))
    if candidates:
        return _until(now, min(candidates, key=lambda candidate: candidate[0])[1])
    parts = {name.lower(): quoted(name) for name in partitions}
    if {"year", "month", "day"} <= parts.keys():
        sql = f"make_date({parts['year']}, {parts['month']}, {parts['day']})"
        hints.append(_written_as("year, month and day are folders", sql))
    return When(why="; ".join([*hints[:1], *reasons] or [When.why]))


def _until(now: datetime, when: When) -> When:
    """The windows that have begun; none where many are yet to come."""
    begun = {name: rows for name, rows in when.windows.items() if name <= f"{now:%Y-%m-%dT%H}"}
    windows, rows = len(when.windows), sum(when.windows.values())
    windows_ahead, rows_ahead = windows - len(begun), rows - sum(begun.values())
    if not windows_ahead:
        return when
    if max(windows_ahead / windows, rows_ahead / rows) > 0.1:
        return When(why=f"{when.column} has {windows_ahead:,} windows with {rows_ahead:,} rows that are yet to come")
    why = f"{when.why}; {windows_ahead} of them are yet to come and left alone until then"
    return replace(when, windows=begun, why=why)


def _of_numbers(profile: Profile) -> str:
    """What there is to do about a column of times that are written as whole numbers; empty for any other."""
    if not profile.integers or not _WHEN.search(profile.name) or looks_like_an_id(profile.name):
        return ""
    column = quoted(profile.name) if profile.is_whole else f"cast({quoted(profile.name)} AS BIGINT)"
    for form, low, high, sql in _AS_NUMBERS:
        if low <= profile.low and profile.high <= high:
            is_date = all(1 <= value // 100 % 100 <= 12 and 1 <= value % 100 <= 31 for value, _ in profile.top)
            if is_date or form != "yyyymmdd":
                return _written_as(f"{profile.name} looks like {form}", sql.format(column))
    return ""


def _written_as(what: str, sql: str) -> str:
    return f"{what}: with source.kind=sql, {sql} makes a column for source.time"


def _is_dated(profile: Profile) -> bool:
    """Whether a column of texts holds nothing but dates or times that begin as ISO 8601 writes them."""
    dated = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}(:.*)?)?$"
    return profile.kind == "text" and bool(pc.all(pc.match_substring_regex(profile.values, dated)).as_py())


def _windows(profile: Profile, divided: bool, hours: Callable[[str], Mapping[str, int] | None]) -> When:
    """The windows of a column, or why it is none to divide by."""
    if _BIRTH.search(profile.name):
        return When(why=f"{profile.name} is a birthday by its name")
    if profile.missing > 0.01 * profile.rows:
        return When(why=f"{profile.name} is missing in {share_of(profile.missing, profile.rows)} of the rows")
    counted = None if divided else hours(profile.name)
    by_hour = count_hours([profile.values]) if counted is None else counted
    by_day = Counter[str]()
    for name, rows in by_hour.items():
        by_day[name[:10]] += rows
    unit = "hour" if len(by_day) < _LEAST_WINDOWS <= len(by_hour) and not divided else "day"
    windows = by_hour if unit == "hour" else by_day
    if not _LEAST_WINDOWS <= len(windows) <= _MOST_WINDOWS:
        bound = f"below {_LEAST_WINDOWS}" if len(windows) < _LEAST_WINDOWS else f"above {_MOST_WINDOWS:,}"
        return When(why=f"{profile.name} has {count_of(len(windows), unit)}, {bound}: not split by it")
    span = f"{count_of(len(windows), unit)} with rows, {min(windows)} to {max(windows)}"
    why = ", ".join(filter(None, [span, profile.gap]))
    return When(column=profile.name, partition=divided, every=unit, windows=windows, why=why)


def find_label(profiles: Mapping[str, Profile], column: str | None, task: str | None = None) -> Label:
    """Find what is to be predicted.

    Args:
        profiles: of all columns.
        column: that the user names; None guesses.
        task: the label's type, if the user says it.

    Raises:
        SchemaError: there is no such column.
        ConfigError: there is no such type.
        DataError: its values cannot be predicted, or nothing can be guessed.
    """
    if task not in (None, *_TASKS):
        raise ConfigError(f"--label-type {task} is not known: write one of {', '.join(_TASKS)}")
    if column is not None:
        if column not in profiles:
            raise SchemaError(f"--label {column}: there is no such column: {choices(column, profiles, columns=True)}")
        return _label_of(profiles[column], "as you said", task)
    names = {name.lower(): name for name in profiles}
    named = [names[name] for name in _LABELS if name in names]
    other_names = [name for name in reversed(list(profiles)) if not looks_like_an_id(name) and name not in named]
    for name in [*named, *other_names]:
        why = "by its name" if name in named else "the last column that can be one: say --label if another is meant"
        try:
            return _label_of(profiles[name], why, task)
        except DataError:
            continue
    raise DataError("no column has values that can be predicted: say --label, or name another table")


def _label_of(profile: Profile, why: str, task: str | None) -> Label:
    """The label's type by its values.

    Raises:
        DataError: they cannot be predicted.
    """
    name, column, distinct, is_number = profile.name, quoted(profile.name), profile.distinct, profile.kind == "number"
    if profile.kind not in ("number", "bool", "text") or distinct < 2:
        shown = f"is {profile.type}" if profile.present else "is missing in every row"
        shown = f"is {profile.top[0][0]!r} in every row" if distinct == 1 else shown
        raise DataError(f"the label {name!r} {shown}: name a column with numbers or classes with --label")
    gap = f", {profile.gap}: such rows are predicted, and not learned from" if profile.gap else ""
    evidence = f"{why}: {count_of(distinct, 'value')}{gap}"
    classes_fit = profile.integers or not is_number
    if (task == "regression" and not is_number) or (task in ("binary", "multiclass") and not classes_fit):
        raise DataError(
            f"the label {name!r} is {profile.type}, {evidence}: it cannot be {task}, leave --label-type out"
        )
    if (task == "binary") != (distinct == 2) and task in ("binary", "multiclass"):
        raise DataError(f"the label {name!r} has {distinct} values, and cannot be {task}: leave --label-type out")
    few = distinct <= MAX_CLASSES and profile.top[-1][1] >= 2
    if task is None:
        by_name = few and profile.integers and _classes_by_name(profile)
        is_binary, is_multiclass = distinct == 2 and classes_fit, not is_number or by_name
        task = "binary" if is_binary else "multiclass" if is_multiclass else "regression"
        ordered = few and profile.integers and 3 <= distinct <= _STEPS and profile.high - profile.low < 2 * _STEPS
        question = "" if not ordered else (
            f"{name} is {profile.span} in {distinct} steps: regression where 4 is twice 2, multiclass "
            "where numbers are names; say --label-type, or change `type` in the file"
        )  # fmt: skip
    else:
        question = ""
    if task == "regression":
        hint = "; write multiclass if they are classes" if profile.integers and distinct <= MAX_CLASSES else ""
        why, options = f"{evidence}, {profile.span}{hint}", {"type": task}
        if profile.low >= 0 and profile.skew > 0 and profile.is_of_products:
            why += f", skewed ({profile.skew:.1f}): their logarithm is learnt, as of amounts whose causes multiply"
            options["loss"] = "poisson"
        check = f"{column} IS NULL OR NOT (isnan({column}) OR abs({column}) = double('inf'))"
        is_finite = check if pa.types.is_floating(profile.type) and stands_in_sql(name) else ""
        return Label(name=name, options=options, why=why, question=question, is_finite=is_finite)
    if profile.kind == "text" and distinct > 1000:
        raise DataError(
            f"the label {name!r} has {distinct:,} different texts: name a column with numbers or fewer classes "
            "with --label"
        )
    fractions = is_number and not pa.types.is_integer(profile.type)
    classes = sorted(int(value) if fractions else value for value, _ in profile.top)
    several = {"type": task, "classes": classes} if distinct <= MAX_CLASSES else {"type": task}
    values = ", ".join(f"{value!s:.30} ({share_of(rows, profile.present)})" for value, rows in profile.top[:5])
    return Label(
        name=name,
        options=_binary(profile) if task == "binary" else several,
        why=f"{evidence}: {values}{', ...' if distinct > 5 else ''}",
        is_cast=fractions,
        question=question,
    )


def _classes_by_name(profile: Profile) -> bool:
    """Whether a few whole numbers are classes: they begin at 0 or 1 and leave none out, or are called so."""
    if _GRADE.search(profile.name):
        return False
    called = re.search(r"class|label|target|category|kind|type|species", profile.name, re.IGNORECASE) is not None
    return called or (profile.low in (0, 1) and profile.high - profile.low + 1 == profile.distinct <= 20)


def _binary(profile: Profile) -> dict[str, Any]:
    values = [value for value, _ in profile.top]
    if profile.kind == "bool" or {float(value) for value in values if profile.kind == "number"} == {0.0, 1.0}:
        return {"type": "binary"}
    if profile.kind == "number":
        return {"type": "binary", "positive": int(max(values))}
    positives = [value for value in values if str(value).strip().lower() in _TRUE]
    return {"type": "binary", "positive": positives[0] if len(positives) == 1 else values[-1]}
