"""What raw values become, what is refused, and that a row never depends on the rows beside it."""

from __future__ import annotations

import datetime as dt
import io
import itertools
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.errors import ConfigError, DataError, SchemaError
from sparkdl.features.fitted import Features, fit
from sparkdl.features.spec import Category, DateParts, Ids, Image, Number, Text, Vector
from sparkdl.features.statistics import statistics_of
from tests.features.conftest import rows_of

NAN, INF = float("nan"), float("inf")


def fitted(options, column, functions=None):
    """One feature ``c``, fitted to a column."""
    table = pa.table({"c": column})
    return fit({"c": options}, statistics_of(table, {"c": options}, functions), functions)


def made(features, column):
    """What a column becomes, as Python values."""
    batch = features.apply(pa.record_batch({"c": column}))
    return batch.column(0).to_pylist()


def flat(features, column):
    return [row[0] for row in made(features, column)]


def test_numbers_are_filled_clipped_logged_and_standardised_in_this_order():
    column = pa.array([0.0, 3.0, 1000.0, None])
    features = fitted(Number(clip=(0.0, 7.0), log=True, fill="mean"), column)  # of the mean 334, which is clipped
    logs = np.log1p(np.array([0.0, 3.0, 7.0]))
    filled = np.log1p(np.array([0.0, 3.0, 7.0, 7.0]))
    expected = ((filled - logs.mean()) / logs.std()).astype(np.float32)
    np.testing.assert_array_equal(np.float32(flat(features, column)), expected)


def test_missing_numbers_are_filled_with_what_training_had():
    training = pa.array([1.0, 2.0, 9.0])
    absent = pa.array([None, NAN, INF, -INF])
    for fill, value in (("mean", 4.0), ("median", 2.0), (0.25, 0.25)):
        assert flat(fitted(Number(fill=fill, standardise=False), training), absent) == [value] * 4
    marked = fitted(Number(fill=0.0, missing_indicator=True, standardise=False), training)
    assert made(marked, pa.array([5.0, None])) == [[5.0, 0.0], [0.0, 1.0]]
    assert marked.inputs[0].names == ("c", "c__missing")
    with pytest.raises(DataError, match="'c' has no finite number in 4 of 4 rows of a batch"):
        made(fitted(Number(fill="none"), training), absent)


def test_a_logarithm_keeps_the_sign_and_zero():
    features = fitted(Number(log=True, standardise=False), pa.array([1.0]))
    expected = np.float32([np.log1p(3.0), -np.log1p(3.0), 0.0])
    np.testing.assert_array_equal(np.float32(flat(features, pa.array([3.0, -3.0, 0.0]))), expected)


def test_numbers_of_all_types_are_numbers():
    features = fitted(Number(standardise=False), pa.array([1.0]))
    assert flat(features, pa.array([2**53 + 1], pa.int64())) == [float(2**53)]
    assert flat(features, pa.array([Decimal("1.10")], pa.decimal128(10, 2))) == [float(np.float32(1.1))]
    assert flat(features, pa.array([True, False])) == [1.0, 0.0]
    assert flat(features, pa.array([None], pa.null())) == [1.0]  # the mean
    with pytest.raises(DataError, match="'c' becomes 1e\\+300, which float32 cannot hold"):
        made(features, pa.array([1e300]))
    for column in (pa.array(["1"]), pa.array([dt.date(2024, 1, 1)]), pa.array([[1.0]])):
        with pytest.raises(SchemaError, match=r"'c' is .*, no number"):
            made(features, column)


def test_a_constant_is_zero_and_stays_finite():
    features = fitted(Number(), pa.array(np.full(1000, 0.1)))
    assert abs(flat(features, pa.array([0.1]))[0]) < 1e-12  # not rounding divided by rounding


def test_unknown_values_are_id_0_and_known_ones_start_at_1():
    features = fitted(Category(min_count=2), pa.array(["b", "b", "a", "a", "a", "once", None]))
    assert flat(features, pa.array(["a", "b", "once", "never", None])) == [1, 2, 0, 0, 0]
    assert features.inputs[0].cardinalities == (3,)
    assert flat(fitted(Category(min_count=1, max_size=1), pa.array(["b", "b", "a"])), pa.array(["a", "b"])) == [0, 1]


