"""The window of each row, as an expression over the column that says when it happened.

Enters: rows, the section ``source``. Leaves: a column of names, ``2026-03-02`` or ``2026-03-02T05``, told by UTC
whatever the session's time zone is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.columns.names import quoted
from sparkdl.errors import SchemaError
from sparkdl.pipeline.rows.windows import NO_TIME, WHOLE
from sparkdl.pipeline.spec import Source

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["FORMS", "window_column"]

FORMS = {"day": r"^\d{4}-\d{2}-\d{2}$", "hour": r"^\d{4}-\d{2}-\d{2}T\d{2}$"}
"""How names of windows look, by how long one is."""
_US_PER_HOUR = 3_600_000_000


def window_column(frame: DataFrame, source: Source) -> Column:
    """The expression for the window of a row.

    Raises:
        SchemaError: the column is not there, or is no date, timestamp or text.
    """
    from pyspark.sql import functions as F

    if source.when is None:
        return F.lit(WHOLE)
    if source.when not in frame.columns:
        raise SchemaError(f"source.time names {source.when!r}, the rows have {frame.columns}: name one of these")
    column, kind = F.col(quoted(source.when)), frame.schema[source.when].dataType.typeName()
    if kind == "timestamp":  # an instant: by arithmetic, so that the session's time zone changes nothing
        hours = F.floor(F.unix_micros(column) / F.lit(_US_PER_HOUR))
        day, hour = F.date_from_unix_date(F.floor(hours / 24).cast("int")).cast("string"), F.pmod(hours, F.lit(24))
        text = day if source.every == "day" else F.concat_ws("T", day, F.lpad(hour.cast("string"), 2, "0"))
    elif kind == "timestamp_ntz":
        text = F.date_format(column, "yyyy-MM-dd" if source.every == "day" else "yyyy-MM-dd'T'HH")
    elif kind == "date" and source.every == "day":
        text = column.cast("string")
    elif kind == "string":
        text = F.translate(F.substring(F.trim(column), 1, 10 if source.every == "day" else 13), " ", "T")
    else:
        raise SchemaError(
            f"source.time names {source.when!r}, which is a {kind}: windows of one {source.every} need a timestamp"
            f"{' or a date' if source.every == 'day' else ''}"
        )
    real = F.when(text.rlike(FORMS[source.every]) & F.substring(text, 1, 10).try_cast("date").isNotNull(), text)
    return F.coalesce(real, F.lit(NO_TIME))
