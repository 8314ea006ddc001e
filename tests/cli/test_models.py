"""The commands of the registry, on a real one."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pyarrow as pa
import pytest
import torch

from sparkdl.cli import main
from sparkdl.models.bundle import save_bundle
from sparkdl.models.registry import Lineage, ModelRegistry
from sparkdl.tables.table import Table as Delta


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A registry with two versions; champion went from 1 to 2."""
    monkeypatch.setenv("COLUMNS", "300")
    place = ModelRegistry(str(tmp_path / "registry"))
    for number in (1, 2):
        bundle = str(tmp_path / f"bundle{number}")
        save_bundle(torch.nn.Linear(2, number), bundle)
        place.publish(
            "ride",
            bundle,
            metrics={"rmse": 1.0 / number, "odd": math.nan},
            parameters={"lr": 0.1 / number, "batch_size": 32},
            lineage=Lineage(source_table="/data/rides", source_version=number),
        )
        place.set_alias("ride", "champion", number, expected=None if number == 1 else 1)
    return place


@pytest.fixture
def run(capsys, registry):
    def run(action, *words):
        code = main(["models", action, registry.uri, *map(str, words)])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


@pytest.fixture
def told(run):
    def told(*words):
        code, out, _ = run(*words, "--json")
        assert code == 0
        return json.loads(out)

    return told


def test_models_and_versions_are_listed_and_shown(run):
    assert "champion → 2" in run("list")[1]
    assert "rmse 0.5" in run("list", "ride")[1]
    assert "/data/rides version 2" in run("list", "ride")[1]
    shown = run("show", "ride", "champion")[1]
    assert run("show", "ride@champion")[1] == run("show", "ride")[1] == shown
    code, _, err = run("show", "ride@champion", "3")
    assert (code, "ride@champion and 3 both say which version" in err) == (1, True)
    assert "'ride@' does not say which" in run("show", "ride@")[2]
    assert run("show", "ride", "")[0] == 1  # as of a shell variable that is not set
    assert "lr = 0.05" in shown
    assert "aliased" in run("history", "ride")[1]
    assert "no versions of walk" in run("list", "walk")[1]


def test_programs_get_one_json_document(told, registry):
    assert told("list") == [{"name": "ride", "versions": 2, "newest": 2, "aliases": {"champion": 2}}]
    assert [each["version"] for each in told("list", "ride")] == [1, 2]
    shown = told("show", "ride", 1)
    assert shown["metrics"] == {"rmse": 1.0, "odd": None}
    assert shown["artifact"] == registry.get("ride", 1).artifact
    assert [event["kind"] for event in told("history", "ride")] == ["published", "aliased"] * 2


def test_two_versions_stand_side_by_side(run, told):
    said = run("compare", "ride", 1, "champion")[1]
    assert "version 2 champion" in said
    assert "-0.5" in said
    assert "parameters: lr" in said
    assert "parameters: batch_size" not in said
    value = told("compare", "ride", 1, 2)
    assert value["versions"] == [1, 2]
    assert value["metrics"] == {"rmse": [1.0, 0.5], "odd": [None, None]}
    assert value["parameters"] == {"lr": [0.1, 0.05], "batch_size": [32, 32]}
    assert value["lineage"]["source_version"] == [1, 2]


def test_an_alias_is_moved_back_and_forth_and_says_so(run, told, registry):
    assert "would move from 2 to 1" in run("rollback", "ride", "--dry-run")[1]
    assert registry.aliases("ride") == {"champion": 2}
    code, out, _ = run("rollback", "ride")
    assert (code, registry.aliases("ride")) == (0, {"champion": 1})
    assert "champion of ride moved from 2 to 1" in out
    assert "would move" in run("promote", "ride", 2, "--dry-run")[1]
    assert registry.aliases("ride") == {"champion": 1}
    done = told("promote", "ride", 2, "--reason", "looks [bold]fine")
    assert (done["moved"], done["version"], done["previous"]) == (True, 2, 1)
    assert "looks [bold]fine" in run("history", "ride")[1]


