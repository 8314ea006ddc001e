import uuid

import pytest

from sparkdl.documents import atomic_folder
from sparkdl.errors import StorageError
from sparkdl.storage import Storage


@pytest.fixture(params=["local", "memory"])
def home(request, tmp_path):
    uri = str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}/models"
    return Storage.of(uri)


def write(folder, **files):
    for name, text in files.items():
        folder.child("deep").child(name).write_atomic(text.encode())


def held(folder):
    deep = folder.child("deep")
    return {entry.name: deep.child(entry.name).read_bytes().decode() for entry in deep.list()}


def half_written(target):
    with atomic_folder.atomic_replace(target) as work:
        write(work, a="2")
        raise ArithmeticError


def test_the_successor_takes_the_place_of_what_was_there_and_nothing_else_is_left(home):
    target = home.child("m")
    with atomic_folder.atomic_replace(target) as work:
        write(work, a="1", b="1")
    assert held(target) == {"a": "1", "b": "1"}
    with atomic_folder.atomic_replace(target) as work:
        write(work, a="2")
        assert held(target) == {"a": "1", "b": "1"}
    assert held(target) == {"a": "2"}
    assert [entry.name for entry in home.list()] == ["m"]


def test_a_failure_while_the_successor_is_written_leaves_the_old_one(home):
    target = home.child("m")
    write(target, a="1")
    with pytest.raises(ArithmeticError):
        half_written(target)
    assert held(target) == {"a": "1"}
    assert [entry.name for entry in home.list()] == ["m"]


def test_a_first_attempt_that_fails_leaves_nothing(home):
    with pytest.raises(ArithmeticError):
        half_written(home.child("m"))
    assert home.list() == []


def test_a_failure_of_the_last_move_puts_the_old_one_back(home, monkeypatch):
    target, moves, move = home.child("m"), [], type(home).move_to
    write(target, a="1")

    def breaks(source, to):
        moves.append(to)
        if len(moves) == 2:
            write(to, half="new")
            raise StorageError("the network is gone")
        move(source, to)

    monkeypatch.setattr(type(home), "move_to", breaks)
    with pytest.raises(StorageError, match="the network is gone"), atomic_folder.atomic_replace(target) as work:
        write(work, a="2")
    assert held(target) == {"a": "1"}
    assert [entry.name for entry in home.list()] == ["m"]
