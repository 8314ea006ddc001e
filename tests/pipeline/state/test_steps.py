"""What was done is found again, and only that."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from sparkdl.pipeline.state.steps import Steps, content_key
from sparkdl.storage import Storage
from sparkdl.tables.table import Table


@dataclass(frozen=True, kw_only=True)
class Made:
    rows: int
    place: str = ""


@pytest.fixture
def folder(tmp_path):
    return Storage.of(tmp_path / "steps")


def steps_of(folder):
    return Steps(folder, Table(f"{folder.uri}-receipts"))


def test_work_is_done_once_for_the_same_inputs(folder):
    calls = []

    def work():
        calls.append(1)
        return Made(rows=3)

    assert steps_of(folder).do("shards", {"a": 1, "b": [2]}, Made, work) == Made(rows=3)
    later = steps_of(folder)
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
        steps_of(folder).do("train", {}, Made, fails)
    assert steps_of(folder).find("train", {}, Made) is None


def test_a_result_counts_while_what_it_names_is_there(folder, tmp_path):
    file = tmp_path / "model"
    file.write_text("x")

    def holds(made):
        return Storage.of(made.place).exists()

    steps_of(folder).do("train", {}, Made, lambda: Made(rows=1, place=str(file)), holds)
    assert steps_of(folder).find("train", {}, Made, holds) is not None
    file.unlink()
    assert steps_of(folder).find("train", {}, Made, holds) is None
    again = steps_of(folder)
    assert again.do("train", {}, Made, lambda: Made(rows=2, place=str(tmp_path)), holds).rows == 2
    assert [note.kept for note in again.notes] == [False]


def test_a_damaged_result_is_done_again(folder, caplog):
    steps_of(folder).do("train", {}, Made, lambda: Made(rows=1))
    file = folder.child("train").child(content_key("train", {}) + ".json")
    file.write_atomic(b'{"rows": "many"}')
    assert steps_of(folder).do("train", {}, Made, lambda: Made(rows=2)) == Made(rows=2)
    assert "the step is done again" in caplog.text
    assert steps_of(folder).find("train", {}, Made) == Made(rows=2)


def test_the_last_receipt_counts_and_is_read_again_by_the_next_run(folder):
    first = steps_of(folder)
    assert first.find("score", {"window": 1}, Made) is None
    for rows in (1, 2):
        first.put("score", {"window": 1}, Made(rows=rows), 0.0)
    first.replace("score", [({"window": 1}, Made(rows=3)), ({"window": 2}, Made(rows=4))])
    later = steps_of(folder)
    assert [later.find("score", {"window": n}, Made).rows for n in (1, 2)] == [3, 4]
    later.replace("score", [({"window": 1}, None)])
    for steps in (later, steps_of(folder)):
        assert steps.find("score", {"window": 1}, Made) is None
        assert not steps.known("score", {"window": 1})
        assert steps.known("score", {"window": 2})
