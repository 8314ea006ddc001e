"""Rows at random over the whole set: nothing lost, the same for any partitions, as good as a uniform shuffle."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shard_blocks import tensor_arrays

from sparkdl.batches.order.quality import content_excess
from sparkdl.columns.convert import Converter
from sparkdl.columns.layout import Layout, plan_tensors
from sparkdl.config import ShardConfig
from sparkdl.errors import StorageError
from sparkdl.shards import spread as spread_module
from sparkdl.shards.files import PartWriter, write_table_shards
from sparkdl.shards.manifest import Manifest
from sparkdl.shards.spread import row_keys, spread
from sparkdl.shards.transaction import PartReport, Transaction
from sparkdl.storage import Storage


def in_process(task, count):
    return [task(number) for number in range(count)]


def written(root, parts, config, layout=None, labels=()):
    """A set whose tasks got ``parts``, tables of one schema."""
    layout = layout or Layout()
    tensors = plan_tensors(parts[0].schema, labels=labels, layout=layout)
    arguments = {"layout": layout, "source": None, "config": config, "key": "", "overwrite": False}
    with Transaction(str(root), **arguments) as transaction:
        reports = []
        for partition, part in enumerate(parts):
            writer = PartWriter(transaction.root, tensors, config, partition=partition, tag=transaction.tag)
            for batch in part.to_batches():
                writer.write(batch)
            reports.append(PartReport.from_json(writer.finish().to_json()))
        (shards,) = spread([transaction.spreading(reports, tensors, [])], in_process)
        return transaction.commit(reports, tensors, [], shards)


def rows_of(manifest):
    """By tensor, the rows in the order of the files."""
    out = {spec.name: [] for spec in manifest.tensors}
    for shard in manifest.shards:
        with pa.memory_map(f"{manifest.uri}/{shard.path}") as source:
            for batch in pa.ipc.open_file(source).read_all().to_batches():
                for name, values in tensor_arrays(batch, manifest.tensors).items():
                    if isinstance(values, np.ndarray):
                        out[name].extend(values.tolist())
                    else:
                        ends = values.offsets
                        out[name].extend(values.values[a:b].tolist() for a, b in itertools.pairwise(ends))
    return out


def sorted_table(rows, *, distinct, seed=0):
    """Five features and a label that depends on them, sorted by the label and then by the features."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, distinct, (rows, 5)) if distinct else rng.normal(size=(rows, 5))
    score = (x - x.mean(0)).sum(1) / x.std()
    y = rng.random(rows) < 1 / (1 + np.exp(-score))
    order = np.lexsort([*x.T, y])
    return pa.table({**{f"x{i}": x[order, i].astype("f4") for i in range(5)}, "y": y[order].astype("f4")})


