"""Raw columns to model inputs, by numpy and Arrow alone: the only way there is, in training and in serving."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.columns.numpy_arrow import filled, from_numpy, to_numpy
from sparkdl.errors import DataError, SchemaError
from sparkdl.features.hashing import to_buckets
from sparkdl.features.images import images_of
from sparkdl.features.inputs import Input, part_ids
from sparkdl.features.spec import (
    CATEGORIES,
    NUMBERS,
    Category,
    DateParts,
    Encoded,
    Feature,
    Ids,
    Image,
    Number,
    Part,
    Text,
    Vector,
)
from sparkdl.features.statistics import PROBABILITIES, Statistics, column_of, limits_of, scaled
from sparkdl.features.tokens import Functions, tokens_of
from sparkdl.features.values import Coded, Lists, coded, lists_of, numbers_of, times_of, vectors_of

Array = np.ndarray[Any, Any]

_MEDIAN = PROBABILITIES.index(0.5)
_CONSTANT = 1e-12
"""A standard deviation below this share of the mean is rounding, and the column constant."""


class Encoder:
    """Fitted features, made ready: vocabularies as dictionaries, moments as numbers.

    Arithmetic is in float64 and element by element, results are float32, so that a row becomes the same in whatever
    batch it comes. What is refused, and what filled:

        number       null, NaN, infinity: filled, or DataError with fill 'none'; more than float32 holds: DataError
        category     missing, or not in the vocabulary: id 0
        ids, text    null and empty: no element; a null element, an unknown one: id 0; too long: cut
        vector       a missing row or number: filled, or DataError with fill 'none'; another length: DataError
        image        missing or broken: black, or DataError with invalid 'error', which names the first reason
        date parts   missing, or a year that training had not: id 0; an hour of a date: SchemaError
        any          a column that is missing or of a wrong type: SchemaError

    Args:
        features: by name, options and statistics.
        inputs: that they make.
        functions: that cut texts.
    """

    def __init__(
        self, features: Mapping[str, tuple[Feature, Statistics]], inputs: tuple[Input, ...], functions: Functions
    ) -> None:
        self._features, self._inputs, self._functions = features, inputs, functions
        self._schema = pa.schema([tensor.field for tensor in inputs])
        self._ids = {
            name: {value: number for number, value in enumerate(statistics.values, 1)}
            for name, (options, statistics) in features.items()
            if isinstance(options, Encoded)
        }

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The model inputs of a batch."""
        rows = batch.num_rows
        numbers: list[Array] = []
        categories: list[Array] = []
        arrays_by_input: dict[str, pa.Array] = {}
        for name, (options, statistics) in self._features.items():
            source = options.source(name)
            column = column_of(batch, source)
            if isinstance(options, Number):
                numbers += _number(source, options, statistics, column)
            elif isinstance(options, Category):
                categories.append(self._coded(name, options, coded(source, column)))
            elif isinstance(options, DateParts):
                categories += _date_parts(source, options, statistics, column)
            elif isinstance(options, Ids):
                arrays_by_input[name] = self._lists(name, options, lists_of(source, column))
            elif isinstance(options, Text):
                arrays_by_input[name] = self._lists(name, options, tokens_of(source, column, options, self._functions))
            elif isinstance(options, Vector):
                arrays_by_input[name] = _fixed(_vector(source, options, column))
            elif isinstance(options, Image):
                pixels = images_of(source, column, options)
                arrays_by_input[name] = _fixed(pixels.reshape(rows, math.prod(pixels.shape[1:])))
        # an input of its own may not have either name, which check_features sees to
        if numbers:
            arrays_by_input[NUMBERS] = _fixed(np.stack(numbers, axis=1))
        if categories:
            arrays_by_input[CATEGORIES] = _fixed(np.stack(categories, axis=1))
        arrays = [arrays_by_input[tensor.name] for tensor in self._inputs]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _coded(self, name: str, options: Encoded, values: Coded) -> Array:
        """The ids of values, ``(n,)`` int64."""
        if options.buckets is not None:
            return values.translated(to_buckets(values.distinct, options.buckets))
        ids_of_values = self._ids[name]
        return values.translated(np.array([ids_of_values.get(value, 0) for value in values.distinct], np.int64))

    def _lists(self, name: str, options: Ids | Text, rows: Lists) -> pa.Array:
        """The ids of lists, each cut to the length that the options allow."""
        ids, lengths = self._coded(name, options, rows.values), rows.lengths
        if lengths.max(initial=0) > options.max_length:
            starts = np.cumsum(lengths) - lengths
            position = np.arange(len(ids)) - np.repeat(starts, lengths)
            if options.keep == "last":
                position = np.repeat(lengths, lengths) - 1 - position
            ids, lengths = ids[position < options.max_length], np.minimum(lengths, options.max_length)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if offsets[-1] > np.iinfo(np.int32).max:
            raise DataError(
                f"a batch of {len(lengths)} rows of {name!r} has {offsets[-1]} elements, above {2**31 - 1}: lower "
                "max_length"
            )
        kind = pa.list_(pa.field("item", pa.int64(), nullable=False))
        buffer = pa.py_buffer(offsets.astype(np.int32))
        return pa.Array.from_buffers(kind, len(lengths), [None, buffer], children=[from_numpy(ids)])


