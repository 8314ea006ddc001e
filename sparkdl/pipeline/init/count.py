"""Counting over all rows of a table, within bounds of memory: different values, and rows by the hour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.types import is_text

_AT_ONCE = 16_000_000
"""Hashes that are kept in memory at a time."""


def count_values(read: Callable[[], Iterable[pa.Table]], about: int) -> tuple[int, int]:
    """Count rows, and their different values where none of the columns is missing.

    Values are told apart by a hash of 64 bits: two that share one, which is unlikelier than one in 8,000 for 64 million
    rows, would make a key look like none, never the other way round.

    Args:
        read: reads the columns from the beginning, as tables of them alone.
        about: how many rows there may be; so often they are read that the hashes of each turn have room.
    """
    import pandas as pd

    rows = distinct = 0
    turns = max(1, -(-about // _AT_ONCE))
    for turn in range(turns):
        rows, kept = 0, [np.zeros(0, np.uint64)]
        for table in read():
            rows += table.num_rows
            complete = table.drop_null().to_pandas(date_as_object=False)
            hashes = pd.util.hash_pandas_object(complete, index=False, categorize=False).to_numpy()
            kept.append(hashes[hashes % np.uint64(turns) == turn])
        distinct += len(np.unique(np.concatenate(kept)))
    return rows, distinct


def count_hours(columns: Iterable[Any]) -> dict[str, int]:
    """Count values by the hour (``2026-03-01T05``): dates, times, or texts that begin as ISO 8601 has them.

    What is none, such as 2026-02-30, and times beyond the year 9999 are left out.
    """
    rows_by_hour: Counter[str] = Counter()
    for times in columns:
        if is_text(times.type):
            texts = times.drop_null().cast(pa.large_string())
            counts = pc.utf8_slice_codeunits(texts, 0, 13).value_counts()
        else:
            seconds = in_calendar(times).cast(pa.timestamp("s"), safe=False)
            counts = pc.floor_temporal(seconds, unit="hour").value_counts()
        for value, rows in zip(*(part.to_pylist() for part in counts.flatten()), strict=True):
            with suppress(ValueError):  # of a day alone, its first hour
                rows_by_hour[datetime.fromisoformat(str(value)[:13]).isoformat()[:13]] += rows
    return dict(sorted(rows_by_hour.items()))


def in_calendar(times: Any) -> Any:
    """The times that lie in the years 1 to 9999, as Python's do; the others are as good as missing."""
    seconds = times.cast(pa.timestamp("s"), safe=False).cast(pa.int64())
    first, last = (int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) for year in (1, 9999))
    return times.filter(pc.and_(pc.greater_equal(seconds, first), pc.less(seconds, last + 365 * 86_400)))
