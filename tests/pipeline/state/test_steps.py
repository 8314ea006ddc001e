"""What was done is found again, and only that."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from sparkdl.pipeline.state.steps import Steps, content_key
from sparkdl.storage import Storage


@dataclass(frozen=True, kw_only=True)
class Made:
    rows: int
    place: str = ""


@pytest.fixture
def folder(tmp_path):
    return Storage.of(tmp_path / "steps")


def test_work_is_done_once_for_the_same_inputs(folder):
    calls = []

    def work():
        calls.append(1)
        return Made(rows=3)

    assert Steps(folder).do("shards", {"a": 1, "b": [2]}, Made, work) == Made(rows=3)
    later = Steps(folder)
    assert later.do("shards", {"b": [2], "a": 1}, Made, work) == Made(rows=3)
    assert calls == [1]
    assert [note.kept for note in later.notes] == [True]


@pytest.mark.parametrize("other", [("shards", {"a": 2}), ("train", {"a": 1}), ("shards", {"a": 1, "b": None})])
def test_another_step_or_input_has_another_key(other):
    assert content_key("shards", {"a": 1}) != content_key(*other)


def test_keys_do_not_depend_on_the_order_of_names_at_any_depth():
    assert content_key("s", {"x": {"a": 1, "b": {"c": 1, "d": 2}}}) == content_key(
        "s", {"x": {"b": {"d": 2, "c": 1}, "a": 1}}
    )


def test_a_value_without_one_spelling_has_no_key():
    with pytest.raises(TypeError, match="has no order"):
        content_key("s", {"a": {1, 2}})
    with pytest.raises(ValueError, match="not JSON"):
        content_key("s", {"a": float("nan")})


def test_a_step_that_failed_leaves_nothing(folder):
    def fails():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        Steps(folder).do("train", {}, Made, fails)
    assert Steps(folder).find("train", {}, Made) is None


def test_a_result_counts_while_what_it_names_is_there(folder, tmp_path):
    file = tmp_path / "model"
    file.write_text("x")

    def holds(made):
        return Storage.of(made.place).exists()

    Steps(folder).do("train", {}, Made, lambda: Made(rows=1, place=str(file)), holds)
    assert Steps(folder).find("train", {}, Made, holds) is not None
    file.unlink()
    assert Steps(folder).find("train", {}, Made, holds) is None
    again = Steps(folder)
    assert again.do("train", {}, Made, lambda: Made(rows=2, place=str(tmp_path)), holds).rows == 2
    assert [note.kept for note in again.notes] == [False]


def test_a_damaged_result_is_done_again(folder, caplog):
    Steps(folder).do("train", {}, Made, lambda: Made(rows=1))
    file = folder.child("train").child(content_key("train", {}) + ".json")
    file.write_atomic(b'{"rows": "many"}')
    assert Steps(folder).do("train", {}, Made, lambda: Made(rows=2)) == Made(rows=2)
    assert "the step is done again" in caplog.text
    assert Steps(folder).find("train", {}, Made) == Made(rows=2)
