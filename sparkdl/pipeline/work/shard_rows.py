"""Rows for shards: where workers can, they read them from the clean table's files, so that they never enter the JVM."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.frames import map_columns, selected
from sparkdl.columns.names import check_names, tells_cases_apart
from sparkdl.columns.numpy_arrow import filled, from_numpy, from_values, one_value, to_numpy
from sparkdl.compat.column_names import Task
from sparkdl.compat.worker_python import use_drivers_python
from sparkdl.launch.driver.slots import slots_of
from sparkdl.pipeline.rows.parts import PART
from sparkdl.pipeline.spec import TimeSplit
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.windows import WINDOW, Part
from sparkdl.pipeline.work.file_rows import FileRows, files_of_parts, part_frame
from sparkdl.pipeline.work.labels import (
    FittedLabel,
    LabelCounts,
    Labels,
    as_doubles,
    check_labels,
    encodable,
    encodable_weight,
    encoded_values,
)
from sparkdl.shards.write import spark_arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VALIDATES = "__sparkdl_validates"
_Mapped = Callable[[Task, str], "DataFrame"]


@dataclass
class ShardRows:
    """The labelled rows of parts, to be written by one ``write_split``, or counted alone.

    Attributes:
        spark: whose workers read.
        schema: of the rows as a task gets them, at the end whether each is to validate, if that is one of the parts.
        labels: as training saw them.
        weight: the column of the weights of rows; None where there are none.
        parts: by part, the values of ``part_column`` in its rows.
        part_column: that tells which part a row is of.
        mapped: what a task makes, with this schema, of the rows of all parts, with and without labels.
        counts: of the rows of each part that tasks have had.
    """

    spark: SparkSession
    schema: pa.Schema
    labels: Labels
    weight: str | None
    parts: Mapping[Part, Sequence[str]]
    part_column: str
    mapped: _Mapped
    counts: dict[Part, LabelCounts] = field(default_factory=dict)

    def reports(self, task: Task) -> list[bytes]:
        """What a task reports of the rows of each worker, in one batch of one row, once it has had all.

        Raises:
            DataError: labels or weights are refused, or a part has no row with a label; see ``check_labels``.
        """
        columns = tuple(self.schema.names)
        labelled_rows = _LabelledRows(task, columns, self.labels, self.weight, self.parts, self.part_column)
        self.counts |= {part: LabelCounts() for part in self.parts}
        rows = self.mapped(labelled_rows, "report binary, counts binary").collect()
        for row in rows:
            for part, counts in msgspec.json.decode(row["counts"], type=dict[Part, LabelCounts]).items():
                self.counts[part].add(counts)
        for part, counts in self.counts.items():
            check_labels(counts, part, self.labels, self.weight)
        return [bytes(row["report"]) for row in rows]

    def count(self) -> dict[Part, LabelCounts]:
        """Count the rows without writing them; raises as ``reports``."""
        self.reports(_only_read)
        return self.counts


def _only_read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        pass
    yield pa.RecordBatch.from_arrays([one_value(b"")], ["report"])


@dataclass(frozen=True)
class _LabelledRows:
    """Hands the labelled rows of batches to ``task``, and tells what it counted beside its report; see ``ShardRows``.

    What is refused is counted, and handed on as 0: the driver tells of all refused rows at once.
    """

    task: Task
    columns: tuple[str, ...]
    labels: Labels
    weight: str | None
    parts: Mapping[Part, Sequence[str]]
    part_column: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts = {part: LabelCounts() for part in self.parts}
        for report in self.task(self._rows(batch, counts) for batch in batches):
            counts_json = one_value(msgspec.json.encode(counts))
            yield pa.RecordBatch.from_arrays([report.column(0), counts_json], ["report", "counts"])

    def _rows(self, batch: pa.RecordBatch, counts: Mapping[Part, LabelCounts]) -> pa.RecordBatch:
        """The labelled rows of a batch, their labels and weights as numbers; adds to ``counts``."""
        part_values = batch.column(self.part_column)
        is_of_part = {
            part: pc.is_in(part_values, value_set=from_values(values, pa.string()))
            for part, values in self.parts.items()
        }
        has_labels = functools.reduce(pc.and_, [batch.column(name).is_valid() for name in self.labels.names])
        is_chosen = pc.and_(has_labels, functools.reduce(pc.or_, is_of_part.values()))
        rows = batch.filter(is_chosen)
        arrays = {name: rows.column(name) for name in self.columns if name != VALIDATES}
        refused = {}
        for label in self.labels:
            numbers = to_numpy(filled(encoded_values(label, arrays[label.name]), math.nan))
            refused[label.name] = ~np.isfinite(numbers)
            arrays[label.name] = from_numpy(np.where(refused[label.name], 0, numbers)).cast(_kind_of(label))
        weights, refused_weights = np.ones(len(rows)), np.zeros(len(rows), bool)
        if self.weight is not None:
            weights = to_numpy(filled(as_doubles(rows.column(self.weight)).cast(pa.float32(), safe=False), math.nan))
            refused_weights = ~(np.isfinite(weights) & (weights >= 0))
            weights = np.where(refused_weights, np.float32(0), weights)
            arrays[self.weight] = from_numpy(weights)
        for part, of_part in is_of_part.items():
            is_labelled = to_numpy(of_part.filter(is_chosen))
            of_batch = LabelCounts(
                rows=int(to_numpy(of_part).sum()),
                labelled=int(is_labelled.sum()),
                refused_weights=int((refused_weights & is_labelled).sum()),
                most_weight=float(weights[is_labelled].max(initial=0)),
            )
            for name, is_refused in refused.items():
                if (is_refused & is_labelled).any():
                    values = rows.column(name).filter(from_numpy(is_refused & is_labelled)).cast(pa.string())
                    of_batch.refused[name], of_batch.examples[name] = len(values), max(values.to_pylist())
            counts[part].add(of_batch)
        if VALIDATES in self.columns:
            arrays[VALIDATES] = is_of_part["validate"].filter(is_chosen)
        return pa.RecordBatch.from_arrays([*arrays.values()], [*arrays])


def _kind_of(label: FittedLabel) -> pa.DataType:
    """The type of a label in shards."""
    return pa.int64() if label.type == "multiclass" else pa.float32()


def shard_rows(
    project: Project, clean: DataFrame, windows: Mapping[Part, Sequence[str]], features: Sequence[str], labels: Labels
) -> ShardRows:
    """The labelled rows of parts, as workers read them from files, or as Spark hands them on where it alone can.

    Args:
        project: the pipeline.
        clean: its clean rows, see ``Run.clean_to_divide``.
        windows: of each part.
        features: columns that features are made of.
        labels: fitted.
    """
    spec, spark = project.spec, clean.sparkSession
    kinds = {label.name: _kind_of(label) for label in labels}
    if spec.weight is not None:
        kinds[spec.weight] = pa.float32()
    columns = list(dict.fromkeys([*features, *kinds]))
    files = None
    if spec.train.spreads and not spec.train.partitions_per_process:  # else Spark makes the order, or the partitions
        files = files_of_parts(project, windows, spark)
    if files is not None and not _encodes(files.scan.schema, columns, labels, spec.weight):
        files = None
    windows_tell = len(windows) == 1 or (files is not None and isinstance(spec.split, TimeSplit))
    part_column = WINDOW if windows_tell else PART
    parts = windows if windows_tell else {part: [part] for part in windows}
    if files is not None:
        mapped, stored = _mapped_of_files(files, columns, part_column), files.scan.schema
    else:
        mapped, stored = _mapped_of_frame(project, clean, windows, columns, labels, part_column)
    fields = [pa.field(name, kinds.get(name, stored.field(name).type)) for name in columns]
    marks = [pa.field(VALIDATES, pa.bool_())] if "validate" in windows else []
    return ShardRows(spark, pa.schema([*fields, *marks]), labels, spec.weight, parts, part_column, mapped)


def _encodes(stored: pa.Schema, columns: Sequence[str], labels: Labels, weight: str | None) -> bool:
    """Whether numbers can be made of labels and weights as files hold them."""
    if not set(columns) <= set(stored.names):
        return False
    no_values = {name: pa.nulls(0, stored.field(name).type) for name in columns}
    numbers = [encoded_values(label, no_values[label.name]) for label in labels]
    numbers += [] if weight is None else [as_doubles(no_values[weight])]
    return all(values is not None for values in numbers)


def _mapped_of_files(files: FileRows, columns: Sequence[str], part_column: str) -> _Mapped:
    stored = list(dict.fromkeys([*columns, *([WINDOW] if part_column == WINDOW else [])]))
    added = PART if part_column == PART else None

    def mapped(task: Task, schema: str) -> DataFrame:
        return files.map(stored, [task], schema, added)

    return mapped


def _mapped_of_frame(
    project: Project, clean: DataFrame, windows: Mapping[Part, Sequence[str]], columns: Sequence[str], labels: Labels,
    part_column: str,
) -> tuple[_Mapped, pa.Schema]:  # fmt: skip
    """The same of the rows as Spark hands them on, and their types."""
    spec, spark = project.spec, clean.sparkSession
    frame = part_frame(project, clean, windows, [*columns, part_column])
    check_names(frame.columns, columns, cases=tells_cases_apart(frame))
    casts = {label.name: encodable(label) for label in labels}
    if spec.weight is not None:
        casts[spec.weight] = encodable_weight(spec.weight)
    rows = selected(frame.withColumns(casts), [*columns, part_column])
    if per_process := spec.train.partitions_per_process:
        rows = rows.repartition(per_process * (spec.train.num_proc or slots_of(spark)))

    def mapped(task: Task, schema: str) -> DataFrame:
        use_drivers_python(spark)
        return map_columns(rows, task, schema)

    return mapped, spark_arrow_schema(rows, (), list(casts))
