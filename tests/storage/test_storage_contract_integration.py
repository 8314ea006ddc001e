"""What every kind of storage promises, tried on a local disk, in memory, on an S3 server and on HDFS."""

import json
import multiprocessing
import subprocess
import sys
import threading
import time
import uuid

import fsspec
import pytest

from sparkdl.documents.atomic_folder import atomic_replace
from sparkdl.errors import ConflictError, IntegrityError, StorageError
from sparkdl.storage import TEMPORARY, Storage

NAMES = [f"name-{number:02d}" for number in range(40)]
WRITERS = 3

WRITER = """
import json, sys
from sparkdl.errors import ConflictError
from sparkdl.storage import Storage

uri, options, names, me = json.loads(sys.stdin.readline())
root, won, lost = Storage.of(uri, options), [], 0
root.child("ready").exists()
print("ready", flush=True)
sys.stdin.readline()
for name in names:
    try:
        root.child(name).write_if_absent(me.encode())
        won.append(name)
    except ConflictError:
        lost += 1
print(json.dumps([won, lost]))
"""


@pytest.fixture(params=["local", "memory", "s3", pytest.param("hdfs", marks=pytest.mark.slow)])
def root(request, tmp_path):
    if request.param == "local":
        yield Storage.of(tmp_path / "root")
    elif request.param == "memory":
        yield Storage.of(f"memory://{tmp_path.name}")
        fsspec.filesystem("memory").store.clear()
    elif request.param == "s3":
        yield request.getfixturevalue("s3_root")
    else:
        yield Storage.of(f"{request.getfixturevalue('hdfs')}/contract/{uuid.uuid4().hex}")


def names(folder):
    return [entry.name for entry in folder.list()]


def test_bytes_come_back_whole_and_in_ranges(root):
    file = root.child("a/b.bin")
    assert not file.exists()
    file.write_atomic(b"0123456789")
    assert (file.read_bytes(), file.read_bytes(3, 4), file.size()) == (b"0123456789", b"3456", 10)
    with file.open_input() as stream:
        stream.seek(8)
        assert stream.read() == b"89"
    with pytest.raises(StorageError, match="cut short"):
        file.read_bytes(8, 10)
    with pytest.raises(IntegrityError, match="at most 9"):
        file.read_bytes(at_most=9)


def test_an_empty_file_is_a_file(root):
    root.child("empty").write_atomic(b"")
    assert root.child("empty").read_bytes() == b""
    assert root.child("empty").exists()


def test_what_is_missing_is_named_listed_as_nothing_and_deleted_without_a_word(root):
    for call in (root.child("no").read_bytes, root.child("no").size):
        with pytest.raises(StorageError, match=r"/no: it does not exist") as caught:
            call()
        assert "\n" not in str(caught.value)
    root.child("no").delete()
    root.child("no").delete(recursive=True)
    assert root.child("no").list() == []
    assert not root.child("no").exists()


def test_files_and_folders_are_listed_and_deleted(root):
    root.child("one").write_atomic(b"1")
    root.child("dir/two").write_atomic(b"22")
    assert [(entry.name, entry.bytes, entry.is_dir) for entry in root.list()] == [("dir", 0, True), ("one", 1, False)]
    [entry] = root.child("dir").list()
    assert entry.modified is None or entry.modified > 1_600_000_000
    root.child("one").delete()
    root.child("dir").delete(recursive=True)
    assert names(root) == []


def test_a_new_version_replaces_the_old_one_and_leaves_nothing_beside_it(root):
    file = root.child("f")
    for text in (b"old", b"newer", b"n"):
        file.write_atomic(text)
        assert file.read_bytes() == text
    assert names(root) == ["f"]


def test_a_second_writer_is_told_of_the_first(root):
    file = root.child("f")
    file.write_if_absent(b"first")
    with pytest.raises(ConflictError, match="another writer committed first"):
        file.write_if_absent(b"second")
    assert file.read_bytes() == b"first"
    assert names(root) == ["f"]


