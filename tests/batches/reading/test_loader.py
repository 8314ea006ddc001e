"""The loader over real shard sets: every tensor whole, the same global batches on any number of ranks, exact resume."""

from __future__ import annotations

import gc
import itertools
import json
import pickle
import subprocess
import sys
import threading
import weakref

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkdl.batches.reading.batch import Batch
from sparkdl.batches.reading.loader import ShardedDataset
from sparkdl.columns.layout import Layout
from sparkdl.config import LoaderConfig, ShardConfig
from sparkdl.errors import ConfigError, DataError, IntegrityError, SchemaError, StorageError
from sparkdl.shards.files import write_table_shards
from sparkdl.world import World

ROWS = 1000


def table(rows=ROWS):
    """A table of every kind of tensor, whose values all follow from the row number in ``id``."""
    n = np.arange(rows)
    lengths = n % 7
    edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = np.repeat(n, lengths) * 10 + np.concatenate([np.arange(k) for k in lengths] or [[]])
    return pa.table(
        {
            "id": pa.array(n, pa.int64()),
            "a": pa.array(n * 0.5, pa.float32()),
            "b": pa.array(n * 2.0, pa.float32()),
            "flag": pa.array(n % 2 == 0),
            "half": pa.array((n % 100).astype(np.float16)),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(n, 3).astype(np.float64)), 3),
            "tokens": pa.ListArray.from_arrays(edges, pa.array(tokens.astype(np.int32))),
            "raw": pa.array([b"x" * int(k % 5) + str(k).encode() for k in n], pa.binary()),
            "maybe": pa.array([None if k % 3 == 0 else float(k) for k in n], pa.float64()),
        }
    )


def write(uri, rows=ROWS, **options):
    config = ShardConfig(**{"block_rows": 64, "shard_bytes": 20_000, "spread_rows": False, **options.pop("config", {})})
    layout = Layout(pack={"features": ["a", "b"]}, nulls={"maybe": "mask"}, shapes={"tokens": "ragged"})
    return write_table_shards(table(rows), str(uri), labels=["id"], layout=layout, config=config, **options)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    uri = tmp_path_factory.mktemp("set") / "s"
    write(uri)
    return uri


SMALL = {"pool_bytes": 40_000, "chunk_bytes": 4_000, "prefetch_bytes": 16_000, "threads": 2}


def dataset(uri, tensors=None, **config):
    return ShardedDataset(uri, tensors=tensors, config=LoaderConfig(**{**SMALL, **config}))


def ids(loader):
    return [batch["id"].tolist() for batch in loader]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    yield

    def left():
        return [each for each in threading.enumerate() if each not in before and each.name.startswith("sparkdl")]

    if left():  # of a reader that nobody holds any more; to look at all there is takes half a second
        gc.collect()
    assert not left()


@pytest.mark.parametrize("pool", [1, 40_000, 10**7])
@pytest.mark.parametrize("batch_size", [1, 7, 64, 1000, 3000])
def test_every_tensor_of_every_row_arrives_whole(shards, pool, batch_size):
    seen = []
    for batch in dataset(shards, pool_bytes=pool).loader(batch_size=batch_size):
        n = batch["id"]
        seen += n.tolist()
        assert batch["id"].dtype == torch.int64
        assert torch.equal(batch["features"], torch.stack([n * 0.5, n * 2.0], 1).float())
        assert torch.equal(batch["flag"], n % 2 == 0)
        assert torch.equal(batch["half"], (n % 100).half())
        assert torch.equal(batch["vector"], n[:, None].expand(-1, 3).double())
        assert torch.equal(batch["maybe__mask"], n % 3 != 0)
        assert torch.equal(batch["maybe"], torch.where(n % 3 != 0, n, 0).double())
        valid = batch["tokens__valid"]
        assert torch.equal(valid.sum(1), n % 7)
        assert torch.equal(batch["tokens"], torch.where(valid, n[:, None] * 10 + torch.arange(valid.shape[1]), 0))
        for k, raw, kept in zip(n.tolist(), batch["raw"], batch["raw__valid"], strict=True):
            assert bytes(raw[kept].tolist()) == b"x" * (k % 5) + str(k).encode()
        assert batch.rows == len(n)
        assert list(batch) == [*batch.keys()]
    assert sorted(seen) == list(range(ROWS))


