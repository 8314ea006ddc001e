"""Options of features: what a file may say, what is refused, and in which words."""

from __future__ import annotations

import math

import msgspec
import pytest

from sparkdl.errors import ConfigError
from sparkdl.features import spec
from sparkdl.features.spec import Category, DateParts, Feature, Ids, Image, Number, Text, Vector, check_features

TYPES = (Number, Category, Ids, Text, Vector, Image, DateParts)
LEAST = {Image: {"height": 8, "width": 8}}


@pytest.mark.parametrize("kind", TYPES)
def test_a_type_alone_is_enough_and_comes_back_as_it_was(kind):
    options = kind(**LEAST.get(kind, {}))
    assert msgspec.convert(msgspec.to_builtins(options), Feature) == options


@pytest.mark.parametrize("kind", TYPES)
def test_every_option_is_described_for_editors(kind):
    _, components = msgspec.json.schema_components([kind])
    properties = dict(components[kind.__name__]["properties"])
    del properties["type"]
    assert all(option.get("description") for option in properties.values()), properties


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Number, {"clip": (3.0, 1.0)}, r"clip=\[3.0, 1.0\] has no room"),
        (Number, {"clip": (0.0, math.inf)}, "clip holds inf, no finite number"),
        (Number, {"clip": (0.0, 1.0), "fill": -1.0}, r"fill=-1.0 lies outside of clip=\[0.0, 1.0\]"),
        (Number, {"fill": math.nan}, "fill holds nan"),
        (Number, {"column": ""}, "column='' is empty"),
        (Category, {"buckets": 1}, "buckets=1 does not lie in 2"),
        (Category, {"min_count": 0}, "min_count=0 is below 1"),
        (Category, {"max_size": 10**7}, "max_size=10000000 exceeds"),
        (Category, {"buckets": 9, "min_count": 3}, "min_count=3 bounds a vocabulary, and buckets=9 hashes"),
        (Ids, {"buckets": 9, "max_size": 3}, "max_size=3 bounds a vocabulary, and buckets=9 hashes"),
        (Ids, {"max_length": 0}, "max_length=0 does not lie in"),
        (Text, {"max_length": 1 << 40}, "max_length=1099511627776 does not lie in"),
        (Text, {"tokens": "letters"}, "tokens='letters' is not 'words', 'characters' or 'module:function'"),
        (Text, {"tokens": "os:system:x"}, "tokens='os:system:x' is not"),
        (Vector, {"size": 0}, "size=0 does not lie in"),
        (Vector, {"fill": math.inf}, "fill holds inf"),
        (Image, {"height": 0, "width": 8}, "height=0 does not lie in"),
        (Image, {"height": 9000, "width": 9000}, "make 243000000 numbers a row"),
        (DateParts, {"parts": ()}, "names no part"),
        (DateParts, {"parts": ("day", "day")}, r"parts names \['day'\] twice"),
        (DateParts, {"timezone": "Mars/Olympus"}, "timezone='Mars/Olympus' is no zone"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(kind, options, message):
    with pytest.raises(ConfigError, match=message):
        kind(**options)
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert({"type": kind.__struct_config__.tag, **options}, Feature)


def test_an_unknown_option_is_refused():
    with pytest.raises(msgspec.ValidationError, match="unknown field `fil`"):
        msgspec.convert({"type": "number", "fil": 0}, Feature)


def test_features_do_not_share_a_name():
    check_features({"a": Number(missing_indicator=True), "b": Category(), "numbers": Number(), "t": DateParts()})
    with pytest.raises(ConfigError, match="'a' and 'a__missing' both make 'a__missing'"):
        check_features({"a": Number(missing_indicator=True), "a__missing": Number()})
    with pytest.raises(ConfigError, match="'t_month' and 't' both make 't_month'"):
        check_features({"t_month": Category(), "t": DateParts()})
    with pytest.raises(ConfigError, match="'categories' has the name of the input that others share"):
        check_features({"categories": Ids()})
    with pytest.raises(ConfigError, match="0 features"):
        check_features({})


def test_defaults_of_a_vocabulary_are_told_apart_from_what_was_said():
    assert (Category().least_count, Category().most_values) == (2, 100_000)
    assert (Category(min_count=1).least_count, Category(max_size=9).most_values) == (1, 9)
    assert Category().most_values <= spec.MAX_VALUES
