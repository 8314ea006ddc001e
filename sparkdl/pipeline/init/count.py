"""Counting over all rows of a table, within bounds of memory: different values, and rows by the hour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.types import is_text

COUNTED_ROWS, _AT_ONCE = 64_000_000, 16_000_000
"""Rows of a table whose keys are counted, and hashes that are kept in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Values of one or several columns together, over all rows.

    Attributes:
        rows: of the table.
        distinct: different values.
        missing: rows without one.
    """

    rows: int
    distinct: int
    missing: int

    @property
    def unique(self) -> bool:
        """Whether no two rows have the same, and none has none."""
        return self.distinct == self.rows and not self.missing


def count_values(read: Callable[[], Iterable[pa.Table]]) -> Counted | None:
    """Count rows, different values and rows without one; None above ``COUNTED_ROWS`` rows.

    Values are told apart by a hash of 64 bits: two that share one, which is unlikelier than one in 8,000 for 64 million
    rows, would make a key look like none, never the other way round.

    Args:
        read: reads the columns from the beginning, as tables of them alone.
    """
    rows = missing = 0
    hash_chunks: list[Any] = []
    for table in read():
        hashes, complete = _hashes(table)
        rows, missing = rows + table.num_rows, missing + int(table.num_rows - complete.sum())
        hash_chunks = [*hash_chunks, hashes[complete]] if rows <= _AT_ONCE else []
        if rows > COUNTED_ROWS:
            return None
    turns = -(-rows // _AT_ONCE)
    if turns <= 1:
        return Counted(rows=rows, distinct=_distinct(hash_chunks), missing=missing)
    distinct = 0
    for turn in range(turns):
        hash_chunks = []
        for table in read():
            hashes, complete = _hashes(table)
            hash_chunks.append(hashes[complete & (hashes % np.uint64(turns) == np.uint64(turn))])
        distinct += _distinct(hash_chunks)
    return Counted(rows=rows, distinct=distinct, missing=missing)


def count_hours(batches: Iterable[pa.Table]) -> dict[str, int]:
    """Count rows by the hour in the one column of the tables: dates, times, or texts that begin as ISO 8601 has them.

    Rows without one are left out.
    """
    rows_by_hour: Counter[str] = Counter()
    for table in batches:
        times = table.column(0).drop_null()
        if is_text(times.type):  # of a day alone, its first hour
            texts = times.cast(pa.large_string())
            hours = pc.replace_substring(pc.utf8_slice_codeunits(texts, 0, 13), " ", "T").value_counts()
            for name, rows in zip(hours.field("values").to_pylist(), hours.field("counts").to_pylist(), strict=True):
                rows_by_hour[name if len(name) == 13 else f"{name}T00"] += rows
        elif len(times):
            seconds = np.asarray(times.cast(pa.timestamp("s"), safe=False).cast(pa.int64()))
            numbers, counts = np.unique(seconds // 3600, return_counts=True)
            rows_by_hour.update(
                {str(np.datetime64(n, "h")): rows for n, rows in zip(numbers.tolist(), counts.tolist(), strict=True)}
            )
    return dict(sorted(rows_by_hour.items()))


def _distinct(kept: list[Any]) -> int:
    return len(np.unique(np.concatenate(kept))) if kept else 0


def _hashes(table: pa.Table) -> tuple[Any, Any]:
    """A hash of 64 bits a row, and whether the row has a value in every column."""
    import pandas as pd

    row_hashes, complete = np.zeros(table.num_rows, np.uint64), np.ones(table.num_rows, bool)
    for column in table.columns:
        values = pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0)
        complete &= values.is_valid().to_numpy(zero_copy_only=False)
        integer = pa.types.is_integer(values.type)
        filled = values.fill_null(0) if integer else values.cast(pa.large_string()).fill_null("")
        hashed = pd.util.hash_array(filled.to_numpy(zero_copy_only=False), categorize=False)
        row_hashes = row_hashes * np.uint64(1_000_003) ^ hashed
    return row_hashes, complete