def test_s3_takes_a_commit_once_whose_answer_was_lost(s3_root, monkeypatch):
    session = pytest.importorskip("aiobotocore.httpsession")
    from botocore.exceptions import ReadTimeoutError

    send, lost = session.AIOHTTPSession.send, []

    async def without_an_answer(self, request):
        answer = await send(self, request)
        if request.method == "PUT" and not lost:
            lost.append(answer.status_code)
            raise ReadTimeoutError(endpoint_url=request.url)
        return answer

    monkeypatch.setattr(session.AIOHTTPSession, "send", without_an_answer)
    s3_root.child("f").write_if_absent(b"mine")
    assert lost == [200]
    with pytest.raises(ConflictError):
        s3_root.child("f").write_if_absent(b"your")
    assert s3_root.child("f").read_bytes() == b"mine"


def test_of_three_writers_of_forty_names_each_name_has_one_winner(root):
    """Three processes; of ``memory://``, which every process has to itself, three threads of one."""
    results = _threads(root) if root.uri.startswith("memory:") else _processes(root)
    winners = {name: number for number, (won, _) in enumerate(results) for name in won}
    assert sorted(name for won, _ in results for name in won) == NAMES
    assert sum(lost for _, lost in results) == (WRITERS - 1) * len(NAMES)
    assert {name: int(root.child(name).read_bytes()) for name in NAMES} == winners
    assert names(root) == NAMES


def _processes(root):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(WRITERS)
    ]
    options = dict(getattr(root, "options", {}))
    for number, writer in enumerate(writers):
        writer.stdin.write(json.dumps([root.uri, options or None, NAMES, str(number)]) + "\n")
        writer.stdin.flush()
    assert [writer.stdout.readline() for writer in writers] == ["ready\n"] * WRITERS
    return [json.loads(writer.communicate("go\n", timeout=120)[0]) for writer in _told(writers)]


def _told(writers):
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    return writers


def _threads(root):
    results = []

    def write(number):
        won, lost = [], 0
        for name in NAMES:
            try:
                root.child(name).write_if_absent(str(number).encode())
                won.append(name)
            except ConflictError:
                lost += 1
        results.append((number, won, lost))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # else one is done before the next comes in
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    return [(won, lost) for _, won, lost in sorted(results)]


def test_a_write_that_fails_half_way_leaves_nothing_and_shows_the_real_error(root):
    with pytest.raises(ArithmeticError, match="mine"), root.child("f").open_output() as stream:  # noqa: PT012
        stream.write(b"x" * 100_000)
        raise ArithmeticError("mine")
    assert names(root) == []
    assert not root.child("f").exists()


def test_a_large_file_is_written_and_read_as_a_stream(root):
    part = bytes(range(256)) * 4096
    with root.child("large").open_output() as stream:
        for _ in range(12):
            stream.write(part)
    assert root.child("large").size() == 12 * len(part)
    with root.child("large").open_input() as stream:
        stream.seek(11 * len(part) + 3)
        assert stream.read(10) == part[3:13]


def test_a_folder_is_replaced_whole_or_stays(root):
    target = root.child("model")
    for text in (b"1", b"2"):
        with atomic_replace(target) as work:
            work.child("deep/a").write_atomic(text)
    with pytest.raises(ArithmeticError), atomic_replace(target) as work:  # noqa: PT012
        work.child("deep/a").write_atomic(b"3")
        raise ArithmeticError
    assert target.child("deep/a").read_bytes() == b"2"
    assert names(root) == ["model"]


def test_a_folder_gets_another_name(root):
    root.child("old/deep/a").write_atomic(b"1")
    root.child("old").move_to(root.child("new"))
    assert root.child("new/deep/a").read_bytes() == b"1"
    assert names(root) == ["new"]


def test_nothing_of_a_failed_replacement_is_left_by_name(root):
    with pytest.raises(ArithmeticError), atomic_replace(root.child("model")) as work:  # noqa: PT012
        work.child("a").write_atomic(b"1")
        raise ArithmeticError
    assert not [name for name in names(root) if name.startswith(TEMPORARY)]
    assert not root.child("model").exists()


@pytest.mark.slow
def test_a_child_process_lives_where_its_parent_spoke_to_hdfs(hdfs):
    root = Storage.of(f"{hdfs}/contract/{uuid.uuid4().hex}")
    root.child("f").write_atomic(b"1")
    time.sleep(4)  # the client keeps a connection for 3 s, and a child that takes it over waits 60 s for an answer
    child = multiprocessing.get_context("fork").Process(target=root.child("f").read_bytes)
    child.start()
    child.join(60)
    try:
        assert child.exitcode == 0
    finally:
        child.kill()
