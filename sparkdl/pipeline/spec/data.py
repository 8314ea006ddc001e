"""The sections of a pipeline file that say what the rows are: source, transform, expect, label, split.

Enters: what the user wrote. Leaves: frozen values; what they contradict in other sections is for ``file/conflicts.py``.
The features, their types and options are ``sparkdl.features.spec``'s.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from sparkdl.pipeline.spec.base import Column, Columns, Duration, Fraction, Function, Positive, Section, Text, Wrong

__all__ = [
    "LOSSES",
    "ColumnSplit",
    "CsvSource",
    "DeltaSource",
    "Expectation",
    "FunctionSource",
    "HashSplit",
    "JsonSource",
    "Label",
    "ParquetSource",
    "Scalar",
    "Source",
    "Split",
    "SqlSource",
    "TableOrPath",
    "TimeSplit",
    "Transform",
]

Scalar = str | int | float | bool
TableOrPath = Annotated[
    str,
    Meta(
        min_length=1,
        description="A path or URI (a relative one is relative to this file), or catalog.schema.table.",
        examples=["s3://lake/customers", "main.sales.customers"],
    ),
]
_Path = Annotated[
    str,
    Meta(min_length=1, description="A file, a folder or a pattern, as path or URI; relative ones to this file."),
]
_Options = Annotated[
    dict[str, Scalar],
    Meta(description="Options of Spark's reader, by its names; secrets as ${NAME} of the environment."),
]
_Schema = Annotated[
    Text | None,
    Meta(
        description="The columns as SQL, 'id BIGINT, day DATE, ...'; without, Spark reads all to guess.",
    ),
]

LOSSES = {
    "regression": ("mse", "mae", "huber"),
    "binary": ("log_loss",),
    "multiclass": ("log_loss",),
}
"""Names of losses by type of label, the default first; any other is ``module:function`` of (output, label)."""


def half_a_name(text: str) -> bool:
    """Whether a text is neither plainly a path nor the whole name of a table: ``sales.customers``."""
    return re.fullmatch(r"[^\W\d]\w*\.[^\W\d]\w*", text) is not None


class _AnySource(Section, frozen=True, kw_only=True, tag_field="kind"):
    """What all kinds of sources have in common."""

    key: Annotated[
        Columns,
        Meta(
            description="The columns that tell rows apart: of rows with the same key one stays, the others are counted "
            "and dropped. Left out, no row is a duplicate, also not of an equal one."
        ),
    ] = ()
    time: Annotated[
        Column | None,
        Meta(description="The date or timestamp of a row: it decides the window a row belongs to."),
    ] = None
    partition: Annotated[
        Column | None,
        Meta(description="Instead of time: the partition column that holds the day or hour, e.g. 2026-03-01."),
    ] = None
    every: Annotated[
        Literal["hour", "day"],
        Meta(description="How long one window is: rows are taken in, checked, counted and scored window by window."),
    ] = "day"

    def _misfits(self) -> Iterator[Wrong]:
        if self.time and self.partition:
            yield (
                "partition",
                f"={self.partition!r} and time={self.time!r} both say when a row happened: keep one of the two",
            )
        double = sorted({column for column in self.key if self.key.count(column) > 1})
        if double:
            yield "key", f" names {double[0]!r} twice: name each column once"

    @property
    def when(self) -> str | None:
        """The column that says when a row happened, if there is one."""
        return self.time or self.partition


class DeltaSource(_AnySource, frozen=True, kw_only=True, tag="delta"):
    """A Delta table."""

    table: TableOrPath
    version: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Read this version always; left out, the newest one, pinned once a run."),
    ] = None

    def _misfits(self) -> Iterator[Wrong]:
        yield from super()._misfits()
        if half_a_name(self.table):
            yield (
                "table",
                f"={self.table!r} may be a table without its catalog, or a folder: write "
                f"'spark_catalog.{self.table}' or './{self.table}'",
            )


class ParquetSource(_AnySource, frozen=True, kw_only=True, tag="parquet"):
    """Parquet files."""

    path: _Path
    options: _Options = field(default_factory=dict)


class CsvSource(_AnySource, frozen=True, kw_only=True, tag="csv"):
    """CSV files; a first line with names unless ``options: {header: false}``."""

    path: _Path
    schema: _Schema = None
    options: _Options = field(default_factory=dict)


class JsonSource(_AnySource, frozen=True, kw_only=True, tag="json"):
    """Files with one JSON object a line."""

    path: _Path
    schema: _Schema = None
    options: _Options = field(default_factory=dict)


class SqlSource(_AnySource, frozen=True, kw_only=True, tag="sql"):
    """A query over the tables of Spark's catalog."""

    query: Annotated[str, Meta(min_length=1, description="One SELECT of Spark SQL.")]


