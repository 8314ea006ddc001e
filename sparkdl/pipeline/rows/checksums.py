"""A checksum of the rows that enter a pass, by window, and the check that as many leave it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparkdl.errors import DataError
from sparkdl.observe import logger
from sparkdl.pipeline.rows.expect import KEPT, Outcomes
from sparkdl.pipeline.windows import NO_TIME, WINDOW

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

AS_READ = "as read"
"""Stands for the fingerprint of a window that is due whatever it is: the pass that writes the rows tells it."""


class RowChecksum:
    """A count of the rows that enter one pass, and a sum in which each row stands for its window.

    Only where what leaves the pass gives other numbers are the rows read once more and counted by window, since a stage
    that Spark ran twice counts twice as well.
    """

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
        observation = self._seen.get
        marks = sum(zlib.crc32(str(window).encode()) * count for window, count in left.items())
        if (observation["rows"], observation["marks"] or 0) == (sum(left.values()), marks):
            return
        counts = counted(rows)
        for name in sorted({*counts, *left}, key=str):
            if counts.get(name, 0) != left.get(name, 0):
                raise DataError(
                    f"window {name} had {left.get(name, 0)} rows when they were judged and has {counts.get(name, 0)}: "
                    "the source changed meanwhile, or the transform is not the same twice; run again"
                )


def counted(rows: DataFrame) -> dict[str, int]:
    """The rows of each window, for which Parquet's footers are enough.

    They are read by themselves: what a transform reads of its rows is not all of them where it takes some (LIMIT), or
    where Spark sees that the other side of a join is empty.
    """
    return {row[WINDOW]: row["count"] for row in rows.groupBy(WINDOW).count().collect()}


def check_counts(
    todo: Mapping[str, str], outcomes_by_window: Mapping[str, Outcomes], rows_before: Mapping[str, int]
) -> None:
    """Refuse windows that are not due, windows that the transform has emptied, and windows without a valid row."""
    not_due = sorted(set(outcomes_by_window) - set(todo), key=str)
    if not_due:
        rows = outcomes_by_window[not_due[0]].total
        raise DataError(
            f"the transform moved {rows} rows into the window {not_due[0]}, which is not due: "
            "change the column that says when a row happened in the source, not in the transform"
        )
    for name in todo:
        if rows_before.get(name) and name not in outcomes_by_window and name != NO_TIME:
            raise DataError(
                f"window {name} has {rows_before[name]} rows in the source, and the transform leaves none of them: "
                "load what it joins them with and run again, correct the transform, or leave the window out of the "
                "source"
            )
    for name, outcomes in outcomes_by_window.items():
        if not outcomes.rows.get(KEPT) and name != NO_TIME:
            reason, rows = max(outcomes.quarantined.items(), key=lambda item: item[1])
            raise DataError(
                f"all {outcomes.total} rows of window {name} are refused, {rows} of them for {reason!r}: deliver the "
                "window again, or correct the expectation"
            )


def check_hashes(todo: Mapping[str, str], outcomes_by_window: Mapping[str, Outcomes], alive: bool) -> None:
    """Compare the rows of windows with their fingerprints, see ``validate.fingerprints``.

    Args:
        todo: fingerprint of each window, taken by a pass of its own.
        outcomes_by_window: what came of its rows.
        alive: whether rows of the source may change while it is read, as in a database: a window that did is taken as
            it is, under the fingerprint of before, so that the next run reads it once more.

    Raises:
        DataError: rows are other ones than those of the fingerprint, and may not be.
    """
    for name, fingerprint in todo.items():
        outcomes = outcomes_by_window.get(name, Outcomes())
        if not fingerprint or fingerprint in (AS_READ, outcomes.everything):  # empty: the source no longer holds it
            continue
        _, rows, _, _ = fingerprint.split(".")
        difference = (
            f"window {name} had {rows} rows when it was looked at, and {outcomes.total} rows, or others, when they "
            "were judged: the source changed meanwhile"
        )
        if not alive:
            raise DataError(
                f"{difference}, or is not the same twice; run again, or let a function of yours return the same rows "
                "with a window and without"
            )
        logger.warning("%s; the next run reads the window once more", difference)
