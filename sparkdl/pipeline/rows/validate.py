"""Validated rows to the files of two tables, and to their counts and hashes, in one pass."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.frames import map_row, row_of
from sparkdl.columns.names import quoted
from sparkdl.columns.numpy_arrow import from_values, instants, one_value, to_numpy
from sparkdl.columns.row_hash import column_hashes, mixed
from sparkdl.compat.column_names import Task
from sparkdl.compat.spark_errors import task_errors
from sparkdl.pipeline.rows.expect import BROKEN, DUPLICATE, KEPT, OUTCOME, OWN, Outcomes, columns_hash
from sparkdl.pipeline.rows.transform import arrow_type
from sparkdl.pipeline.windows import MALFORMED, WINDOW
from sparkdl.tables.parquet import FileRow, WriteTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

REPORT = "report binary"
"""What a task tells the driver: one row."""
QUARANTINE = (WINDOW, "reason", "row")
"""The columns of the table of refused rows, all of them texts."""

Broken = Counter[tuple[str, str, bool]]
"""Rows by window, by the expectation that they broke, and by whether they were kept."""

Hash = tuple[int, int]
"""A hash of rows in any order: the hashes of all exclusive-ored, and their sum modulo 2^64."""

Sums = dict[tuple[str, str], tuple[int, list[Hash]]]
"""The rows of a window with one outcome, their hash, and that without the labels, by window and outcome."""
_NOTHING: list[Hash] = [(0, 0), (0, 0)]
_KEPT, _DUPLICATE = from_values([KEPT, DUPLICATE], pa.string())


def clean_columns(rows: DataFrame) -> list[str]:
    """The columns of the table of clean rows, as ``validated`` leaves them."""
    return [WINDOW, *(name for name in rows.columns if name not in OWN)]


def validate_rows(
    rows: DataFrame,
    labels: Collection[str],
    clean: WriteTask,
    quarantine: WriteTask,
    read: Callable[[Task], DataFrame] | None = None,
) -> tuple[list[FileRow], list[FileRow], dict[str, Outcomes]]:
    """Write validated rows to files that nobody has committed yet, and count by window what is written.

    Args:
        rows: as ``validated`` leaves them.
        labels: columns of these.
        clean: writes the valid ones.
        quarantine: writes the invalid ones, each as JSON or as the line that could not be read.
        read: the reports of a task on the validated rows, where ``rows`` only tells their columns.

    Returns:
        the files of both, and what became of the rows of each window.

    Raises:
        StorageError: files cannot be written.
    """
    from pyspark.sql import functions as F

    task = _Validation(labels=frozenset(labels), clean=clean, quarantine=quarantine)
    if read is not None:
        reports = _collected(read(task))
    else:
        if MALFORMED not in rows.columns:
            rows = rows.withColumn(MALFORMED, F.lit(None).cast("string"))
        row = row_of([*clean_columns(rows), OUTCOME, BROKEN, MALFORMED])
        reports = _collected(map_row(rows, row, task, REPORT))
    valid = [FileRow(**file) for report in reports for file in report["clean"]]
    invalid = [FileRow(**file) for report in reports for file in report["quarantine"]]
    return valid, invalid, _outcomes(reports, [columns_hash(rows), columns_hash(rows, labels)])


def fingerprints(
    source: DataFrame, read: Callable[[Task], DataFrame] | None = None
) -> tuple[dict[str, str], dict[str, int]]:
    """A hash of the columns and the rows of each window, as ``Outcomes.everything`` is one, and their number.

    Args:
        source: the rows.
        read: the reports of a task on the rows, where ``source`` only tells their columns.
    """
    from pyspark.sql import functions as F

    if read is not None:
        reports = _collected(read(_fingerprint))
    else:
        unreadable = [field.name for field in source.schema if arrow_type(field.dataType) is None]
        readable = source  # only a transform that does without such a column can take it
        for name in unreadable:
            readable = readable.withColumn(name, F.col(quoted(name)).cast("string"))
        reports = _collected(map_row(readable, row_of(clean_columns(source)), _fingerprint, REPORT))
    outcomes_by_window = _outcomes(reports, [columns_hash(source)] * 2)
    hashes = {name: outcomes.everything for name, outcomes in outcomes_by_window.items()}
    return hashes, {name: outcomes.total for name, outcomes in outcomes_by_window.items()}


def _collected(report: DataFrame) -> list[dict[str, Any]]:
    """The reports of all tasks."""
    with task_errors():
        return [json.loads(zlib.decompress(bytes(row["report"]))) for row in report.collect()]


def _report(sums: Sums, broken: Broken, **files: list[dict[str, Any]]) -> pa.RecordBatch:
    facts = {
        "sums": [[*key, rows, *hashes] for key, (rows, hashes) in sums.items()],
        "broken": [[*key, rows] for key, rows in broken.items()],
        **files,
    }
    return pa.RecordBatch.from_arrays([one_value(zlib.compress(json.dumps(facts).encode(), level=1))], ["report"])


def _outcomes(reports: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> dict[str, Outcomes]:
    """What became of the rows of each window, from the reports of all tasks.

    Their hashes begin with those of the ``columns``, with labels and without.
    """
    outcomes_by_window: dict[str, Outcomes] = {}
    kept_hashes: dict[str, list[Hash]] = {}
    all_hashes: dict[str, list[Hash]] = {}
    for window, outcome, rows, *hashes in (line for report in reports for line in report["sums"]):
        outcomes = outcomes_by_window.setdefault(window, Outcomes())
        outcomes.rows[outcome] = outcomes.rows.get(outcome, 0) + rows
        for sums in (all_hashes, kept_hashes) if outcome == KEPT else (all_hashes,):
            sums[window] = _together(sums.get(window, _NOTHING), hashes)
    for window, outcomes in outcomes_by_window.items():
        outcomes.everything = _text(columns[0], outcomes.total, all_hashes[window][0])
        if window in kept_hashes:
            outcomes.content, outcomes.unlabelled = (
                _text(hash_of_columns, outcomes.rows[KEPT], folded)
                for hash_of_columns, folded in zip(columns, kept_hashes[window], strict=True)
            )
    for window, name, was_kept, rows in (line for report in reports for line in report["broken"]):
        outcomes = outcomes_by_window[window]
        outcomes.broken[name] = outcomes.broken.get(name, 0) + rows
        if was_kept:
            outcomes.warned[name] = outcomes.warned.get(name, 0) + rows
    return dict(sorted(outcomes_by_window.items()))


def _together(first: Sequence[Hash], second: Sequence[Hash]) -> list[Hash]:
    return [(a ^ c, (b + d) % 2**64) for (a, b), (c, d) in zip(first, second, strict=True)]


def _text(columns: str, rows: int, folded: Hash) -> str:
    return f"{columns}.{rows}.{folded[0]}.{folded[1]}"


def _add(sums: Sums, rows: pa.RecordBatch, outcomes: pa.Array, labels: Collection[str]) -> None:
    """Add the rows of a batch by window, the first of its columns, and outcome; all other columns are hashed."""
    windows, reasons = rows.column(0).dictionary_encode(), outcomes.dictionary_encode()
    codes = to_numpy(windows.indices).astype(np.int64) * len(reasons.dictionary) + to_numpy(reasons.indices)
    by_column = column_hashes(dict(zip(rows.schema.names[1:], rows.columns[1:], strict=True)))
    inputs, label_hashes = np.zeros((2, rows.num_rows), np.uint64)
    for name, hashes in by_column.items():
        into = label_hashes if name in labels else inputs
        into += hashes
    hashed = mixed(inputs + label_hashes), mixed(inputs)
    groups = np.unique(codes)
    for code in groups.tolist():
        window, outcome = divmod(code, len(reasons.dictionary))
        key = windows.dictionary[window].as_py(), reasons.dictionary[outcome].as_py()
        chosen = slice(None) if len(groups) == 1 else codes == code
        folded = [(int(np.bitwise_xor.reduce(hashes[chosen])), int(np.add.reduce(hashes[chosen]))) for hashes in hashed]
        count, earlier = sums.get(key, (0, _NOTHING))
        sums[key] = count + len(hashed[0][chosen]), _together(earlier, folded)


def _fingerprint(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Sums up the rows of a task as they are read; the window is the first of the columns."""
    sums: Sums = {}
    for rows in batches:
        _add(sums, rows, pa.repeat(_KEPT, len(rows)), ())
    yield _report(sums, Counter())


