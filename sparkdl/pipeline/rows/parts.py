"""Which rows train, validate, test and are scored: parts of the clean rows.

By time a part is whole windows; by a hash or a column every window can hold rows of each part.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from sparkdl.columns.names import quoted
from sparkdl.columns.numpy_arrow import from_numpy, from_values
from sparkdl.columns.spark_hash import hashes_as_spark, xxhash64
from sparkdl.errors import DataError, SchemaError
from sparkdl.pipeline.rows.expect import OWN, SLOT, columns_of, content_hash
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.spec import ColumnSplit, HashSplit, PipelineSpec, Split, TimeSplit
from sparkdl.pipeline.spec.base import hours_of, spelled
from sparkdl.pipeline.windows import NO_TIME, PARTS, WINDOW, Part, Parts, split_by_time

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

PART = "__sparkdl_part"
"""The column that says of which part a row is."""
_SLOTS = 1_000_000


def parts_of(
    spec: PipelineSpec, window_receipts: Mapping[str, WindowReceipt], *, train: bool = True, hold_back: bool = True
) -> Parts:
    """Divide the windows that have clean rows.

    Args:
        spec: the pipeline.
        window_receipts: what is known of the clean rows of each window.
        train: whether the parts to train and to validate are needed.
        hold_back: whether the windows to score are kept from training and validation, as the split says. Otherwise the
            newest windows validate, those before them train, and what is scored stays the same.

    Raises:
        DataError: a part that is needed is left without a window.
    """
    if not window_receipts:
        raise DataError("the source has no rows, or none of a window that has begun: wait for data, or correct source")
    windows = [name for name, receipt in window_receipts.items() if receipt.kept and name != NO_TIME]
    if not windows:
        raise DataError(f"there is no window with clean rows{_outcomes(window_receipts)}: check source and expect")
    if not isinstance(spec.split, TimeSplit):
        everything = tuple(sorted(windows))
        tested = everything if spec.split is not None and spec.split.test else ()
        return Parts(train=everything, validate=everything, test=tested, score=everything)
    split = spec.split
    train_hours = None if split.train == "all" else hours_of(split.train)
    test_hours = hours_of(split.test) if split.test else 0

    def divided(score: int, *needed: Part) -> Parts:
        validate = hours_of(split.validate)
        return split_by_time(windows, train=train_hours, validate=validate, test=test_hours, score=score, needed=needed)

    held_back = divided(hours_of(split.score), *(PARTS if train else ("score",)))
    return held_back if hold_back else replace(divided(0, "train", "validate", "test"), score=held_back.score)


def _outcomes(window_receipts: Mapping[str, WindowReceipt]) -> str:
    """What became of the rows that were read, in words; empty where there were none."""
    counts: Counter[str] = Counter()
    for receipt in window_receipts.values():
        counts.update({**receipt.outcomes, "duplicate": receipt.duplicates, "kept without a time": receipt.kept})
    parts = [f"{rows:,} rows {name}" for name, rows in counts.most_common(3) if rows]
    return f" ({', '.join(parts)})" if parts else ""


def with_slots(clean: DataFrame, spec: PipelineSpec) -> DataFrame:
    """The clean rows with the column ``SLOT``, by which a hash divides them; as they are where another split does.

    Args:
        clean: whole windows, since copies are numbered among all rows of a window.
        spec: the pipeline.
    """
    split = spec.split
    if not isinstance(split, HashSplit):
        return clean
    # were labels hashed, copies of a row with label 1 could all train, and those with label 0 all judge
    units = [unit_of(clean, spec)] if split.copies == "spread" else _units(clean, spec, without=spec.label)
    return clean.withColumn(SLOT, _slot(split, units))


def hashes_rows(spec: PipelineSpec) -> bool:
    """Whether the part of a row follows from all that it holds."""
    return isinstance(spec.split, HashSplit) and not spec.split.group  # which is the key, if nothing else


def rows_of(clean: DataFrame, spec: PipelineSpec, part: Part, windows: Sequence[str]) -> DataFrame:
    """The clean rows of one part.

    Args:
        clean: the table of clean rows, with ``_window``; with or without slots, see ``with_slots``.
        spec: the pipeline.
        part: which.
        windows: of that part, or some of them.

    Raises:
        SchemaError: the column of the split is not there.
    """
    rows, conditions = _divided(clean, spec, {part: windows})
    return rows.where(conditions[part]).drop(SLOT)


def rows_of_parts(clean: DataFrame, spec: PipelineSpec, windows: Mapping[Part, Sequence[str]]) -> DataFrame:
    """The clean rows of several parts, to be read at once: the column ``PART`` says of which each row is.

    Some rows may be of none of them, which have null there: where whole rows are hashed, and not kept in memory, a
    condition that leaves them out would have Spark hash each row twice.

    Args:
        clean: the table of clean rows, with ``_window``; with or without slots, see ``with_slots``.
        spec: the pipeline.
        windows: of each part, or some of them.

    Raises:
        SchemaError: the column of the split is not there.
    """
    from pyspark.sql import functions as F

    rows, conditions = _divided(clean, spec, windows)
    named = [F.when(condition, F.lit(part)) for part, condition in conditions.items()]
    rows = rows.withColumn(PART, F.coalesce(*named)).drop(SLOT)
    return rows if hashes_rows(spec) else rows.where(F.col(PART).isNotNull())


def _divided(
    clean: DataFrame, spec: PipelineSpec, windows: Mapping[Part, Sequence[str]]
) -> tuple[DataFrame, dict[Part, Column]]:
    """The rows of the windows of several parts, and the condition of each part."""
    from pyspark.sql import functions as F

    rows = clean if SLOT in clean.columns else with_slots(clean, spec)
    rows = rows.where(F.col(WINDOW).isin(*dict.fromkeys(itertools.chain(*windows.values()))))
    conditions: dict[Part, Column] = {}
    for part, names in windows.items():
        of_part, of_windows = _condition(clean, spec.split, part), F.col(WINDOW).isin(*names)
        conditions[part] = of_windows if of_part is None else of_windows & of_part
    return rows, conditions


def unseen_rows(
    rows: DataFrame,
    spec: PipelineSpec,
    windows: Sequence[str],
    split: Mapping[str, Any],
    columns: Mapping[str, str],
    labels: Collection[str],
) -> Column | None:
    """Which held-out rows another training has not seen; None where none of them can have been part of it.

    Args:
        rows: that are held out now.
        spec: the pipeline as it is now.
        windows: of these rows, those that the other was trained on.
        split: which rows of these; empty where that is not known, and is taken to be as now.
        columns: the types of the clean rows by their names, as they were then; likewise.
        labels: names of the labels then; likewise.
    """
    from pyspark.sql import functions as F

    then = msgspec.convert(split, Split) if split else spec.split
    cut_as_now = then == spec.split and not isinstance(then, TimeSplit)
    if cut_as_now and isinstance(then, HashSplit) and not then.group:
        # a hash of whole rows is another one once there is another column or label
        same_columns = not columns or list(columns.items()) == list(columns_of(rows).items())
        cut_as_now = same_columns and set(labels or spec.label) == set(spec.label)
    if not windows or cut_as_now:
        return None
    taught = F.col(WINDOW).isin(*windows)
    if isinstance(then, ColumnSplit) and then.column not in rows.columns:
        return ~taught
    if not isinstance(then, HashSplit):
        condition = _condition(rows, then, "train")
        return ~taught if condition is None else ~(taught & F.coalesce(condition, F.lit(False)))
    types, labels = columns_of(rows), labels or spec.label
    hashed = then.group or [name for name in columns or types if name not in labels]
    moved = any(name not in types or columns.get(name, types[name]) != types[name] for name in hashed)
    if moved or then.copies == "spread":  # copies were numbered among all rows of a window
        return ~taught
    names = [quoted(name) for name in hashed]
    units = [F.col(name) for name in names] if then.group else [content_hash(rows.select(*names))]
    return ~(taught & _slot(then, units).between(*_slots_of(then, "train")))


def unit_of(rows: DataFrame, spec: PipelineSpec) -> Column:
    """A hash of what a row is of, bigint: rows that share the split's group, or else the key, depend on each other.

    Rows that are copies without depending on each other are numbered, within their window.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    if isinstance(spec.split, HashSplit) and spec.split.copies == "spread":
        content = content_hash(rows)
        number = F.row_number().over(Window.partitionBy(WINDOW, content).orderBy(content))
        return F.xxhash64(content, F.col(WINDOW), number)
    return F.xxhash64(*_units(rows, spec))


