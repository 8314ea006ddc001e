"""Dates and times that are written with the day or the month first: how, and what they are."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["DateFormat", "date_format_of"]

_DATED = r"^(?P<first>\d{1,2})(?P<sep>[/.-])(?P<second>\d{1,2})(?P<sep2>[/.-])\d{4}(?P<time> \d{1,2}:\d\d(?::\d\d)?)?$"
_TIMES = (("", ""), (" H:mm", " %H:%M"), (" H:mm:ss", " %H:%M:%S"))


@dataclass(frozen=True)
class DateFormat:
    """How dates are written.

    Attributes:
        spark: as an option of Spark's reader says it, such as ``M/d/yyyy H:mm``.
        strptime: as the standard library says it.
        type: of what they are.
    """

    spark: str
    strptime: str
    type: pa.DataType

    def read(self, texts: pa.Array) -> pa.Array:
        """The dates, null where a text is none; times are of UTC."""
        times = pc.strptime(texts, format=self.strptime, unit="us", error_is_null=True)
        return times.cast(self.type) if pa.types.is_date(self.type) else pc.assume_timezone(times, "UTC")


def date_format_of(column: pa.Array) -> DateFormat | None:
    """How all texts of a column are written; None where they are no such dates, or none tells day and month apart."""
    parts = pc.extract_regex(column.drop_null(), _DATED)
    if not len(parts) or parts.null_count:
        return None
    first, sep, second, sep2, time = (parts.field(position) for position in range(5))
    separators, colons = pc.unique(pa.concat_arrays([sep, sep2])), pc.unique(pc.count_substring(time, ":"))
    is_day = [pc.max(part.cast(pa.int8())).as_py() > 12 for part in (first, second)]
    if len(separators) > 1 or len(colons) > 1 or is_day[0] == is_day[1]:
        return None
    mark, (of_spark, of_strptime) = separators[0].as_py(), _TIMES[colons[0].as_py()]
    order = ("d", "M") if is_day[0] else ("M", "d")
    return DateFormat(
        spark=mark.join([*order, "yyyy"]) + of_spark,
        strptime=mark.join(f"%{part.replace('M', 'm')}" for part in (*order, "Y")) + of_strptime,
        type=pa.timestamp("us", "UTC") if of_spark else pa.date32(),
    )
