"""The host's cache of blocks: bounded, whole or absent, made once however many ask."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
import torch

from sparkdl.batches.memory.cache import BlockCache, default_folder
from sparkdl.batches.reading.loader import ShardedDataset
from sparkdl.config import LoaderConfig, ShardConfig
from sparkdl.errors import IntegrityError, StorageError
from sparkdl.shards.files import write_table_shards
from sparkdl.shards.manifest import Manifest
from sparkdl.storage import RemoteStorage


def read(cache, key, make):
    descriptor, size = cache.open(key, make)
    try:
        return os.pread(descriptor, size, 0)
    finally:
        os.close(descriptor)


def test_a_block_is_made_once(tmp_path):
    cache = BlockCache(tmp_path / "c", 10**6)
    made = []

    def make():
        made.append(1)
        time.sleep(0.05)
        return b"x" * 1000

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: read(cache, "k", make), range(8)))
    assert answers == [b"x" * 1000] * 8
    assert len(made) == 1


def test_the_bound_holds_and_the_least_recently_used_go_first(tmp_path):
    cache = BlockCache(tmp_path / "c", 10_000)
    for number in range(30):
        read(cache, f"k{number}", lambda: b"x" * 990)
        os.utime(tmp_path / "c" / f"k{number}.block", (number + 1, number + 1))
        if number > 1:
            read(cache, "k0", lambda: pytest.fail("k0 was used all the time"))
        assert cache.usage() <= 10_000
    left = {path.stem for path in (tmp_path / "c").glob("*.block")}
    assert "k0" in left
    assert "k29" in left
    assert "k5" not in left


def test_what_is_being_read_survives_eviction(tmp_path):
    cache = BlockCache(tmp_path / "c", 1500)
    descriptor, size = cache.open("a", lambda: b"a" * 1000)
    read(cache, "b", lambda: b"b" * 1000)
    assert not (tmp_path / "c" / "a.block").exists()
    assert os.pread(descriptor, size, 0) == b"a" * 1000
    os.close(descriptor)


def test_a_failed_make_leaves_nothing(tmp_path):
    cache = BlockCache(tmp_path / "c", 10**6)

    def fail():
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="full"):
        cache.open("k", fail)
    assert not list((tmp_path / "c").glob("*.block"))
    assert read(cache, "k", lambda: b"later") == b"later"


def _die_while_writing(folder, ready):
    cache = BlockCache(folder, 10**6)

    def make():
        ready.set()
        time.sleep(60)
        return b"never"

    cache.open("k", make)


def test_a_killed_writer_leaves_no_lock_and_no_half_block(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_die_while_writing, args=(tmp_path / "c", ready))
    process.start()
    assert ready.wait(20)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert read(BlockCache(tmp_path / "c", 10**6), "k", lambda: b"whole") == b"whole"


def test_left_over_temporary_files_are_swept(tmp_path):
    cache = BlockCache(tmp_path / "c", 2000)
    old = tmp_path / "c" / "dead.tmp"
    old.write_bytes(b"half")
    os.utime(old, (1, 1))
    for key in "abc":
        read(cache, key, lambda: b"x" * 900)
    assert not old.exists()


def test_an_unwritable_folder_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        BlockCache(tmp_path / "file" / "c", 100)


def test_the_default_folder_can_be_named(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARKDL_CACHE", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.delenv("SPARKDL_CACHE")
    assert str(os.getuid()) in default_folder().name


@pytest.fixture
def remote(tmp_path):
    """A shard set that is not on the local disk, and its loader settings."""
    uri = "memory://sets/one"
    table = pa.table({"id": pa.array(range(600), pa.int64())})
    write_table_shards(table, uri, config=ShardConfig(block_rows=50, shard_bytes=5000, spread_rows=False))
    yield uri, LoaderConfig(cache_dir=str(tmp_path / "cache"), pool_bytes=3000)
    fsspec.filesystem("memory").rm("/sets", recursive=True)


def rows(uri, config):
    return torch.cat([batch["id"] for batch in ShardedDataset(uri, config=config).loader(batch_size=32)])


def test_a_remote_set_is_fetched_once_and_read_in_the_same_order(remote, monkeypatch):
    uri, config = remote
    fetched = []
    plain = RemoteStorage.read_bytes

    def counting(self, offset=0, length=None, **options):
        fetched.append((self.uri, offset))
        return plain(self, offset, length, **options)

    monkeypatch.setattr(RemoteStorage, "read_bytes", counting)
    first = rows(uri, config)
    assert sorted(first.tolist()) == list(range(600))
    blocks = [where for where in fetched if "shards/" in where[0]]
    assert len(blocks) == len(set(blocks)) == 12
    assert torch.equal(rows(uri, config), first)
    assert len([where for where in fetched if "shards/" in where[0]]) == 12


def test_a_remote_parquet_set_costs_its_row_groups_and_one_footer_a_file(tmp_path, monkeypatch):
    uri = "memory://sets/parquet"
    table = pa.table({"id": pa.array(range(600), pa.int64()), "t": [[k] * (k % 3) for k in range(600)]})
    manifest = write_table_shards(
        table, uri, config=ShardConfig(block_rows=50, shard_bytes=5000, spread_rows=False, format="parquet")
    )
    opened = []
    plain = RemoteStorage.open_input
    monkeypatch.setattr(RemoteStorage, "open_input", lambda self: opened.append(self.uri) or plain(self))
    got = rows(uri, LoaderConfig(cache_dir=str(tmp_path / "cache"), pool_bytes=3000))
    assert sorted(got.tolist()) == list(range(600))
    assert 1 < len(manifest.shards) == len([u for u in opened if "shards/" in u]) < 12
    fsspec.filesystem("memory").rm("/sets", recursive=True)


def test_a_cache_smaller_than_the_set_stays_bounded(remote):
    uri, config = remote
    config = dataclasses.replace(config, cache_bytes=2500)
    assert sorted(rows(uri, config).tolist()) == list(range(600))
    assert BlockCache(f"{config.cache_dir}/blocks", 2500).usage() <= 2500


def test_a_damaged_cache_is_filled_again(remote):
    uri, config = remote
    first = rows(uri, config)
    for path in Path(config.cache_dir).rglob("*.block"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert torch.equal(rows(uri, config), first)


def test_a_remote_block_that_differs_from_its_hash_is_found(remote):
    uri, config = remote
    files = fsspec.filesystem("memory")
    path = next(name for name in files.find("/sets") if name.endswith(".arrow"))
    block = Manifest.load(uri).shards[0].blocks[0]
    data = bytearray(files.cat_file(path))
    data[block.offset + block.bytes // 2] ^= 1
    files.pipe_file(path, bytes(data))
    with pytest.raises(IntegrityError, match="hash"):
        rows(uri, config)