def _units(rows: DataFrame, spec: PipelineSpec, without: Collection[str] = ()) -> list[Column]:
    """What a row is of: the values of the split's group, or else of the key, or else of all columns but some."""
    from pyspark.sql import functions as F

    group = spec.split.group if isinstance(spec.split, HashSplit) else spec.source.key
    return [F.col(quoted(name)) for name in group] or [content_hash(rows, without)]


def _slot(split: HashSplit, units: Sequence[Column]) -> Column:
    """The slot of a row, by what it is of."""
    from pyspark.sql import functions as F

    return F.pmod(F.xxhash64(F.lit(split.seed), *units), F.lit(_SLOTS))


def _slots_of(split: HashSplit, part: Part) -> tuple[int, int]:
    """The first slot of a part, and the last; there is none where that comes before."""
    order: tuple[Part, ...] = ("train", "validate", "score", "test")  # with or without test, the others stay
    first = sum(getattr(split, name) for name in order[: order.index(part)])
    return round(first * _SLOTS), round((first + getattr(split, part)) * _SLOTS) - 1


def _condition(rows: DataFrame, split: Split | None, part: Part) -> Column | None:
    """Whether a row of a part's windows is of that part; None where all of them are."""
    from pyspark.sql import functions as F

    if isinstance(split, HashSplit):
        return F.col(SLOT).between(*_slots_of(split, part))
    if isinstance(split, ColumnSplit):
        if split.column not in rows.columns:
            raise SchemaError(f"split.column names {split.column!r}, the rows have {rows.columns}: name one of these")
        column = F.col(quoted(split.column)).cast("string")
        values = list(map(spelled, getattr(split, part)))
        return column.isin(*values) if values else F.lit(False)
    return None


