"""The examples: short, sound files; data that follow from their recipe, whatever was there before."""

from __future__ import annotations

import gzip
import importlib
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from sparkdl.errors import PipelineFileError
from sparkdl.pipeline import Pipeline
from sparkdl.pipeline.sources import source_of
from sparkdl.storage import sha256_hex

FOLDER = Path(__file__).resolve().parents[3] / "jobs" / "examples"
RECIPES = {"digits": {"rows": 1900}, "clicks": {"rows": 1500, "days": 2}, "baskets": {"rows": 1000}}


def make(name):
    return importlib.import_module(f"jobs.examples.{name}.make_data").make


def contents(folder):
    return {
        str(path.relative_to(folder)): sha256_hex(path.read_bytes()) for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.slow
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


@pytest.mark.parametrize("name", ["digits", "baskets"])
def test_the_columns_that_a_file_reads_are_in_its_data(name, tmp_path):
    make(name)(tmp_path, **RECIPES[name], seed=0)
    schema = pq.read_schema(next((tmp_path / "rows").glob("*.parquet")))
    file = Pipeline.load(FOLDER / name / f"{name}.yaml").file
    file.check_columns(dict(zip(schema.names, schema.types, strict=True)))
    with pytest.raises(PipelineFileError, match="is no column of the source"):
        file.check_columns({"id": schema.field("id").type})


def test_clicks_are_lines_of_criteos_format_zipped_or_not(tmp_path):
    truth = make("clicks")(tmp_path / "plain", **RECIPES["clicks"])
    make("clicks")(tmp_path / "zipped", **RECIPES["clicks"], zipped=True)
    plain, zipped = (tmp_path / kind / "rows" / "day=2024-01-02" for kind in ("plain", "zipped"))
    text = (plain / "day_1").read_bytes()
    assert gzip.decompress((zipped / "day_1.gz").read_bytes()) == text
    lines = [line.split("\t") for line in text.decode().splitlines()]
    assert len(lines) == 1500
    whole = [line for line in lines if line[0] and any(line[11:])]
    assert len([line for line in lines if line[0] in "01"]) == 1500
    assert sum(line[0] == "1" for line in whole) == pytest.approx(truth["days"]["2024-01-02"]["clicks"], abs=3)
    assert {len(line) for line in lines} <= {40, 1 + 13 + 10}
    assert all(re.fullmatch(r"-?\d*", count) for line in lines for count in line[1:14])
    assert all(re.fullmatch(r"([0-9a-f]{8})?", value) for line in lines for value in line[14:])
    assert truth["days"]["2024-01-02"]["auc"] > 0.65


def test_a_day_more_leaves_the_others_as_they_were(tmp_path):
    make("clicks")(tmp_path, rows=300, days=1)
    first = contents(tmp_path / "rows")
    truth = make("clicks")(tmp_path, rows=300, days=2)
    assert first.items() < contents(tmp_path / "rows").items()
    assert list(truth["days"]) == ["2024-01-01", "2024-01-02"]


def test_real_files_are_laid_out_by_day(tmp_path):
    link = importlib.import_module("jobs.examples.clicks.make_data").link
    (tmp_path / "criteo").mkdir()
    for name in ("day_0.gz", "day_2.gz"):
        (tmp_path / "criteo" / name).write_bytes(gzip.compress(b"1" + b"\t" * 39 + b"\n"))
    made = [str(path.relative_to(tmp_path)) for path in link(tmp_path / "to", tmp_path / "criteo")]
    assert made == ["to/rows/day=2024-01-01/day_0.gz", "to/rows/day=2024-01-03/day_2.gz"]
    source = Pipeline.load(FOLDER / "clicks" / "clicks.yaml", [f"source.path={tmp_path}/to/rows"]).spec.source
    assert set(source_of(source).snapshot().windows) == {"2024-01-01", "2024-01-03"}


def test_only_the_rows_that_a_batch_names_move():
    module = importlib.import_module("jobs.examples.clicks.clicks_model")
    model = module.build(
        {"inputs": [{"name": "numbers", "shape": [3]}, {"name": "categories", "cardinalities": [5, 7]}]}
    )
    optimizer = module.lazy_adam(model)
    row = {"numbers": torch.randn(4, 3), "categories": torch.tensor([[1, 2], [1, 3], [4, 2], [1, 2]])}
    before = model.table.weight.detach().clone()
    model(row).sum().backward()
    assert model.table.weight.grad.is_sparse
    optimizer.step()
    moved = (model.table.weight.detach() != before).any(1).nonzero().ravel().tolist()
    assert moved == [1, 4, 5 + 2, 5 + 3]  # of the first category, then of the second
    again = module.lazy_adam(model)
    again.load_state_dict(optimizer.state_dict())
    assert len(again.state) == len(list(model.parameters()))


def test_padding_of_a_basket_changes_nothing():
    module = importlib.import_module("jobs.examples.baskets.baskets_model")
    names = {"basket": 9, "tags": 4, "article": 6}
    model = module.build({"inputs": [{"names": [name], "cardinalities": [n]} for name, n in names.items()]})
    row = {"basket": [[3, 5]], "basket_mask": [[True, True]], "tags": [[1]], "tags_mask": [[True]], "categories": [[2]]}
    padded = row | {"basket": [[3, 5, 7]], "basket_mask": [[True, True, False]]}
    empty = row | {"basket": [[0]], "basket_mask": [[False]]}
    found = [model({name: torch.tensor(value) for name, value in one.items()}) for one in (row, padded, empty)]
    assert torch.equal(found[0], found[1])
    assert torch.isfinite(found[2]).all()
    assert not torch.equal(found[0], found[2])
