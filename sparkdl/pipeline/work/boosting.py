"""LightGBM on the columns of the model and the rows that judge it: what boosted trees come to (Ke et al. 2017).

It runs on the driver, bounded in rows, values and seconds, judges nobody, and fails no run: it says why it did not run.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sparkdl.columns.frames import selected
from sparkdl.columns.numpy_arrow import to_numpy
from sparkdl.compat.spark_errors import task_errors
from sparkdl.errors import CancelledError, first_line
from sparkdl.features.fitted import Features, Fitted
from sparkdl.features.spec import CATEGORIES, Category, DateParts, Number, Vector, input_names
from sparkdl.features.statistics import column_of
from sparkdl.features.values import numbers_of, vectors_of
from sparkdl.metrics.measure import measure
from sparkdl.metrics.rows import Floats, Rows
from sparkdl.observe import logger
from sparkdl.pipeline.spec import PipelineSpec
from sparkdl.pipeline.state.results import Boosted, Trained
from sparkdl.pipeline.work.evaluate import CHALLENGER, LABEL, RAW, Judged, drawn, numbers, predicted
from sparkdl.pipeline.work.labels import FittedLabel, as_doubles, encoded, encoded_values, row_weight

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparkdl.pipeline.work.file_rows import FileRows
    from sparkdl.pipeline.work.prepare import Prepared

MOST_ROWS = 300_000
MOST_VALUES = 30_000_000
"""Rows by columns and outputs that are held at once, of 8 bytes each; of more rows, a share is drawn by a hash."""
MOST_CLASSES = 100
MOST_THREADS, VALUES_OF_A_THREAD = 8, 1_000_000
"""Threads that have less to do wait for each other."""
ROUNDS_TO_COMPARE = 5
ROUNDS, PATIENCE = 2_000, 50
RATE, RATE_OF_MANY_VALUES, MANY_VALUES = 0.05, 0.1, 1_000_000
"""LightGBM's own rate is 0.1: half of the rounds, and an rmse of rides that is 0.5 % above (6.766, by 0.05 6.735)."""
LEAST_SECONDS = 600.0
"""That a training may take, or twice as long as the model's did: rounds end it, and the clock one that is stuck."""
_WEIGHT, _OUTPUT = "__sparkdl_weight", "__sparkdl_output"


@dataclass(frozen=True, kw_only=True)
class TreeColumns:
    """What trees can take of a model's features.

    Attributes:
        features: those.
        left_out: names of the others.
        most_rows: that are held at once.
    """

    features: Features
    left_out: tuple[str, ...]
    most_rows: int