def test_without_shuffle_rows_come_in_file_order(shards):
    data = dataset(shards, tensors=["id"])
    first = [batch["id"].clone() for batch in data.loader(batch_size=48, shuffle=False)]
    again = torch.cat([batch["id"] for batch in data.loader(batch_size=13, shuffle=False)])
    assert torch.equal(torch.cat(first), again)
    blocks = again.split([int(rows) for rows in data.geometry.block_rows])
    assert [int(block.min()) for block in blocks] == sorted(int(block.min()) for block in blocks)


@given(
    world_size=st.integers(1, 9),
    batch=st.integers(1, 150),
    tail=st.sampled_from(("exact", "drop", "pad")),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 3),
    pool=st.sampled_from((300, 5_000, 40_000)),
    lanes=st.sampled_from((None, 1, 3, 8)),
)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ranks_together_train_on_the_batches_of_one(shards, world_size, batch, tail, seed, epoch, pool, lanes):
    data = dataset(shards, tensors=["id"], pool_bytes=pool, lanes=lanes)
    how = {"global_batch_size": batch, "tail": tail, "seed": seed}
    loaders = [data.loader(world=World(rank=rank, size=world_size), **how) for rank in range(world_size)]
    alone = data.loader(**how)
    for loader in (alone, *loaders):
        loader.set_epoch(epoch)
    assert {len(loader) for loader in loaders} == {len(alone)}
    rows = 0
    for parts in zip(alone, *loaders, strict=True):
        whole, ranks = parts[0], parts[1:]
        assert torch.equal(torch.cat([part["id"] for part in ranks]), whole["id"])
        assert {(part.step, part.epoch, part.global_rows) for part in ranks} == {(whole.step, epoch, whole.rows)}
        assert sum(part.weight for part in ranks) == pytest.approx(world_size)
        mean = sum(part["id"].double().mean() * part.weight for part in ranks if part.rows) / world_size
        assert float(mean) == pytest.approx(float(whole["id"].double().mean()))
        rows += whole.rows
    assert rows == {"exact": ROWS, "drop": ROWS // batch * batch, "pad": len(alone) * batch}[tail]


@pytest.mark.parametrize("tail", ["exact", "drop", "pad"])
def test_every_step_can_be_resumed_on_another_world_size(shards, tail):
    data = dataset(shards, tensors=["id"])
    alone = data.loader(batch_size=90, tail=tail, seed=5)
    order = ids(alone) + ids(alone)
    steps = len(alone)
    for stop in range(1, 2 * steps):
        writer = data.loader(batch_size=90, tail=tail, seed=5)
        stream = itertools.chain(writer, writer)
        for _ in range(stop):
            next(stream)
        state = json.loads(json.dumps(writer.state_dict()))
        assert len(json.dumps(state)) < 130
        assert (state["epoch"], state["step"]) == divmod(stop, steps)
        size = stop % 4 + 1
        readers = [
            data.loader(batch_size=7, tail=tail, seed=5, world=World(rank=rank, size=size)) for rank in range(size)
        ]
        for reader in readers:
            reader.load_state_dict(state)
            assert reader.global_batch_rows == 90
            assert reader.state_dict() == state
        rest = [ids(reader) + (ids(reader) if stop < steps else []) for reader in readers]
        assert [list(itertools.chain(*parts)) for parts in zip(*rest, strict=True)] == order[stop:]


def test_a_state_counts_batches_handed_out_not_those_gathered_ahead(shards):
    loader = dataset(shards, tensors=["id"]).loader(batch_size=10)
    stream = iter(loader)
    for k in range(5):
        next(stream)
        assert loader.state_dict()["step"] == k + 1
    stream.close()


def test_breaking_off_starts_the_epoch_over_and_set_epoch_keeps_a_loaded_step(shards):
    data = dataset(shards, tensors=["id"])
    whole = ids(data.loader(batch_size=100))
    loader = data.loader(batch_size=100)
    for _ in loader:
        break
    assert ids(loader) == whole
    for _ in loader:
        break
    state = loader.state_dict()
    other = data.loader(batch_size=100)
    other.load_state_dict(state)
    other.set_epoch(state["epoch"])
    assert len(ids(other)) == len(loader) - 1
    other.load_state_dict(state)
    other.set_epoch(0)
    assert ids(other) == whole


def test_epochs_follow_each_other_in_orders_of_their_own(shards):
    loader = dataset(shards, tensors=["id"]).loader(batch_size=100, tail="drop")
    epochs = [ids(loader) for _ in range(3)]
    assert loader.epoch == 3
    loader.set_epoch(1)
    assert ids(loader) == epochs[1]
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed 0, this loader 1"),
        ({"tail": "drop"}, "order"),
        ({"shuffle": False}, "order"),
        ({"version": 9}, "version"),
        ({"global_batch_size": 99}, "global_batch_size=10"),
    ],
)
def test_a_state_of_another_order_is_refused(shards, change, message):
    data = dataset(shards)
    state = data.loader(batch_size=10).state_dict()
    state["version"] = change.pop("version", state["version"])
    how = change if "global_batch_size" in change else {"batch_size": 10, **change}
    with pytest.raises(ConfigError, match=message):
        data.loader(**how).load_state_dict(state)


