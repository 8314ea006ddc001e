"""Which columns of a table tell rows apart, say when they happened, and are to be predicted."""

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
        """The type of the label."""
        return str(self.options["type"])


def looks_like_an_id(name: str) -> bool:
    """Whether a column's name says that it tells things apart."""
    return _ID.match(name) is not None or _SOME_ID.search(name) is not None


def find_key(rows: Rows, profiles: Mapping[str, Profile], when: When, label: Label) -> Key:
    """Find the key: a candidate by name and by the sample, and then by counting all rows."""
    prediction_names = prediction_columns({label.name: label.type})  # beside which the key stands
    may_be = [
        profile for profile in profiles.values()
        if _tells_apart(profile) and profile.name not in (label.name, when.column)
        and profile.name.lower() not in prediction_names
    ]  # fmt: skip
    single = sorted(
        (profile for profile in may_be if _is_unique(profile)), key=lambda profile: not _ID.match(profile.name)
    )
    tried: list[str] = []
    for profile in single[:_TRIED]:
        counted = rows.count([profile.name])
        if counted is None:
            why = f"{profile.name} is unique in the rows that were looked at; there are too many to count them all"
            return Key(columns=(), why=why)
        if counted.unique:
            evidence = f"{count_of(counted.rows, 'row')}, {count_of(counted.distinct, 'different value')}, none missing"
            return Key(columns=(profile.name,), why=f"counted: {evidence}")
        tried.append(f"{profile.name} has {counted.distinct:,} different values in {counted.rows:,} rows")
    ids = [
        profile for profile in may_be if looks_like_an_id(profile.name) and not profile.missing and profile.distinct > 1
    ]
    time = when.column if when.column and when.column.lower() not in prediction_names else None
    for profile in sorted(ids, key=lambda profile: -profile.distinct)[:2] if time else ():
        counted = rows.count([profile.name, str(time)])
        if counted is not None and counted.unique:
            return Key(columns=(profile.name, str(time)), why=f"counted: together unique in {counted.rows:,} rows")
    reason = "; ".join(tried) if tried else "no column, as far as was counted, tells rows apart"
    return Key(columns=(), why=f"{reason}: without a key no row is a duplicate")


def _tells_apart(profile: Profile) -> bool:
    return profile.kind == "text" or (profile.kind == "number" and profile.is_whole)


def _is_unique(profile: Profile) -> bool:
    """Whether a column is unique in the sample, and not by chance, as a measured number may be in a few rows."""
    if profile.missing or profile.distinct < max(2, profile.rows):
        return False
    running = profile.kind == "number" and profile.high - profile.low < 2 * profile.rows
    # so many pairs of equal values were to be expected if they were drawn at random between the least and the greatest
    drawn = profile.kind == "number" and profile.rows**2 / (2 * (profile.high - profile.low + 1)) > _PAIRS
    words = profile.kind == "text" and profile.lengths[2] <= 2
    return looks_like_an_id(profile.name) or running or drawn or words


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
    candidates: list[tuple[tuple[bool, bool, int], When]] = []
    why, numbers = [], []
    for index, profile in enumerate(profiles.values()):
        if profile.name == label or not profile.present:
            continue
        divided = profile.name in partitions
        if hint := _of_numbers(profile):
            numbers.append(hint)
        if profile.kind != "when" and not (divided and _names_days(profile)) and not _is_dated(profile):
            continue
        when = _windows(profile, divided, count)
        if when.column is None:
            why.append(when.why)
        else:
            candidates.append(((not divided, not _WHEN.search(profile.name), index), when))
    if candidates:
        return min(candidates, key=lambda candidate: candidate[0])[1]
    parts = {name.lower(): quoted(name) for name in partitions}
    if {"year", "month", "day"} <= parts.keys():
        sql = f"make_date({parts['year']}, {parts['month']}, {parts['day']})"
        numbers.append(_written_as("year, month and day are folders", sql))
    reasons = [*numbers[:1], *why]
    return When(why="; ".join(reasons)) if reasons else When()


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


def _names_days(profile: Profile) -> bool:
    return profile.kind == "text" and all(
        re.fullmatch(r"\d{4}-\d{2}-\d{2}([ T]\d{2})?", str(text)) for text, _ in profile.top
    )


def _is_dated(profile: Profile) -> bool:
    """Whether a column of texts holds nothing but dates or times that begin as ISO 8601 writes them."""
    dated = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}(:.*)?)?$"
    return profile.kind == "text" and bool(pc.all(pc.match_substring_regex(profile.values, dated)).as_py())


