"""The options of a feature, by type: frozen values that a file, a program and a fitted model write alike."""

from __future__ import annotations

import functools
import math
import zoneinfo
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec

from sparkdl.config import require
from sparkdl.errors import ConfigError

NUMBERS, CATEGORIES = "numbers", "categories"
"""The model inputs that all numbers and all single ids share; every other feature is an input of its own name."""

MAX_VALUES = 1_000_000
"""Values of a vocabulary, which travels inside the bundle's one document."""
MAX_BUCKETS = 2**31 - 1
MAX_ELEMENTS = 1 << 24
"""Elements of one row of a list, a vector or an image."""

Part = Literal["year", "quarter", "month", "day", "weekday", "hour", "minute"]

# The description of every option goes into the JSON schema that editors read; ``type`` tells the types apart.
_Column = Annotated[
    str | None, msgspec.Meta(description="The column it is made of; left out, the column of the feature's own name.")
]
_MinCount = Annotated[
    int | None,
    msgspec.Meta(
        description="A value enters the vocabulary if it stands there at least so often in the training rows; 2 by "
        "default, so that values seen once teach the model what an unknown one means.",
        extra_json_schema={"minimum": 1},
    ),
]
_MaxSize = Annotated[
    int | None,
    msgspec.Meta(
        description="The vocabulary keeps at most so many values, the most frequent; 100,000 by default.",
        extra_json_schema={"minimum": 1, "maximum": MAX_VALUES},
    ),
]
_Buckets = Annotated[
    int | None,
    msgspec.Meta(
        description="Hash the values into so many ids instead of keeping a vocabulary; different values may share one.",
        extra_json_schema={"minimum": 2, "maximum": MAX_BUCKETS},
    ),
]
_MaxLength = Annotated[
    int,
    msgspec.Meta(
        description="Elements kept of a row; longer rows are cut.",
        extra_json_schema={"minimum": 1, "maximum": MAX_ELEMENTS},
    ),
]
_Keep = Annotated[
    Literal["first", "last"], msgspec.Meta(description="Which elements of a row that is too long are kept.")
]


def _size(description: str, most: int) -> msgspec.Meta:
    return msgspec.Meta(description=description, extra_json_schema={"minimum": 1, "maximum": most})


class _Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """What all types have in common.

    Attributes:
        column: that it is made of; None is the column of the feature's own name.
    """

    column: _Column = None

    def __post_init__(self) -> None:
        require(self.column is None or bool(self.column), "column='' is empty: name a column, or leave it out")

    def source(self, name: str) -> str:
        """The raw column behind the feature ``name``."""
        return self.column or name


class Number(_Options, frozen=True, kw_only=True, tag="number"):
    """A number: filled, clipped, put on a logarithmic scale and standardised, in this order.

    Null, NaN and infinities are missing values.

    Attributes:
        fill: what stands for a missing value.
        missing_indicator: add a number of 0 or 1 that marks missing values.
        clip: limits of the numbers.
        log: the sign times ``log1p`` of the absolute value.
        standardise: to mean 0 and variance 1 over the training rows.
    """

    fill: Annotated[
        Literal["mean", "median", "none"] | float,
        msgspec.Meta(
            description="What stands for a missing value: the training rows' mean or median, a number, or none, which "
            "refuses rows without a value."
        ),
    ] = "mean"
    missing_indicator: Annotated[
        bool, msgspec.Meta(description="Add a number of 0 or 1 beside it that says where a value was missing.")
    ] = False
    clip: Annotated[
        Literal["none", "quantiles"] | tuple[float, float],
        msgspec.Meta(
            description="Limit the numbers: none, quantiles (the training rows' 1 % and 99 %), or [low, high]."
        ),
    ] = "none"
    log: Annotated[
        bool,
        msgspec.Meta(description="Take log1p of the absolute value, with its sign: for counts and amounts of money."),
    ] = False
    standardise: Annotated[
        bool, msgspec.Meta(description="Subtract the training rows' mean and divide by their standard deviation.")
    ] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_finite("fill", self.fill)
        if isinstance(self.clip, tuple):
            low, high = self.clip
            _require_finite("clip", low, high)
            require(low < high, f"clip=[{low}, {high}] has no room between its limits: give the lower one first")
            if isinstance(self.fill, float | int):
                require(
                    low <= self.fill <= high,
                    f"fill={self.fill} lies outside of clip=[{low}, {high}]: choose one between",
                )


