"""Fitted features: a value that travels as JSON with the model, and makes its inputs of raw columns."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec
import pyarrow as pa

from sparkdl.config import require
from sparkdl.documents.typed import Source, convert, encode
from sparkdl.errors import DataError
from sparkdl.features.apply import Encoder, knots_of
from sparkdl.features.inputs import Input, inputs_of
from sparkdl.features.spec import MAX_VALUES, DateParts, Encoded, Feature, Number, Text, Vector, check_features
from sparkdl.features.statistics import KNOTS, PROBABILITIES, Statistics
from sparkdl.features.tokens import Functions, Tokens
from sparkdl.storage import sha256_hex

FORMAT = 1
MAX_FEATURES = 100_000
OUTPUT_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """One feature.

    Attributes:
        name: of it.
        options: as the user chose them.
        statistics: of the training rows.
    """

    name: str
    options: Feature
    statistics: Statistics

    def __post_init__(self) -> None:
        statistics, subject = self.statistics, f"the feature {self.name!r}"
        numbers = (
            *(
                statistics.minimum,
                statistics.maximum,
                statistics.mean,
                statistics.variance,
                statistics.scaled_mean,
                statistics.scaled_variance,
            ),
            *statistics.quantiles,
            *statistics.knots,
        )
        require(
            all(number is None or math.isfinite(number) for number in numbers),
            f"{subject} has statistics that are not finite",
        )
        require(
            len(statistics.values) == len(statistics.value_counts), f"{subject} has other values than counts of them"
        )
        require(
            len(set(statistics.values)) == len(statistics.values) <= MAX_VALUES,
            f"{subject} has a value twice, or too many",
        )
        require(
            len(statistics.quantiles) in (0, len(PROBABILITIES)), f"{subject} has {len(statistics.quantiles)} quantiles"
        )
        require(sorted(statistics.quantiles) == list(statistics.quantiles), f"{subject} has quantiles out of order")
        require(len(statistics.knots) in (0, len(KNOTS)), f"{subject} has {len(statistics.knots)} knots")
        require(sorted(statistics.knots) == list(statistics.knots), f"{subject} has knots out of order")
        require(len(statistics.counts) <= 64, f"{subject} has {len(statistics.counts)} bins")
        spread = (statistics.variance or 0.0, statistics.scaled_variance or 0.0)
        require(min(spread) >= 0, f"{subject} has a variance below 0")
        if isinstance(self.options, Number):
            standardised = (
                statistics.scaled_mean is not None
                and statistics.scaled_variance is not None
                and statistics.mean is not None
            )
            require(standardised and bool(statistics.quantiles), f"{subject} is a number and has no moments")
        if isinstance(self.options, Vector):
            require(self.options.size is not None, f"{subject} is a vector and has no size")
        if isinstance(self.options, DateParts):
            years = (statistics.minimum, statistics.maximum)
            require(all(number is not None and abs(number) < 1e6 for number in years), f"{subject} has no years")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Document:
    format: int
    features: Annotated[tuple[Fitted, ...], msgspec.Meta(min_length=1, max_length=MAX_FEATURES)]


@dataclass(frozen=True)
class Features:
    """Fitted features.

    ``apply`` is the only way from raw columns to model inputs, in training and in serving. All that it needs follows
    from options and statistics, so the document holds these alone.

    Attributes:
        fitted: one a feature, in order.
        functions: that cut texts, handed in by whoever fitted or loaded them; no part of the document.
    """

    fitted: tuple[Fitted, ...]
    functions: Functions = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_features({feature.name: feature.options for feature in self.fitted})
        require(len({feature.name for feature in self.fitted}) == len(self.fitted), "a feature stands there twice")

    def __getstate__(self) -> dict[str, Any]:
        return {"fitted": self.fitted, "functions": self.functions}

    @property
    def columns(self) -> tuple[str, ...]:
        """The raw columns that ``apply`` reads, each once."""
        return tuple(dict.fromkeys(feature.options.source(feature.name) for feature in self.fitted))

    @functools.cached_property
    def inputs(self) -> tuple[Input, ...]:
        """What ``apply`` makes, in order: names, dtypes, shapes and cardinalities, as a model factory needs them."""
        return inputs_of({feature.name: (feature.options, feature.statistics) for feature in self.fitted})

    @functools.cached_property
    def knots(self) -> tuple[tuple[float, ...], ...]:
        """The knots of each column of the input ``numbers``, as the model gets them: ascending.

        From the least number to the greatest, each interval with about as many rows; empty for the columns that mark
        missing values.
        """
        knots: list[tuple[float, ...]] = []
        for feature in self.fitted:
            if isinstance(feature.options, Number):
                knots.append(tuple(knots_of(feature.options, feature.statistics)))
                knots += [()] if feature.options.missing_indicator else []
        return tuple(knots)

    def describe(self) -> list[dict[str, Any]]:
        """The inputs as JSON values: what a model factory is told, and told again when a bundle is rebuilt."""
        plain: list[dict[str, Any]] = json.loads(encode(list(self.inputs)))
        return plain

    @property
    def schema(self) -> pa.Schema:
        """The schema of what ``apply`` returns."""
        return pa.schema([tensor.field for tensor in self.inputs])

    @property
    def shapes(self) -> dict[str, tuple[int, ...] | str]:
        """The shape of one row by input, ``"ragged"`` for lists, as a layout of shards takes them."""
        return {tensor.name: tensor.shape or "ragged" for tensor in self.inputs}

    @property
    def rows_at_once(self) -> int:
        """Rows that ``apply`` may be given at once so that what it makes stays below 64 MiB, lists aside."""
        return max(1, OUTPUT_BYTES // max(1, sum(tensor.row_bytes for tensor in self.inputs)))

    @property
    def token_functions(self) -> tuple[str, ...]:
        """The user's functions that cut texts, as ``"module:function"``, each once."""
        return tuple(
            dict.fromkeys(name for feature in self.fitted for name in token_functions({feature.name: feature.options}))
        )

    @functools.cached_property
    def hash(self) -> str:
        """64 hexadecimal digits; equal for features that make equal inputs of equal rows."""
        return sha256_hex(encode(self.to_json()))

    @functools.cached_property
    def _encoder(self) -> Encoder:
        fitted = {feature.name: (feature.options, feature.statistics) for feature in self.fitted}
        return Encoder(fitted, self.inputs, self.functions)

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Turn raw columns into model inputs; what a row becomes does not depend on the rows beside it.

        Args:
            batch: has ``columns``; others are left aside.

        Returns:
            as many rows, with the columns of ``schema``.

        Raises:
            SchemaError: a column is missing or of a type that its feature cannot be made of.
            DataError: a value is missing, or cannot be what it should, where the options refuse that.
            ConfigError: a function that cuts texts was not handed in.
        """
        return self._encoder(batch)

    def to_json(self) -> dict[str, Any]:
        """These features as JSON values, exactly."""
        plain: dict[str, Any] = msgspec.to_builtins(_Document(format=FORMAT, features=self.fitted))
        return plain

    @staticmethod
    def from_json(value: Any, source: Source, resolve: Callable[[str], Tokens] | None = None) -> Features:
        """Read what ``to_json`` gave.

        Args:
            value: parsed JSON.
            source: where it came from, for messages.
            resolve: finds a function by ``"module:function"``, or refuses it; without, texts that need one are refused
                when they are cut.

        Raises:
            IntegrityError: it holds something else.
        """
        document = convert(value, _Document, source)
        if document.format != FORMAT:
            raise source.error(f"it has the format {document.format}, this sparkdl reads {FORMAT}", "$.format")
        try:
            features = Features(document.features)
        except ValueError as cause:
            raise source.error(cause) from cause
        return features if resolve is None else features.with_functions(resolve)

    def with_functions(self, resolve: Callable[[str], Tokens]) -> Features:
        """The features with the functions that ``resolve`` finds by ``"module:function"``."""
        return Features(self.fitted, {name: resolve(name) for name in self.token_functions})


def token_functions(features: Mapping[str, Feature]) -> tuple[str, ...]:
    """The user's functions that these features cut texts by, each once."""
    named = [options.tokens for options in features.values() if isinstance(options, Text) and ":" in options.tokens]
    return tuple(dict.fromkeys(named))


