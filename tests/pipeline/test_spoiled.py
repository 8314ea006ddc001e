"""Every key of a whole pipeline file, spoiled one at a time, is told in one sentence with its line and what was meant.

The same holds of every key and every column of the files that `sparkdl init` writes.

Also holds the JSON schema against the same files: what the reader takes, editors take, and a misspelt key they mark.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import get_annotations as annotations_of
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from msgspec import inspect

from sparkdl.cli import main
from sparkdl.errors import PipelineFileError
from sparkdl.pipeline import schema
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.file.decode import alternatives, fields_of, sections_of, whole_file
from sparkdl.pipeline.file.problems import Problems
from sparkdl.pipeline.file.tree import parse
from sparkdl.pipeline.init import init
from sparkdl.pipeline.spec.base import plain_type
from sparkdl.pipeline.spec.training import ESTIMATOR_NAMES
from sparkdl.tables.table import Table

FILES = Path(__file__).parent / "files"
LOADER, DUMPER = getattr(yaml, "CSafeLoader", yaml.SafeLoader), getattr(yaml, "CSafeDumper", yaml.SafeDumper)
ENVIRONMENT = {"S3_SECRET_KEY": "hunter2"}
COMMON = {"key": ["order_id", "line"], "time": "ordered_at", "every": "hour", "deleted_windows": "remove"}
WINDOWS = {"publish": {"gate": {"over": "key"}, "label": "returned"}}

# What a source, a split and the rest may be instead of what they are in full.yaml.
SHARES = {"train": 0.5, "validate": 0.25, "test": 0.1, "score": 0.15}
FOLDS = {"train": [1], "validate": [2], "test": [4], "score": [3]}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "parquet": {"source": {"kind": "parquet", "path": "/d", "options": {"mergeSchema": True}, **COMMON}},
    "csv": {"source": {"kind": "csv", "path": "/d", "schema": "a INT", "options": {"sep": ";"}, **COMMON}},
    "json": {"source": {"kind": "json", "path": "/d", "schema": "a INT", "options": {"multiLine": False}, **COMMON}},
    "jdbc": {"source": {"kind": "jdbc", "url": "jdbc:x:y", "table": "t", "options": {"user": "me"}, **COMMON}},
    "jdbc query": {"source": {"kind": "jdbc", "url": "jdbc:x:y", "query": "SELECT 1", **COMMON}},
    "spark": {"source": {"kind": "spark", "format": "orc", "path": "/d", "schema": "a INT", "options": {}, **COMMON}},
    "spark table": {"source": {"kind": "spark", "table": "a.b.c", **COMMON}},
    "sql": {"source": {"kind": "sql", "query": "SELECT 1", **COMMON}},
    "function": {"source": {"kind": "function", "function": "a:b", "arguments": {"x": 1}, **COMMON}},
    "partition": {"source": {"kind": "delta", "table": "/d", "partition": "day", "every": "hour"}},
    "hash": {"split": {"by": "hash", **SHARES, "group": ["store"], "copies": "together", "seed": 3}, **WINDOWS},
    "column": {"split": {"by": "column", "column": "fold", **FOLDS}, **WINDOWS},
    "halving": {
        "search": {
            "space": {"train.learning_rate": [0.01, 0.1]},
            "method": "halving",
            "trials": 2,
            "min_epochs": 1,
            "reduction": 2,
        }
    },
    "sql transform": {"transform": {"sql": "SELECT * FROM source"}},
    "classes hashed": {"features": {"x": {"type": "category", "buckets": 10}}, "drift": {"ignore": ["x"]}},
    "registry": {"places": {}, "publish": {"registry": "/r", "label": "returned"}},
}


def plain(file: Path) -> dict[str, Any]:
    return json.loads(json.dumps(parse(file.read_bytes(), file.name, Problems(file.name))))


def values(name: str) -> dict[str, Any]:
    return plain(FILES / f"{name}.yaml")


@dataclass(frozen=True)
class Place:
    """One key of a file: its path, the field that it is, and the section around it."""

    path: tuple[str, ...]
    kind: inspect.Type
    required: bool
    tag: bool
    section: type

    def __str__(self) -> str:
        return ".".join(self.path)


def keys_of(value: Any, kind: inspect.Type, path: tuple[str, ...] = ()) -> Iterator[Place]:
    """Every key that is a field of a section, with all below it."""
    found = sections_of(kind)
    if isinstance(value, dict) and found:
        chosen = next((one for one in found if one.tag_field and value.get(one.tag_field) == one.tag), found[0])
        if chosen.tag_field:
            tags = inspect.LiteralType(tuple(str(one.tag) for one in found))
            yield Place((*path, chosen.tag_field), tags, True, True, chosen.cls)
        for name, field in fields_of(chosen).items():
            if name in value:
                yield Place((*path, name), field.type, field.required, False, chosen.cls)
                yield from keys_of(value[name], field.type, (*path, name))
    elif isinstance(value, dict):
        for one in (plain_type(one)[0] for one in alternatives(kind)):
            if isinstance(one, inspect.DictType):
                for name, inner in value.items():
                    yield from keys_of(inner, one.value_type, (*path, name))


def variant(name: str) -> dict[str, Any]:
    return {**values("full"), **copy.deepcopy(VARIANTS[name])}


def keys_to_spoil(name: str) -> list[Place]:
    """Those of a variant that the whole file has not in the same section."""
    return [
        place for place in keys_of(variant(name), whole_file()) if name == "full" or place.path[0] in VARIANTS[name]
    ]


def spoiled(said: dict[str, Any], place: Place, change: Any) -> tuple[str, int]:
    """The file's text with one key changed, and the line that the error must name."""
    said = copy.deepcopy(said)
    around = said
    for name in place.path[:-1]:
        around = around[name]
    path = change(around, place.path[-1], place)
    text = yaml.dump(said, Dumper=DUMPER, sort_keys=False, width=1000)
    node, line = yaml.compose(text, LOADER), 1
    for name in path:
        key, node = next((key, inner) for key, inner in node.value if key.value == name)
        line = key.start_mark.line + 1
    return text, line


