"""Sets whose writer means harm, hashes recomputed: typed errors or batches, never a crash, never unbounded memory.

Each run reads many mutated sets in a process of its own, since what is looked for ends a process.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

READ_MUTATED = """
    import json, random, resource, sys
    from pathlib import Path

    import numpy as np, pyarrow as pa
    from sparkdl.batches.reading.loader import ShardedDataset
    from sparkdl.columns.layout import Layout
    from sparkdl.config import LoaderConfig, ShardConfig
    from sparkdl.errors import SparkdlError
    from sparkdl.shards.files import write_table_shards
    from sparkdl.storage import xxh3_hex

    folder, count, options = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    n = np.arange(120)
    table = pa.table({"id": n, "a": n * 0.5, "b": n * 2.0, "tokens": [list(range(k % 7)) for k in n],
                      "raw": [b"x" * (k % 5) for k in n], "even": [[k, k] for k in n]})
    config = ShardConfig(block_rows=32, shard_bytes=4000, **options)
    manifest = write_table_shards(table, folder / "set", labels=["id"], layout=Layout(shapes={"tokens": "ragged"}),
                                  config=config)
    text = (folder / "set/manifest.json").read_text()
    good = {shard.path: (folder / "set" / shard.path).read_bytes() for shard in manifest.shards}
    HUGE = [-1, 0, 1, 3, 7, 63, 4097, 2**20, 2**30, 2**31, 2**40, 2**61, 2**62]

    def leaves(value, way=()):
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            yield from leaves(item, (*way, key))
        if way:
            yield way

    def mutate_manifest(draw, body):
        ways = [way for way in leaves(body) if way[0] in ("shards", "tensors", "rows", "bytes", "statistics")]
        for _ in range(draw.choice([1, 1, 2])):
            *parents, last = draw.choice(ways)
            part = body
            try:
                for step in parents:
                    part = part[step]
                old = part[last]
                if isinstance(old, int) and not isinstance(old, bool):
                    part[last] = draw.choice([*HUGE, old + 1, old - 8, old + 64, -old])
                elif isinstance(old, float):
                    part[last] = draw.choice([1e308, -1.0, 0.0])
                elif isinstance(old, list) and old:
                    part[last] = draw.choice([old[1:], old * 2, old[::-1]])
            except (KeyError, IndexError, TypeError):
                pass
        if well_formed(body) and draw.random() < 0.7:  # sums that fit, so that what is behind them is reached
            for shard in body["shards"]:
                shard["rows"] = sum(shard["blocks"][0])
            body["rows"] = sum(shard["rows"] for shard in body["shards"])
            body["bytes"] = sum(shard["bytes"] for shard in body["shards"])

    def well_formed(body):
        counts = [n for shard in body["shards"] for n in [shard["bytes"], *shard["blocks"][0]]]
        return all(type(n) is int for n in counts)

    def mutate_bytes(draw, body):
        shard = draw.choice(body["shards"])
        number = draw.randrange(len(shard["blocks"][0]))
        offset, size = shard["blocks"][2][number], shard["blocks"][1][number]
        data = bytearray(good[shard["path"]])
        for _ in range(draw.choice([1, 2, 8])):
            at = offset + draw.randrange(size if draw.random() < 0.4 else min(size, 700))
            if draw.random() < 0.5:
                data[at] = draw.randrange(256)
            else:
                word = draw.choice([-1, 2**31 - 1, -(2**31), 65536])
                data[at & ~3 : (at & ~3) + 4] = word.to_bytes(4, "little", signed=True)
        data = bytes(data[: len(good[shard["path"]])])
        (folder / "set" / shard["path"]).write_bytes(data)
        shard["blocks"][3][number] = xxh3_hex(data[offset : offset + size])

    seen = {"read": 0, "refused": 0}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in range(count):
        draw = random.Random(case)
        body = json.loads(text)["manifest"]
        for path, data in good.items():
            (folder / "set" / path).write_bytes(data)
        if draw.random() < 0.5:
            mutate_bytes(draw, body)
        else:
            mutate_manifest(draw, body)
        sealed = json.dumps(body, separators=(",", ":"))
        head = json.dumps({"sparkdl_shards": 1, "hash": xxh3_hex(sealed.encode())})[:-1]
        (folder / "set/manifest.json").write_text(head + ',"manifest":' + sealed + "}")
        print(case, flush=True, file=sys.stderr)
        try:
            loading = LoaderConfig(pool_bytes=20_000, chunk_bytes=2_000, threads=1, cache_dir=str(folder / "cache"))
            loader = ShardedDataset(folder / "set", config=loading).loader(batch_size=30)
            for _, batch in zip(range(40), loader):
                sum(float(tensor.double().sum()) for tensor in batch.values())
            seen["read"] += 1
        except SparkdlError:
            seen["refused"] += 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 600 << 10, f"{grown >> 10} MiB more than before"
    print(json.dumps(seen))
"""


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ("{}", 80),
        pytest.param("{}", 3000, marks=pytest.mark.slow),
        pytest.param('{"compression": "zstd"}', 1000, marks=pytest.mark.slow),
        pytest.param('{"format": "parquet"}', 1000, marks=pytest.mark.slow),
    ],
)
def test_mutated_sets_give_typed_errors_and_never_a_crash(tmp_path, options, count):
    command = [sys.executable, "-c", textwrap.dedent(READ_MUTATED), str(tmp_path), str(count), options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    assert '"refused": 0' not in done.stdout