class FunctionSource(_AnySource, frozen=True, kw_only=True, tag="function"):
    """A function of yours, ``(spark, window, **arguments) -> DataFrame``; window is None where there is no time."""

    function: Annotated[Function, Meta(description="The function, as module:function.")]
    arguments: Annotated[dict[str, Any], Meta(description="Its further arguments, by name.")] = field(
        default_factory=dict
    )


Source = DeltaSource | ParquetSource | CsvSource | JsonSource | SqlSource | FunctionSource


class Transform(Section, frozen=True, kw_only=True):
    """What is made of the source's rows before anything else: a function or SQL."""

    short = "function"

    function: Annotated[
        Function | None, Meta(description="A function (DataFrame, **arguments) -> DataFrame, as module:function.")
    ] = None
    sql: Annotated[Text | None, Meta(description="One SELECT of Spark SQL, from the view named source.")] = None
    arguments: Annotated[dict[str, Any], Meta(description="Further arguments of the function, by name.")] = field(
        default_factory=dict
    )

    def _misfits(self) -> Iterator[Wrong]:
        if (self.function is None) == (self.sql is None):
            yield "", f" has {'both' if self.function else 'neither'} function and sql: write one of the two"
        elif self.sql is not None and self.arguments:
            yield "arguments", f"={self.arguments!r} are for a function, and sql is given: leave them out"


class Expectation(Section, frozen=True, kw_only=True):
    """A condition that each row should fulfil, evaluated once; NULL counts as broken."""

    short = "check"

    check: Annotated[str, Meta(min_length=1, description="The condition, as SQL: 'amount >= 0'.")]
    action: Annotated[
        Literal["quarantine", "warn", "fail"],
        Meta(
            description="quarantine puts rows that break it aside; warn keeps them and says so; fail ends the run, "
            "before anything of the window is committed, if they are more than above."
        ),
    ] = "quarantine"
    above: Annotated[
        Fraction, Meta(description="The share of a window's rows up to which warn is silent and fail quarantines.")
    ] = 0.0

    def _misfits(self) -> Iterator[Wrong]:
        if self.above and self.action == "quarantine":
            yield (
                "above",
                f"={self.above} has no meaning with action 'quarantine': leave it out, or choose warn or fail",
            )


class Label(Section, frozen=True, kw_only=True):
    """What is predicted, by column."""

    short = "type"

    type: Annotated[
        Literal["regression", "binary", "multiclass"],
        Meta(description="regression predicts a number, binary one of two values, multiclass one of several."),
    ]
    loss: Annotated[
        Annotated[
            str,
            Meta(pattern=r"^([a-z_]+|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$", examples=["huber", "mypackage.losses:focal"]),
        ]
        | None,
        Meta(
            description="mse (default), mae or huber of a regression, log_loss of classes, or module:function, a "
            "function of yours of (output, label).",
        ),
    ] = None
    weight: Annotated[
        Positive | None,
        Meta(description="Its share of the loss where there are several labels; equal shares by default."),
    ] = None
    positive: Annotated[
        Scalar | None,
        Meta(description="Of a binary label: the value that is class 1; left out, true or 1, as the column is."),
    ] = None
    classes: Annotated[
        tuple[str | int, ...],
        Meta(
            description="Of a multiclass label: its values, in the order of the model's outputs; left out, those of "
            "the training rows, sorted."
        ),
    ] = ()

    def _misfits(self) -> Iterator[Wrong]:
        known = LOSSES[self.type]
        if self.loss and ":" not in self.loss and self.loss not in known:
            yield (
                "loss",
                f"={self.loss!r} is no loss of type {self.type!r}: choose {' or '.join(known)}, or module:function",
            )
        if self.positive is not None and self.type != "binary":
            yield "positive", f"={self.positive!r} belongs to type 'binary', and type is {self.type!r}: leave it out"
        if self.classes and self.type != "multiclass":
            yield "classes", f" belong to type 'multiclass', and type is {self.type!r}: leave them out"
        elif self.classes and len(set(self.classes)) < max(3, len(self.classes)):
            yield "classes", f"={list(self.classes)} are not three different values or more: name each once"


