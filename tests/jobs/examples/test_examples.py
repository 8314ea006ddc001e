"""The examples: short, sound files; data that follow from their recipe, whatever was there before."""

from __future__ import annotations

import importlib
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sparkdl.pipeline import Pipeline
from sparkdl.storage import sha256_hex

FOLDER = Path(__file__).resolve().parents[3] / "jobs" / "examples"
RECIPES = {"digits": {"rows": 1900}}


def make(name):
    return importlib.import_module(f"jobs.examples.{name}.make_data").make


def contents(folder):
    return {
        str(path.relative_to(folder)): sha256_hex(path.read_bytes()) for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("name", RECIPES)
def test_data_follow_from_their_recipe_and_are_made_once(name, tmp_path):
    truth = make(name)(tmp_path / "a", **RECIPES[name], seed=3)
    assert make(name)(tmp_path / "b", **RECIPES[name], seed=3) == truth
    first = contents(tmp_path / "a")
    assert first == contents(tmp_path / "b")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
    assert make(name)(tmp_path / "a", **RECIPES[name], seed=3) == truth
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")} == times
    with pytest.raises(SystemExit, match="name another --to"):
        make(name)(tmp_path / "a", **RECIPES[name], seed=4)
    make(name)(tmp_path / "c", **RECIPES[name], seed=4)
    assert contents(tmp_path / "c") != first


@pytest.mark.parametrize("name", RECIPES)
def test_the_file_of_an_example_is_sound_and_its_code_short(name):
    pipeline = Pipeline.load(FOLDER / name / f"{name}.yaml")
    assert pipeline.spec.name == name
    lines = sum(len(path.read_text().splitlines()) for path in (FOLDER / name).rglob("*.py"))
    assert lines <= 300


@pytest.mark.parametrize("name", ["digits"])
def test_the_columns_that_a_file_reads_are_in_its_data(name, tmp_path):
    make(name)(tmp_path, **RECIPES[name], seed=0)
    schema = pq.read_schema(next((tmp_path / "rows").glob("*.parquet")))
    file = Pipeline.load(FOLDER / name / f"{name}.yaml").file
    file.check_columns(dict(zip(schema.names, schema.types, strict=True)))
    with pytest.raises(Exception, match="is no column of the source"):
        file.check_columns({"id": schema.field("id").type})
