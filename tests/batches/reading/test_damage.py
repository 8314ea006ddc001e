"""Bytes that change while a loader reads them: noticed, named by file and block, never trained on in silence."""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.batches.reading.loader import ShardedDataset
from sparkdl.columns.layout import Layout
from sparkdl.config import LoaderConfig, ShardConfig
from sparkdl.errors import ConfigError, IntegrityError
from sparkdl.shards.files import write_table_shards


def write(uri, config=None):
    """A set of 1,000 rows in several files, with a tensor of every way to lie in a block."""
    n = np.arange(1000)
    tokens = [list(range(k % 7)) for k in n]
    table = pa.table({"id": n, "a": n * 0.5, "b": n * 2.0, "tokens": tokens, "raw": [b"x" * (k % 5) for k in n]})
    config = ShardConfig(**{"block_rows": 64, "shard_bytes": 20_000, **(config or {})})
    return write_table_shards(table, uri, labels=["id"], layout=Layout(shapes={"tokens": "ragged"}), config=config)


def dataset(uri, **config):
    small = {"pool_bytes": 40_000, "chunk_bytes": 4_000, "prefetch_bytes": 16_000, "threads": 2}
    return ShardedDataset(uri, config=LoaderConfig(**{**small, **config}))


def ids(loader):
    return [batch["id"].tolist() for batch in loader]


def overwrite(path, offset, count=64):
    """Flip ``count`` bytes of a file in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        data = file.read(count)
        file.seek(offset)
        file.write(bytes(byte ^ 255 for byte in data))


def middle(uri, manifest, number=0):
    """The path of a shard, and a place in the numbers of its first block."""
    shard = manifest.shards[number]
    return uri / shard.path, shard.blocks[0].offset + shard.blocks[0].bytes // 2


def test_a_shard_that_is_damaged_between_two_epochs_is_noticed(tmp_path):
    manifest = write(tmp_path / "s")
    loader = dataset(tmp_path / "s").loader(batch_size=50)
    first = ids(loader)
    path, place = middle(tmp_path / "s", manifest, 1)
    overwrite(path, place)
    with pytest.raises(IntegrityError, match=rf"block at byte \d+ of .*{path.name} has hash"):
        ids(loader)
    overwrite(path, place)  # restored, with a time of its own
    loader.set_epoch(0)
    assert ids(loader) == first


def test_a_shard_that_is_damaged_while_it_is_read_ends_the_epoch_with_an_error(tmp_path):
    manifest = write(tmp_path / "s")
    batches = iter(dataset(tmp_path / "s").loader(batch_size=50, shuffle=False))
    taken = [next(batches) for _ in range(10)]
    path, place = middle(tmp_path / "s", manifest)
    overwrite(path, place)
    with pytest.raises(IntegrityError, match=rf"{path.name} has hash"):
        taken.extend(batches)
    assert len(taken) == 20


@pytest.mark.parametrize("taken", [10, 20])
def test_damage_to_an_epoch_that_is_left_early_is_raised_at_its_end_and_not_twice(tmp_path, caplog, taken):
    manifest = write(tmp_path / "s")
    loader = dataset(tmp_path / "s").loader(batch_size=50, shuffle=False)
    path, place = middle(tmp_path / "s", manifest)
    for step, _ in enumerate(loader, start=1):
        if step == taken:
            overwrite(path, place)
            break
    assert f"{path.name} has hash" in caplog.text
    with pytest.raises(IntegrityError, match=rf"{path.name} has hash"):
        loader.end_epoch()
    overwrite(path, place)
    loader.end_epoch()
    loader.set_epoch(0)
    assert len(ids(loader)) == 20


def test_damage_to_an_epoch_that_is_left_early_is_raised_by_the_next(tmp_path):
    manifest = write(tmp_path / "s")
    loader = dataset(tmp_path / "s").loader(batch_size=50, shuffle=False)
    path, place = middle(tmp_path / "s", manifest)
    next(batches := iter(loader))
    overwrite(path, place)
    del batches
    overwrite(path, place)  # restored; the batch that was taken may still have held it
    with pytest.raises(IntegrityError, match=rf"{path.name} has hash"):
        next(iter(loader))


def test_a_damaged_shard_is_substituted_from_the_next_epoch_on(tmp_path, caplog):
    manifest = write(tmp_path / "s")
    data = dataset(tmp_path / "s", on_damage="substitute")
    loader = data.loader(batch_size=50)
    list(loader)
    overwrite(*middle(tmp_path / "s", manifest))
    assert [len(batch) for batch in ids(loader)] == [50] * 20
    assert data.blocks.damaged == {0: 1}
    overwrite(*middle(tmp_path / "s", manifest, 1))
    list(loader)
    assert "its rows are replaced by those of block 1" in caplog.text


def test_a_file_that_was_written_again_with_the_same_bytes_is_read_on(tmp_path):
    manifest = write(tmp_path / "s")
    loader = dataset(tmp_path / "s").loader(batch_size=50)
    first = ids(loader)
    for shard in manifest.shards:
        path = tmp_path / "s" / shard.path
        copy = path.with_suffix(".copy")
        copy.write_bytes(path.read_bytes())
        copy.replace(path)
    loader.set_epoch(0)
    assert ids(loader) == first


def test_damage_that_leaves_no_trace_is_found_where_every_epoch_is_verified(tmp_path):
    manifest = write(tmp_path / "s")
    loader = dataset(tmp_path / "s", verify="epoch").loader(batch_size=50)
    first = ids(loader)
    loader.set_epoch(0)
    assert ids(loader) == first
    path, place = middle(tmp_path / "s", manifest)
    facts = path.stat()
    overwrite(path, place)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with pytest.raises(IntegrityError, match=rf"{path.name} has hash"):
        ids(loader)


def test_a_shard_that_is_cut_between_two_epochs_is_an_error_not_a_crash(tmp_path):
    manifest = write(tmp_path / "s")
    loader = dataset(tmp_path / "s").loader(batch_size=50)
    list(loader)
    path = tmp_path / "s" / manifest.shards[-1].path
    os.truncate(path, manifest.shards[-1].blocks[0].offset + 8)
    with pytest.raises(IntegrityError, match="cut short"):
        list(loader)


def test_a_block_of_the_cache_that_is_damaged_in_use_is_noticed(tmp_path):
    write(tmp_path / "s", config={"compression": "zstd"})
    data = dataset(tmp_path / "s", cache_dir=str(tmp_path / "cache"))
    loader = data.loader(batch_size=50)
    first = ids(loader)
    for path in (tmp_path / "cache" / "blocks").glob("*.block"):
        overwrite(path, 600)
    with pytest.raises(IntegrityError, match=r"returns other bytes than were written of the block at byte"):
        ids(loader)
    again = dataset(tmp_path / "s", cache_dir=str(tmp_path / "cache")).loader(batch_size=50)
    assert ids(again) == first  # what was left of the cache is fetched again


def test_how_often_blocks_are_verified_is_one_of_two_words():
    with pytest.raises(ConfigError, match="verify='always' is not one of"):
        LoaderConfig(verify="always")


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_shard_that_is_a_link_out_of_the_set_is_not_read(tmp_path, what):
    shard = tmp_path / "s" / write(tmp_path / "s").shards[0].path
    moved = shard if what == "file" else shard.parent
    assert moved != tmp_path / "s"
    moved.rename(tmp_path / "outside")
    moved.symlink_to(tmp_path / "outside")
    with pytest.raises(IntegrityError, match=r"is a link to .*outside of"):
        list(dataset(tmp_path / "s").loader(batch_size=50))
