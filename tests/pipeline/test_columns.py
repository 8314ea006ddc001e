"""A pipeline file against the columns that there are: what is missing, of another type or nested is told by line."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pyarrow as pa
import pytest

from sparkdl.errors import DataError, PipelineFileError, SchemaError
from sparkdl.features.spec import Feature
from sparkdl.features.statistics import statistics_of
from sparkdl.pipeline.file import columns as columns_of_files
from sparkdl.pipeline.file import load, loads

FILES = Path(__file__).parent / "files"

CHURN = {
    "customer_id": pa.int64(),
    "snapshot_day": pa.date32(),
    "age": pa.int32(),
    "tenure_months": pa.int16(),
    "bill": pa.decimal128(10, 2),
    "plan": pa.string(),
    "country": pa.dictionary(pa.int32(), pa.string()),
    "last_login": pa.timestamp("us", "UTC"),
    "churned": pa.bool_(),
    "segment": pa.string(),
}


def told(columns, transformed=None, *overrides):
    with pytest.raises(PipelineFileError) as caught:
        load(FILES / "churn.yaml", overrides, {}).check_columns(columns, transformed)
    return list(caught.value.problems)


def line_of(text):
    lines = (FILES / "churn.yaml").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.startswith(text))


def test_columns_that_fit_are_taken():
    load(FILES / "churn.yaml", (), {}).check_columns(CHURN)


def test_all_columns_that_do_not_fit_are_told_at_once_by_line():
    columns = {**CHURN, "bill": pa.string(), "plan": pa.binary(), "last_login": pa.struct([("at", pa.date32())])}
    columns["custmer_id"] = columns.pop("customer_id")
    remedy = "cast it, or take what you need of it, in transform, or choose another type or column"
    assert told(columns) == [
        f"churn.yaml:{line_of('  key:')}: source.key[0]='customer_id' is no column of the source: write custmer_id",
        f"churn.yaml:{line_of('  bill:')}: features.bill is a column of string, and numbers are needed: {remedy}",
        f"churn.yaml:{line_of('  plan,')}: features.plan is a column of binary, and texts, whole numbers, truth "
        f"values or dates are needed: {remedy}",
        f"churn.yaml:{line_of('  last_login:')}: features.last_login is a column of struct<at: date32[day]>, "
        "and timestamps, which have hours, are needed: cast it in transform, or of a date write {type: date_parts, "
        "parts: [weekday]}",
    ]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("weight=wieght", "override weight: weight='wieght' is no column of the source: choose one of customer_id"),
        ("weight=segment", "override weight: weight='segment' is a column of string, and numbers are needed"),
        ("score.keep=[plan, contry]", "score.keep[1]='contry' is no column of the source: write country"),
        ("report.slices=cuntry", "report.slices[0]='cuntry' is no column of the source: write country"),
        ("split={by: hash, group: [cuntry]}", "split.group[0]='cuntry' is no column of the source: write country"),
        ("source.time=age", "source.time='age' is a column of int32, and dates, timestamps or texts are needed"),
        ("features.years={type: number, column: agee}", "years.column='agee' is no column of the source: write age"),
        ("label.churned=regression", ""),
        ("label={plan: regression}", "label.plan is a column of string, and numbers are needed"),
    ],
)  # fmt: skip
def test_whatever_a_file_names_is_looked_for(override, sentence):
    overrides = [override, *(["publish.metric=rmse", "publish.gate.floors=[]"] if "regression" in override else [])]
    overrides += ["features={age: number}", "score.keep=[]", "report.slices=[]"] if "label={plan" in override else []
    if not sentence:
        load(FILES / "churn.yaml", overrides, {}).check_columns(CHURN)
        return
    (found,) = told(CHURN, None, *overrides)
    assert sentence in found


@pytest.mark.parametrize("key", ["time", "partition"])
@pytest.mark.parametrize(("every", "wanted"), [("day", "dates, timestamps or texts"), ("hour", "timestamps or texts")])
def test_a_column_that_says_when_is_of_a_type_that_windows_are_told_by(key, every, wanted):
    text = (
        f"source: {{kind: parquet, path: x, {key}: day, every: {every}}}\nlabel: {{y: binary}}\nfeatures: {{x: number}}"
    )
    columns = {"x": pa.int8(), "y": pa.bool_()}
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.string(), *[pa.date32()] * (every == "day")):
        loads(text).check_columns({**columns, "day": kind})
    for kind in (pa.int64(), pa.int32(), *[pa.date32()] * (every == "hour")):
        with pytest.raises(PipelineFileError) as caught:
            loads(text).check_columns({**columns, "day": kind})
        (told,) = caught.value.problems
        assert f"source.{key}='day' is a column of {kind}, and {wanted} are needed: name another column" in told


def test_a_field_of_a_nested_column_is_no_column():
    text = (FILES / "minimal.yaml").read_text().replace("alcohol", "lab.alcohol")
    columns = {"lab": pa.struct([("alcohol", pa.float32())]), "colour": pa.string(), "quality": pa.int32()}
    with pytest.raises(PipelineFileError, match=r"lab\.alcohol is no column of the source: it may be a field of lab"):
        loads(text).check_columns(columns)


def test_what_a_transform_makes_is_checked_when_it_is_known():
    transform = "transform={sql: SELECT * FROM source}"
    before = {"customer_id": pa.int64(), "snapshot_day": pa.date32()}
    load(FILES / "churn.yaml", [transform], {}).check_columns(before)
    load(FILES / "churn.yaml", [transform], {}).check_columns(before, CHURN)
    (sentence,) = told(before, {name: kind for name, kind in CHURN.items() if name != "age"}, transform)
    assert "features.age is no column of the transform" in sentence


def test_every_type_of_feature_says_which_columns_it_reads():
    types = {str(kind.__struct_config__.tag) for kind in get_args(Feature)}
    assert columns_of_files._FEATURES.keys() == types


@pytest.mark.parametrize(
    ("feature", "fits", "other"),
    [
        ("number", [pa.int8(), pa.float64(), pa.bool_(), pa.decimal128(5, 2)], [pa.string(), pa.list_(pa.int8())]),
        ("category", [pa.string(), pa.int64(), pa.float32(), pa.date32()], [pa.timestamp("us"), pa.list_(pa.string())]),
        ("ids", [pa.list_(pa.int64()), pa.large_list(pa.string())], [pa.int64(), pa.list_(pa.binary())]),
        ("vector", [pa.list_(pa.float32()), pa.list_(pa.float32(), 3)], [pa.float32(), pa.list_(pa.string())]),
        ("text", [pa.string(), pa.large_string()], [pa.binary(), pa.list_(pa.string())]),
        ("{type: image, height: 2, width: 2}", [pa.binary(), pa.large_binary()], [pa.string()]),
        ("{type: date_parts, parts: [day]}", [pa.date32(), pa.timestamp("us")], [pa.string(), pa.int64()]),
    ],
)
def test_the_type_of_a_column_fits_the_type_of_its_feature(feature, fits, other):
    file = loads("source: {kind: csv, path: x}\nlabel: {y: binary}\nfeatures:\n  x: " + feature)
    for kind in fits:
        file.check_columns({"x": kind, "y": pa.bool_()})
    for kind in other:
        with pytest.raises(PipelineFileError, match=r"^pipeline\.yaml:4: features\.x is a (nested )?column of "):
            file.check_columns({"x": kind, "y": pa.bool_()})


@pytest.mark.parametrize("options", ["date_parts", "{type: date_parts, parts: [month, weekday, minute]}"])
def test_a_date_has_no_hour_which_the_default_parts_ask_for(options):
    file = loads(f"source: {{kind: csv, path: x}}\nlabel: {{y: binary}}\nfeatures:\n  joined: {options}")
    file.check_columns({"joined": pa.timestamp("us"), "y": pa.bool_()})
    with pytest.raises(
        PipelineFileError, match=r"yaml:4: features\.joined is a column of date32.* parts: \[month, weekday\]}"
    ):
        file.check_columns({"joined": pa.date32(), "y": pa.bool_()})


KINDS = [
    *(pa.int8(), pa.uint64(), pa.float32(), pa.float64(), pa.bool_(), pa.decimal128(5, 2), pa.string()),
    *(pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(4), pa.date32()),
    *(pa.list_(pa.int64()), pa.list_(pa.string()), pa.list_(pa.float32()), pa.list_(pa.float32(), 2)),
    *(pa.list_(pa.binary()), pa.struct([("a", pa.int8())]), pa.map_(pa.string(), pa.int8()), pa.duration("s")),
    *(pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.dictionary(pa.int32(), pa.string())),
]  # fmt: skip


@pytest.mark.parametrize("feature", ["number", "category", "ids", "vector", "text", "{type: date_parts, parts: [day]}"])
def test_the_check_takes_the_columns_that_features_are_made_of(feature):
    file = loads("source: {kind: csv, path: x}\nlabel: {y: binary}\nfeatures:\n  x: " + feature)
    for kind in KINDS:
        try:
            statistics_of(pa.table({"x": pa.array([None], kind)}), file.spec.features)
            made = True
        except SchemaError:
            made = False
        except DataError:
            made = True  # of these rows, not of the type
        try:
            file.check_columns({"x": kind, "y": pa.bool_()})
            taken = True
        except PipelineFileError:
            taken = False
        assert taken == made, f"{feature} of {kind}"
