"""The commands of shard sets, on real ones."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sparkdl.cli import main
from sparkdl.shards.files import write_table_shards


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


@pytest.mark.parametrize("age", ["--set-days=-30", "--set-days=nan", "--orphan-hours=-1"])
def test_an_age_below_0_removes_nothing(capsys, tmp_path, age):
    """Thirty days ago is no age: every set is older than that."""
    write_table_shards(pa.table({"x": [1.0]}), str(tmp_path / "one"))
    code, out = run(capsys, "shards", "gc", tmp_path, age)
    assert code == 1
    assert "must be at least 0 seconds: give a positive age" in " ".join(out.err.split())
    assert (tmp_path / "one" / "manifest.json").exists()


def test_a_narrow_terminal_and_brackets_leave_the_whole_address_of_a_set(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    place = tmp_path / "sets of the [bold] ones" / ("a" * 64)
    write_table_shards(pa.table({"x": [1.0]}), str(place))
    said = run(capsys, "shards", "list", place.parent)[1].out
    assert "".join(line.split("│")[1].strip() for line in said.splitlines() if "│" in line).endswith("a" * 64)
    assert "…" not in said
    (place / "shards" / "orphan.arrow").write_bytes(b"x")
    assert str(place) in run(capsys, "shards", "gc", place.parent, "--orphan-hours", 0)[1].out


def test_sets_are_listed_and_swept_whatever_their_folders_are_called(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    for name in ("back\\slash", "per%41cent", "two\nlines"):
        write_table_shards(pa.table({"x": [1.0]}), str(tmp_path / "one"))
        (tmp_path / "one").rename(tmp_path / name)
        (tmp_path / name / "shards" / "orphan.arrow").write_bytes(b"x")
    code, out = run(capsys, "shards", "list", tmp_path)
    assert (code, "back\\slash" in out.out, "per%41cent" in out.out) == (0, True, True)
    code, out = run(capsys, "shards", "gc", tmp_path, "--orphan-hours", 0)
    assert (code, "3 removed" in out.out) == (0, True), out


def test_an_interrupt_is_one_sentence_and_an_exit_code(capsys, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("sparkdl.shards.sets.list_sets", interrupted)
    code, out = run(capsys, "shards", "list", "sets")
    assert (code, out.err) == (130, "sparkdl: interrupted\n")
