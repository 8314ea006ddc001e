"""What every kind of source answers: its snapshot without Spark, and the identity that keys hold."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from msgspec import structs

from sparkdl.documents.typed import encode
from sparkdl.pipeline.code import code_hash
from sparkdl.pipeline.sources import source_of
from sparkdl.pipeline.sources.base import SourceSnapshot
from sparkdl.pipeline.spec.source import (
    CsvSource,
    DeltaSource,
    FunctionSource,
    JdbcSource,
    JsonSource,
    ParquetSource,
    SourceSection,
    SparkSource,
    SqlSource,
)

COMMON = {"key": [], "time": None, "partition": None, "every": "day", "deleted_windows": "keep"}
FUNCTION = "sparkdl.pipeline.windows:span"
IDENTITIES = [
    (DeltaSource(table="/t", allow_folders=("/u",)), {"kind": "delta", "table": "/t", "version": None}),
    (ParquetSource(path="/p", deleted_windows="keep"), {"kind": "parquet", "path": "/p", "options": {}}),
    (CsvSource(path="/p"), {"kind": "csv", "path": "/p", "schema": None, "options": {}}),
    (JsonSource(path="/p", options={"a": 1}), {"kind": "json", "path": "/p", "schema": None, "options": {"a": 1}}),
    (SqlSource(query="SELECT 1"), {"kind": "sql", "query": "SELECT 1"}),
    (
        JdbcSource(url="jdbc:h2:x", table="t", options={"User": "me", "password": "secret", "fetchSize": 7}),
        {"kind": "jdbc", "url": "jdbc:h2:x", "table": "t", "query": None, "options": {"password": "(hidden)"}},
    ),
    (
        SparkSource(format="orc", path="/p", options={"user": "me"}),
        {"kind": "spark", "format": "orc", "table": None, "path": "/p", "schema": None, "options": {"user": "me"}},
    ),
    (
        FunctionSource(function=FUNCTION, arguments={"a": 1}),
        {"kind": "function", "function": FUNCTION, "arguments": {"a": 1}},
    ),
]


def as_json(source):
    return json.loads(encode(source.identity()))


def test_every_kind_of_a_file_is_tried_here():
    assert {type(section) for section, _ in IDENTITIES} == {*get_args(SourceSection)}


@pytest.mark.parametrize(("section", "settings"), IDENTITIES)
def test_an_identity_is_what_keys_hold_and_names_no_secret(section, settings):
    code = code_hash(FUNCTION) if settings["kind"] == "function" else ""
    wanted = [type(section).__name__, COMMON | settings, code]
    assert as_json(source_of(section)) == wanted
    windowed = structs.replace(section, time="at", deleted_windows="remove")
    assert as_json(source_of(windowed)) == [wanted[0], COMMON | settings | {"time": "at"}, code]


@pytest.mark.parametrize(
    "section", [section for section, _ in IDENTITIES[4:]] + [DeltaSource(table="spark_catalog.sales.orders")]
)
def test_a_kind_that_spark_alone_reads_says_so(section):
    source = source_of(section)
    assert source.snapshot() == SourceSnapshot(state=None)
    assert source.columns(source.snapshot()).why_not
    assert source.arrow_address is None