def test_a_promotion_that_is_refused_has_an_exit_code_of_its_own(run, registry):
    code, out, _ = run("promote", "ride", 1, "--if-better", "rmse")
    assert code == 20
    assert "stays at 2" in out
    assert run("promote", "ride", 1, "--if-better", "rmse", "--mode", "max", "--dry-run")[0] == 0
    assert registry.aliases("ride") == {"champion": 2}
    assert run("promote", "ride", 2, "--if-better", "rmse")[0] == 0  # it is the champion already
    code, _, err = run("promote", "ride", 1, "--expected", 7)
    assert code == 30
    assert "points to 2, 7 was expected" in err
    assert run("promote", "ride", 1, "--expected", 2, "--if-better", "rmse")[0] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--mode", "max"), "--mode max has no meaning without --if-better"),
        (("--min-delta", 0.0), "--min-delta 0.0 has no meaning without --if-better"),
        (("--if-better", "rmse", "--reason", "mine"), "--reason and --if-better are given: leave --reason out"),
    ],
)
def test_words_that_a_promotion_would_not_heed_are_refused(run, registry, words, said):
    code, _, err = run("promote", "ride", 1, *words)
    assert code == 1
    assert said in err
    assert registry.aliases("ride") == {"champion": 2}


@pytest.mark.parametrize("hours", ["nan", "inf", "1e8", "-1"])
def test_hours_that_are_none_collect_nothing(run, hours):
    code, _, err = run("gc", "--older-than-hours", hours)
    assert code == 1
    assert "does not lie in 0..1000000: give one that does" in err


def test_only_digits_are_a_version(run):
    code, _, err = run("show", "ride", "²")
    assert code == 1
    assert "no alias '²'" in err


def test_lineage_leads_both_ways(run, told, registry, tmp_path):
    table = Delta(str(tmp_path / "features"), engine="delta-rs")
    table.append(pa.table({"x": [1.0]}))
    (file,) = (file.path for file in table.files())
    registry.publish("ride", str(tmp_path / "bundle1"), lineage=Lineage(source_table=table.uri, source_version=0))
    said = run("lineage", "ride", 3)[1]
    assert f"{table.uri} version 0" in said
    assert file in said
    assert told("lineage", "ride", 3)["files"] == told("lineage", "ride@3")["files"] == [file]
    assert "cannot be told" in run("lineage", "ride")[1]
    assert [each["version"] for each in told("lineage", "--table", table.uri, "--file", file)["versions"]] == [3]
    assert "ride" in run("lineage", "--table", table.uri, "--version", 0)[1]
    assert "no model was trained on" in run("lineage", "--table", table.uri, "--version", 7)[1]
    assert run("lineage", "ride", "--table", table.uri)[0] == 1
    assert run("lineage")[0] == 1
    assert run("lineage", "ride", "--file", "x")[0] == 1


def test_garbage_is_named_before_and_after_it_went(run, told, registry):
    words = ("gc", "--keep-last", 1, "--older-than-hours", 0)
    assert "version ride 1: not among the last 1" in run(*words, "--dry-run")[1]
    assert [each.version for each in registry.list("ride")] == [1, 2]
    done = told(*words)
    assert {each["kind"] for each in done["removed"]} >= {"version", "artifact"}
    assert [each.version for each in registry.list("ride")] == [2]
    assert "0 removed" in run("gc")[1]
    assert run("gc", "--keep-last", 0)[0] == 1


def test_a_key_of_the_environment_is_asked_for(run, monkeypatch):
    monkeypatch.setenv("SPARKDL_REGISTRY_KEY", "k" * 32)
    code, _, err = run("show", "ride", "champion")
    assert code == 1
    assert "is not signed" in err
    assert run("list")[0] == 0


def test_a_refusal_is_one_sentence_and_exit_code_1(run):
    code, _, err = run("show", "ride", "9")
    assert code == 1
    assert err.startswith("sparkdl: ")
    assert len(err.strip().splitlines()) == 1


def test_what_a_registry_says_cannot_steer_the_terminal(run, registry):
    registry.set_alias("ride", "champion", 1, expected=2, reason="\x1b]0;owned\x07 [red]x[/red]")
    said = run("history", "ride")[1]
    assert "\x1b]0;" not in said
    assert r"\x1b]0;owned\x07 [red]x[/red]" in said


def test_a_reader_that_hangs_up_ends_a_command_without_a_word(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "sparkdl.cli", "models", "list", str(tmp_path / "registry"), "--json"]
    ended = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")