def _fixed(matrix: Array) -> pa.Array:
    """A matrix as a column of lists of one length."""
    rows, size = matrix.shape
    values = from_numpy(matrix.reshape(-1))
    kind = pa.list_(pa.field("item", values.type, nullable=False), size)
    return pa.Array.from_buffers(kind, rows, [None], children=[values])


def _number(name: str, options: Number, statistics: Statistics, column: pa.Array) -> list[Array]:
    """The column of ``numbers``, and the one that marks missing values, where it is asked for."""
    values = numbers_of(name, column)
    missing = np.isnan(values)
    if missing.any():
        values = np.where(missing, _fill(name, options, statistics, int(missing.sum()), len(values)), values)
    narrow = _float32(name, _standardised(options, statistics, values))
    return [narrow, missing.astype(np.float32)] if options.missing_indicator else [narrow]


def _standardised(options: Number, statistics: Statistics, values: Array) -> Array:
    """Numbers as the model gets them, in float64."""
    values = scaled(options, limits_of(options, statistics.quantiles), values)
    if options.standardise:
        mean, deviation = statistics.scaled_mean or 0.0, math.sqrt(statistics.scaled_variance or 0.0)
        values = values - mean
        if deviation > _CONSTANT * abs(mean):
            values = values / deviation
    return values


def knots_of(options: Number, statistics: Statistics) -> list[float]:
    """The least number, the knots and the greatest number of the training rows as the model gets them, each once."""
    if not statistics.knots or statistics.minimum is None or statistics.maximum is None:
        return []
    raw = np.array([statistics.minimum, *statistics.knots, statistics.maximum])
    with np.errstate(over="ignore"):
        narrow = np.unique(_standardised(options, statistics, raw).astype(np.float32))
    return [float(number) for number in narrow[np.isfinite(narrow)]]


def _fill(name: str, options: Number, statistics: Statistics, missing: int, rows: int) -> float:
    if options.fill == "none":
        raise DataError(
            f"column {name!r} has no finite number in {missing} of {rows} rows of a batch, and fill='none' refuses "
            "that: fill it, or choose another fill"
        )
    if options.fill == "mean":
        return statistics.mean or 0.0
    return statistics.quantiles[_MEDIAN] if options.fill == "median" else float(options.fill)


def _float32(name: str, values: Array) -> Array:
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if not np.isfinite(narrow).all():
        worst = values[~np.isfinite(narrow)][0]
        raise DataError(f"column {name!r} becomes {worst}, which float32 cannot hold: set clip or log of its feature")
    return narrow


def _vector(name: str, options: Vector, column: pa.Array) -> Array:
    """``(rows, size)`` float32."""
    values, missing = vectors_of(name, column)
    size = options.size or 0
    if missing.all():
        values = np.full((len(values), size), np.nan)
    if values.shape[1] != size:
        raise DataError(
            f"column {name!r} has rows of {values.shape[1]} numbers, its feature {size}: correct one of them"
        )
    holes = np.isnan(values)
    if holes.any():
        if options.fill == "none":
            raise DataError(
                f"column {name!r} misses numbers in {int(holes.any(axis=1).sum())} of {len(values)} rows of a batch, "
                "and fill='none' refuses that: fill them, or choose another fill"
            )
        values = np.where(holes, float(options.fill), values)
    return _float32(name, values)


def _date_parts(name: str, options: DateParts, statistics: Statistics, column: pa.Array) -> list[Array]:
    """The ids of each part, ``(rows,)`` int64."""
    times = times_of(name, column, options.timezone)
    if pa.types.is_date(times.type):
        finer = [part for part in options.parts if part in ("hour", "minute")]
        if finer and not pa.types.is_null(column.type):
            raise SchemaError(f"column {name!r} is {column.type}, which has no {finer[0]}: leave it out of parts")
        times = times.cast(pa.timestamp("s"))
    return [_part(part, statistics, times) for part in options.parts]


def _part(part: Part, statistics: Statistics, times: pa.Array) -> Array:
    read = {
        "year": pc.year,
        "quarter": pc.quarter,
        "month": pc.month,
        "day": pc.day,
        "weekday": pc.day_of_week,
        "hour": pc.hour,
        "minute": pc.minute,
    }[part]
    first = {"year": int(statistics.minimum or 0), "weekday": 0, "hour": 0, "minute": 0}.get(part, 1)
    ids = to_numpy(filled(read(times).cast(pa.int64()), first - 1)) - first + 1
    return np.where((ids >= 1) & (ids <= part_ids(part, statistics)), ids, 0)
