"""The seam to filesystems on a local disk and on fsspec's in-memory filesystem."""

import errno
import os
import pickle
import resource
import threading
from pathlib import Path

import fsspec
import pytest

from sparkdl.errors import ConfigError, ConflictError, StorageError
from sparkdl.storage import Storage, sha256_hex, storage_errors, xxh3_hex


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    if request.param == "local":
        yield Storage.of(tmp_path / "root")
    else:
        yield Storage.of(f"memory://{tmp_path.name}")
        fsspec.filesystem("memory").store.clear()


def test_bytes_come_back_whole_and_in_ranges(root):
    file = root.child("a/b.bin")
    file.write_atomic(b"0123456789")
    assert file.read_bytes() == b"0123456789"
    assert file.read_bytes(3, 4) == b"3456"
    assert file.size() == 10
    with file.open_input() as stream:
        stream.seek(8)
        assert stream.read() == b"89"


def test_reading_past_the_end_is_an_error(root):
    file = root.child("short")
    file.write_atomic(b"0123")
    with pytest.raises(StorageError, match="cut short"):
        file.read_bytes(2, 10)


def test_a_missing_file_is_named(root):
    file = root.child("nothing")
    assert not file.exists()
    with pytest.raises(StorageError, match="nothing: it does not exist"):
        file.read_bytes()


def test_write_atomic_replaces(root):
    file = root.child("f")
    file.write_atomic(b"old")
    file.write_atomic(b"new")
    assert file.read_bytes() == b"new"
    assert [entry.name for entry in root.list()] == ["f"]


def test_write_if_absent_keeps_the_first(root):
    file = root.child("f")
    file.write_if_absent(b"first")
    with pytest.raises(ConflictError, match="another writer"):
        file.write_if_absent(b"second")
    assert file.read_bytes() == b"first"
    assert [entry.name for entry in root.list()] == ["f"]


def test_a_writer_whose_answer_was_lost_is_not_told_that_somebody_was_faster(lost_answers):
    file = Storage.of(lost_answers).child("f")
    file.write_if_absent(b"first")
    for other in (b"other", b"more than the first"):
        with pytest.raises(ConflictError, match="another writer"):
            file.write_if_absent(other)
    assert file.read_bytes() == b"first"


def test_of_many_writers_exactly_one_creates(tmp_path):
    file = Storage.of(tmp_path / "f")
    won = []
    ready = threading.Barrier(8)

    def write(number):
        ready.wait()
        try:
            file.write_if_absent(b"%d" % number)
            won.append(number)
        except ConflictError:
            pass

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [b"%d" % number for number in won] == [file.read_bytes()]


def test_list_and_delete(root):
    root.child("one").write_atomic(b"1")
    root.child("dir/two").write_atomic(b"22")
    assert [(entry.name, entry.bytes, entry.is_dir) for entry in root.list()] == [("dir", 0, True), ("one", 1, False)]
    root.child("one").delete()
    root.child("one").delete()
    root.child("dir").delete(recursive=True)
    assert not root.child("one").exists()
    assert not root.child("dir/two").exists()
    assert root.child("never").list() == []


def test_a_failed_output_leaves_no_file(tmp_path):
    file = Storage.of(tmp_path / "f")
    with pytest.raises(RuntimeError), file.open_output() as stream:  # noqa: PT012
        stream.write(b"half")
        raise RuntimeError
    assert not file.exists()


def test_a_copy_that_no_longer_fits_is_a_storage_error_and_leaves_no_file(tmp_path):
    (tmp_path / "large").write_bytes(b"x" * 100_000)
    copy = Storage.of(tmp_path / "folder/copy")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(StorageError, match=r"cannot write .*/folder/copy"):
            copy.write_copy(tmp_path / "large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not copy.exists()
    copy.write_copy(tmp_path / "large")
    assert copy.size() == 100_000


def test_a_full_device_is_said_to_be_full():
    with pytest.raises(StorageError, match=r"/dev/full.*full.*free space"), Path("/dev/full").open("wb") as full:  # noqa: PT012, SIM117
        with storage_errors("/dev/full", "write"):
            full.write(b"x" * (1 << 20))
            full.flush()


def test_every_errno_gets_its_remedy():
    for code, remedy in ((errno.EDQUOT, "free space"), (errno.EROFS, "grant"), (errno.EACCES, "grant")):
        with pytest.raises(StorageError, match=f"cannot write u: .*{remedy}"), storage_errors("u", "write"):
            raise OSError(code, os.strerror(code))


def test_a_file_where_a_directory_is_needed(tmp_path):
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(StorageError, match="a file stands where a directory is needed"):
        Storage.of(tmp_path / "f" / "child").write_atomic(b"")


def test_uris():
    assert Storage.of("file:///a/b").local_path() == Path("/a/b")
    assert Storage.of("rel/x").local_path() == Path.cwd() / "rel/x"
    assert Storage.of("memory://b/c").local_path() is None
    assert Storage.of("memory://b/c/").child("d").uri == "memory://b/c/d"
    with pytest.raises(ConfigError, match="empty"):
        Storage.of(" ")
    with pytest.raises(ConfigError, match="'nosuch' of nosuch://x is unknown"):
        Storage.of("nosuch://x")


def test_a_pickled_storage_keeps_its_options_and_hides_them():
    storage = Storage.of("s3://bucket/set", {"key": "k", "secret": "hidden"})
    copy = pickle.loads(pickle.dumps(storage))
    assert copy.options["secret"] == "hidden"
    assert "hidden" not in repr(copy)


def test_hashes_are_the_published_ones():
    assert xxh3_hex(b"") == "2d06800538d394c2"
    assert sha256_hex(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_a_folder_in_the_place_of_a_file_is_said_to_be_one(tmp_path):
    with pytest.raises(StorageError, match=r"a file is needed there \(.* is a directory\): name one in it"):
        Storage.of(str(tmp_path)).read_bytes()
