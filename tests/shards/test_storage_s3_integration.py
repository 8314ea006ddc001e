"""The seam to filesystems against an S3 server process that honours conditional requests."""

import threading
import time

import numpy as np
import pyarrow as pa
import pytest
from shard_blocks import tensor_arrays

from sparkdl.config import ShardConfig
from sparkdl.errors import ConflictError, IntegrityError, StorageError
from sparkdl.shards.files import write_table_shards
from sparkdl.shards.manifest import Manifest
from sparkdl.shards.sets import collect_garbage, list_sets
from sparkdl.storage import Storage, xxh3_hex


def test_objects_are_written_read_listed_and_deleted(s3_root):
    file = s3_root.child("a/b")
    assert not file.exists()
    file.write_atomic(b"0123456789")
    assert (file.exists(), file.size(), file.read_bytes(2, 3)) == (True, 10, b"234")
    [entry] = s3_root.child("a").list()
    assert (entry.name, entry.bytes, entry.is_dir) == ("b", 10, False)
    assert abs(entry.modified - time.time()) < 300
    s3_root.child("a").delete(recursive=True)
    assert not file.exists()
    file.delete()


def test_if_none_match_lets_exactly_one_writer_win(s3_root):
    file = s3_root.child("manifest.json")
    won, lost = [], []
    ready = threading.Barrier(6)

    def write(number):
        ready.wait()
        try:
            file.write_if_absent(b"%d" % number)
            won.append(b"%d" % number)
        except ConflictError:
            lost.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [file.read_bytes()]
    assert len(lost) == 5


def test_a_failed_upload_leaves_no_object(s3_root):
    file = s3_root.child("f")
    with pytest.raises(RuntimeError), file.open_output() as stream:  # noqa: PT012
        stream.write(b"half")
        raise RuntimeError
    assert not file.exists()


def test_a_missing_bucket_is_named(s3_root):
    missing = Storage.of("s3://no-such-bucket-here/set", s3_root.options)
    with pytest.raises(StorageError, match="cannot write s3://no-such-bucket-here/set/f"):
        missing.child("f").write_atomic(b"")


def test_a_set_is_written_and_single_blocks_are_read_by_range(s3_root):
    rows = 5000
    table = pa.table({"id": np.arange(rows), "a": np.random.rand(rows), "b": np.random.rand(rows)})
    config = ShardConfig(shard_bytes=60_000, block_rows=1000)
    manifest = write_table_shards(table, s3_root, labels=["id"], config=config)
    assert Manifest.load(s3_root) == manifest
    assert len(manifest.shards) > 1
    ids = []
    for shard in manifest.shards:
        file = s3_root.child(shard.path)
        assert file.size() == shard.bytes
        with file.open_input() as stream:
            schema = pa.ipc.open_file(stream).schema
        for block in shard.blocks:
            data = file.read_bytes(block.offset, block.bytes)
            assert xxh3_hex(data) == block.hash
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(data), schema)
            ids.append(tensor_arrays(batch, manifest.tensors)["id"])
    assert sorted(np.concatenate(ids)) == list(range(rows))
    with pytest.raises(ConflictError):
        write_table_shards(table, s3_root, labels=["id"])


def test_orphans_on_an_object_store_are_found_and_swept(s3_root):
    table = pa.table({"a": [1.0, 2.0], "b": [1.0, 2.0]})
    manifest = write_table_shards(table, s3_root)
    s3_root.child("shards/00000-0000-dead.arrow").write_atomic(b"half")
    [info] = list_sets(s3_root)
    assert (info.orphan_files, info.orphan_bytes) == (1, 4)
    assert collect_garbage(s3_root) == []
    [removed] = collect_garbage(s3_root, orphan_seconds=0)
    assert removed.uri.endswith("dead.arrow")
    assert [shard.path for shard in manifest.shards] == [f"shards/{e.name}" for e in s3_root.child("shards").list()]


def test_a_damaged_manifest_is_noticed(s3_root):
    write_table_shards(pa.table({"a": [1.0], "b": [1.0]}), s3_root)
    file = s3_root.child("manifest.json")
    file.write_atomic(file.read_bytes().replace(b'"rows":1', b'"rows":2'))
    with pytest.raises(IntegrityError, match="differs from its own hash"):
        Manifest.load(s3_root)
