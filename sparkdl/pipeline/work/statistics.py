"""Statistics of the columns behind features, of a Spark DataFrame.

They are the same ``Statistics`` as ``features.statistics`` gives of rows in memory: counts are equal, moments to 1e-12,
and quantiles are numbers of the rows whose rank is off by a ten-thousandth of the rows at most.

Two passes. In the first every task hands on a few numbers for many, of which one ``groupBy`` makes the quantiles. Then
every task counts its rows with the very functions that ``features.statistics`` uses, and one ``groupBy`` adds up the
values of all vocabularies; what is rare, or beyond the size of a vocabulary, never leaves the cluster, so that the
driver holds as many values as the model will. Rows that lie in files of a table are read by the tasks themselves
(``file_rows``).

Of a small table the driver counts itself: its rows reach it sooner than the two passes are planned.

Windows that are compared with training rows need one pass: quantiles and vocabularies are those of the training rows.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyspark.sql.types as st
from pyspark import TaskContext
from pyspark.sql import DataFrame, Row, Window
from pyspark.sql import functions as F

from sparkdl import errors
from sparkdl.columns.frames import map_row, row_of, selected
from sparkdl.columns.names import quoted
from sparkdl.columns.numpy_arrow import from_numpy, from_values, to_numpy
from sparkdl.compat.column_names import Task
from sparkdl.compat.spark_errors import task_errors
from sparkdl.compat.worker_python import use_drivers_python
from sparkdl.errors import DataError, SchemaError
from sparkdl.features.fitted import Features
from sparkdl.features.spec import Category, DateParts, Encoded, Feature, Image, Number
from sparkdl.features.statistics import KNOTS, PROBABILITIES, Running, Statistics, statistics_of, top_values
from sparkdl.features.tokens import Functions
from sparkdl.features.values import numbers_of
from sparkdl.pipeline.windows import WINDOW
from sparkdl.pipeline.work.file_rows import FileRows

POINTS = 10_000
"""Numbers that stand for those of a column in a block of rows, each for as many: ranks are off by half of that."""

BLOCK_NUMBERS = 20_000_000
"""Numbers of all columns together that a task holds, 160 MB."""

HELD_VALUES = 200_000
"""Distinct values that a task counts before it hands them on."""

DRIVER_VALUES = 20_000_000
"""Values, 160 MB of numbers, up to which the driver counts itself."""

_WINDOW = "__sparkdl_window"
_REPORT = -1
_POINTS_SCHEMA = "column int, value double, weight bigint"
_SCHEMA = "window string, feature int, value string, times long, report binary"
_Found = dict[str, Running]
Array = np.ndarray[Any, Any]


def spark_statistics(
    df: DataFrame,
    features: Mapping[str, Feature],
    functions: Functions | None = None,
    files: FileRows | None = None,
    rows: int | None = None,
) -> dict[str, Statistics]:
    """The statistics of the rows of a DataFrame.

    Args:
        df: of raw columns; it is computed twice, once if no feature is a number, and not at all with ``files``.
        features: by name, their options.
        functions: that cut texts.
        files: the same rows, as workers read them from files.
        rows: how many there are at most; None if nobody knows.

    Raises:
        SchemaError: a column is missing, or of a type that its feature cannot be made of.
        DataError: its values are none that the feature can be made of.
    """
    sources = _sources(df, features)
    narrow = all(isinstance(options, Number | Category | DateParts) for options in features.values())
    width = len(sources) if files is None else files.width(sources)
    if narrow and rows is not None and rows * width <= DRIVER_VALUES:
        with task_errors():
            table = selected(df, sources).toArrow() if files is None else files.collected(sources)
        return statistics_of(table, features, functions)

    def mapped(columns: Sequence[str], task: Task, schema: str) -> DataFrame:
        if files is not None:
            return files.map(columns, [task], schema)
        return map_row(_first_bytes(df, features), row_of(columns), task, schema)

    use_drivers_python(df.sparkSession)
    quantiles_and_knots = _quantiles(df, features, mapped)
    quantiles = {name: numbers[: len(PROBABILITIES)] for name, numbers in quantiles_and_knots.items()}
    task = _Count(dict(features), quantiles, dict(functions or {}))
    with task_errors():
        reported = _bounded(mapped(sources, task, _SCHEMA), features).collect()
    running = _merged(reported, list(features))
    counts_by_feature: list[list[tuple[str, int]]] = [[] for _ in features]
    for _, position, value, times, _ in reported:
        if position != _REPORT:
            counts_by_feature[position].append((value, times))
    statistics = {}
    for position, (name, options) in enumerate(features.items()):
        values = top_values(counts_by_feature[position], options) if isinstance(options, Encoded) else []
        statistics[name] = running.get("", _none(features))[name].result(
            quantiles.get(name, ()), values, quantiles_and_knots.get(name, ())[len(PROBABILITIES) :]
        )
    return statistics


def window_statistics(df: DataFrame, fitted: Features) -> dict[str, dict[str, Statistics]]:
    """The statistics of each window of a DataFrame, counted as those of the training rows were, in one pass.

    Args:
        df: of raw columns, with ``_window``.
        fitted: to the training rows: numbers are counted between their quantiles, and of a vocabulary's values those
            that it names.

    Returns:
        by window, then by feature; a window without rows is not there.

    Raises:
        SchemaError: a column is missing, or of a type that its feature cannot be made of.
        DataError: its values are none that the feature can be made of.
    """
    features = {feature.name: feature.options for feature in fitted.fitted}
    vocabularies = {
        feature.name: feature.statistics.values for feature in fitted.fitted if isinstance(feature.options, Encoded)
    }
    quantiles = {feature.name: feature.statistics.quantiles for feature in fitted.fitted}
    named = {name: frozenset(values) for name, values in vocabularies.items()}
    task = _Count(features, quantiles, dict(fitted.functions), named)
    use_drivers_python(df.sparkSession)
    frame = _first_bytes(df, features).withColumn(_WINDOW, F.col(WINDOW).cast("string"))
    with task_errors():
        rows = _summed(map_row(frame, row_of([_WINDOW, *_sources(df, features)]), task, _SCHEMA)).collect()
    running = _merged(rows, list(features))
    times = {(row["window"], row["feature"], row["value"]): row["times"] for row in rows if row["feature"] != _REPORT}
    return {
        name: {
            feature: running_by_feature[feature].result(
                quantiles[feature],
                [(value, times.get((name, position, value), 0)) for value in vocabularies.get(feature, ())],
            )
            for position, feature in enumerate(features)
        }
        for name, running_by_feature in sorted(running.items())
    }


def _sources(df: DataFrame, features: Mapping[str, Feature]) -> tuple[str, ...]:
    """The columns that features are made of, each once."""
    sources = tuple(dict.fromkeys(options.source(name) for name, options in features.items()))
    absent = [name for name in sources if df.columns.count(name) != 1]
    if absent:
        raise SchemaError(f"the columns {absent} are missing, or there twice, among {df.columns}: add or rename them")
    return sources


def _first_bytes(df: DataFrame, features: Mapping[str, Feature]) -> DataFrame:
    """The rows with the first byte of each picture, of which it only matters whether it is there.

    Columns of other names would not do: Spark's optimizer writes a condition on k renamed columns in 2^k ways.
    """
    pictures = {options.source(name) for name, options in features.items() if isinstance(options, Image)}
    only = pictures - {options.source(name) for name, options in features.items() if not isinstance(options, Image)}
    return df.withColumns({name: F.substring(F.col(quoted(name)), 1, 1) for name in only}) if only else df


def _quantiles(
    df: DataFrame, features: Mapping[str, Feature], mapped: Callable[[Sequence[str], Task, str], DataFrame]
) -> dict[str, tuple[float, ...]]:
    """The quantiles of every number and then its knots; none where no row has one.

    What is missing, NaN or infinite does not count.

    Args:
        df: the rows, whose types are looked at.
        features: by name, their options.
        mapped: makes of the columns of that name, by a task, a DataFrame of that schema.
    """
    sources = {name: options.source(name) for name, options in features.items() if isinstance(options, Number)}
    columns = list(dict.fromkeys(sources.values()))
    if not columns:
        return {}
    _check_numbers(df, columns)
    with task_errors():
        points = mapped(columns, _points, _POINTS_SCHEMA)
        merged = points.groupBy("column").applyInArrow(_merged_points, "column int, quantiles array<double>").collect()
    quantiles = {columns[row["column"]]: tuple(row["quantiles"]) for row in merged}
    return {name: quantiles.get(source, ()) for name, source in sources.items()}


def _check_numbers(df: DataFrame, columns: Sequence[str]) -> None:
    types = {field.name: field.dataType for field in df.schema}
    for name in columns:
        if not isinstance(types[name], st.NumericType | st.BooleanType | st.NullType):
            raise SchemaError(
                f"column {name!r} is {types[name].simpleString()}, no number: cast it, or make it another type"
            )


def _points(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """At most ``POINTS`` numbers of each column and block of rows, with how many each stands for."""
    arrays_by_column: dict[str, list[Array]] = defaultdict(list)
    numbers = 0
    for batch in batches:
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            arrays_by_column[name].append(numbers_of(name, column))
        numbers += batch.num_rows * batch.num_columns
        if numbers >= BLOCK_NUMBERS:
            yield _points_of_block(arrays_by_column.values())
            arrays_by_column.clear()
            numbers = 0
    if numbers:
        yield _points_of_block(arrays_by_column.values())


def _points_of_block(columns: Iterable[Sequence[Array]]) -> pa.RecordBatch:
    blocks = []
    for position, arrays in enumerate(columns):
        values = np.concatenate(arrays)
        values = np.sort(values[~np.isnan(values)])
        edges = np.arange(min(POINTS, len(values)) + 1) * len(values) // max(1, min(POINTS, len(values)))
        chosen = values[(edges[:-1] + edges[1:]) // 2]
        blocks.append((np.full(len(chosen), position, np.int32), chosen, np.diff(edges)))
    return pa.RecordBatch.from_arrays(
        [from_numpy(np.concatenate(arrays)) for arrays in zip(*blocks, strict=True)], ["column", "value", "weight"]
    )


def _merged_points(points: pa.Table) -> pa.Table:
    """The quantiles of one column at ``PROBABILITIES`` and ``KNOTS``, of the points of all blocks: numbers of the rows.

    Their ranks are off by 1/20,000 of the rows at most.
    """
    value, weight = (to_numpy(points[name].combine_chunks()) for name in ("value", "weight"))
    order = np.argsort(value, kind="stable")
    upto = np.cumsum(weight[order])
    at = np.searchsorted(upto, np.ceil(np.array(PROBABILITIES + KNOTS) * upto[-1] - 1e-9), side="left")
    quantiles = value[order][np.minimum(at, len(order) - 1)]
    row = pa.ListArray.from_arrays(from_values([0, len(quantiles)], pa.int32()), from_numpy(quantiles))
    return pa.Table.from_arrays([points["column"][:1], row], ["column", "quantiles"])


def _bounded(counted: DataFrame, features: Mapping[str, Feature]) -> DataFrame:
    """The reports, and of every vocabulary the values that are frequent enough, at most as many as it may hold."""
    bounds = [
        (options.least_count, options.most_values) if isinstance(options, Encoded) else (1, 1)
        for options in features.values()
    ]
    least, most = (F.array(*map(F.lit, part)) for part in zip(*bounds, strict=True))
    of_report = F.col("feature") == _REPORT
    position = F.greatest(F.col("feature"), F.lit(0)) + 1
    frequent = _summed(counted).where(of_report | (F.col("times") >= F.element_at(least, position)))
    ordered = Window.partitionBy("feature").orderBy(F.desc("times"), F.col("value"))
    ranked = frequent.withColumn("rank", F.row_number().over(ordered))
    return ranked.where(of_report | (F.col("rank") <= F.element_at(most, position))).drop("rank")


def _summed(counted: DataFrame) -> DataFrame:
    together = counted.groupBy("window", "feature", "value")
    return together.agg(F.sum("times").alias("times"), F.first("report").alias("report"))


def _none(features: Iterable[str]) -> _Found:
    return {name: Running() for name in features}


def _merged(rows: Sequence[Row], names: Sequence[str]) -> dict[str, _Found]:
    """What the tasks found, by window, merged in the order of their partitions."""
    reports = [json.loads(row["report"]) for row in rows if row["feature"] == _REPORT]
    merged: dict[str, _Found] = {}
    for report in sorted(reports, key=lambda report: report["partition"]):
        if report["error"]:
            kind, message = report["error"]
            raise getattr(errors, kind)(message)
        into = merged.setdefault(report["window"], _none(names))
        for name, fields in report["features"].items():
            into[name].merge(msgspec.convert(fields, Running))
    return merged


@dataclass(frozen=True)
class _Count:
    """Counts the rows of one partition, by window where they have the column ``_WINDOW``.

    What is wrong with the rows goes to the driver as a report, since trying again would not help.
    """

    features: dict[str, Feature]
    quantiles: dict[str, tuple[float, ...]]
    functions: Functions
    named: Mapping[str, frozenset[str]] | None = None
    """The values that are counted, by feature; None counts all."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        running: dict[str, _Found] = {}
        counters_by_window: dict[str, list[Counter[str]]] = {}
        error = None
        try:
            for batch in batches:
                for window, rows in _by_window(batch):
                    values = counters_by_window.setdefault(window, [Counter() for _ in self.features])
                    self._add(rows, running.setdefault(window, _none(self.features)), values)
                    for position, counter in enumerate(values):
                        if len(counter) > HELD_VALUES:
                            yield _rows(window, position, counter)
                            counter.clear()
        except (DataError, SchemaError) as cause:
            error = (type(cause).__name__, str(cause))
            running, counters_by_window = {"": {}}, {}
        context = TaskContext.get()
        partition = context.partitionId() if context is not None else 0
        for window, by_feature in counters_by_window.items():
            for position, counter in enumerate(by_feature):
                if counter:
                    yield _rows(window, position, counter)
        for window, of_features in running.items():
            report = {"partition": partition, "window": window, "error": error}
            report |= {"features": {name: asdict(statistics) for name, statistics in of_features.items()}}
            yield _rows(window, _REPORT, {str(partition): 0}, json.dumps(report).encode())

    def _add(self, batch: pa.RecordBatch, running: _Found, counted: list[Counter[str]]) -> None:
        for (name, options), values in zip(self.features.items(), counted, strict=True):
            source = options.source(name)
            quantiles = self.quantiles.get(name, ())
            counter = running[name].add(
                source, options, batch.column(source), quantiles=quantiles, functions=self.functions
            )
            named = None if self.named is None else self.named.get(name, frozenset())
            values.update(counter if named is None else {value: counter[value] for value in counter.keys() & named})


def _by_window(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    if _WINDOW not in batch.schema.names:
        yield "", batch
        return
    column = batch.column(_WINDOW)
    windows = pc.unique(column)
    for window in windows:
        yield window.as_py(), batch if len(windows) == 1 else batch.filter(pc.equal(column, window))


def _rows(window: str, feature: int, times: Mapping[str, int], report: bytes | None = None) -> pa.RecordBatch:
    count = len(times)
    arrays = [
        from_values([window] * count, pa.string()),
        from_values([feature] * count, pa.int32()),
        from_values(list(times), pa.string()),
        from_values(list(times.values()), pa.int64()),
        from_values([report] * count, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(arrays, ["window", "feature", "value", "times", "report"])