def misspelt(around, key, place):
    entries = dict(around)
    around.clear()
    for name, value in entries.items():
        around[name + name[-1] if name == key else name] = value
    return (*place.path[:-1], key + key[-1])


def removed(around, key, place):
    del around[key]
    return place.path[:-1]


def of_another_type(around, key, place):
    kinds = [plain_type(one)[0] for one in alternatives(place.kind)]
    of_names = any(isinstance(one, inspect.StructType | inspect.DictType) for one in kinds)
    around[key] = 7.5 if of_names else {"zz": 1}
    return place.path


def impossible(around, key, place):
    around[key] = impossible_value(place, around[key])
    return place.path


def impossible_value(place: Place, now: Any) -> Any:
    """A value of the right type that cannot be; None if every one of the type can."""
    kind, said = plain_type(place.kind)
    plain_kinds = [plain_type(one) for one in alternatives(kind)]
    for one, more in plain_kinds:
        least = {**more, **said}.get("minimum", getattr(one, "ge", None) if hasattr(one, "ge") else None)
        above = getattr(one, "gt", None)
        if isinstance(one, inspect.LiteralType) and isinstance(now, str) and now in one.values:
            return now + now[-1]
        if isinstance(one, inspect.IntType | inspect.FloatType):
            if least is not None or above is not None:
                return (least if least is not None else above) - 1
            if place.path[0] == "train" and place.path[-1] in ESTIMATOR_NAMES:
                return -1
        if isinstance(one, inspect.StrType) and isinstance(now, str):
            return "?? ??" if one.pattern else "" if one.min_length else None
    return None


def told(text: str) -> list[str]:
    with pytest.raises(PipelineFileError) as caught:
        loads(text, (), ENVIRONMENT, name="p.yaml", folder="/f")
    return list(caught.value.problems)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_key_spoiled_is_one_sentence_with_its_line(name):
    said = variant(name)
    loads(yaml.safe_dump(said, sort_keys=False), (), ENVIRONMENT)
    for place in keys_to_spoil(name):
        check_keys(said, place)