class Encoded(_Options, frozen=True, kw_only=True):
    """What is common to types whose values become ids: a vocabulary of the training rows, or hashing.

    Id 0 is the unknown: missing values, and those that the vocabulary does not hold. Values become ids from 1 on.

    Attributes:
        min_count: rows that a value needs to enter the vocabulary; None is 2.
        max_size: of the vocabulary, the most frequent values; None is 100,000.
        buckets: hash into so many ids; None keeps a vocabulary.
    """

    min_count: _MinCount = None
    max_size: _MaxSize = None
    buckets: _Buckets = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("min_count", "max_size"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name}={value} is below 1: give at least 1")
            require(
                value is None or self.buckets is None,
                f"{name}={value} bounds a vocabulary, and buckets={self.buckets} hashes: give one of the two",
            )
        require(
            self.max_size is None or self.max_size <= MAX_VALUES,
            f"max_size={self.max_size} exceeds the {MAX_VALUES} values of a vocabulary: hash with buckets",
        )
        require(
            self.buckets is None or 2 <= self.buckets <= MAX_BUCKETS,
            f"buckets={self.buckets} does not lie in 2..{MAX_BUCKETS}: give a number in that range",
        )

    @property
    def least_count(self) -> int:
        """``min_count``, its default filled in."""
        return 2 if self.min_count is None else self.min_count

    @property
    def most_values(self) -> int:
        """``max_size``, its default filled in."""
        return 100_000 if self.max_size is None else self.max_size


class Category(Encoded, frozen=True, kw_only=True, tag="category"):
    """One value of a few or of many, as an id."""


class Ids(Encoded, frozen=True, kw_only=True, tag="ids"):
    """A list of values, of any length, as ids.

    Attributes:
        max_length: elements kept of a row.
        keep: which ones.
    """

    max_length: _MaxLength = 256
    keep: _Keep = "first"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_length(self.max_length)


class Text(Encoded, frozen=True, kw_only=True, tag="text"):
    """A text, cut into tokens, as their ids.

    Attributes:
        tokens: ``"words"``, ``"characters"``, or ``"module:function"``.
        lowercase: whether the text is lower-cased before.
        max_length: tokens kept of a text.
        keep: which ones.
    """

    tokens: Annotated[
        str,
        msgspec.Meta(
            description="How a text is cut: words (at white space), characters, or module:function, a function of "
            "yours from a text to a list of strings."
        ),
    ] = "words"
    lowercase: Annotated[bool, msgspec.Meta(description="Lower-case the text first.")] = True
    max_length: _MaxLength = 256
    keep: _Keep = "first"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_length(self.max_length)
        module, _, function = self.tokens.partition(":")
        named = all(part.isidentifier() for part in [*module.split("."), *function.split(".")])
        require(
            self.tokens in ("words", "characters") or named,
            f"tokens={self.tokens!r} is not 'words', 'characters' or 'module:function': choose one of these",
        )


class Vector(_Options, frozen=True, kw_only=True, tag="vector"):
    """A list or a Spark ML vector of numbers, of one length.

    Attributes:
        size: its length; None takes that of the training rows.
        fill: what stands for a missing row and for missing numbers in it.
    """

    size: Annotated[
        int | None, _size("Numbers of a row; left out, as many as the training rows have.", MAX_ELEMENTS)
    ] = None
    fill: Annotated[
        Literal["none"] | float,
        msgspec.Meta(description="What stands for missing numbers: a number, or none, which refuses such rows."),
    ] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.size is None or 1 <= self.size <= MAX_ELEMENTS,
            f"size={self.size} does not lie in 1..{MAX_ELEMENTS}: give the numbers of a row",
        )
        _require_finite("fill", self.fill)