_Train = Annotated[
    str,
    Meta(
        pattern=r"^(all|[1-9]\d{0,5} ?(hours?|days?|weeks?))$",
        examples=["14 days", "all"],
        description="How much time before the validation window trains: '14 days' slides along, 'all' grows.",
    ),
]


_TEST = (
    "Held out, too: judges champion and challenger on rows that chose nothing. An epoch that was chosen by the rows "
    "that judge it looks a little better than it is, the best of many trials much better."
)


class TimeSplit(Section, frozen=True, kw_only=True, tag_field="by", tag="time"):
    """Windows in time, one after the other: train, validate, test, score; the last one ends with the newest rows."""

    train: _Train = "all"
    validate: Annotated[
        Duration,
        Meta(description="Held out after the training window: chooses the epoch, and judges models without test."),
    ] = "1 day"
    test: Annotated[Duration | None, Meta(description=_TEST)] = None
    score: Annotated[Duration, Meta(description="The newest rows, unseen in training, that the champion scores.")] = (
        "1 day"
    )


class HashSplit(Section, frozen=True, kw_only=True, tag_field="by", tag="hash"):
    """Shares by a hash of the key (of the whole row without one): a row stays where it is from run to run."""

    group: Annotated[
        Columns,
        Meta(
            description="Hash these columns instead of the key: rows that share their values stay in one part, such "
            "as all rows of a customer, so that no model is judged on whom it was trained on."
        ),
    ] = ()
    train: Annotated[float, Meta(gt=0, le=1, description="Share of the rows that trains.")] = 0.8
    validate: Annotated[
        float, Meta(gt=0, le=1, description="Share held out: chooses the epoch, and judges models without test.")
    ] = 0.1
    test: Annotated[Fraction, Meta(description=_TEST)] = 0.0
    score: Annotated[Fraction, Meta(description="Share, unseen in training, that the champion scores.")] = 0.1
    seed: Annotated[int, Meta(ge=0, description="Another seed chooses other rows.")] = 0

    def _misfits(self) -> Iterator[Wrong]:
        total = self.train + self.validate + self.test + self.score
        if total > 1 + 1e-9:
            tested = f", test={self.test}" if self.test else ""
            yield (
                "",
                f" has train={self.train}, validate={self.validate}{tested} and score={self.score}, together {total:g},"
                " above 1: lower one of them",
            )


_Values = tuple[str | int | bool, ...]


class ColumnSplit(Section, frozen=True, kw_only=True, tag_field="by", tag="column"):
    """By the values of a column; rows with other values are left out."""

    column: Annotated[Column, Meta(description="The column.")]
    train: Annotated[_Values, Meta(min_length=1, description="Its values in rows that train.")]
    validate: Annotated[
        _Values,
        Meta(min_length=1, description="Its values in rows held out: choose the epoch, and judge models without test."),
    ]
    test: Annotated[_Values, Meta(description=_TEST)] = ()
    score: Annotated[_Values, Meta(description="Its values in rows that the champion scores.")] = ()

    def _misfits(self) -> Iterator[Wrong]:
        parts = {"train": self.train, "validate": self.validate, "test": self.test, "score": self.score}
        for first, second in itertools.combinations(parts, 2):
            for value in parts[second]:
                if value in parts[first]:
                    yield second, f" holds {value!r}, which {first} holds, too: a row can have one part only"


Split = TimeSplit | HashSplit | ColumnSplit