def fit(
    features: Mapping[str, Feature], statistics: Mapping[str, Statistics], functions: Functions | None = None
) -> Features:
    """Fit features to the statistics of the training rows.

    Args:
        features: by name, their options.
        statistics: by name.
        functions: that cut texts.

    Raises:
        ConfigError: two features would share a name.
        DataError: the training rows hold nothing that a feature could be fitted to.
    """
    check_features(features)
    fitted = tuple(_fitted(name, options, statistics[name]) for name, options in features.items())
    document = convert(Features(fitted).to_json(), _Document, Source("what was fitted"))  # an option of 0 becomes 0.0
    return Features(document.features, dict(functions or {}))


def _fitted(name: str, options: Feature, statistics: Statistics) -> Fitted:
    where = f"the feature {name!r} of the column {options.source(name)!r}"
    if not statistics.rows:
        raise DataError(f"{where} has 0 training rows: choose a window that has some")
    if isinstance(options, Number | DateParts) and not statistics.count:
        raise DataError(f"{where} has a value in 0 of {statistics.rows} training rows: leave it out")
    spread = (statistics.variance or 0.0, statistics.scaled_variance or 0.0)
    if isinstance(options, Number | Vector) and not all(map(math.isfinite, spread)):
        raise DataError(
            f"{where} reaches from {statistics.minimum} to {statistics.maximum}, too far for a variance: refuse such "
            "rows in expect, or take its logarithm in transform"
        )
    if isinstance(options, Encoded) and options.buckets is None and not statistics.values:
        raise DataError(
            f"{where} has no value that occurs {options.least_count} times in {statistics.rows} training rows: lower "
            "min_count, or leave it out"
        )
    if isinstance(options, Vector) and options.size is None:
        rows = statistics.rows - statistics.missing
        size, remainder = divmod(statistics.total, rows) if rows else (0, 0)
        if not size or remainder:
            raise DataError(
                f"{where} has {statistics.total} numbers in {rows} rows, which does not tell one length: give its size"
            )
        options = msgspec.structs.replace(options, size=size)
    return Fitted(name=name, options=options, statistics=replace(statistics))