def test_one_value_has_one_id_in_whatever_type_it_comes():
    features = fitted(Category(min_count=1), pa.array([7, 8, 8]))
    columns = [
        pa.array([8, 7], pa.int16()),
        pa.array(["8", "7"], pa.large_string()),
        pa.array(["8", "7"]).dictionary_encode(),
        pa.array([8.0, 7.0]),
        pa.array([Decimal(8), Decimal(7)], pa.decimal128(10, 0)),
        pa.array([Decimal("8.00"), Decimal("7.00")], pa.decimal128(10, 2)),
    ]
    assert [flat(features, column) for column in columns] == [[1, 2]] * len(columns)
    assert flat(features, pa.array([8.0, NAN, INF, None])) == [1, 0, 0, 0]  # as pandas makes of integers with gaps
    for column in (pa.array([7.5]), pa.array([2.0**60]), pa.array([Decimal("7.5")], pa.decimal128(5, 1))):
        with pytest.raises(DataError, match=r"'c' is .* and holds numbers that are not whole"):
            made(features, column)
    with pytest.raises(SchemaError, match="whose values are no ids"):
        made(features, pa.array([b"7"]))


def test_large_integers_are_told_apart():
    features = fitted(Category(min_count=1), pa.array([2**60, 2**60 + 1], pa.int64()))
    assert sorted(flat(features, pa.array([2**60, 2**60 + 1, 2**60 + 2], pa.int64()))) == [0, 1, 2]


def test_two_normal_forms_of_a_string_are_one_value():
    features = fitted(Category(min_count=2), pa.array(["Köln", "Ko\u0308ln"]))
    assert flat(features, pa.array(["Ko\u0308ln", "Köln"])) == [1, 1]
    hashed = fitted(Category(buckets=1000), pa.array(["Köln"]))
    assert len(set(flat(hashed, pa.array(["Ko\u0308ln", "Köln"])))) == 1


def test_strings_that_are_no_utf8_are_refused():
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe")]
    )
    for options, column in ((Category(buckets=5), broken), (Text(buckets=5), broken)):
        with pytest.raises(DataError, match=r"'c' holds .* that are no UTF-8"):
            made(fitted(options, pa.array(["a"])), column)


def test_lists_become_ids_cut_to_their_length():
    training = pa.array([[1, 2, 3]], pa.list_(pa.int64()))
    rows = pa.array([[1, 2, 3], [], None, [2, None, 9], [3]], pa.list_(pa.int64()))
    first = fitted(Ids(min_count=1, max_length=2), training)
    last = fitted(Ids(min_count=1, max_length=2, keep="last"), training)
    assert made(first, rows) == [[1, 2], [], [], [2, 0], [3]]
    assert made(last, rows) == [[2, 3], [], [], [0, 0], [3]]
    assert made(first, rows.slice(3)) == [[2, 0], [3]]
    assert made(first, rows.cast(pa.large_list(pa.int64()))) == made(first, rows)
    with pytest.raises(SchemaError, match="'c' is int64, no list"):
        made(first, pa.array([1]))


def test_texts_become_ids_of_tokens():
    rows = pa.array([" Ab  b ", "", None, "zz"])
    words = fitted(Text(min_count=1), pa.array(["ab b b"]))
    assert made(words, rows) == [[2, 1], [], [], [0]]
    letters = fitted(Text(tokens="characters", min_count=1, lowercase=False), pa.array(["bbA"]))
    assert made(letters, pa.array(["Ab!", None])) == [[2, 1, 0], []]
    own = {"mine:split": lambda text: text.split("-")}
    cut = fitted(Text(tokens="mine:split", min_count=1), pa.array(["x-y-y"]), own)
    assert made(cut, pa.array(["y-x"])) == [[1, 2]]
    with pytest.raises(ConfigError, match="is cut by mine:split, which was not loaded"):
        made(Features(cut.fitted), pa.array(["y-x"]))
    with pytest.raises(DataError, match=r"mine:split fails on the column 'c' \(TypeError"):
        made(Features(cut.fitted, {"mine:split": lambda text: None}), pa.array(["y-x"]))


def test_vectors_have_the_length_of_training():
    features = fitted(Vector(), pa.array([[1.0, 2.0], None]))
    assert features.inputs[0].shape == (2,)
    assert made(features, pa.array([[1, 2]], pa.list_(pa.int8()))) == [[1.0, 2.0]]
    with pytest.raises(DataError, match="rows of 3 numbers, its feature 2"):
        made(features, pa.array([[1.0, 2.0, 3.0]]))
    with pytest.raises(DataError, match="misses numbers in 2 of 3 rows"):
        made(features, pa.array([[1.0, NAN], None, [1.0, 2.0]]))
    filled = fitted(Vector(fill=9.0), pa.array([[1.0, 2.0]]))
    assert made(filled, pa.array([[1.0, None], None, [INF, 3.0]])) == [[1.0, 9.0], [9.0, 9.0], [9.0, 3.0]]
    assert made(filled, pa.array([None, None], pa.list_(pa.float64()))) == [[9.0, 9.0]] * 2
    with pytest.raises(DataError, match=r"does not tell one length|needs one length"):
        fitted(Vector(), pa.array([[1.0], [1.0, 2.0]]))