def check_keys(said: dict[str, Any], place: Place) -> None:
    """Misspell a key, give it a value of another type, remove it: one sentence each, with its line."""
    dotted, key = str(place), place.path[-1]
    text, line = spoiled(said, place, misspelt)
    (sentence,) = told(text)
    assert sentence.startswith(f"p.yaml:{line}: {dotted}{key[-1]} is not a key of "), sentence
    assert sentence.endswith(f": write {key}"), sentence

    text, line = spoiled(said, place, of_another_type)
    (sentence,) = told(text)
    assert sentence.startswith(f"p.yaml:{line}: {dotted}"), sentence

    if place.required:
        text, line = spoiled(said, place, removed)
        (sentence,) = told(text)
        assert sentence.startswith(f"p.yaml:{line}: " if len(place.path) > 1 else "p.yaml: "), sentence
        assert f"{dotted} is missing: " in sentence


@pytest.mark.parametrize("name", VARIANTS)
def test_every_value_out_of_range_is_one_sentence_with_its_line(name):
    said = variant(name)
    tried = sum(check_range(said, place) for place in keys_to_spoil(name))
    assert tried > (60 if name == "full" else 0)


def check_range(said: dict[str, Any], place: Place) -> bool:
    """Give a key a value of its type that cannot be: one sentence, with its line; False if every value can be."""
    around: Any = said
    for part in place.path[:-1]:
        around = around[part]
    now = around[place.path[-1]]
    value = impossible_value(place, now)
    if value is None:
        return False
    text, line = spoiled(said, place, impossible)
    (sentence,) = told(text)
    assert sentence.startswith(f"p.yaml:{line}: {place}"), sentence
    assert (f"{value!r}" if value != "" else "''") in sentence
    literal = isinstance(now, str) and value == now + now[-1]
    assert not literal or sentence.endswith(f"write {now}"), sentence
    return True


TABLES = ("by day", "csv", "delta")


@pytest.fixture(scope="module", params=TABLES)
def inits(request, tmp_path_factory):
    """What `sparkdl init` wrote for a table: the folder, and the values of its file."""
    folder, random = tmp_path_factory.mktemp("spoiled"), np.random.default_rng(0)
    days = np.datetime64("2026-01-01") + np.arange(400) // 10
    columns = {
        "order_id": np.arange(400), "amount": random.lognormal(4, 2, 400),
        "colour": random.choice(["red", "blue"], 400), "note": [f"a note of {n} words" for n in range(400)],
        "seen": days, "returned": random.integers(0, 2, 400),
    }  # fmt: skip
    place = f"{folder}/rows.csv" if request.param == "csv" else f"{folder}/rows"
    if request.param == "csv":
        pd.DataFrame(columns).drop(columns=["seen", "order_id"]).to_csv(place, index=False)
    elif request.param == "delta":
        Table(place).append(pa.table({**columns, "returned": random.normal(size=400)}))
    else:
        pq.write_table(pa.table(columns), f"{place}.parquet")
    init(f"{folder}/orders", place if request.param != "by day" else f"{place}.parquet", "returned")
    file = folder / "orders" / "orders.yaml"
    return file, plain(file)


def test_every_key_that_init_writes_spoiled_is_one_sentence_with_its_line(inits):
    _, said = inits
    places = list(keys_of(said, whole_file()))
    assert len(places) > 25
    for place in places:
        check_keys(said, place)
        check_range(said, place)


def test_every_value_that_init_writes_left_empty_is_one_sentence_with_its_line(inits):
    _, said = inits
    tried = 0
    for place in keys_of(said, whole_file()):
        kinds = [plain_type(one)[0] for one in alternatives(place.kind)]
        if not any(isinstance(one, inspect.NoneType) for one in kinds):  # else it says that there is none
            text, line = spoiled(said, place, emptied)
            (sentence,) = told(text)
            assert sentence.startswith(f"p.yaml:{line}: {place}=null is "), sentence
            tried += 1
    assert tried > 15


def emptied(around, key, place):
    around[key] = None
    return place.path


