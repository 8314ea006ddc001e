"""How many rows entered a pass, by window, without a reading of their own.

Enters: rows as they are read. Leaves: the same rows, counted by Spark on their way with one sum more, in which each row
stands for its window: what leaves the pass must give both numbers again, so no window lost or gained a row. Only where
they differ are the rows read once more and counted by window, since a stage that Spark ran twice counts twice as well.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparkdl.errors import DataError
from sparkdl.pipeline.rows.source import WINDOW

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Entered"]


class Entered:
    """The rows that entered one pass."""

    def __init__(self) -> None:
        from pyspark.sql import Observation

        self._seen = Observation()

    def observe(self, rows: DataFrame) -> DataFrame:
        """The same rows; they are counted when an action reads them, once."""
        from pyspark.sql import functions as F

        marks = F.sum(F.crc32(F.col(WINDOW).cast("binary")))
        return rows.observe(self._seen, F.count(F.lit(1)).alias("rows"), marks.alias("marks"))

    def check(self, left: Mapping[str, int], rows: DataFrame) -> None:
        """Compare with what left the pass.

        Args:
            left: rows by window.
            rows: those that entered, to count them by window where the sums differ.

        Raises:
            DataError: names the first window that lost or gained rows, and both counts.
        """
        seen = self._seen.get
        marks = sum(zlib.crc32(str(window).encode()) * count for window, count in left.items())
        if (seen["rows"], seen["marks"] or 0) == (sum(left.values()), marks):
            return
        counts = {row[WINDOW]: row["count"] for row in rows.groupBy(WINDOW).count().collect()}
        for name in sorted({*counts, *left}, key=str):
            if counts.get(name, 0) != left.get(name, 0):
                raise DataError(
                    f"window {name} had {left.get(name, 0)} rows when they were judged and has {counts.get(name, 0)}: "
                    "the source changed meanwhile, or the transform is not the same twice; run again"
                )
