"""Rows for shards, as workers read them from the clean table's files: they never enter the JVM."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.numpy_arrow import from_values, one_value, to_numpy
from sparkdl.compat.column_names import Task
from sparkdl.errors import DataError
from sparkdl.features.fitted import Features
from sparkdl.pipeline.rows.parts import PART
from sparkdl.pipeline.spec import TimeSplit
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.windows import WINDOW, Part
from sparkdl.pipeline.work.file_rows import FileRows, files_of_parts
from sparkdl.pipeline.work.labels import Labels, as_doubles, encoded_values

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VALIDATES, _MOST = "__sparkdl_validates", "most weight"


@dataclass
class ShardRows:
    """The labelled rows to train and to validate, for one ``write_split``.

    Attributes:
        files: the rows of both parts, with and without labels.
        schema: of the rows as a task gets them, at the end whether each is to validate.
        labels: as training saw them.
        weight: the column of the weights of rows; None where there are none.
        train: the windows of the rows to train on, where these tell the parts; None where ``PART`` does.
        totals: ``label_totals`` of the rows that tasks have had.
    """

    files: FileRows
    schema: pa.Schema
    labels: Labels
    weight: str | None
    train: tuple[str, ...] | None
    totals: Counter[str] = field(default_factory=Counter)

    @property
    def spark(self) -> SparkSession:
        """Whose workers read."""
        return self.files.spark

    def reports(self, task: Task) -> list[bytes]:
        """What a task reports of the rows of each worker, in one batch of one row, once it has had all."""
        columns, part_column = self.schema.names[:-1], PART if self.train is None else None
        read = columns if part_column else list(dict.fromkeys([*columns, WINDOW]))
        labelled_rows = _LabelledRows(task, self.schema, self.labels, self.weight, self.train)
        rows = self.files.map(read, [labelled_rows], "report binary, totals binary", part_column).collect()
        for totals in (json.loads(bytes(row["totals"])) for row in rows):
            _add(self.totals, totals)
        return [bytes(row["report"]) for row in rows]


@dataclass(frozen=True)
class _LabelledRows:
    """Hands the labelled rows of batches to ``task``, and tells their totals beside its report; see ``ShardRows``."""

    task: Task
    schema: pa.Schema
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
            validates = pc.is_in(batch.column(PART), value_set=from_values(["validate"], pa.string()))
        else:
            validates = pc.invert(pc.is_in(batch.column(WINDOW), value_set=from_values(self.train, pa.string())))
        has_labels = functools.reduce(pc.and_, [batch.column(name).is_valid() for name in self.labels.names])
        rows, labelled_validates = batch.filter(has_labels), validates.filter(has_labels)
        numbers = {label.name: encoded_values(label, rows.column(label.name)) for label in self.labels}
        if self.weight is not None:
            numbers[self.weight] = as_doubles(rows.column(self.weight)).cast(pa.float32(), safe=False)
        for name, values in numbers.items():
            if values.null_count or not np.isfinite(to_numpy(values)).all():
                raise DataError(f"column {name!r} holds no finite float32, or no class that training saw, in some rows")
        weights = None if self.weight is None else to_numpy(numbers[self.weight])
        if weights is not None and (weights < 0).any():
            raise DataError(f"weight {self.weight!r} is negative in some rows")
        of_all, of_labelled = to_numpy(validates), to_numpy(labelled_validates)
        for part, is_part, is_labelled in (("train", ~of_all, ~of_labelled), ("validate", of_all, of_labelled)):
            counts = {f"{part} rows": int(is_part.sum()), f"{part} labelled": int(is_labelled.sum())}
            most_weight = {} if weights is None else {f"{part} {_MOST}": float(weights[is_labelled].max(initial=0))}
            _add(totals, counts | most_weight)
        numbers[VALIDATES] = labelled_validates
        arrays = [
            numbers[kind.name].cast(kind.type) if kind.name in numbers else rows.column(kind.name)
            for kind in self.schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _add(totals: Counter[str], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        totals[name] = max(totals[name], value) if name.endswith(_MOST) else totals[name] + value


def shard_rows(
    project: Project, windows: Mapping[Part, Sequence[str]], features: Features, labels: Labels, spark: SparkSession
) -> ShardRows | None:
    """The rows to train and to validate, as workers read them from files; None where only Spark can.

    Args:
        project: the pipeline.
        windows: of the parts ``train`` and ``validate``.
        features: fitted.
        labels: fitted.
        spark: whose workers read.
    """
    spec = project.spec
    if not spec.train.spreads or spec.train.partitions_per_process:  # the rows keep Spark's order, or partitions
        return None
    files = files_of_parts(project, windows, spark)
    if files is None:
        return None
    weight = [spec.weight] if spec.weight else []
    kinds = {
        name: pa.int64() if label.type == "multiclass" else pa.float32()
        for name, label in zip(labels.names, labels, strict=True)
    }
    kinds |= dict.fromkeys(weight, pa.float32())
    stored = files.scan.schema
    columns = list(dict.fromkeys([*features.columns, *kinds]))
    if not set(columns) <= set(stored.names):
        return None
    no_values = {name: pa.nulls(0, stored.field(name).type) for name in kinds}
    encoded = [encoded_values(label, no_values[label.name]) for label in labels]
    encoded += [as_doubles(no_values[name]) for name in weight]
    if any(values is None for values in encoded):  # of such types Spark alone makes numbers
        return None
    fields = [pa.field(name, kinds.get(name, stored.field(name).type)) for name in columns]
    schema = pa.schema([*fields, pa.field(VALIDATES, pa.bool_())])
    train = tuple(windows["train"]) if isinstance(spec.split, TimeSplit) else None
    return ShardRows(files, schema, labels, spec.weight, train)