def columns_in(said: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Where a file of init's names a column: as a key, as a value, as an element of a list, within a condition."""
    yield from (("features", name) for name in said["features"])
    yield from (("label", name) for name in said["label"])
    for section, name in (("source", "key"), ("source", "time"), ("score", "keep"), ("report", "slices")):
        if name in said.get(section, {}):
            yield section, name
    yield from (("expect", name) for name in said.get("expect", {}))


def other_column(said: dict[str, Any], path: tuple[str, ...]) -> tuple[dict[str, Any], str, str]:
    """The file with one column misspelt, the right word and the wrong one."""
    said = copy.deepcopy(said)
    around, key = said[path[0]], path[1]
    if path[0] in ("features", "label"):
        right, wrong = key, f"{key}{key[-1]}"
        said[path[0]] = {wrong if name == key else name: value for name, value in around.items()}
    elif path[0] == "expect":
        check = around[key]["check"] if isinstance(around[key], dict) else around[key]
        right = check.split("`")[1]
        wrong = f"{right}{right[-1]}"
        misspelt = check.replace(f"`{right}`", f"`{wrong}`")
        around[key] = around[key] | {"check": misspelt} if isinstance(around[key], dict) else misspelt
    else:
        right = around[key][0] if isinstance(around[key], list) else around[key]
        wrong = f"{right}{right[-1]}"
        around[key] = [wrong, *around[key][1:]] if isinstance(around[key], list) else wrong
    return said, right, wrong


@pytest.mark.parametrize("command", [pytest.param("check", marks=pytest.mark.slow), "run"])
def test_every_column_that_init_writes_misspelt_is_told_before_spark_starts(inits, command, capsys, monkeypatch):
    def started(spec):
        raise AssertionError("Spark was started")

    monkeypatch.setattr("sparkdl.pipeline.run.open_session", started)
    file, whole = inits
    paths = list(columns_in(whole))
    assert len(paths) > 4
    for path in paths:
        said, right, wrong = other_column(whole, path)
        spoiled_file = file.with_name("spoiled.yaml")
        spoiled_file.write_text(yaml.safe_dump(said, sort_keys=False, width=1000))
        assert main([command, str(spoiled_file)]) == 1
        error = capsys.readouterr().err
        sentences = [line for line in error.splitlines() if wrong in line]
        assert len(sentences) >= 1, (path, error)
        name = path[1] if path[0] not in ("features", "label") else wrong
        assert f": {path[0]}.{name}" in sentences[0], (path, error)
        assert sentences[0].endswith(f"write {right}"), (path, error)
        lines = spoiled_file.read_text().splitlines()
        number = int(sentences[0].split("spoiled.yaml:")[1].split(":")[0])
        assert wrong in lines[number - 1], (path, error)
        assert "Traceback" not in error


def declared(section: type, field: str) -> str:
    """A field by the class that declares it, which may be one that others derive from."""
    owner = next(one for one in section.__mro__ if field in annotations_of(one))
    return f"{owner.__name__}.{field}"


def test_the_files_that_are_spoiled_hold_every_key_that_there_is():
    places = [place for name in VARIANTS for place in keys_of(variant(name), whole_file()) if not place.tag]
    seen = {declared(place.section, place.path[-1]) for place in places}
    missing = {
        declared(section.cls, field) for section in schema.sections_in(whole_file()) for field in fields_of(section)
    } - seen
    assert not missing


VALIDATOR = jsonschema.Draft202012Validator(schema.schema())


@pytest.mark.parametrize("file", sorted(file.stem for file in FILES.glob("*.yaml")))
def test_editors_take_the_examples(file):
    VALIDATOR.validate(values(file))


@pytest.mark.parametrize("name", VARIANTS)
def test_editors_take_what_is_read_and_mark_what_is_misspelt(name):
    said = variant(name)
    VALIDATOR.validate(said)
    for place in keys_to_spoil(name):
        text, _ = spoiled(said, place, misspelt)
        assert not VALIDATOR.is_valid(yaml.load(text, LOADER)), str(place)


def test_the_schema_is_the_committed_one_and_says_what_each_key_is():
    assert schema.PAGE.read_text(encoding="utf-8") == schema.render(), "run `make schema`"
    jsonschema.Draft202012Validator.check_schema(schema.schema())
    made = schema.schema()
    for name, section in [("pipeline", made), *made["$defs"].items()]:
        for key, about in section["properties"].items():
            assert about.get("description") or "enum" in about or key == "column", f"{name}.{key} says nothing"
