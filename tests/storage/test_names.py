"""Names that documents hold, and links and pipes that folders hold: none of them leads out."""

import os
from pathlib import Path

import pytest

from sparkdl.errors import IntegrityError, StorageError
from sparkdl.storage import Storage

HOSTILE = [
    *("", ".", "..", "/", "/etc/passwd", "../x", "a/../../x", "a/..", "a//b", "a/", "./a", "a/./b"),
    *("C:/x", "c:x", "a\\b", "..\\x", "a\x00b", "a\nb", "\x7f"),
]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("root", ["/data/set", "memory://set", "s3://bucket/set"])
def test_a_name_that_is_not_plain_is_refused_and_shown(root, name):
    with pytest.raises(IntegrityError, match="is not the plain name of a file below") as caught:
        Storage.of(root).child(name)
    assert repr(name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_huge_name_is_shortened_in_the_message():
    with pytest.raises(IntegrityError) as caught:
        Storage.of("/data").child("../" * 100_000)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["a", "a/b.c/d", "...", "..a", "a b", "day=2024-01-01/p.parquet", "ä", "~", "a*"])
def test_plain_names_are_taken_as_they_are(name, tmp_path):
    file = Storage.of(tmp_path).child(name)
    file.write_atomic(b"1")
    assert (tmp_path / name).read_bytes() == b"1"
    assert file.read_bytes() == b"1"


@pytest.fixture
def outside(tmp_path):
    """A folder beside the one that tests hand out, with a file that must stay as it is."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_bytes(b"secret")
    yield folder
    assert sorted(os.listdir(folder)) == ["secret"]
    assert (folder / "secret").read_bytes() == b"secret"


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


ACTIONS = {
    "read_bytes": lambda file: file.read_bytes(),
    "open_input": lambda file: file.open_input(),
    "local_path": lambda file: file.local_path(),
    "size": lambda file: file.size(),
    "open_output": lambda file: file.open_output(),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("through", ["link", "folder/secret"])
def test_no_link_leads_out(home, outside, action, through):
    (home / "link").symlink_to(outside / "secret")
    (home / "folder").symlink_to("../outside")
    with pytest.raises(IntegrityError, match=r"is a link to .*/outside/secret, outside of .*/home"):
        ACTIONS[action](Storage.of(home).child(through))


@pytest.mark.parametrize("write", ["write_atomic", "write_if_absent"])
def test_nothing_is_written_or_deleted_through_a_linked_folder(home, outside, write):
    (home / "folder").symlink_to(outside)
    root = Storage.of(home)
    with pytest.raises(IntegrityError):
        getattr(root.child("folder/new"), write)(b"x")
    with pytest.raises(IntegrityError):
        root.child("folder/new").open_output()
    for recursive in (False, True):
        with pytest.raises(IntegrityError):
            root.child("folder/secret").delete(recursive)
    with pytest.raises(IntegrityError):
        root.child("folder").list()


def test_what_is_replaced_or_deleted_is_the_link_itself(home, outside):
    root = Storage.of(home)
    for name in ("replaced", "deleted"):
        (home / name).symlink_to(outside / "secret")
    (home / "tree").symlink_to(outside)
    root.child("replaced").write_atomic(b"mine")
    root.child("deleted").delete()
    root.child("tree").delete(recursive=True)
    assert sorted(os.listdir(home)) == ["replaced"]
    assert not (home / "replaced").is_symlink()


def test_links_that_lead_out_are_not_listed(home, outside):
    (home / "link").symlink_to(outside)
    (home / "inside").write_bytes(b"1")
    (home / "alias").symlink_to("inside")
    root = Storage.of(home)
    assert [entry.name for entry in root.list()] == ["alias", "inside"]
    assert root.child("alias").read_bytes() == b"1"


@pytest.mark.parametrize("target", ["link", "gone", "file/x"])
def test_links_that_lead_nowhere_do_not_hide_the_rest(home, target):
    (home / "file").write_text("x")
    (home / "link").symlink_to(target)
    assert "file" in [entry.name for entry in Storage.of(home).list()]
    assert "link" not in [entry.name for entry in Storage.of(home).list()]


def test_what_the_user_names_may_be_a_link(home, tmp_path):
    (home / "f").write_bytes(b"1")
    (tmp_path / "alias").symlink_to(home)
    (tmp_path / "file").symlink_to(home / "f")
    assert Storage.of(tmp_path / "alias").child("f").read_bytes() == b"1"
    assert Storage.of(tmp_path / "file").read_bytes() == b"1"


def test_a_pipe_is_refused_and_does_not_wait(home):
    os.mkfifo(home / "pipe")
    for action in ("read_bytes", "open_input"):
        with pytest.raises(IntegrityError, match="no regular file but a pipe or a device"):
            ACTIONS[action](Storage.of(home).child("pipe"))


def test_a_device_without_an_end_is_refused():
    with pytest.raises(IntegrityError, match="/dev/zero is no regular file"):
        Storage.of("/dev/zero").read_bytes(at_most=10)


def test_a_directory_is_no_file(home):
    with pytest.raises(StorageError, match="cannot read"):
        Storage.of(home).read_bytes()


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_a_file_larger_than_expected_is_refused(tmp_path, scheme):
    file = Storage.of(f"{scheme}{tmp_path}").child("document")
    file.write_atomic(b"12345")
    assert file.read_bytes(at_most=5) == b"12345"
    with pytest.raises(IntegrityError, match="has 5 bytes, at most 4 are expected"):
        file.read_bytes(at_most=4)


def test_a_name_with_a_star_deletes_one_file_of_an_object_store():
    root = Storage.of("memory://stars")
    for name in ("a1", "a2", "a*"):
        root.child(name).write_atomic(b"")
    root.child("a*").delete()
    assert [entry.name for entry in root.list()] == ["a1", "a2"]
    root.child("b[12]/c").write_atomic(b"")
    root.child("b1/c").write_atomic(b"")
    root.child("b[12]").delete(recursive=True)
    assert [root.child(name).exists() for name in ("b1/c", "b[12]/c")] == [True, False]
    root.delete(recursive=True)


def test_a_sparse_file_of_a_terabyte_costs_no_memory_where_a_bound_is_stated(tmp_path):
    with Path(tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(IntegrityError, match="1099511627776 bytes"):
        Storage.of(tmp_path).child("huge").read_bytes(at_most=1 << 20)
