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
from sparkdl.pipeline.windows import MALFORMED, WINDOW
from sparkdl.tables.parquet import FileRow, WriteTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LINE = "__sparkdl_line"
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
    read: Callable[[Task, str], DataFrame] | None = None,
) -> tuple[list[FileRow], list[FileRow], dict[str, Outcomes]]:
    """Write validated rows to files that nobody has committed yet, and count by window what is written.

    Args:
        rows: as ``validated`` leaves them.
        labels: columns of these.
        clean: writes the valid ones.
        quarantine: writes the invalid ones, each as JSON or as the line that could not be read.
        read: what a task makes of the validated rows, with this schema, where ``rows`` only tells their columns.

    Returns:
        the files of both, and what became of the rows of each window.

    Raises:
        StorageError: files cannot be written.
    """
    from pyspark.sql import functions as F

    columns = clean_columns(rows)
    task = _Validation(columns=tuple(columns), labels=frozenset(labels), clean=clean, quarantine=quarantine)
    if read is None:
        line = F.col(MALFORMED) if MALFORMED in rows.columns else F.lit(None).cast("string")
        row = row_of([*columns, OUTCOME, BROKEN, _LINE])
        report = map_row(rows.withColumn(_LINE, line), row, task, "report binary")
    else:
        report = read(task, "report binary")
    with task_errors():
        reported = report.collect()
    reports = [json.loads(zlib.decompress(bytes(row["report"]))) for row in reported]
    valid = [FileRow(**file) for report in reports for file in report["clean"]]
    invalid = [FileRow(**file) for report in reports for file in report["quarantine"]]
    return valid, invalid, _outcomes(reports, [columns_hash(rows), columns_hash(rows, labels)])


def fingerprints(
    source: DataFrame, read: Callable[[Task, str], DataFrame] | None = None
) -> tuple[dict[str, str], dict[str, int]]:
    """A hash of the columns and the rows of each window, as ``Outcomes.everything`` is one, and their number.

    Args:
        source: the rows.
        read: what a task makes of the rows, with this schema, where ``source`` only tells their columns.
    """
    from pyspark.errors import PySparkTypeError
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import to_arrow_type

    columns, readable = clean_columns(source), source
    task = _Fingerprint(tuple(columns))
    for name in columns if read is None else ():
        try:
            to_arrow_type(source.schema[name].dataType, timezone="UTC")
        except PySparkTypeError:  # only a transform that does without it can take it
            readable = readable.withColumn(name, F.col(quoted(name)).cast("string"))
    with task_errors():
        if read is None:
            reported = map_row(readable, row_of(columns), task, "report binary").collect()
        else:
            reported = read(task, "report binary").collect()
    outcomes_by_window = _outcomes([json.loads(bytes(row["report"])) for row in reported], [columns_hash(source)] * 2)
    hashes = {name: outcomes.everything for name, outcomes in outcomes_by_window.items()}
    return hashes, {name: outcomes.total for name, outcomes in outcomes_by_window.items()}


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


def _add(sums: Sums, windows: pa.Array, outcomes: pa.Array, rows: pa.RecordBatch, labels: Collection[str]) -> None:
    """Add the rows of a batch by window and outcome; all columns of ``rows`` are hashed."""
    named, reasons = windows.dictionary_encode(), outcomes.dictionary_encode()
    codes = to_numpy(named.indices).astype(np.int64) * len(reasons.dictionary) + to_numpy(reasons.indices)
    by_column = column_hashes(dict(zip(rows.schema.names, rows.columns, strict=True)))
    inputs, label_hashes = np.zeros((2, rows.num_rows), np.uint64)
    for name, hashes in by_column.items():
        into = label_hashes if name in labels else inputs
        into += hashes
    hashed = mixed(inputs + label_hashes), mixed(inputs)
    groups = np.unique(codes)
    for code in groups.tolist():
        window, outcome = divmod(code, len(reasons.dictionary))
        key = named.dictionary[window].as_py(), reasons.dictionary[outcome].as_py()
        chosen = slice(None) if len(groups) == 1 else codes == code
        folded = [(int(np.bitwise_xor.reduce(hashes[chosen])), int(np.add.reduce(hashes[chosen]))) for hashes in hashed]
        count, earlier = sums.get(key, (0, _NOTHING))
        sums[key] = count + len(hashed[0][chosen]), _together(earlier, folded)