def test_broken_pictures_are_refused_with_a_reason_or_black():
    pytest.importorskip("PIL")
    column = rows_of(1)["photo"].combine_chunks()
    strict, lax = (fitted(Image(height=2, width=2, invalid=invalid), column) for invalid in ("error", "zeros"))
    bad = pa.array([column[0].as_py(), b"no picture", None, column[0].as_py()[:50]], pa.binary())
    with pytest.raises(DataError, match=r"3 of 4 rows without a picture, the first in row 1 .*UnidentifiedImage"):
        made(strict, bad)
    assert [sum(row) > 0 for row in made(lax, bad)] == [True, False, False, False]
    assert lax.inputs[0].shape == (3, 2, 2)


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_pictures_of_16_bits_are_those_of_8_bits_and_not_white(channels):
    pillow = pytest.importorskip("PIL.Image")

    def png(pixels):
        sink = io.BytesIO()
        pillow.fromarray(pixels).save(sink, "PNG")
        return sink.getvalue()

    deep = np.array([[0, 256], [32768, 65535]], np.uint16)
    column = pa.array([png(deep), png((deep >> 8).astype(np.uint8))])
    features = fitted(Image(height=2, width=2, channels=channels, scale="none"), column)
    of_16_bits, of_8_bits = made(features, column)
    assert of_16_bits == of_8_bits == [0, 1, 128, 255] * channels


def test_parts_of_instants_follow_the_zone_and_others_are_as_written():
    moment = dt.datetime(2024, 1, 1, 3, 30)
    options = DateParts(parts=("day", "hour"), timezone="America/New_York")
    instant = pa.array([moment, None], pa.timestamp("us", "UTC"))
    features = fitted(options, instant)
    assert made(features, instant) == [[31, 23], [0, 0]]  # 22:30 of the day before
    assert made(features, pa.array([moment], pa.timestamp("ns"))) == [[1, 4]]
    shown_elsewhere = instant.cast(pa.timestamp("us", "Asia/Tokyo"))
    assert made(features, shown_elsewhere) == made(features, instant)


def test_a_year_that_training_had_not_is_unknown():
    days = pa.array([dt.date(2019, 5, 1), dt.date(2021, 5, 1)])
    features = fitted(DateParts(parts=("year", "weekday", "quarter")), days)
    assert features.inputs[0].cardinalities == (4, 8, 5)
    later = pa.array([dt.date(2019, 5, 1), dt.date(2022, 1, 3), None])
    assert made(features, later) == [[1, 3, 2], [0, 1, 1], [0, 0, 0]]
    with pytest.raises(SchemaError, match="'c' is date32\\[day\\], which has no hour"):
        made(fitted(DateParts(), pa.array([dt.datetime(2024, 1, 1)])), days)
    with pytest.raises(SchemaError, match="no date and no time"):
        made(features, pa.array(["2019-05-01"]))


def test_a_column_that_is_missing_is_named(features):
    with pytest.raises(SchemaError, match="the column 'plain' is missing"):
        features.apply(pa.record_batch({"x": pa.array([1])}))


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 40), max_size=5), seed=st.integers(0, 3))
def test_a_row_becomes_the_same_in_every_batch(features, cuts, seed):
    [batch] = rows_of(40, seed=seed, unseen=True).to_batches()
    whole = features.apply(batch)
    edges = sorted({0, 40, *cuts})
    parts = [features.apply(batch.slice(low, high - low)) for low, high in itertools.pairwise(edges)]
    assert pa.Table.from_batches(parts).combine_chunks().to_batches() == [whole]


def test_rows_of_pandas_and_of_nothing_are_rows(features):
    [batch] = rows_of(9, seed=5).to_batches()
    empty = features.apply(batch.slice(0, 0))
    assert (empty.num_rows, empty.schema) == (0, features.schema)
    chosen = [one.name for one in features.fitted if one.options.source(one.name) in ("plain", "city", "code", "at")]
    some = Features(tuple(one for one in features.fitted if one.name in chosen))
    through_pandas = pa.RecordBatch.from_pandas(batch.to_pandas()[list(some.columns)])
    assert pd.api.types.is_float_dtype(batch.to_pandas()["code"])  # integers with gaps
    through_pandas = through_pandas.drop_columns(["code"]).append_column("code", batch.column("code"))
    assert some.apply(through_pandas) == some.apply(batch)