class Image(_Options, frozen=True, kw_only=True, tag="image"):
    """An encoded picture (PNG, JPEG, BMP, GIF or WebP), decoded and resized, ``(channels, height, width)``.

    Attributes:
        height: in pixels.
        width: in pixels.
        channels: 3 for colours, 1 for grey.
        scale: numbers between 0 and 1, or bytes.
        invalid: what becomes of rows without a picture, or with one that cannot be decoded.
    """

    height: Annotated[int, _size("Height in pixels.", 1 << 14)]
    width: Annotated[int, _size("Width in pixels.", 1 << 14)]
    channels: Annotated[Literal[1, 3], msgspec.Meta(description="3 for colours, 1 for grey.")] = 3
    scale: Annotated[
        Literal["unit", "none"],
        msgspec.Meta(description="unit gives numbers from 0 to 1, none leaves bytes from 0 to 255."),
    ] = "unit"
    invalid: Annotated[
        Literal["error", "zeros"],
        msgspec.Meta(
            description="What becomes of a row without a picture or with a broken one: error refuses it, zeros makes "
            "it black."
        ),
    ] = "error"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("height", "width"):
            size = getattr(self, name)
            require(1 <= size <= 1 << 14, f"{name}={size} does not lie in 1..{1 << 14} pixels: give one that does")
        numbers = self.height * self.width * self.channels
        require(
            numbers <= MAX_ELEMENTS,
            f"height={self.height}, width={self.width} and channels={self.channels} make {numbers} numbers a row, "
            f"above {MAX_ELEMENTS}: choose a smaller size",
        )


_zones = functools.cache(zoneinfo.available_timezones)  # it lists a folder of hundreds of files each time


class DateParts(_Options, frozen=True, kw_only=True, tag="date_parts"):
    """Parts of a date or a time, each an id.

    Attributes:
        parts: which ones.
        timezone: in which parts of an instant are taken; dates and times without a zone are taken as they are written.
            After 2037 a zone with summer time has none, as Arrow's tables of zones end there: in training and in
            scoring alike.
    """

    parts: Annotated[
        tuple[Part, ...],
        msgspec.Meta(description="Which parts of the date or time.", extra_json_schema={"minItems": 1}),
    ] = ("month", "weekday", "hour")
    timezone: Annotated[
        str,
        msgspec.Meta(
            description="The zone in which parts of an instant are taken, such as Europe/Berlin; times without a zone "
            "are taken as they are written. After 2037 no zone has summer time."
        ),
    ] = "UTC"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.parts), f"parts=() names no part: choose from {', '.join(get_args(Part))}")
        double = sorted({part for part in self.parts if self.parts.count(part) > 1})
        require(not double, f"parts names {double} twice: name each part once")
        exists = self.timezone == "UTC" or self.timezone in _zones()
        require(exists, f"timezone={self.timezone!r} is no zone that is known here: give one such as 'Europe/Berlin'")


Feature = Number | Category | Ids | Text | Vector | Image | DateParts
"""The options of one feature."""


def input_names(name: str, options: Feature) -> dict[str, tuple[str, ...]]:
    """What a feature adds to the model's inputs: by input, the names inside of it."""
    if isinstance(options, Number):
        return {NUMBERS: (name, f"{name}__missing") if options.missing_indicator else (name,)}
    if isinstance(options, Category):
        return {CATEGORIES: (name,)}
    if isinstance(options, DateParts):
        return {CATEGORIES: tuple(f"{name}_{part}" for part in options.parts)}
    return {name: (name,)}


def check_features(features: Mapping[str, Feature]) -> None:
    """Refuse features that would not have an input, or a name inside of one, to themselves.

    Raises:
        ConfigError: names both.
    """
    require(bool(features), "there are 0 features: name at least one column")
    owners: dict[tuple[str, str], str] = {}
    for name, options in features.items():
        require(bool(name), "a feature has an empty name: give it one")
        for owned in _owned(name, options):
            if owned in owners:
                raise ConfigError(
                    f"the features {owners[owned]!r} and {name!r} both make {owned[1]!r}: rename one of the two"
                )
            owners[owned] = name
    for name, options in features.items():
        is_taken = name in (NUMBERS, CATEGORIES) and name in input_names(name, options) and _alone(options)
        require(not is_taken, f"the feature {name!r} has the name of the input that others share: rename it")


def _owned(name: str, options: Feature) -> Iterable[tuple[str, str]]:
    return [(name_in, part) for name_in, parts in input_names(name, options).items() for part in parts]


def _alone(options: Any) -> bool:
    return isinstance(options, Ids | Text | Vector | Image)


def _require_finite(name: str, *values: float | str) -> None:
    for value in values:
        require(
            isinstance(value, str) or math.isfinite(value), f"{name} holds {value}, no finite number: give one that is"
        )


def _require_length(length: int) -> None:
    require(1 <= length <= MAX_ELEMENTS, f"max_length={length} does not lie in 1..{MAX_ELEMENTS}: give one that does")