def _windows(profile: Profile, divided: bool, count: Callable[[str], Mapping[str, int] | None] | None) -> When:
    """The windows of a column, or why it is none to divide by."""
    if _BIRTH.search(profile.name):
        return When(why=f"{profile.name} is a birthday by its name")
    if profile.missing > 0.01 * profile.rows:
        return When(why=f"{profile.name} is missing in {share_of(profile.missing, profile.rows)} of the rows")
    hour = count(profile.name) if count is not None and not divided else None
    hour = _by_hour(profile, divided) if hour is None else dict(hour)
    day: dict[str, int] = {}
    for name, rows in hour.items():
        day[name[:10]] = day.get(name[:10], 0) + rows
    by_hour = len(day) < _LEAST_WINDOWS <= len(hour) and not divided
    windows = hour if by_hour else day
    unit = "hour" if by_hour else "day"
    if not _LEAST_WINDOWS <= len(windows) <= _MOST_WINDOWS:
        bound = f"below {_LEAST_WINDOWS}" if len(windows) < _LEAST_WINDOWS else f"above {_MOST_WINDOWS:,}"
        return When(why=f"{profile.name} has {count_of(len(windows), unit)}, {bound}: not split by it")
    first, last = min(windows), max(windows)
    return When(
        column=profile.name, partition=divided, every=unit, windows=windows,
        why=", ".join(filter(None, [f"{count_of(len(windows), unit)} with rows, {first} to {last}", profile.gap])),
    )  # fmt: skip


def _by_hour(profile: Profile, divided: bool) -> dict[str, int]:
    """Rows of the sample by the hour; of partitions by the day, by the day."""
    if profile.kind == "text" and divided:
        return {str(text).replace(" ", "T"): rows for text, rows in profile.top}
    return count_hours([pa.table({"when": profile.values})])


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
    column = quoted(profile.name)
    if profile.kind not in ("number", "bool", "text") or profile.distinct < 2:
        shown = f"is {profile.type}" if profile.present else "is missing in every row"
        shown = f"is {profile.top[0][0]!r} in every row" if profile.distinct == 1 else shown
        raise DataError(f"the label {profile.name!r} {shown}: name a column with numbers or classes with --label")
    fractions = profile.kind == "number" and not pa.types.is_integer(profile.type)
    values = ", ".join(f"{value!s:.30} ({share_of(rows, profile.present)})" for value, rows in profile.top[:5])
    gap = f", {profile.gap}: such rows are predicted, and not learned from" if profile.gap else ""
    evidence = f"{why}: {count_of(profile.distinct, 'value')}{gap}"
    classes_fit = profile.integers or profile.kind != "number"
    if (task == "regression" and profile.kind != "number") or (task in ("binary", "multiclass") and not classes_fit):
        raise DataError(
            f"the label {profile.name!r} is {profile.type}, {evidence}: it cannot be {task}, leave --label-type out"
        )
    if (task == "binary") != (profile.distinct == 2) and task in ("binary", "multiclass"):
        raise DataError(
            f"the label {profile.name!r} has {profile.distinct} values, and cannot be {task}: leave --label-type out"
        )
    if profile.distinct == 2 and classes_fit and task != "regression":
        return Label(
            name=profile.name, options=_binary(profile), why=f"{evidence}: {values}",
            cast=f"try_cast({column} AS BIGINT)" if fractions else "",
        )  # fmt: skip
    few = profile.distinct <= MAX_CLASSES and profile.top[-1][1] >= 2
    ordered = few and profile.integers and 3 <= profile.distinct <= _STEPS and profile.high - profile.low < 2 * _STEPS
    question = "" if task is not None or not ordered else (
        f"{profile.name} is {profile.span} in {profile.distinct} steps: regression where 4 is twice 2, multiclass "
        "where numbers are names; say --label-type, or change `type` in the file"
    )  # fmt: skip
    by_values = few and profile.integers and _classes_by_name(profile)
    if profile.kind == "text" or task == "multiclass" or (by_values and task is None):
        if profile.kind == "text" and profile.distinct > 1000:
            raise DataError(
                f"the label {profile.name!r} has {profile.distinct:,} different texts: name a column with numbers "
                "or fewer classes with --label"
            )
        classes = sorted(int(value) if fractions else value for value, _ in profile.top)
        options = (
            {"type": "multiclass", "classes": classes} if profile.distinct <= MAX_CLASSES else {"type": "multiclass"}
        )
        return Label(
            name=profile.name, options=options, why=f"{evidence}: {values}{', ...' if profile.distinct > 5 else ''}",
            cast=f"try_cast({column} AS BIGINT)" if fractions else "", question=question,
        )  # fmt: skip
    check = f"{column} IS NULL OR NOT (isnan({column}) OR abs({column}) = double('inf'))"
    hint = "; write multiclass if they are classes" if profile.integers and profile.distinct <= MAX_CLASSES else ""
    why, options = f"{evidence}, {profile.span}{hint}", {"type": "regression"}
    if profile.low >= 0 and profile.skew > 0 and profile.is_of_products:
        why += f", skewed ({profile.skew:.1f}): their logarithm is learnt, as of amounts whose causes multiply"
        options["loss"] = "poisson"
    return Label(
        name=profile.name, options=options, why=why, question=question,
        sound=check if pa.types.is_floating(profile.type) and "${" not in profile.name else "",  # Spark fills it in
    )  # fmt: skip


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


def in_time(windows: Mapping[str, int], now: datetime) -> dict[str, int]:
    """Windows that do not begin after ``now``."""
    return {name: rows for name, rows in windows.items() if name <= f"{now:%Y-%m-%dT%H}"}