def _of_sums(sums: Sums) -> list[Any]:
    return [[*key, rows, *folded] for key, (rows, folded) in sums.items()]


@dataclass(frozen=True)
class _Fingerprint:
    """Sums up the rows of a task as they are read; the window is the first of the columns."""

    columns: tuple[str, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        sums: Sums = {}
        for batch in batches:
            rows = pa.RecordBatch.from_arrays(batch.columns[1:], list(self.columns[1:]))
            _add(sums, batch.column(0), pa.repeat(_KEPT, len(rows)), rows, ())
        report = {"sums": _of_sums(sums), "broken": []}
        yield pa.RecordBatch.from_arrays([one_value(json.dumps(report).encode())], ["report"])


@dataclass(frozen=True, kw_only=True)
class _Validation:
    """The function that every task of the pass runs; the window is the first of the columns of valid rows."""

    columns: tuple[str, ...]
    labels: frozenset[str]
    clean: WriteTask
    quarantine: WriteTask

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        sums: Sums = {}
        broken: Broken = Counter()
        with self.clean.open() as clean, self.quarantine.open() as quarantine:
            for batch in batches:
                validated = _ValidatedBatch(batch, self.columns)
                validated.count(sums, broken, self.labels)
                clean.write(validated.valid())
                quarantine.write(validated.invalid())
            report = {
                "clean": [asdict(file) for file in clean.finish()],
                "quarantine": [asdict(file) for file in quarantine.finish()],
                "sums": _of_sums(sums),
                "broken": [[*key, rows] for key, rows in broken.items()],
            }
        yield pa.RecordBatch.from_arrays([one_value(zlib.compress(json.dumps(report).encode(), level=1))], ["report"])


class _ValidatedBatch:
    """A batch: columns of valid rows, the window first; then outcome, what was broken, the line if it is not whole."""

    def __init__(self, batch: pa.RecordBatch, columns: Sequence[str]) -> None:
        self.rows = pa.RecordBatch.from_arrays(batch.columns[: len(columns)], list(columns))
        self.outcomes, self.broken, self.lines = batch.columns[len(columns) :]
        self.windows = batch.column(0)
        self.kept = pc.equal(self.outcomes, _KEPT)

    def valid(self) -> pa.RecordBatch:
        return self.rows if self.kept.true_count == len(self.kept) else self.rows.filter(self.kept)

    def invalid(self) -> pa.RecordBatch:
        chosen = pc.invert(pc.or_(self.kept, pc.equal(self.outcomes, _DUPLICATE)))
        windows, outcomes, lines = (column.filter(chosen) for column in (self.windows, self.outcomes, self.lines))
        texts = from_values(_as_json(self.rows.filter(chosen)), pa.string())
        return pa.RecordBatch.from_arrays([windows, outcomes, pc.coalesce(lines, texts)], list(QUARANTINE))

    def count(self, sums: Sums, broken: Broken, labels: Collection[str]) -> None:
        """Add the rows of the batch."""
        rows = pa.RecordBatch.from_arrays(self.rows.columns[1:], self.rows.schema.names[1:])
        _add(sums, self.windows, self.outcomes, rows, labels)
        row_of_name = pc.list_parent_indices(self.broken)
        windows, kept_flags = self.windows.take(row_of_name), self.kept.take(row_of_name)
        names = self.broken.flatten()
        broken.update(zip(windows.to_pylist(), names.to_pylist(), kept_flags.to_pylist(), strict=True))


_JSON = msgspec.json.Encoder(decimal_format="number")


def _as_json(rows: pa.RecordBatch) -> list[str]:
    """Each row, but for its window, as JSON: times as ISO 8601, bytes in base64, NaN and infinities as words."""
    columns = []
    for column in rows.columns[1:]:
        with_zone = pa.types.is_timestamp(column.type) and column.type.tz is not None and column.type.unit == "us"
        try:
            values = instants(column) if with_zone else column.to_pylist()
        except (OverflowError, ValueError):  # a time that Python has none for
            values = column.cast(_with_texts(column.type)).to_pylist()
        kind = column.type
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