@dataclass(frozen=True, kw_only=True)
class _Validation:
    """The function that every task of the pass runs.

    It takes the columns of valid rows, the window first, then outcome, what was broken, and the line if it is not
    whole.
    """

    labels: frozenset[str]
    clean: WriteTask
    quarantine: WriteTask

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        sums: Sums = {}
        broken: Broken = Counter()
        with self.clean.open() as clean, self.quarantine.open() as quarantine:
            for batch in batches:
                *columns, outcomes, broken_names, lines = batch.columns
                rows = pa.RecordBatch.from_arrays(columns, batch.schema.names[: len(columns)])
                windows, kept = rows.column(0), pc.equal(outcomes, _KEPT)
                _add(sums, rows, outcomes, self.labels)
                row_of_name = pc.list_parent_indices(broken_names)
                keys = windows.take(row_of_name), broken_names.flatten(), kept.take(row_of_name)
                broken.update(zip(*(key.to_pylist() for key in keys), strict=True))
                clean.write(rows if kept.true_count == len(kept) else rows.filter(kept))
                invalid = pc.invert(pc.or_(kept, pc.equal(outcomes, _DUPLICATE)))
                texts = from_values(_as_json(rows.filter(invalid)), pa.string())
                texts = pc.coalesce(lines.filter(invalid), texts)
                refused = [windows.filter(invalid), outcomes.filter(invalid), texts]
                quarantine.write(pa.RecordBatch.from_arrays(refused, list(QUARANTINE)))
            files = {
                "clean": [asdict(file) for file in clean.finish()],
                "quarantine": [asdict(file) for file in quarantine.finish()],
            }
        yield _report(sums, broken, **files)


