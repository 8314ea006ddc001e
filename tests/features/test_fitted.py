"""Fitted features as a document: exact, bounded, and refused where somebody has been at it."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.documents.typed import Source, decode, encode
from sparkdl.errors import ConfigError, DataError, IntegrityError
from sparkdl.features.fitted import Features, fit
from sparkdl.features.spec import Category, DateParts, Ids, Number, Vector
from sparkdl.features.statistics import Running, Statistics, limits_of, scaled, statistics_of
from tests.features.conftest import FEATURES, VOWELS, rows_of

SOURCE = Source("the bundle")


def test_features_come_back_from_their_document_as_they_were(features):
    document = json.loads(encode(features.to_json()))
    again = Features.from_json(document, SOURCE, VOWELS.__getitem__)
    assert again == features
    assert again.hash == features.hash
    [batch] = rows_of(30, seed=3, unseen=True).to_batches()
    assert again.apply(batch) == features.apply(batch)
    assert pickle.loads(pickle.dumps(features)).apply(batch) == features.apply(batch)


def test_other_training_rows_have_another_hash(features):
    other = fit(FEATURES, statistics_of(rows_of(200, seed=1), FEATURES, VOWELS), VOWELS)
    assert other.hash != features.hash


def test_what_the_model_factory_is_told(features):
    inputs = {one.name: one for one in features.inputs}
    assert list(inputs)[:2] == ["numbers", "categories"]
    assert inputs["numbers"].shape == (len(inputs["numbers"].names),)
    assert {"median", "median__missing", "price__missing"} <= set(inputs["numbers"].names)
    sizes = dict(zip(inputs["categories"].names, inputs["categories"].cardinalities, strict=True))
    assert (sizes["hashed"], sizes["rare"], sizes["at_month"], sizes["there_hour"]) == (8, 3, 13, 25)
    assert (inputs["history"].shape, inputs["latest"].cardinalities) == ((), (6,))
    assert (inputs["photo"].shape, inputs["photo"].dtype, inputs["grey"].dtype) == ((3, 4, 3), "float32", "uint8")
    assert inputs["embedding"].shape == (3,)


def test_the_description_is_what_json_gives_back(features):
    described = features.describe()
    assert json.loads(json.dumps(described)) == described
    assert [one["name"] for one in described] == features.schema.names
    assert described[0]["names"][:2] == ["plain", "raw"]


def test_ids_stay_below_their_cardinality(features):
    [batch] = rows_of(500, seed=9, unseen=True).to_batches()
    made = features.apply(batch)
    for one in features.inputs:
        if one.cardinalities:
            ids = np.array(made.column(one.name).flatten()).reshape(-1, len(one.cardinalities))
            assert (ids >= 0).all()
            assert (ids < np.array(one.cardinalities)).all(), one


def _spoiled(document, path, value):
    spoiled = copy.deepcopy(document)
    target = spoiled
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value
    return spoiled


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), 2, "format 2, this sparkdl reads 1"),
        (("format",), "1", "Expected `int`"),
        (("features",), [], "length >= 1"),
        (("more",), 1, "the field 'more' is unknown"),
        (("features", 0, "options", "type"), "code", "Invalid value 'code'"),
        (("features", 0, "options", "fill"), [], "fill"),
        (("features", 0, "statistics", "scaled_mean"), None, "has no moments"),
        (("features", 0, "statistics", "scaled_variance"), -1.0, "a variance below 0"),
        (("features", 0, "statistics", "quantiles"), [1.0], "1 quantiles"),
        (("features", 0, "statistics", "knots"), [1.0], "1 knots"),
        (("features", 0, "statistics", "knots"), [2.0, *[1.0] * 30], "knots out of order"),
        (("features", 0, "statistics", "rows"), -1, "Expected `int` >= 0"),
        (("features", 1, "statistics", "value_counts"), [1], "other values than counts"),
        (("features", 1, "statistics", "values"), ["a", "a"], "a value twice"),
        (("features", 1, "name"), "n", "both make 'n'|stands there twice"),
        (("features", 2, "options", "size"), None, "has no size"),
        (("features", 3, "statistics", "maximum"), 1e300, "has no years"),
    ],
)
def test_a_document_that_was_altered_is_refused(path, value, message):
    options = {"n": Number(), "c": Category(min_count=1), "v": Vector(), "t": DateParts(parts=("year",))}
    rows = pa.table(
        {"n": [1.0, 2.0], "c": ["x", "y"], "v": [[1.0], [2.0]], "t": pa.array([0, 1], pa.int32()).cast(pa.date32())}
    )
    document = fit(options, statistics_of(rows, options)).to_json()
    document = json.loads(encode(document))
    Features.from_json(document, SOURCE)
    with pytest.raises((IntegrityError, ConfigError), match=message) as caught:
        Features.from_json(_spoiled(document, path, value), SOURCE)
    assert isinstance(caught.value, IntegrityError)
    assert "the bundle cannot be read" in str(caught.value)


def test_a_document_names_a_function_and_its_reader_decides(features):
    document = json.loads(encode(features.to_json()))
    unbound = Features.from_json(document, SOURCE)
    assert unbound.token_functions == ("tests.features.conftest:by_vowel",)
    with pytest.raises(ConfigError, match="was not loaded: allow its module"):
        unbound.apply(rows_of(3).to_batches()[0])


@pytest.mark.parametrize(
    ("options", "column", "message"),
    [
        (Number(), pa.array([None, float("nan")], pa.float64()), "has a value in 0 of 2 training rows"),
        (Number(), pa.array([], pa.float64()), "has 0 training rows"),
        (Number(), pa.array([1e308, -1e308]), "too far for a variance"),
        (Category(), pa.array(["a", "b"]), "no value that occurs 2 times in 2 training rows"),
        (Ids(), pa.array([[], []], pa.list_(pa.int64())), "no value that occurs 2 times"),
        (Vector(), pa.array([None], pa.list_(pa.float64())), "does not tell one length"),
        (DateParts(), pa.array([None], pa.timestamp("us")), "has a value in 0 of 1 training rows"),
    ],
)
def test_what_training_rows_do_not_tell_is_refused(options, column, message):
    with pytest.raises(DataError, match=message):
        fit({"c": options}, statistics_of(pa.table({"c": column}), {"c": options}))


def test_statistics_of_parts_merge_to_those_of_the_whole():
    rows = rows_of(400, seed=2)
    whole = statistics_of(rows, FEATURES, VOWELS)
    for name, options in FEATURES.items():
        source = options.source(name)
        merged, counted = Running(), {}
        for start, stop in ((0, 10), (10, 399), (399, 400)):
            running = Running()
            for chunk in rows[source].slice(start, stop - start).chunks:
                found = running.add(source, options, chunk, quantiles=whole[name].quantiles, functions=VOWELS)
                for value, times in found.items():
                    counted[value] = counted.get(value, 0) + times
            merged.merge(running)
        kept = [(value, counted[value]) for value in whole[name].values]
        again = merged.result(whole[name].quantiles, kept, whole[name].knots)
        for field in Statistics.__dataclass_fields__:
            one, two = getattr(again, field), getattr(whole[name], field)
            assert one == two or one == pytest.approx(two, rel=1e-12), (name, field)


def test_moments_are_of_clipped_and_logarithmic_numbers():
    options = Number(clip="quantiles", log=True)
    values = np.random.default_rng(0).lognormal(3, 2, 5000)
    found = statistics_of(pa.table({"c": values}), {"c": options})["c"]
    low, high = limits_of(options, found.quantiles)
    ordered = np.sort(values)
    assert (low, high) == (ordered[49], ordered[4949])
    expected = scaled(options, (low, high), values)
    assert found.scaled_mean == pytest.approx(expected.mean(), rel=1e-12)
    assert found.scaled_variance == pytest.approx(expected.var(), rel=1e-12)
    assert found.mean == pytest.approx(values.mean(), rel=1e-12)
    assert sum(found.counts) == 5000
    assert found.counts[1] == 450  # from 1 % to 10 %


def test_a_document_that_is_too_large_is_refused():
    with pytest.raises(IntegrityError, match="has 200 bytes, and none of its kind has more than 100"):
        decode(b" " * 200, dict, SOURCE, 100)


def test_knots_are_what_the_model_gets_of_the_training_rows_quantiles():
    values = np.random.default_rng(0).lognormal(3, 2, 3200)
    features = {"many": Number(column="c", log=True), "marked": Number(column="n", missing_indicator=True)}
    rows = pa.table({"c": values, "n": np.where(np.arange(3200) % 4 == 0, np.nan, np.arange(3200) % 2)})
    fitted = fit(features, statistics_of(rows, features))
    many, marked, indicator = fitted.knots
    inputs = fitted.apply(rows.combine_chunks().to_batches()[0])["numbers"].flatten().to_numpy().reshape(3200, 3)
    assert len(many) == 33
    assert set(np.float32(many)) <= set(inputs[:, 0])
    assert (many[0], many[-1]) == (inputs[:, 0].min(), inputs[:, 0].max())
    assert np.histogram(inputs[:, 0], many)[0] == pytest.approx([100] * 32, abs=2)
    assert marked == (inputs[:, 1].min(), inputs[:, 1].max())
    assert indicator == ()


def test_features_that_were_fitted_before_there_were_knots_have_none():
    features = {"c": Number()}
    document = fit(features, statistics_of(pa.table({"c": [1.0, 2.0, 3.0]}), features)).to_json()
    del document["features"][0]["statistics"]["knots"]
    assert Features.from_json(document, Source("old")).knots == ((),)