@pytest.mark.parametrize(
    "distinct",
    [0, 2, pytest.param(4, marks=pytest.mark.slow)],
    ids=["all rows differ", "32 kinds of rows", "1,024 kinds of rows"],
)
@pytest.mark.parametrize("shard_bytes", [128 << 20, 100_000], ids=["one bucket", "many buckets"])
def test_a_sorted_table_is_as_random_as_a_uniform_shuffle(tmp_path, distinct, shard_bytes):
    rows = 60_000
    table = sorted_table(rows, distinct=distinct)
    manifest = write_table_shards(table, tmp_path, labels=["y"], config=ShardConfig(shard_bytes=shard_bytes))
    assert manifest.rows == rows
    assert (len(manifest.shards) > 8) == (shard_bytes < 1 << 20)
    got = rows_of(manifest)
    x, y = np.array(got["features"]), np.array(got["y"])
    given = sorted(zip(*table.to_pydict().values(), strict=True))
    assert sorted((*row, label) for row, label in zip(x.tolist(), y.tolist(), strict=True)) == given
    content = np.column_stack([x, y, x * y[:, None]])  # a label given features, not the label alone
    for span in (256, rows // 16):
        assert content_excess(content, span) < 3  # eleven columns: the largest of as many chi-squares
    plain = np.column_stack([table[name] for name in table.column_names])
    assert content_excess(plain, 256) > 200


ANY_PARTITIONS = given(
    cuts=st.lists(st.integers(0, 3000), max_size=6),
    distinct=st.sampled_from([0, 2, 4]),
    shard_bytes=st.sampled_from([2_000, 20_000, 1 << 20]),
    seed=st.integers(0, 2**40),
    shuffled=st.booleans(),
)


@ANY_PARTITIONS
@example(cuts=[3], distinct=2, shard_bytes=20_000, seed=0, shuffled=False)  # runs without a row of some bucket
@example(cuts=[7, 900], distinct=0, shard_bytes=2_000, seed=1 << 39, shuffled=True)
@settings(max_examples=6, deadline=None)
def test_the_same_rows_and_seed_give_the_same_shards_in_any_partitions(
    tmp_path_factory, cuts, distinct, shard_bytes, seed, shuffled
):
    check_any_partitions(tmp_path_factory, cuts, distinct, shard_bytes, seed, shuffled)


@pytest.mark.slow
@ANY_PARTITIONS
@settings(max_examples=50, deadline=None)
def test_the_same_rows_and_seed_give_the_same_shards_in_very_many_partitions(
    tmp_path_factory, cuts, distinct, shard_bytes, seed, shuffled
):
    check_any_partitions(tmp_path_factory, cuts, distinct, shard_bytes, seed, shuffled)


def check_any_partitions(tmp_path_factory, cuts, distinct, shard_bytes, seed, shuffled):
    table = sorted_table(3000, distinct=distinct)
    ragged = pa.array([[float(i % 3)] * (i % 4) for i in range(3000)], pa.list_(pa.float32()))
    table = table.append_column("r", ragged)
    table = table.append_column("b", pa.array([b"x" * (i % 3) for i in range(3000)]))
    config = ShardConfig(block_rows=100, shard_bytes=shard_bytes, seed=seed)
    whole = written(tmp_path_factory.mktemp("whole"), [table], config, labels=["y"])
    if shuffled:
        table = table.take(np.random.default_rng(1).permutation(3000))
    ends = sorted({0, 3000, *cuts})
    parts = [table.slice(a, b - a) for a, b in itertools.pairwise(ends)]
    cut = written(tmp_path_factory.mktemp("cut"), [*parts, table.slice(0, 0)], config, labels=["y"])
    assert cut.content_hash == whole.content_hash
    assert [shard.rows for shard in cut.shards] == [shard.rows for shard in whole.shards]
    assert sorted(map(repr, zip(*rows_of(cut).values(), strict=True))) == sorted(
        map(repr, zip(*rows_of(whole).values(), strict=True))
    )


def test_a_set_of_one_kind_of_row_is_dealt_evenly(tmp_path):
    table = pa.table({"x": np.ones(50_000, "f4")})
    manifest = write_table_shards(table, tmp_path, config=ShardConfig(shard_bytes=20_000, block_rows=100))
    assert manifest.rows == 50_000
    sizes = [shard.rows for shard in manifest.shards]
    assert len(sizes) == 16
    assert max(sizes) - min(sizes) <= 1
    assert [path.name for path in (tmp_path / "shards").iterdir() if path.name.startswith(("run", "common"))] == []


def test_nan_negative_zero_and_rows_that_share_a_key_stay_what_they_are(tmp_path, monkeypatch):
    numbers = np.array([0.0, -0.0, np.nan, 1.0] * 500)
    table = pa.table({"x": numbers, "r": pa.array([[v, v] for v in numbers], pa.list_(pa.float64()))})
    for name in ("keys", "one key"):
        if name == "one key":  # keys decide where a row goes, never what it is
            monkeypatch.setattr(spread_module, "row_keys", lambda rows, count, seed: np.zeros(count, np.uint64))
        manifest = write_table_shards(
            table, tmp_path / name, layout=Layout(shapes={"r": "ragged"}), config=ShardConfig(shard_bytes=4_000)
        )
        got = rows_of(manifest)
        for values in (got["x"], [row[0] for row in got["r"]], [row[1] for row in got["r"]]):
            assert [np.isnan(values).sum(), np.signbit(values).sum(), (np.array(values) == 0).sum()] == [500, 500, 1000]


def test_keys_differ_where_any_bit_does():
    rng = np.random.default_rng(0)
    columns = {
        "a": rng.integers(0, 3, 20_000).astype("f8"),
        "b": rng.integers(0, 1 << 12, 20_000) / 64,
        "c": rng.integers(0, 2, 20_000).astype("i1"),
        "r": pa.array([list(range(i % 5)) for i in range(20_000)], pa.list_(pa.int64())),
        "s": [b"ab"[: i % 3] for i in range(20_000)],
    }
    batch = pa.table(columns).combine_chunks().to_batches()[0]
    tensors = plan_tensors(batch.schema, layout=Layout(shapes={"r": "ragged"}))
    rows = Converter(tensors).convert(batch)
    keys = row_keys(rows, 20_000, 7)
    distinct = {tuple(map(repr, row)) for row in zip(*batch.to_pydict().values(), strict=True)}
    assert len(np.unique(keys)) == len(distinct)
    assert (row_keys(rows, 20_000, 8) != keys).all()
    assert np.histogram(keys >> np.uint64(60), bins=16)[0].min() > 0  # the high bits choose the bucket


def test_a_stage_that_fails_leaves_nothing(tmp_path):
    config = ShardConfig(shard_bytes=2_000)
    tensors = plan_tensors(sorted_table(10, distinct=0).schema)

    def failing(task, count):
        task(0)
        raise StorageError("the disk is full")

    arguments = {"layout": Layout(), "source": None, "config": config, "key": "", "overwrite": False}
    with pytest.raises(StorageError, match="disk is full"), Transaction(str(tmp_path), **arguments) as transaction:  # noqa: PT012
        writer = PartWriter(transaction.root, tensors, config, tag=transaction.tag)
        for batch in sorted_table(1000, distinct=0).to_batches():
            writer.write(batch)
        spread([transaction.spreading([writer.finish()], tensors, [])], failing)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_runs_on_another_machines_disk_are_named_before_anyone_reads_them(tmp_path):
    config = ShardConfig()
    tensors = plan_tensors(sorted_table(10, distinct=0).schema)
    arguments = {"layout": Layout(), "source": None, "config": config, "key": "", "overwrite": False}
    with Transaction(str(tmp_path / "driver"), **arguments) as transaction:
        elsewhere = PartWriter(Storage.of(tmp_path / "executor"), tensors, config, tag=transaction.tag)
        elsewhere.write(sorted_table(10, distinct=0).to_batches()[0])
        with pytest.raises(StorageError, match=r"what executors wrote to .*/driver is not there on the driver"):
            transaction.spreading([elsewhere.finish()], tensors, [])


def test_a_set_on_an_object_store_is_spread_like_one_on_disk(tmp_path):
    table = sorted_table(4000, distinct=2)
    config = ShardConfig(shard_bytes=8_000, block_rows=200)
    local = write_table_shards(table, tmp_path, labels=["y"], config=config)
    remote = write_table_shards(table, "memory://spread-test/set", labels=["y"], config=config)
    assert remote.content_hash == local.content_hash
    assert Manifest.load("memory://spread-test/set") == remote


def test_a_list_has_one_key_whether_its_neighbours_are_as_long_or_not():
    even = pa.array([[float(i), 2.0, -0.0] for i in range(100)], pa.list_(pa.float32()))
    mixed_lengths = pa.concat_arrays([even, pa.array([[], [1.0]], even.type)])
    assert row_keys({"r": even}, 100, 3).tolist() == row_keys({"r": mixed_lengths}, 102, 3)[:100].tolist()
    assert row_keys({"r": even.slice(40, 7)}, 7, 3).tolist() == row_keys({"r": even}, 100, 3)[40:47].tolist()