_JSON = msgspec.json.Encoder(decimal_format="number")


def _as_json(rows: pa.RecordBatch) -> list[str]:
    """Each row, but for its window, as JSON: times as ISO 8601, bytes in base64, NaN and infinities as words."""
    columns = []
    for column in rows.columns[1:]:
        kind = column.type
        with_zone = pa.types.is_timestamp(kind) and kind.tz is not None and kind.unit == "us"
        try:
            values = instants(column) if with_zone else column.to_pylist()
        except (OverflowError, ValueError):  # a time that Python has none for
            values = column.cast(_with_texts(kind)).to_pylist()
        columns.append([_sayable(value, kind) for value in values])
    names = rows.schema.names[1:]
    return [_JSON.encode(dict(zip(names, row, strict=True))).decode() for row in zip(*columns, strict=True)]


def _with_texts(kind: pa.DataType) -> pa.DataType:
    """The type with texts for times."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_with_texts(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_with_texts(kind.key_type), _with_texts(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(_with_texts(kind.value_type))
    return pa.string() if pa.types.is_temporal(kind) else kind


def _sayable(value: Any, kind: pa.DataType) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or not pa.types.is_nested(kind):
        return value
    if pa.types.is_struct(kind):
        return {field.name: _sayable(value[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        return {str(key): _sayable(item, kind.item_type) for key, item in value}
    return [_sayable(item, kind.value_type) for item in value]
