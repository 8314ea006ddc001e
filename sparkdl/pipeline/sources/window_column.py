"""The window of each row, as an expression over the column that says when it happened.

Names are told by UTC whatever the session's time zone is; and without Spark of dates and times in Arrow, and of one
text, such as the name of a partition's folder. A text with an offset behind its time is the moment that it tells,
another one is told by its letters.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.names import quoted
from sparkdl.columns.numpy_arrow import filled, from_numpy, from_values, to_numpy
from sparkdl.errors import SchemaError
from sparkdl.pipeline.spec import SourceSection
from sparkdl.pipeline.windows import NO_TIME, WHOLE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_DAY = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
_FORMS = {"day": f"^{_DAY}$", "hour": f"^{_DAY}T([01][0-9]|2[0-3])$"}
"""How names of windows look, by how long one is; whether there is such a day they do not tell."""
_PADDED = (
    ("^([0-9]{4})-([0-9])-", r"\1-0\2-"),
    ("^([0-9]{4}-[0-9]{2})-([0-9])(?![0-9])", r"\1-0\2"),
    (f"^({_DAY}[T ][0-9:.]+) (?=[Z+-])", r"\1"),
    (f"^({_DAY}[T ][0-9]{{2}}:[0-9]{{2}})(?=[Z+-])", r"\1:00"),
)
"""Months and days of one digit, which Spark takes for dates, too; offsets after a space, or without seconds."""
_TIME, _OFFSET = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]([.][0-9]+)?", "(Z|[+-](0[0-9]|1[0-4])(:?[0-5][0-9])?)"
_WITH_OFFSET = rf"^{_DAY}[T ]{_TIME}{_OFFSET}(?![\s\S])"
"""A text that tells a moment; to Java a ``$`` would stand before a line's end as well."""
_LENGTHS = {"day": 10, "hour": 13}
_FIRST_YEAR = "0001"
"""Spark knows a year 0, Python's dates begin after it."""
_US_PER_HOUR = 3_600_000_000
_EPOCH = datetime(1970, 1, 1)


def window_column(frame: DataFrame, section: SourceSection, partition_is_text: bool = False) -> Column:
    """The expression for the window of a row.

    Args:
        frame: the rows.
        section: of their source.
        partition_is_text: see ``Source.partition_is_text``.

    Raises:
        SchemaError: the column is not there, or is no date, timestamp or text.
    """
    from pyspark.sql import functions as F

    if section.when is None:
        return F.lit(WHOLE)
    key = "partition" if section.partition is not None else "time"
    if section.when not in frame.columns:
        raise SchemaError(f"source.{key} names {section.when!r}, the rows have {frame.columns}: name one of these")
    column, kind = F.col(quoted(section.when)), frame.schema[section.when].dataType.typeName()
    if kind == "timestamp" and section.partition is not None and partition_is_text:
        column, kind = column.cast("string"), "string"  # as its folder is called: Spark read that in the session's zone
    if kind == "timestamp":
        text = _of_instant(column, section)
    elif kind == "timestamp_ntz":  # by its date, since the years of a format are those of an era
        day = column.cast("date").cast("string")
        text = day if section.every == "day" else F.concat_ws("T", day, F.date_format(column, "HH"))
    elif kind == "date" and section.every == "day":
        text = column.cast("string")
    elif kind == "string":
        padded = _padded(column)
        letters = F.translate(F.substring(padded, 1, _LENGTHS[section.every]), " ", "T")
        # as ltz: what a plain timestamp is, the session's settings decide
        instant = _of_instant(padded.try_cast("timestamp_ltz"), section)
        text = F.when(padded.rlike(_WITH_OFFSET), instant).otherwise(letters)
    else:
        raise SchemaError(
            f"source.{key} names {section.when!r}, which is a {kind}: windows of one {section.every} need a timestamp"
            f"{' or a date' if section.every == 'day' else ''}"
        )
    dated = F.substring(text, 1, 10).try_cast("date").isNotNull() & (text >= _FIRST_YEAR)
    return F.coalesce(F.when(text.rlike(_FORMS[section.every]) & dated, text), F.lit(NO_TIME))


def _of_instant(column: Column, section: SourceSection) -> Column:
    """The window of an instant: by arithmetic, so that the session's time zone changes nothing."""
    from pyspark.sql import functions as F

    micros, hour = F.unix_micros(column), F.lit(_US_PER_HOUR)
    # whole numbers: a fraction of a double is a moment too late in the year 9999
    hours = F.call_function("div", micros, hour) - F.when(micros % hour < 0, 1).otherwise(0)
    day, of_day = F.date_from_unix_date(F.floor(hours / 24).cast("int")).cast("string"), F.pmod(hours, F.lit(24))
    return day if section.every == "day" else F.concat_ws("T", day, F.lpad(of_day.cast("string"), 2, "0"))


def window_names(values: pa.Array, every: str) -> pa.Array:
    """The window of each of these dates, or times in microseconds: the one that ``window_column`` gives the row."""
    numbers = values.cast(pa.int32() if pa.types.is_date32(values.type) else pa.int64())
    starts = to_numpy(filled(numbers, 0))
    if not pa.types.is_date32(values.type):
        starts = starts // _US_PER_HOUR // (24 if every == "day" else 1)
    different, places = np.unique(starts, return_inverse=True)
    names = from_values([_window_from(start, every) for start in different.tolist()], pa.string())
    return pc.if_else(values.is_valid(), names.take(from_numpy(places)), from_values([NO_TIME], pa.string())[0])


def _window_from(start: int, every: str) -> str:
    """The window that begins so many days or hours after 1970 has begun."""
    try:
        return (_EPOCH + timedelta(**{f"{every}s": start})).isoformat()[: _LENGTHS[every]]
    except OverflowError:  # before the year 1, or after 9999
        return NO_TIME


def newest_first(frame: DataFrame, name: str) -> list[Column]:
    """The order of rows by the column that says when they happened, the newest first, those without a time last.

    Texts are ordered by the moments that they tell, those without an offset as if they were UTC; then by their letters,
    a day without a time among them.
    """
    from pyspark.sql import functions as F

    column = F.col(quoted(name))
    if frame.schema[name].dataType.typeName() != "string":
        return [column.desc_nulls_last()]
    padded = _padded(column)
    with_offset = F.when(padded.rlike(_WITH_OFFSET), padded).otherwise(F.concat(padded, F.lit("Z")))
    return [with_offset.try_cast("timestamp_ltz").desc_nulls_last(), column.desc_nulls_last()]


def _padded(column: Column) -> Column:
    """A text with months and days of two digits, and nothing before an offset but whole seconds."""
    from pyspark.sql import functions as F

    padded = F.trim(column)
    for short, long in _PADDED:
        padded = F.regexp_replace(padded, short, long.replace("\\", "$"))
    return padded


def window_of(text: str, section: SourceSection) -> str:
    """The window that a text tells: the one that ``window_column`` gives a row with this text.

    Args:
        text: the value of a partition.
        section: of the source.
    """
    name = text.strip(" ")
    for short, long in _PADDED:
        name = re.sub(short, long, name)
    try:
        if re.match(_WITH_OFFSET, name):
            name = datetime.fromisoformat(name).astimezone(UTC).isoformat()
        name = name[: _LENGTHS[section.every]].replace(" ", "T")
        return name if re.fullmatch(_FORMS[section.every], name) and date.fromisoformat(name[:10]) else NO_TIME
    except (ValueError, OverflowError):
        return NO_TIME
