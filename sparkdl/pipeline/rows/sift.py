"""Judged rows to the files of two tables, and to their counts, in one pass.

Enters: judged rows (``expect.judged``), and a task for each table. Leaves: files of sound rows, files of refused ones,
none of them committed, and the books of each window, from one report a task. What is counted is what is written, row
by row: there is no second reading that could differ.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.names import quoted
from sparkdl.columns.numpy_arrow import one_value, to_numpy
from sparkdl.compat.quick_ack import promptly
from sparkdl.compat.spark_errors import task_errors
from sparkdl.pipeline.rows.expect import BROKEN, DUPLICATE, KEPT, OUTCOME, OWN, Outcomes, columns_hash, content_hash
from sparkdl.pipeline.rows.source import MALFORMED, WINDOW
from sparkdl.tables.parquet import FileRow, WriteTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["QUARANTINE", "clean_columns", "sift"]

QUARANTINE = (WINDOW, "reason", "row")
"""The columns of the table of refused rows, all of them texts."""
_MODULUS = 2**31 - 1

Broken = dict[tuple[str, str, bool], int]
"""Rows by window, by the expectation that they broke, and by whether they were kept."""

Sums = dict[tuple[str, str], tuple[int, list[tuple[int, int]]]]
"""By window and outcome: rows; of both hashes of these, all exclusive-ored, and the sum of all modulo ``_MODULUS``."""
_NOTHING = [(0, 0), (0, 0)]


def clean_columns(rows: DataFrame) -> list[str]:
    """The columns of the table of clean rows, as ``judged`` leaves them."""
    return [WINDOW, *(name for name in rows.columns if name not in OWN)]


def sift(
    rows: DataFrame, labels: Collection[str], clean: WriteTask, quarantine: WriteTask
) -> tuple[list[FileRow], list[FileRow], dict[str, Outcomes]]:
    """Write judged rows, and count them by window.

    Args:
        rows: as ``judged`` leaves them.
        labels: columns of these.
        clean: writes the sound ones.
        quarantine: writes the refused ones, each as JSON or as the line that could not be read.

    Returns:
        the files of both, and the books of each window.

    Raises:
        StorageError: files cannot be written.
    """
    from pyspark.sql import functions as F

    columns = clean_columns(rows)
    whole = F.to_json(F.struct(*[F.col(quoted(name)) for name in columns[1:]]), {"ignoreNullFields": "false"})
    line = F.coalesce(F.col(MALFORMED), whole) if MALFORMED in rows.columns else whole
    text = F.when(~F.col(OUTCOME).isin(KEPT, DUPLICATE), line)
    own = [F.col(OUTCOME), F.col(BROKEN), content_hash(rows), content_hash(rows, labels), text]
    selected = rows.select(*[F.col(quoted(name)) for name in columns], *own)
    # Spark's mapInArrow takes a dot in a name for a path into a struct, and a backtick for a quote.
    plain = selected.toDF(*(f"column_{number}" for number in range(len(columns) + len(own))))
    task = _Sift(columns=tuple(columns), clean=clean, quarantine=quarantine)
    with task_errors():
        found = plain.mapInArrow(task, "report binary").collect()
    reports = [json.loads(zlib.decompress(bytes(row["report"]))) for row in found]
    sound, bad = ([FileRow(**file) for one in reports for file in one[part]] for part in ("clean", "quarantine"))
    return sound, bad, _books(reports, [columns_hash(rows), columns_hash(rows, labels)])


def _books(reports: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> dict[str, Outcomes]:
    """The books of each window from the counts of all tasks; of rows that are kept with hashes of all of them.

    Args:
        reports: of the tasks.
        columns: hashes of the rows' columns, with labels and without, which are part of them.
    """
    found: dict[str, Outcomes] = {}
    hashes: dict[str, list[tuple[int, int]]] = {}
    for window, outcome, rows, *folded in (line for report in reports for line in report["sums"]):
        into = found.setdefault(window, Outcomes())
        into.rows[outcome] = into.rows.get(outcome, 0) + rows
        if outcome == KEPT:
            before = hashes.get(window, _NOTHING)
            hashes[window] = [(mixed ^ m, added + a) for (mixed, added), (m, a) in zip(before, folded, strict=True)]
    for window, folded in hashes.items():
        into = found[window]
        both = zip(columns, folded, strict=True)
        into.content, into.unlabelled = (f"{named}.{into.rows[KEPT]}.{mixed}.{added}" for named, (mixed, added) in both)
    for window, name, kept, rows in (line for report in reports for line in report["broken"]):
        into = found[window]
        into.broken[name] = into.broken.get(name, 0) + rows
        if kept:
            into.warned[name] = into.warned.get(name, 0) + rows
    return dict(sorted(found.items()))


@dataclass(frozen=True, kw_only=True)
class _Sift:
    """The function that every task of the pass runs.

    Attributes:
        columns: of sound rows, the window first.
        clean: writes these.
        quarantine: writes window, reason and text of refused ones.
    """

    columns: tuple[str, ...]
    clean: WriteTask
    quarantine: WriteTask

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        sums: Sums = {}
        broken: Broken = {}
        with self.clean.open() as clean, self.quarantine.open() as quarantine:
            for batch in promptly(batches):
                judged = _Judged(batch, self.columns)
                judged.count(sums, broken)
                clean.write(judged.sound())
                quarantine.write(judged.refused())
            report = {
                "clean": [asdict(file) for file in clean.finish()],
                "quarantine": [asdict(file) for file in quarantine.finish()],
                "sums": [[*key, rows, *folded] for key, (rows, folded) in sums.items()],
                "broken": [[*key, rows] for key, rows in broken.items()],
            }
        yield pa.RecordBatch.from_arrays([one_value(zlib.compress(json.dumps(report).encode(), level=1))], ["report"])


class _Judged:
    """A batch: columns of sound rows, the window first; then outcome, what was broken, hashes, a refused row's text."""

    def __init__(self, batch: pa.RecordBatch, columns: Sequence[str]) -> None:
        self.rows = pa.RecordBatch.from_arrays(batch.columns[: len(columns)], list(columns))
        self.outcomes, self.broken, *self.hashes, self.texts = batch.columns[len(columns) :]
        self.windows = batch.column(0)
        self.kept = pc.equal(self.outcomes, KEPT)

    def sound(self) -> pa.RecordBatch:
        return self.rows if self.kept.true_count == len(self.kept) else self.rows.filter(self.kept)

    def refused(self) -> pa.RecordBatch:
        there = pc.is_valid(self.texts)
        columns = [column.filter(there) for column in (self.windows, self.outcomes, self.texts)]
        return pa.RecordBatch.from_arrays(columns, list(QUARANTINE))

    def count(self, sums: Sums, broken: Broken) -> None:
        """Add the rows of the batch."""
        windows, outcomes = self.windows.dictionary_encode(), self.outcomes.dictionary_encode()
        codes = to_numpy(windows.indices).astype(np.int64) * len(outcomes.dictionary) + to_numpy(outcomes.indices)
        groups = np.unique(codes)
        for code in groups.tolist():
            window, outcome = divmod(code, len(outcomes.dictionary))
            key = windows.dictionary[window].as_py(), outcomes.dictionary[outcome].as_py()
            chosen = slice(None) if len(groups) == 1 else codes == code
            rows, before = sums.get(key, (0, _NOTHING))
            folded = []
            for hashes, (mixed, added) in zip(map(to_numpy, self.hashes), before, strict=True):
                found = hashes[chosen]
                folded.append((mixed ^ int(np.bitwise_xor.reduce(found)), added + int(np.mod(found, _MODULUS).sum())))
            sums[key] = rows + len(found), folded
        if len(names := self.broken.flatten()):
            rows = pc.list_parent_indices(self.broken)
            table = pa.table([self.windows.take(rows), names, self.kept.take(rows)], ["window", "name", "kept"])
            counted = table.group_by(table.column_names).aggregate([([], "count_all")])
            for row in counted.to_pylist():
                told = row["window"], row["name"], row["kept"]
                broken[told] = broken.get(told, 0) + row["count_all"]