def tree_columns(features: Features, label: FittedLabel) -> TreeColumns | Boosted:
    """What trees can take, or why LightGBM is left out, which is an outcome as any other."""
    if importlib.util.find_spec("lightgbm") is None:
        return Boosted(reason="it is not installed: pip install 'sparkdl[boosting]'")
    usable = [feature for feature in features.fitted if _width(feature)]
    if not usable:
        return Boosted(reason="no feature is a number, a category, a date or a vector")
    if label.outputs > MOST_CLASSES:
        return Boosted(reason=f"label {label.name!r} has {label.outputs:,} classes, above {MOST_CLASSES}")
    return TreeColumns(
        features=Features(tuple(usable)),
        left_out=tuple(feature.name for feature in features.fitted if not _width(feature)),
        most_rows=min(MOST_ROWS, MOST_VALUES // (sum(map(_width, usable)) + label.outputs)),
    )


def tree_rows(
    training: DataFrame,
    stopping: DataFrame | None,
    spec: PipelineSpec,
    prepared: Prepared,
    label: FittedLabel,
    columns: TreeColumns,
    files: FileRows | None = None,
) -> list[pa.Table] | Boosted:
    """Collect the rows that LightGBM trains on, and those that it stops by: raw columns, label and weight.

    Args:
        training: the rows to train on, with raw columns and labels.
        stopping: those of the part ``validate``, whose loss ends the training; None where they are those that judge.
        spec: the pipeline.
        prepared: features, labels, and numbers of rows.
        label: the one that is judged.
        columns: that trees can take.
        files: the rows to train on, as they are read without Spark, whose way from Java takes longer.

    Returns:
        them, or why LightGBM is left out.
    """
    features, rows, most = columns.features, prepared.shards.train_rows, columns.most_rows
    try:
        importlib.import_module("lightgbm")  # it takes a second, in which others wait for Spark
        table = None
        if files is not None and rows <= most and rows * files.width(features.columns) <= MOST_VALUES:
            table = _collected_of_files(files, spec, features, label)
        if table is None:
            table = _collected(drawn(training, spec, "boosted", most, rows), spec, features, label)
        if stopping is None:
            return [table]
        stopping = drawn(stopping, spec, "boosted", most, prepared.shards.validate_rows)
        return [table, _collected(stopping, spec, features, label)]
    except CancelledError:
        raise
    except Exception as cause:
        return _failed(cause)


def boosted(
    tables: Sequence[pa.Table] | Boosted, judging: Judged, spec: PipelineSpec, prepared: Prepared, columns: TreeColumns,
    judging_rows: int, trained: Trained,
) -> Boosted:  # fmt: skip
    """Train LightGBM, and measure it and the model on the same held-out rows.

    Args:
        tables: what ``tree_rows`` gives.
        judging: the rows that the model is judged by, with ``RAW``.
        spec: the pipeline.
        prepared: numbers of rows.
        columns: that trees can take.
        judging_rows: how many rows there were to draw those from.
        trained: the model.

    Returns:
        what it came to, or why it was left out.
    """
    if isinstance(tables, Boosted):
        return tables
    try:
        measured_on = _of_judged(judging, spec)
        seconds = max(LEAST_SECONDS, 2 * trained.seconds.get("fit", 0.0))
        label = judging.labels[CHALLENGER]
        trees = train_trees([*tables, *[measured_on] * (3 - len(tables))], spec, columns.features, label, seconds)
    except CancelledError:
        raise
    except Exception as cause:
        return _failed(cause)
    return replace(trees, of_rows=prepared.shards.train_rows, of_judging=judging_rows, left_out=columns.left_out)


def _of_judged(judging: Judged, spec: PipelineSpec) -> pa.Table:
    """The rows that have raw columns: these, label, weight, and what the model says."""
    drawn_rows = judging.table.filter(judging.table[RAW].is_valid())
    weights = [np.ones(drawn_rows.num_rows)] if spec.weight is None else drawn_rows[spec.weight]
    raw = pa.Table.from_struct_array(drawn_rows[RAW])
    more = {LABEL: drawn_rows[LABEL], _WEIGHT: weights, _OUTPUT: drawn_rows[CHALLENGER]}
    for name, values in more.items():
        raw = raw.append_column(name, values)
    return raw


def _failed(cause: Exception) -> Boosted:
    reason = f"{type(cause).__name__}: {first_line(cause)}"
    logger.warning("LightGBM is not beside the model, since it failed: %s", reason)
    return Boosted(reason=f"it failed ({reason})")


def train_trees(
    tables: Sequence[pa.Table],
    spec: PipelineSpec,
    features: Features,
    label: FittedLabel,
    seconds: float = LEAST_SECONDS,
) -> Boosted:
    """Train on the first table, stop by the second, measure on the third, which has the model's outputs."""
    import lightgbm

    begun = time.monotonic()
    matrices = [training_matrix(table, features) for table in tables]
    truths, weights = ([numbers(table[name]) for table in tables] for name in (LABEL, _WEIGHT))
    parameters: dict[str, Any] = {
        **_objective(spec, label),
        "learning_rate": RATE_OF_MANY_VALUES if matrices[0].size > MANY_VALUES else RATE,
        "seed": spec.train.random_seed or 0,
        "deterministic": True,
        "force_col_wise": True,
        "verbosity": -1,
    }
    named: dict[str, Any] = {"params": parameters, "categorical_feature": _categorical(features)}
    training = lightgbm.Dataset(matrices[0], truths[0], weight=weights[0], **named)
    stopping = lightgbm.Dataset(matrices[1], truths[1], weight=weights[1], reference=training, **named)
    training.construct()
    most = min(MOST_THREADS, len(os.sched_getaffinity(0)), matrices[0].size // VALUES_OF_A_THREAD)
    parameters["num_threads"] = threads = faster_threads(
        most, lambda threads: lightgbm.train(parameters | {"num_threads": threads}, training, ROUNDS_TO_COMPARE)
    )
    clock = _Clock(begun + seconds, lightgbm.callback.EarlyStopException)
    booster = lightgbm.train(
        parameters,
        training,
        ROUNDS,
        valid_sets=[stopping],
        callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False), clock],
    )
    trees = np.asarray(booster.predict(matrices[2], num_threads=threads), np.float64)
    model = predicted(label, numbers(tables[2][_OUTPUT]))
    measured = [
        measure(Rows.of(label.type, truths[2], predictions, weights=weights[2], label=label.name))
        for predictions in (trees, model)
    ]
    return Boosted(
        version=lightgbm.__version__,
        trees=measured[0],
        model=measured[1],
        rounds=booster.best_iteration or booster.current_iteration(),
        rows=tables[0].num_rows,
        columns=matrices[0].shape[1],
        out_of_time=clock.ran_out,
        seconds=time.monotonic() - begun,
    )


def faster_threads(most: int, train: Callable[[int], object]) -> int:
    """One thread or several, whichever trains sooner while others use the processors as they do now.

    Threads of GNU's OpenMP spin while they wait for each other: of 156,000 rows and 10 columns two take .6 of one's
    time on two processors, and 12 times as long beside another process. They sleep only where a variable says so before
    the library is loaded, and in a driver PyTorch has loaded it. The trees are the same.

    Args:
        most: threads that have enough to do.
        train: some rounds with so many threads.
    """
    if most <= 1:
        return 1
    seconds = {}
    for threads in (most, 1):
        begun = time.perf_counter()
        train(threads)
        seconds[threads] = time.perf_counter() - begun
    return min(seconds, key=seconds.__getitem__)