def test_a_kept_batch_is_never_overwritten(shards):
    kept, copies = [], []
    loader = dataset(shards).loader(batch_size=16)
    for batch in itertools.chain(loader, loader):
        kept.append({name: tensor[1:2] if len(tensor) > 1 else tensor for name, tensor in batch.items()})
        copies.append({name: tensor.clone() for name, tensor in kept[-1].items()})
    for left, right in zip(kept, copies, strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_buffers_go_round_when_nobody_looks_at_them(shards):
    loader = dataset(shards, tensors=["vector"]).loader(batch_size=50)
    places = {batch["vector"].untyped_storage().data_ptr() for batch in itertools.chain(loader, loader, loader)}
    assert len(places) < 3 * len(loader) / 2


def test_an_abandoned_iterator_ends_its_threads(shards):
    loader = dataset(shards).loader(batch_size=16)
    stream = iter(loader)
    next(stream)
    assert any(thread.name.startswith("sparkdl-gather") for thread in threading.enumerate())
    gone = weakref.ref(stream)
    del stream
    gc.collect()
    assert gone() is None
    assert not any(thread.name.startswith("sparkdl-gather") for thread in threading.enumerate())


def test_torch_keeps_its_threads(shards):
    before = torch.get_num_threads()
    ids(dataset(shards).loader(batch_size=100))
    assert torch.get_num_threads() == before
    inside = []
    thread = threading.Thread(target=lambda: inside.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert inside == [before]


def test_ragged_rows_as_nested_tensors(shards):
    for batch in dataset(shards, tensors=["id", "tokens"], ragged="jagged").loader(batch_size=40):
        assert batch["tokens"].is_nested
        for n, row in zip(batch["id"].tolist(), batch["tokens"].unbind(), strict=True):
            assert row.tolist() == [n * 10 + k for k in range(n % 7)]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("ragged", ["padded", "jagged"])
def test_bools_and_unsigned_numbers_arrive_as_such(tmp_path, dtype, ragged):
    least, most = (False, True) if dtype == "bool" else (0, 2 ** int(dtype[4:]) - 1)
    kind = pa.bool_() if dtype == "bool" else pa.type_for_alias(dtype)
    scalars, lists = [most, least, most], [[most], [most, least], []]
    columns = {"x": pa.array(scalars, kind), "rows": pa.array(lists, pa.list_(kind))}
    write_table_shards(pa.table(columns), str(tmp_path), config=ShardConfig(spread_rows=False))
    (batch,) = dataset(tmp_path, ragged=ragged).loader(batch_size=3, shuffle=False)
    assert batch["x"].dtype == batch["rows"].dtype == getattr(torch, dtype)
    assert batch["x"].tolist() == scalars
    rows = [row.tolist() for row in batch["rows"]]
    assert [row[: len(values)] for row, values in zip(rows, lists, strict=True)] == lists


def test_ragged_rows_cut_and_padded_by_choice(shards):
    for batch in dataset(shards, tensors=["id", "tokens"], max_length=3, pad_value=-1).loader(batch_size=40):
        for n, row in zip(batch["id"].tolist(), batch["tokens"].tolist(), strict=True):
            want = [n * 10 + k for k in range(min(3, n % 7))]
            assert row == want + [-1] * (len(row) - len(want))
            assert len(row) <= 3


@pytest.mark.parametrize(
    ("kind", "value"), [("int64", 1.5), ("int64", float("nan")), ("int16", 1 << 20), ("bool", -1), ("binary", -1)]
)
def test_padding_that_a_tensor_cannot_hold_is_refused(tmp_path, kind, value):
    """Torch would make 1 of 1.5, and 255 of -1 in a byte."""
    one = True if kind == "bool" else 1
    rows = [b"ab", b"c"] if kind == "binary" else [[one, one], [one]]
    column = pa.array(rows, pa.binary() if kind == "binary" else pa.list_(pa.type_for_alias(kind)))
    write_table_shards(pa.table({"t": column}), str(tmp_path / "s"))
    with pytest.raises(ConfigError, match=rf"^pad_value={value} cannot stand in tensor 't' of {kind}"):
        dataset(tmp_path / "s", pad_value=value).loader(batch_size=2)
    decode = {"decode": {"t": len}} if kind == "binary" else {}
    config = {"pad_value": value} if decode else {"pad_value": value, "ragged": "jagged"}
    (batch,) = dataset(tmp_path / "s", **config).loader(batch_size=2, **decode)  # of which nothing is padded
    assert len(batch["t"]) == 2


def test_one_long_row_among_short_ones(tmp_path):
    rows = [[k] * (3000 if k == 17 else 2) for k in range(200)]
    uri = str(tmp_path / "s")
    write_table_shards(pa.table({"t": pa.array(rows, pa.list_(pa.int64()))}), uri, config=ShardConfig(block_rows=50))
    seen = {}
    for batch in ShardedDataset(uri).loader(batch_size=64):
        for row, valid in zip(batch["t"], batch["t__valid"], strict=True):
            assert not row[~valid].any()
            seen[int(row[0])] = row[valid].tolist()
    assert seen == dict(enumerate(rows))


def test_decode_runs_in_threads_and_stacks(shards):
    threads = set()

    def decode(data):
        threads.add(threading.current_thread().name)
        return np.full((2, 2), int(bytes(data).lstrip(b"x") or b"0"), np.int64)

    data = dataset(shards, tensors=["id", "raw"], decode_threads=2)
    for batch in data.loader(batch_size=64, decode={"raw": decode}):
        assert torch.equal(batch["raw"], batch["id"][:, None, None].expand(-1, 2, 2))
    assert all(name.startswith("sparkdl-decode") for name in threads)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("id", (0, 999)), ("features", (0, 1998)), ("vector", (0, 999))]
    + [(name, None) for name in ("maybe", "tokens", "raw", "nothing")],
)
def test_extremes_of_a_tensor_are_told_only_where_they_are_those_of_every_value(shards, name, wanted):
    assert dataset(shards).loader(batch_size=10).bounds(name) == wanted


