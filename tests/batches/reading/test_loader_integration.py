"""Readers in processes of their own: one cache for all, killed readers, a real S3 server."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys

import pyarrow as pa
import pytest

from sparkdl.batches.reading.loader import ShardedDataset
from sparkdl.config import LoaderConfig, ShardConfig
from sparkdl.shards.files import write_table_shards
from sparkdl.world import World

ROWS = 4000

READER = """
import json, sys, time
from sparkdl.batches.reading.loader import ShardedDataset
from sparkdl.config import LoaderConfig
from sparkdl.world import World
uri, cache, rank, size, pause = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
config = LoaderConfig(cache_dir=cache, cache_bytes=60_000, pool_bytes=10_000, chunk_bytes=2_000, prefetch_bytes=4_000)
rows = []
for batch in ShardedDataset(uri, config=config).loader(global_batch_size=64, world=World(rank=rank, size=size)):
    rows.append(batch["id"].tolist())
    print("step", flush=True, file=sys.stderr)
    time.sleep(pause)
print(json.dumps(rows))
"""


def start(uri, cache, rank, size, pause=0.0):
    command = [sys.executable, "-c", READER, str(uri), str(cache), str(rank), str(size), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def numbers():
    return pa.table({"id": pa.array(range(ROWS), pa.int64())})


@pytest.mark.slow
def test_ranks_share_one_cache_and_survive_a_killed_one(tmp_path):
    uri, cache = tmp_path / "s", tmp_path / "cache"
    config = ShardConfig(block_rows=100, shard_bytes=10_000, compression="zstd")
    write_table_shards(numbers(), str(uri), config=config)
    doomed = start(uri, cache, 0, 1, pause=0.2)
    assert "step" in doomed.stderr.readline()
    ranks = [start(uri, cache, rank, 2) for rank in range(2)]
    assert "step" in ranks[0].stderr.readline()
    os.kill(doomed.pid, signal.SIGKILL)
    doomed.communicate()
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    parts = [json.loads(out) for out, _ in outputs]
    small = LoaderConfig(pool_bytes=10_000, chunk_bytes=2_000, prefetch_bytes=4_000, cache_dir=str(tmp_path / "other"))
    alone = ShardedDataset(uri, config=small).loader(batch_size=64, world=World())
    assert [left + right for left, right in zip(*parts, strict=True)] == [batch["id"].tolist() for batch in alone]
    kept = list(cache.rglob("*.block"))
    assert kept
    assert sum(path.stat().st_size for path in kept) <= 60_000


def test_a_set_on_s3_gives_the_batches_of_a_local_one(s3_root, tmp_path):
    config = ShardConfig(block_rows=250, shard_bytes=10_000)
    write_table_shards(numbers(), s3_root, config=config)
    write_table_shards(numbers(), str(tmp_path / "s"), config=config)
    settings = LoaderConfig(cache_dir=str(tmp_path / "cache"), pool_bytes=10_000)
    remote = ShardedDataset(s3_root, config=settings).loader(batch_size=96, seed=4)
    local = ShardedDataset(tmp_path / "s", config=settings).loader(batch_size=96, seed=4)
    rows = [batch["id"].tolist() for batch in remote]
    assert rows == [batch["id"].tolist() for batch in local]
    assert sorted(itertools.chain(*rows)) == list(range(ROWS))