class _Clock:
    """A callback that ends a training after some seconds, with the trees that there are then."""

    order = 20
    """Before the callback that ends it by the loss, which knows the best round only once it is called itself."""
    before_iteration = False

    def __init__(self, deadline: float, stop: Callable[[int, list[Any]], Exception]) -> None:
        self._deadline, self._stop, self.ran_out = deadline, stop, False
        self._best: tuple[float, int, list[Any]] | None = None

    def __call__(self, environment: Any) -> None:
        loss = environment.evaluation_result_list[0][2]
        if self._best is None or loss < self._best[0]:
            self._best = (loss, environment.iteration, list(environment.evaluation_result_list))
        if time.monotonic() > self._deadline:
            self.ran_out = True
            raise self._stop(self._best[1], self._best[2])


def _objective(spec: PipelineSpec, label: FittedLabel) -> dict[str, Any]:
    """What LightGBM minimises: the loss of the label, or what stands for a function of the user's."""
    if label.type == "binary":
        return {"objective": "binary"}
    if label.type == "multiclass":
        return {"objective": "multiclass", "num_class": label.outputs}
    if label.levels:
        return {"objective": "quantile", "alpha": label.levels[label.middle]}
    loss = spec.label[label.name].loss
    if loss == "huber":
        return {"objective": "huber", "alpha": 1.0}  # as torch's
    return {"objective": "regression_l1" if loss == "mae" else "regression"}


def _width(feature: Fitted) -> int:
    """How many columns of numbers and categories a feature is; 0 where trees cannot take it."""
    options = feature.options
    if isinstance(options, Number | Category):
        return 1
    if isinstance(options, DateParts):
        return len(options.parts)
    return options.size or 0 if isinstance(options, Vector) else 0


def _categorical(features: Features) -> list[int]:
    """The places of the categories among the columns of ``training_matrix``."""
    ends = list(itertools.accumulate(map(_width, features.fitted)))
    return [
        end - 1 for end, feature in zip(ends, features.fitted, strict=True) if isinstance(feature.options, Category)
    ]


def training_matrix(table: pa.Table, features: Features) -> Floats:
    """Raw columns as trees take them: numbers as they came, categories and parts of dates as ids from 1.

    Args:
        table: with the raw columns.
        features: numbers, categories, parts of dates and vectors.

    Returns:
        ``(rows, columns)``, NaN where a value is missing, or a category is none that training saw.
    """
    matrix = np.full((table.num_rows, sum(map(_width, features.fitted))), np.nan)
    coded = tuple(feature for feature in features.fitted if isinstance(feature.options, Category | DateParts))
    first = 0
    for batch in table.combine_chunks().to_batches():
        rows = slice(first, first + batch.num_rows)
        ids: dict[str, Floats] = {}
        if coded:
            apply = Features(coded)
            values = to_numpy(apply.apply(batch)[CATEGORIES].flatten()).reshape(batch.num_rows, -1)
            ids = dict(zip(apply.inputs[0].names, np.where(values, values, np.nan).T, strict=True))
        start = 0
        for feature in features.fitted:
            source, columns = feature.options.source(feature.name), slice(start, start + _width(feature))
            if isinstance(feature.options, Number):
                matrix[rows, start] = numbers_of(source, column_of(batch, source))
            elif isinstance(feature.options, Vector):
                vectors = vectors_of(source, column_of(batch, source))[0]
                if vectors.shape[1] == _width(feature):  # not so where all are missing
                    matrix[rows, columns] = vectors
            else:
                names = input_names(feature.name, feature.options)[CATEGORIES]
                matrix[rows, columns] = np.stack([ids[name] for name in names], axis=1)
            start = columns.stop
        first = rows.stop
    return matrix


def _collected(frame: DataFrame, spec: PipelineSpec, features: Features, label: FittedLabel, *more: str) -> pa.Table:
    """The raw columns of rows with label and weight, on the driver."""
    rows = frame.withColumns({LABEL: encoded(label).cast("double"), _WEIGHT: row_weight(spec)})
    with task_errors():
        return selected(rows, [*features.columns, *more, LABEL, _WEIGHT]).toArrow()


def _collected_of_files(files: FileRows, spec: PipelineSpec, features: Features, label: FittedLabel) -> pa.Table | None:
    """The same, read from files; None where only Spark knows what a label or a weight is as a number."""
    weight = [] if spec.weight is None else [spec.weight]
    table = files.collected(list(dict.fromkeys([*features.columns, label.name, *weight])))
    truth = encoded_values(label, table[label.name])
    weights = as_doubles(table[spec.weight]) if spec.weight else pa.chunked_array([np.ones(table.num_rows)])
    if truth is None or weights is None:
        return None
    return table.select(features.columns).append_column(LABEL, truth).append_column(_WEIGHT, weights)
