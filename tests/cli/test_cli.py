"""The command line on real shard sets and a real registry."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch

from sparkdl.cli import main
from sparkdl.models.bundle import save_bundle
from sparkdl.models.registry import ModelRegistry
from sparkdl.shards.files import write_table_shards


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A registry with two versions; champion went from 1 to 2."""
    monkeypatch.setenv("COLUMNS", "300")
    place = ModelRegistry(str(tmp_path / "registry"))
    for number in (1, 2):
        bundle = str(tmp_path / f"bundle{number}")
        save_bundle(torch.nn.Linear(2, number), bundle)
        place.publish("ride", bundle, metrics={"rmse": 1.0 / number})
        place.set_alias("ride", "champion", number, expected=None if number == 1 else 1)
    return place


def run(capsys, *words):
    code = main([str(word) for word in words])
    return code, capsys.readouterr()


def test_shard_sets_are_listed_and_swept(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    place = tmp_path / "sets" / "one"
    write_table_shards(pa.table({"x": [1.0, 2.0, 3.0]}), str(place))
    orphan = place / "shards" / "left-behind.arrow"
    orphan.write_bytes(b"x" * 4096)
    code, out = run(capsys, "shards", "list", tmp_path / "sets")
    assert code == 0
    assert str(place) in out.out
    assert "1 (4.0 KiB)" in out.out
    assert run(capsys, "shards", "gc", tmp_path / "sets", "--orphan-hours", 0, "--dry-run")[0] == 0
    assert orphan.exists()
    assert run(capsys, "shards", "gc", tmp_path / "sets", "--orphan-hours", 0)[0] == 0
    assert not orphan.exists()
    assert "3" in run(capsys, "shards", "list", place)[1].out


def test_models_are_listed_shown_and_rolled_back(capsys, registry):
    assert "champion → 2" in run(capsys, "models", "list", registry.uri)[1].out
    assert "rmse 0.5" in run(capsys, "models", "list", registry.uri, "ride")[1].out
    assert "version" in run(capsys, "models", "show", registry.uri, "ride", "champion")[1].out
    code, out = run(capsys, "models", "rollback", registry.uri, "ride")
    assert code == 0
    assert "moved from 2 to 1" in out.out
    assert registry.aliases("ride") == {"champion": 1}
    run(capsys, "models", "promote", registry.uri, "ride", 2)
    assert registry.aliases("ride") == {"champion": 2}
    assert "rolled_back" in run(capsys, "models", "history", registry.uri, "ride")[1].out


def test_a_refusal_is_one_sentence_and_exit_code_1(capsys, registry):
    code, out = run(capsys, "models", "show", registry.uri, "ride", "9")
    assert code == 1
    assert out.err.startswith("sparkdl: ")
    assert len(out.err.strip().splitlines()) == 1
