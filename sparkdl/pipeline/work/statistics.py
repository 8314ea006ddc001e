"""Statistics of the columns behind features, of a Spark DataFrame.

They are the same ``Statistics`` as ``features.statistics`` gives of rows in memory: counts are equal, moments to 1e-12,
and quantiles are numbers of the rows whose rank is off by a ten-thousandth of the rows at most.

Two passes. The first finds the quantiles of all numbers in one aggregation. Then every task counts its rows with the
very functions that ``features.statistics`` uses, and one ``groupBy`` adds up the values of all vocabularies; what is
rare, or beyond the size of a vocabulary, never leaves the cluster, so that the driver holds as many values as the model
will. Rows that lie in files of a table are read by the tasks themselves (``file_rows``).

Of a small table the driver counts itself: its rows reach it sooner than the two passes are planned.

Windows that are compared with training rows need one pass: quantiles and vocabularies are those of the training rows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyspark.sql.types as st
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from sparkdl import errors
from sparkdl.columns.frames import map_row, row_of
from sparkdl.columns.names import quoted, stands_in_sql
from sparkdl.columns.numpy_arrow import from_values
from sparkdl.columns.statistics import RunningStats
from sparkdl.compat.spark_errors import task_errors
from sparkdl.compat.worker_python import use_drivers_python
from sparkdl.errors import DataError, SchemaError
from sparkdl.features.fitted import Features
from sparkdl.features.spec import Category, DateParts, Encoded, Feature, Image, Number
from sparkdl.features.statistics import KNOTS, PROBABILITIES, Running, Statistics, statistics_of, top_values
from sparkdl.features.tokens import Functions
from sparkdl.pipeline.windows import WINDOW
from sparkdl.pipeline.work.file_rows import FileRows

ACCURACY = 10_000
"""The accuracy of Spark's ``percentile_approx``: ranks are off by one in so many rows at most."""

HELD_VALUES = 200_000
"""Distinct values that a task counts before it hands them on."""

DRIVER_VALUES = 20_000_000
"""Values, 160 MB of numbers, up to which the driver counts itself."""

_WINDOW = "__sparkdl_window"
_REPORT = -1
_SCHEMA = "window string, feature int, value string, times long, report binary"
_Found = dict[str, Running]


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
            table = _collected(df, features, sources) if files is None else files.collected(sources)
        return statistics_of(table, features, functions)
    quantiles_and_knots = _quantiles(df, features, files)
    quantiles = {name: numbers[: len(PROBABILITIES)] for name, numbers in quantiles_and_knots.items()}
    task = _Count(dict(features), sources, quantiles, dict(functions or {}))
    with task_errors():
        if files is None:
            by_task = map_row(*_raw(df, features), task, _SCHEMA)
        else:
            by_task = files.map(sources, [_of_one_window, task], _SCHEMA)
        reported = _bounded(by_task, features).collect()
    running = _merged([bytes(row["report"]) for row in reported if row["feature"] == _REPORT], list(features))
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
    task = _Count(features, _sources(df, features), quantiles, dict(fitted.functions), named)
    with task_errors():
        raw_counts = map_row(*_raw(df, features, F.col(WINDOW)), task, _SCHEMA)
        rows = _summed(raw_counts).collect()
    running = _merged([bytes(row["report"]) for row in rows if row["feature"] == _REPORT], list(features))
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


def _raw(df: DataFrame, features: Mapping[str, Feature], window: Column | None = None) -> tuple[DataFrame, Column]:
    """What ``_Count`` takes: rows, and a struct of the window, if there are several, and the columns of ``_sources``.

    Columns of other names would not do: Spark's optimizer writes a condition on k renamed columns in 2^k ways.
    """
    use_drivers_python(df.sparkSession)
    pictures = {options.source(name) for name, options in features.items() if isinstance(options, Image)}
    only = pictures - {options.source(name) for name, options in features.items() if not isinstance(options, Image)}
    sources = _sources(df, features)
    # of a picture it only matters whether it is there
    changed = {name: F.substring(F.col(quoted(name)), 1, 1) for name in only}
    changed[_WINDOW] = F.lit("") if window is None else window.cast("string")
    return df.withColumns(changed), row_of([_WINDOW, *sources])


