"""Rows for shards: where workers can, they read them from the clean table's files, so that they never enter the JVM."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.frames import map_columns, selected
from sparkdl.columns.names import check_names, tells_cases_apart
from sparkdl.columns.numpy_arrow import from_values, one_value, to_numpy
from sparkdl.compat.column_names import Task
from sparkdl.compat.worker_python import use_drivers_python
from sparkdl.errors import DataError
from sparkdl.features.fitted import Features
from sparkdl.launch.driver.slots import slots_of
from sparkdl.pipeline.rows.parts import PART
from sparkdl.pipeline.spec import TimeSplit
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.windows import WINDOW, Part
from sparkdl.pipeline.work.file_rows import FileRows, files_of_parts, part_frame
from sparkdl.pipeline.work.labels import (
    FittedLabel,
    Labels,
    as_doubles,
    encodable,
    encodable_weight,
    encoded_values,
)
from sparkdl.shards.write import spark_arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VALIDATES, _MOST = "__sparkdl_validates", "most weight"
_Mapped = Callable[[Task, str], "DataFrame"]


@dataclass
class ShardRows:
    """The labelled rows to train and to validate, for one ``write_split``.

    Attributes:
        spark: whose workers read.
        schema: of the rows as a task gets them, at the end whether each is to validate.
        labels: as training saw them.
        weight: the column of the weights of rows; None where there are none.
        train: the windows of the rows to train on, where these tell the parts; None where ``PART`` does.
        mapped: what a task makes, with this schema, of the rows of both parts, with and without labels.
        totals: ``label_totals`` of the rows that tasks have had.
    """

    spark: SparkSession
    schema: pa.Schema
    labels: Labels
    weight: str | None
    train: tuple[str, ...] | None
    mapped: _Mapped
    totals: Counter[str] = field(default_factory=Counter)

    def reports(self, task: Task) -> list[bytes]:
        """What a task reports of the rows of each worker, in one batch of one row, once it has had all."""
        labelled_rows = _LabelledRows(task, tuple(self.schema.names), self.labels, self.weight, self.train)
        rows = self.mapped(labelled_rows, "report binary, totals binary").collect()
        for totals in (json.loads(bytes(row["totals"])) for row in rows):
            _add(self.totals, totals)
        return [bytes(row["report"]) for row in rows]


@dataclass(frozen=True)
class _LabelledRows:
    """Hands the labelled rows of batches to ``task``, and tells their totals beside its report; see ``ShardRows``."""

    task: Task
    columns: tuple[str, ...]
    labels: Labels
    weight: str | None
    train: tuple[str, ...] | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        totals: Counter[str] = Counter()
        for report in self.task(self._rows(batch, totals) for batch in batches):
            totals_json = one_value(json.dumps(totals).encode())
            yield pa.RecordBatch.from_arrays([report.column(0), totals_json], ["report", "totals"])

    def _rows(self, batch: pa.RecordBatch, totals: Counter[str]) -> pa.RecordBatch:
        """The labelled rows of a batch, their labels and weights as numbers; adds to ``totals``.

        Raises:
            DataError: a label or a weight of them is none; ``check_labels`` tells more.
        """
        if self.train is None:
            batch = batch.filter(batch.column(PART).is_valid())  # others are of neither part
            validates = pc.is_in(batch.column(PART), value_set=from_values(["validate"], pa.string()))
        else:
            validates = pc.invert(pc.is_in(batch.column(WINDOW), value_set=from_values(self.train, pa.string())))
        has_labels = functools.reduce(pc.and_, [batch.column(name).is_valid() for name in self.labels.names])
        rows, labelled_validates = batch.filter(has_labels), validates.filter(has_labels)
        arrays = {name: rows.column(name) for name in self.columns if name != VALIDATES}
        arrays |= {label.name: encoded_values(label, arrays[label.name]) for label in self.labels}
        if self.weight is not None:
            arrays[self.weight] = as_doubles(arrays[self.weight]).cast(pa.float32(), safe=False)
        for name in (*self.labels.names, *([] if self.weight is None else [self.weight])):
            if arrays[name].null_count or not np.isfinite(to_numpy(arrays[name])).all():
                raise DataError(f"column {name!r} holds no finite float32, or no class that training saw, in some rows")
        weights = None if self.weight is None else to_numpy(arrays[self.weight])
        if weights is not None and (weights < 0).any():
            raise DataError(f"weight {self.weight!r} is negative in some rows")
        of_all, of_labelled = to_numpy(validates), to_numpy(labelled_validates)
        for part, is_part, is_labelled in (("train", ~of_all, ~of_labelled), ("validate", of_all, of_labelled)):
            counts = {f"{part} rows": int(is_part.sum()), f"{part} labelled": int(is_labelled.sum())}
            most_weight = {} if weights is None else {f"{part} {_MOST}": float(weights[is_labelled].max(initial=0))}
            _add(totals, counts | most_weight)
        for label in self.labels:
            arrays[label.name] = arrays[label.name].cast(_kind_of(label))
        return pa.RecordBatch.from_arrays([*arrays.values(), labelled_validates], [*arrays, VALIDATES])


def _add(totals: Counter[str], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        totals[name] = max(totals[name], value) if name.endswith(_MOST) else totals[name] + value


def _kind_of(label: FittedLabel) -> pa.DataType:
    """The type of a label in shards."""
    return pa.int64() if label.type == "multiclass" else pa.float32()


def shard_rows(
    project: Project, clean: DataFrame, windows: Mapping[Part, Sequence[str]], features: Features, labels: Labels
) -> ShardRows:
    """The rows to train and to validate, as workers read them from files, or as Spark hands them on where it alone can.

    Args:
        project: the pipeline.
        clean: its clean rows, see ``Run.clean_to_divide``.
        windows: of the parts ``train`` and ``validate``.
        features: fitted.
        labels: fitted.
    """
    spec, spark = project.spec, clean.sparkSession
    kinds = {label.name: _kind_of(label) for label in labels}
    if spec.weight is not None:
        kinds[spec.weight] = pa.float32()
    columns = list(dict.fromkeys([*features.columns, *kinds]))
    files, train = None, None
    if spec.train.spreads and not spec.train.partitions_per_process:  # else Spark makes the order, or the partitions
        files = files_of_parts(project, windows, spark)
    if files is not None and _encodes(files.scan.schema, columns, labels, spec.weight):
        train = tuple(windows["train"]) if isinstance(spec.split, TimeSplit) else None
        mapped, stored = _mapped_of_files(files, columns, train), files.scan.schema
    else:
        mapped, stored = _mapped_of_frame(project, clean, windows, columns, labels)
    fields = [pa.field(name, kinds.get(name, stored.field(name).type)) for name in columns]
    schema = pa.schema([*fields, pa.field(VALIDATES, pa.bool_())])
    return ShardRows(spark, schema, labels, spec.weight, train, mapped)


def _encodes(stored: pa.Schema, columns: Sequence[str], labels: Labels, weight: str | None) -> bool:
    """Whether numbers can be made of labels and weights as files hold them."""
    if not set(columns) <= set(stored.names):
        return False
    no_values = {name: pa.nulls(0, stored.field(name).type) for name in columns}
    numbers = [encoded_values(label, no_values[label.name]) for label in labels]
    numbers += [] if weight is None else [as_doubles(no_values[weight])]
    return all(values is not None for values in numbers)


def _mapped_of_files(files: FileRows, columns: Sequence[str], train: Sequence[str] | None) -> _Mapped:
    part_column = PART if train is None else None
    read = list(columns) if train is None else list(dict.fromkeys([*columns, WINDOW]))

    def mapped(task: Task, schema: str) -> DataFrame:
        return files.map(read, [task], schema, part_column)

    return mapped


def _mapped_of_frame(
    project: Project, clean: DataFrame, windows: Mapping[Part, Sequence[str]], columns: Sequence[str], labels: Labels
) -> tuple[_Mapped, pa.Schema]:
    """The same of the rows as Spark hands them on, and their types."""
    spec, spark = project.spec, clean.sparkSession
    frame = part_frame(project, clean, windows, columns)
    check_names(frame.columns, columns, cases=tells_cases_apart(frame))
    casts = {label.name: encodable(label) for label in labels}
    if spec.weight is not None:
        casts[spec.weight] = encodable_weight(spec.weight)
    rows = selected(frame.withColumns(casts), [*columns, PART])
    if per_process := spec.train.partitions_per_process:
        rows = rows.repartition(per_process * (spec.train.num_proc or slots_of(spark)))

    def mapped(task: Task, schema: str) -> DataFrame:
        use_drivers_python(spark)
        return map_columns(rows, task, schema)

    return mapped, spark_arrow_schema(rows, (), list(casts))
