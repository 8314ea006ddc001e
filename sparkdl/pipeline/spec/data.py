"""The sections of a pipeline file that say what becomes of the rows: transform, expect, label, split.

What they contradict in other sections is for ``file/conflicts.py``. The features, their types and options are
``sparkdl.features.spec``'s.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from sparkdl.pipeline.spec.base import (
    Column,
    Columns,
    Duration,
    Fraction,
    Function,
    Natural,
    Positive,
    Section,
    Text,
    Wrong,
    doc,
    one_of,
)
from sparkdl.pipeline.spec.source import Scalar

LOSSES = {
    "regression": ("mse", "mae", "huber", "poisson"),
    "quantiles": ("pinball",),
    "binary": ("log_loss",),
    "multiclass": ("log_loss",),
}
"""Names of losses by type of label, the default first; any other is ``module:function`` of (output, label)."""


class Transform(Section, frozen=True, kw_only=True):
    """What is made of the source's rows first, by a function or SQL; a window of which it leaves no row is refused."""

    short = "function"

    function: Annotated[
        Function | None, doc("A function (DataFrame, **arguments) -> DataFrame, as module:function.")
    ] = None
    sql: Annotated[Text | None, doc("One SELECT of Spark SQL, from source: SELECT *, a / b AS rate FROM source.")] = (
        None
    )
    arguments: Annotated[dict[str, Any], doc("Further arguments of the function, by name.")] = field(
        default_factory=dict
    )

    def _misfits(self) -> Iterator[Wrong]:
        yield from one_of("function", self.function, "sql", self.sql)
        if self.function is None and self.sql is not None and self.arguments:
            yield "arguments", f"={self.arguments!r} are for a function, and sql is given: leave them out"


OUTCOMES = ("", "duplicate", "no time that can be read", "malformed in its file")
"""What the pipeline itself says of rows: kept, dropped, and refused for two reasons; no expectation is called so."""


class Expectation(Section, frozen=True, kw_only=True):
    """A condition that each row should fulfil, evaluated once; NULL counts as broken."""

    short = "check"

    check: Annotated[Text, doc("The condition, as SQL: 'amount >= 0'.")]
    action: Annotated[
        Literal["quarantine", "warn", "fail"],
        doc(
            "quarantine puts rows that break it aside; warn keeps them and says so; fail ends the run, "
            "before anything of the window is committed, if they are more than above, counting also rows that are "
            "duplicates, malformed or refused for another reason."
        ),
    ] = "quarantine"
    above: Annotated[Fraction, doc("The share of a window's rows up to which warn is silent and fail quarantines.")] = (
        0.0
    )

    def _misfits(self) -> Iterator[Wrong]:
        if self.above and self.action == "quarantine":
            yield (
                "above",
                f"={self.above} has no meaning with action 'quarantine': leave it out, or choose warn or fail",
            )


_TYPES = {
    "levels": ("quantiles",),
    "positive": ("binary",),
    "classes": ("multiclass",),
    "smoothing": ("multiclass",),
    "calibrate": ("binary", "multiclass"),
}
"""The types of label that an option of one is for."""


class Label(Section, frozen=True, kw_only=True):
    """What is predicted, by column."""

    short = "type"

    type: Annotated[
        Literal["regression", "quantiles", "binary", "multiclass"],
        doc(
            "regression predicts a number, quantiles several that a number stays below with given "
            "probabilities, binary one of two values, multiclass one of several."
        ),
    ]
    loss: Annotated[
        Annotated[
            str, Meta(pattern=r"^([a-z_]+|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$", examples=["huber", "mypackage.losses:focal"])
        ]
        | None,
        doc(
            "mse (default), mae, huber or poisson of a regression, pinball of quantiles, log_loss of "
            "classes, or module:function, a function of yours of (output, label). poisson is of amounts from 0 on, "
            "whose causes multiply: the network says their logarithm, and no prediction is more than twice the "
            "greatest amount that it learned from."
        ),
    ] = None
    weight: Annotated[
        Positive | None, doc("Its share of the loss where there are several labels; equal shares by default.")
    ] = None
    positive: Annotated[
        Scalar | None, doc("Of a binary label: the value that is class 1; left out, true or 1, as the column is.")
    ] = None
    classes: Annotated[
        tuple[str | int, ...],
        doc(
            "Of a multiclass label: its values, in the order of the model's outputs; left out, those of "
            "the training rows, sorted."
        ),
    ] = ()

    levels: Annotated[
        tuple[float, ...],
        doc(
            "Of quantiles: the probabilities, ascending, [0.1, 0.5, 0.9] if left out; the one nearest to "
            "0.5 is the prediction."
        ),
    ] = ()
    smoothing: Annotated[
        Annotated[float, Meta(ge=0, lt=1)] | None,
        doc(
            "Of several classes: the share of a training row's label that is spread over all of them, by "
            "which accuracy gains and probabilities lose. Left out: 0.1 where accuracy judges, else 0."
        ),
    ] = None
    calibrate: Annotated[
        Literal["none", "temperature"] | None,
        doc(
            "Of classes: temperature divides the logits by the number that makes the probabilities of the "
            "validation rows most likely (Guo et al. 2017). Left out: temperature where labels are smoothed, else none."
        ),
    ] = None

    @property
    def quantiles(self) -> tuple[float, ...]:
        """The levels of quantiles; none of other types."""
        return (self.levels or (0.1, 0.5, 0.9)) if self.type == "quantiles" else ()

    def _misfits(self) -> Iterator[Wrong]:
        values: dict[str, Any] = {
            "levels": list(self.levels) or None,
            "positive": self.positive,
            "classes": list(self.classes) or None,
            "smoothing": self.smoothing or None,
            "calibrate": None if self.calibrate == "none" else self.calibrate,
        }
        for name, value in values.items():
            if value is not None and self.type not in _TYPES[name]:
                types = " or ".join(map(repr, _TYPES[name]))
                yield name, f"={value!r} belongs to type {types}, and type is {self.type!r}: leave it out"
        if not all(0 < level < 1 for level in self.levels):
            yield "levels", f"={list(self.levels)} are no probabilities of quantiles: give numbers above 0 and below 1"
        elif any(low >= high for low, high in itertools.pairwise(self.levels)):
            yield "levels", f"={list(self.levels)} do not ascend: give each level once, the lowest first"
        elif len({quantile_column(level) for level in self.levels}) < len(self.levels):
            yield "levels", f"={list(self.levels)} are too near to each other to have columns of their own: round them"
        if self.type == "multiclass" and self.classes and len(set(self.classes)) < max(3, len(self.classes)):
            yield "classes", f"={list(self.classes)} are not three different values or more: name each once"
        losses = LOSSES[self.type]
        if ":" in (self.loss or ""):
            for name in ("smoothing", "calibrate"):
                if values[name] is not None:
                    yield name, f"={values[name]!r} is for log_loss, and loss is {self.loss!r}: leave one out"
        elif self.loss and self.loss not in losses:
            remedy = f"choose {' or '.join(losses)}, or module:function"
            yield "loss", f"={self.loss!r} is no loss of type {self.type!r}: {remedy}"


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