def _collected(df: DataFrame, features: Mapping[str, Feature], sources: Sequence[str]) -> pa.Table:
    frame, row = _raw(df, features)
    structs = frame.select(row).toArrow()
    return structs.flatten().remove_column(0).rename_columns(list(sources))  # the window lies in front


def _quantiles(df: DataFrame, features: Mapping[str, Feature], files: FileRows | None) -> dict[str, tuple[float, ...]]:
    """The quantiles of every number and then its knots, in one aggregation; none where no row has one."""
    sources = {name: options.source(name) for name, options in features.items() if isinstance(options, Number)}
    columns = list(dict.fromkeys(sources.values()))
    if not columns:
        return {}
    _check_numbers(df, columns)
    with task_errors():
        if files is not None:
            quantiles = files.quantiles(columns)
        else:
            aggregates = [_quantile(name).alias(f"column_{position}") for position, name in enumerate(columns)]
            [row] = df.agg(*aggregates).collect()
            quantiles = {column: tuple(row[f"column_{position}"] or ()) for position, column in enumerate(columns)}
    return {name: quantiles.get(source, ()) for name, source in sources.items()}


def _check_numbers(df: DataFrame, columns: Sequence[str]) -> None:
    types = {field.name: field.dataType for field in df.schema}
    for name in columns:
        if not isinstance(types[name], st.NumericType | st.BooleanType | st.NullType):
            raise SchemaError(
                f"column {name!r} is {types[name].simpleString()}, no number: cast it, or make it another type"
            )


def _quantile(name: str) -> Column:
    """The aggregation of one column, as a text: each part of an expression is a question to Java, 20 ms for all."""
    if not stands_in_sql(name):
        column = F.col(quoted(name)).cast("double")
        finite_column = F.when(~F.isnan(column) & (F.abs(column) < float("inf")), column)
        return F.percentile_approx(finite_column, [*PROBABILITIES, *KNOTS], ACCURACY)
    number = f"CAST({quoted(name)} AS DOUBLE)"
    finite = f"IF(NOT isnan({number}) AND abs({number}) < double('inf'), {number}, NULL)"
    probabilities = ", ".join(f"{probability!r}D" for probability in (*PROBABILITIES, *KNOTS))
    return F.expr(f"percentile_approx({finite}, array({probabilities}), {ACCURACY})")


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


def _merged(reports: Sequence[bytes], names: Sequence[str]) -> dict[str, _Found]:
    """What the tasks found, by window, merged in the order of their partitions."""
    parsed = sorted(map(json.loads, reports), key=lambda report: report["partition"])
    merged: dict[str, _Found] = {}
    for report in parsed:
        if report["error"]:
            kind, message = report["error"]
            raise getattr(errors, kind)(message)
        into = merged.setdefault(report["window"], _none(names))
        for name, fields in report["features"].items():
            numbers, of_scaled = (RunningStats.from_json(fields.pop(part)) for part in ("numbers", "scaled"))
            into[name].merge(Running(**fields, numbers=numbers, scaled=of_scaled))
    return merged


@dataclass(frozen=True)
class _Count:
    """Counts the rows of one partition, by window: the first column.

    What is wrong with the rows goes to the driver as a report, since trying again would not help.
    """

    features: dict[str, Feature]
    sources: tuple[str, ...]
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
            column = batch.column(self.sources.index(source) + 1)
            quantiles = self.quantiles.get(name, ())
            counter = running[name].add(source, options, column, quantiles=quantiles, functions=self.functions)
            named = None if self.named is None else self.named.get(name, frozenset())
            values.update(counter if named is None else {value: counter[value] for value in counter.keys() & named})


def _of_one_window(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Batches as ``_Count`` takes them: the window in front."""
    for batch in batches:
        window = pa.repeat(from_values([""], pa.string())[0], batch.num_rows)
        yield pa.RecordBatch.from_arrays([window, *batch.columns], ["window", *batch.schema.names])


def _by_window(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    column = batch.column(0)
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