def test_what_decode_raises_reaches_the_consumer(shards):
    def decode(data):
        if bytes(data).endswith(b"77"):
            raise RuntimeError("not an image")
        return np.zeros(3)

    loader = dataset(shards).loader(batch_size=10, decode={"raw": decode})
    with pytest.raises(RuntimeError, match="not an image"):
        list(loader)


def test_decode_must_return_one_shape(shards):
    loader = dataset(shards).loader(batch_size=100, decode={"raw": lambda data: np.zeros(len(data))})
    with pytest.raises(DataError, match="one shape"):
        list(loader)


def test_decode_of_what_is_no_bytes_is_refused(shards):
    with pytest.raises(SchemaError, match="features"):
        dataset(shards).loader(batch_size=1, decode={"features": np.array})
    with pytest.raises(ConfigError, match="nosuch"):
        dataset(shards).loader(batch_size=1, decode={"nosuch": np.array})


@pytest.mark.parametrize("rows", [1, 63, 64, 65])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_few_rows_on_many_ranks(tmp_path, rows, size):
    write(tmp_path / "s", rows)
    data = dataset(tmp_path / "s")
    loaders = [data.loader(batch_size=4, world=World(rank=rank, size=size)) for rank in range(size)]
    seen = []
    for parts in zip(*loaders, strict=True):
        for part in parts:
            assert all(len(tensor) == part.rows for tensor in part.values())
            assert part["vector"].shape == (part.rows, 3)
            assert part["tokens"].shape[0] == part.rows
            assert part.weight == 0 if part.rows == 0 else part.weight > 0
            seen += part["id"].tolist()
    assert sorted(seen) == list(range(rows))