_PREDICTED = {
    "regression": ("prediction",),
    "quantiles": ("prediction",),
    "binary": ("prediction", "probability"),
    "multiclass": ("prediction", "probability", "probabilities"),
}


def quantile_column(level: float) -> str:
    """What the column of a quantile is called: ``q10``, ``q2_5``."""
    return f"q{100 * level:g}".replace(".", "_")


def prediction_columns(
    types: Mapping[str, str], levels: Mapping[str, Sequence[float]] | None = None
) -> tuple[str, ...]:
    """The columns that predictions have besides the key and what is kept.

    Args:
        types: of the labels, by name.
        levels: of those that are quantiles, likewise.
    """
    prefixes = {name: "" if len(types) == 1 else f"{name}_" for name in types}
    columns = {
        name: (*_PREDICTED[kind], *map(quantile_column, (levels or {}).get(name, ()))) for name, kind in types.items()
    }
    predicted = (f"{prefixes[name]}{column}" for name, label_columns in columns.items() for column in label_columns)
    return (*predicted, "model_version", "run_id", "scored_at")


class TimeSplit(Section, frozen=True, kw_only=True, tag_field="by", tag="time"):
    """Windows in time, one after the other: train, validate, test, score; the last one ends with the newest rows."""

    train: _Train = "all"
    validate: Annotated[
        Duration, doc("Held out after the training window: chooses the epoch, and judges models without test.")
    ] = "1 day"
    test: Annotated[Duration | None, doc(_TEST)] = None
    score: Annotated[Duration, doc("The newest rows, unseen in training, that the champion scores.")] = "1 day"


class HashSplit(Section, frozen=True, kw_only=True, tag_field="by", tag="hash"):
    """Shares by a hash of the key, or of all columns but the labels: a row stays where it is from run to run.

    Rows whose key is null are all in one part.
    """

    copies: Annotated[
        Literal["together", "spread"],
        doc(
            "Rows without a key that differ in labels at most: together in one part, so that no model is "
            "judged on what it was trained on, or spread one by one, where a table has few rows that differ otherwise."
        ),
    ] = "together"
    group: Annotated[
        Columns,
        doc(
            "Hash these columns instead of the key: rows that share their values stay in one part, such "
            "as all rows of a customer, so that no model is judged on whom it was trained on."
        ),
    ] = ()
    train: Annotated[float, doc("Share of the rows that trains.", gt=0, le=1)] = 0.8
    validate: Annotated[
        float, doc("Share held out: chooses the epoch, and judges models without test.", gt=0, le=1)
    ] = 0.1
    test: Annotated[Fraction, doc(_TEST)] = 0.0
    score: Annotated[Fraction, doc("Share, unseen in training, that the champion scores.")] = 0.1
    seed: Annotated[Natural, doc("Another seed chooses other rows.")] = 0

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

    column: Annotated[Column, doc("The column.")]
    train: Annotated[_Values, doc("Its values in rows that train.", min_length=1)]
    validate: Annotated[
        _Values, doc("Its values in rows held out: choose the epoch, and judge models without test.", min_length=1)
    ]
    test: Annotated[_Values, doc(_TEST)] = ()
    score: Annotated[_Values, doc("Its values in rows that the champion scores.")] = ()

    def _misfits(self) -> Iterator[Wrong]:
        parts = {"train": self.train, "validate": self.validate, "test": self.test, "score": self.score}
        for first, second in itertools.combinations(parts, 2):
            for value in parts[second]:
                if value in parts[first]:
                    yield second, f" holds {value!r}, which {first} holds, too: a row can have one part only"


Split = TimeSplit | HashSplit | ColumnSplit