@dataclass(frozen=True, kw_only=True)
class HashParts:
    """The rows of parts that a hash divides, for whoever reads rows that never enter Spark.

    Attributes:
        columns: that are hashed.
        all_columns: whether they are all that a row holds, see ``content_hash``, or a key or group.
        seed: of the split.
        slots: of each part, the first and the last.
    """

    columns: tuple[str, ...]
    all_columns: bool
    seed: int
    slots: Mapping[Part, tuple[int, int]]

    def of_batches(
        self, batches: Iterator[pa.RecordBatch], columns: Sequence[str], name: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Some columns of the rows that are of a part, and of which, in a column ``name``."""
        for batch in batches:
            slots = self._slots(batch)
            numbers = np.full(batch.num_rows, -1, np.int8)
            for number, (first, last) in enumerate(self.slots.values()):
                numbers[(first <= slots) & (slots <= last)] = number
            rows = batch.select(columns)
            if name is not None:
                parts = from_values([*self.slots], pa.string()).take(from_numpy(np.maximum(numbers, 0)))
                rows = rows.append_column(name, parts)
            rows = rows.filter(from_numpy(numbers >= 0))
            if rows.num_rows:
                yield rows

    def _slots(self, batch: pa.RecordBatch) -> np.ndarray[Any, Any]:
        units = [batch.column(name) for name in self.columns]
        if self.all_columns:
            values = [value for unit in units for value in (unit.is_null() if unit.null_count else 0, unit)]
            content = xxhash64(values, batch.num_rows)  # Spark hashes false as 0
            units = [from_numpy(content.view(np.int64))]
        return xxhash64([self.seed, *units], batch.num_rows).view(np.int64) % _SLOTS


def hash_parts(spec: PipelineSpec, parts: Sequence[Part], schema: pa.Schema) -> HashParts | None:
    """Which of the clean rows a hash makes parts of; None where only Spark can tell, or reads them in less memory.

    Args:
        spec: the pipeline.
        parts: which.
        schema: of the clean rows.
    """
    split = spec.split
    if not isinstance(split, HashSplit) or split.copies == "spread":  # copies are numbered among all rows of a window
        return None
    columns = split.group or [name for name in schema.names if name not in OWN and name not in spec.label]
    kinds = [schema.field(name).type for name in columns if name in schema.names]
    if len(kinds) < len(columns) or not all(map(hashes_as_spark, kinds)):
        return None
    if any(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) for kind in kinds):
        return None
    slots = {part: _slots_of(split, part) for part in parts}
    return HashParts(columns=tuple(columns), all_columns=not split.group, seed=split.seed, slots=slots)