def test_no_rows_and_no_steps_are_errors(shards):
    with pytest.raises(DataError, match="4096 rows exceeds the 1000 rows"):
        dataset(shards).loader(batch_size=4096, tail="drop")


@pytest.mark.parametrize(
    "wrong", [{}, {"batch_size": 1, "global_batch_size": 2}, {"batch_size": 1, "tail": "x"}, {"batch_size": -3}]
)
def test_wrong_parameters_are_refused(shards, wrong):
    with pytest.raises(ConfigError):
        dataset(shards).loader(**wrong)


def test_unknown_tensors_and_sets_are_refused(shards, tmp_path):
    with pytest.raises(SchemaError, match="nosuch"):
        dataset(shards, tensors=["nosuch"])
    with pytest.raises(StorageError, match="no committed shard set"):
        ShardedDataset(tmp_path)


def test_the_order_does_not_depend_on_which_tensors_are_read(shards):
    few = ids(dataset(shards, tensors=["id"]).loader(batch_size=50))
    assert few == ids(dataset(shards).loader(batch_size=50))


@pytest.mark.parametrize("format_", [{"format": "parquet"}, {"compression": "zstd"}], ids=["parquet", "zstd"])
def test_other_formats_give_the_same_batches(shards, tmp_path, format_):
    write(tmp_path / "s", config=format_)
    data = dataset(tmp_path / "s", cache_dir=str(tmp_path / "cache"))
    for left, right in zip(dataset(shards).loader(batch_size=70), data.loader(batch_size=70), strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


def corrupt(uri, manifest, number):
    """Flip one bit in the middle of a block."""
    blocks = [(shard, block) for shard in manifest.shards for block in shard.blocks]
    shard, block = blocks[number]
    with (uri / shard.path).open("r+b") as file:
        file.seek(block.offset + block.bytes // 2)
        byte = file.read(1)[0]
        file.seek(block.offset + block.bytes // 2)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize(
    "format_", [{}, {"format": "parquet"}, {"compression": "zstd"}], ids=["ipc", "parquet", "zstd"]
)
def test_every_corrupted_block_is_found(tmp_path, format_):
    manifest = write(tmp_path / "s", 300, config={"block_rows": 40, **format_})
    count = sum(len(shard.blocks) for shard in manifest.shards)
    assert count == 8
    for number in range(count):
        corrupt(tmp_path / "s", manifest, number)
        with pytest.raises(IntegrityError, match="hash"):
            list(dataset(tmp_path / "s", cache_dir=str(tmp_path / f"cache{number}")).loader(batch_size=32))
        corrupt(tmp_path / "s", manifest, number)
    assert len(list(dataset(tmp_path / "s", cache_dir=str(tmp_path / "cache")).loader(batch_size=32))) == 10


def test_substitute_keeps_the_steps_and_is_the_same_on_every_rank(tmp_path, caplog):
    manifest = write(tmp_path / "s", 300, config={"block_rows": 40})
    whole = ids(dataset(tmp_path / "s").loader(batch_size=32))
    for number in (2, 3, 7):
        corrupt(tmp_path / "s", manifest, number)
    data = dataset(tmp_path / "s", on_damage="substitute")
    alone = ids(data.loader(batch_size=32))
    assert [len(batch) for batch in alone] == [len(batch) for batch in whole]
    lost = set(range(300)) - set(itertools.chain(*alone))
    assert len(lost) == 40 + 40 + 20
    changed = [old != new for a, b in zip(whole, alone, strict=True) for old, new in zip(a, b, strict=True)]
    assert sum(changed) == len(lost)
    assert data.blocks.damaged == {2: 4, 3: 4, 7: 0}
    assert "its rows are replaced by those of block 4" in caplog.text
    fresh = dataset(tmp_path / "s", on_damage="substitute")
    ranks = [ids(fresh.loader(global_batch_size=32, world=World(rank=rank, size=3))) for rank in range(3)]
    assert [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)] == alone


def test_a_set_with_no_whole_block_cannot_be_substituted(tmp_path):
    manifest = write(tmp_path / "s", 80, config={"block_rows": 40})
    corrupt(tmp_path / "s", manifest, 0)
    corrupt(tmp_path / "s", manifest, 1)
    with pytest.raises(IntegrityError):
        list(dataset(tmp_path / "s", on_damage="substitute").loader(batch_size=8))


def test_a_cut_or_missing_shard_is_an_error_not_a_crash(tmp_path):
    manifest = write(tmp_path / "s")
    path = tmp_path / "s" / manifest.shards[1].path
    data = path.read_bytes()
    path.write_bytes(data[:5000])
    with pytest.raises(IntegrityError, match="cut short"):
        list(dataset(tmp_path / "s").loader(batch_size=100))
    path.write_bytes(b"")
    with pytest.raises(IntegrityError, match="cut short"):
        list(dataset(tmp_path / "s").loader(batch_size=100))
    path.unlink()
    with pytest.raises(IntegrityError, match="gone"):
        list(dataset(tmp_path / "s").loader(batch_size=100))


def test_a_dataset_can_be_pickled(shards):
    data = dataset(shards, tensors=["id"])
    whole = ids(data.loader(batch_size=100))
    assert ids(pickle.loads(pickle.dumps(data)).loader(batch_size=100)) == whole


def test_a_batch_moves_as_one_thing():
    batch = Batch({"x": torch.ones(3)}, step=4, epoch=2, rows=3, global_rows=9, weight=0.5)
    moved = batch.to(torch.float64)
    assert moved["x"].dtype == torch.float64
    assert (moved.step, moved.epoch, moved.rows, moved.global_rows, moved.weight) == (4, 2, 3, 9, 0.5)
    assert pickle.loads(pickle.dumps(batch)).weight == 0.5


def test_explain_prints_what_an_epoch_will_be(shards, capsys):
    data = dataset(shards)
    told = data.explain(world_size=3, batch_size=64)
    printed = capsys.readouterr().out
    for word in ("steps", "rows per rank", "read per rank", "memory per rank", "shuffle", "neighbours"):
        assert word in printed
    loaders = [data.loader(batch_size=64, world=World(rank=rank, size=3)) for rank in range(3)]
    trained = [sum(batch.rows for batch in loader) for loader in loaders]
    assert told.steps == len(loaders[0])
    assert told.rows_per_rank == (min(trained), max(trained))
    assert told.last_step_rows == ROWS % 192
    assert 1 <= told.read_amplification <= 3
    warned = " ".join(data.explain(world_size=400, batch_size=2, tail="drop").warnings)
    assert "leaves out 200 rows" in warned
    assert "lanes for 400 ranks" in warned


def test_batches_run_without_spark(shards):
    program = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pyspark", "py4j"):
            raise ImportError(name)
sys.meta_path.insert(0, Block())
from sparkdl.batches.reading.loader import ShardedDataset
data = ShardedDataset({str(shards)!r})
data.explain(world_size=2, batch_size=100)
print(sum(batch.rows for batch in data.loader(batch_size=100)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(str(ROWS))
