"""Shard sets written without Spark: types, blocks, alignment, hashes, statistics, policies."""

import datetime
import decimal
import math
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_blocks import Ragged, tensor_arrays

from sparkdl.columns.layout import Layout
from sparkdl.config import ShardConfig
from sparkdl.errors import ConfigError, ConflictError, DataError, IntegrityError, SchemaError, StorageError
from sparkdl.shards.files import write_table_shards
from sparkdl.shards.manifest import Manifest, Source
from sparkdl.storage import xxh3_hex


def blocks(manifest, tmp_path=None):
    """Every block of a set as tensors, checked against its hash."""
    root = manifest.uri
    for shard in manifest.shards:
        path = f"{root}/{shard.path}"
        data = open(path, "rb").read()  # noqa: SIM115
        assert len(data) == shard.bytes
        assert shard.rows == sum(block.rows for block in shard.blocks)
        file = pa.ipc.open_file(pa.memory_map(path)) if manifest.format == "ipc" else pq.ParquetFile(path)
        for index, block in enumerate(shard.blocks):
            message = data[block.offset : block.offset + block.bytes]
            assert xxh3_hex(message) == block.hash
            if manifest.format == "ipc":
                batch = file.get_batch(index)
                assert pa.ipc.read_record_batch(pa.ipc.read_message(message), file.schema).equals(batch)
                body = pa.ipc.read_message(message).body.size
                assert (block.offset + block.bytes - body) % 64 == 0
            else:
                [batch] = file.read_row_group(index).combine_chunks().to_batches()
            assert batch.num_rows == block.rows
            yield tensor_arrays(batch, manifest.tensors)


def rows_of(manifest, order="id"):
    """Every tensor of the set as a list of rows (lists for ragged ones), sorted by ``order``."""
    out = {}
    for block in blocks(manifest):
        for name, values in block.items():
            if isinstance(values, Ragged):
                offsets = values.offsets
                listed = [values.values[offsets[i] : offsets[i + 1]] for i in range(len(offsets) - 1)]
                if manifest.tensor(name).dtype == "binary":
                    listed = [item.tobytes() for item in listed]
                else:
                    listed = [item.tolist() for item in listed]
            else:
                listed = values.tolist()
            out.setdefault(name, []).extend(listed)
    positions = sorted(range(len(out[order])), key=out[order].__getitem__)
    return {name: [values[i] for i in positions] for name, values in out.items()}


@pytest.mark.parametrize(
    ("format", "compression"), [("ipc", None), ("ipc", "zstd"), ("parquet", None), ("parquet", "zstd")]
)
def test_every_type_comes_back(tmp_path, format, compression):
    rows = 300
    rng = np.random.default_rng(1)
    day = datetime.date(2020, 1, 1)
    table = pa.table(
        {
            "id": np.arange(rows),
            "f1": rng.random(rows, dtype="f4"),
            "f2": rng.random(rows, dtype="f4"),
            "half": pa.array(rng.random(rows).astype("f2")),
            "flag": [bool(i % 3) for i in range(rows)],
            "byte": pa.array([i % 100 - 50 for i in range(rows)], pa.int8()),
            "money": pa.array([decimal.Decimal(i - 150) / 100 for i in range(rows)], pa.decimal128(18, 2)),
            "day": [day - datetime.timedelta(days=i) for i in range(rows)],
            "at": pa.array(
                [datetime.datetime(1969, 12, 31, 23, 59, 59, i) for i in range(rows)], pa.timestamp("us", "UTC")
            ),
            "zone": [f"z{i * 7 % 11}" for i in range(rows)],
            "image": [b"%d" % i * (i % 4) for i in range(rows)],
            "even": [[float(i), -1.0] for i in range(rows)],
            "tokens": [list(range(i % 5)) for i in range(rows)],
            "matrix": [[[i, 1, 2], [3, 4, 5]] for i in range(rows)],
        }
    )
    config = ShardConfig(block_rows=64, shard_bytes=20_000, format=format, compression=compression)
    manifest = write_table_shards(table, tmp_path, labels=["id"], config=config)
    assert Manifest.load(tmp_path) == manifest
    got = rows_of(manifest)
    specs = {s.name: (s.dtype, s.shape, s.ragged, s.logical, s.role) for s in manifest.tensors}
    assert specs == {
        "id": ("int64", (), False, "", "label"),
        "features": ("float32", (2,), False, "", "feature"),
        "half": ("float16", (), False, "", "feature"),
        "flag": ("bool", (), False, "", "feature"),
        "byte": ("int8", (), False, "", "feature"),
        "money": ("float64", (), False, "", "feature"),
        "day": ("int64", (), False, "date", "feature"),
        "at": ("int64", (), False, "timestamp", "feature"),
        "zone": ("int32", (), False, "string", "feature"),
        "image": ("binary", (), False, "", "feature"),
        "even": ("float64", (2,), False, "", "feature"),
        "tokens": ("int64", (), True, "", "feature"),
        "matrix": ("int64", (2, 3), False, "", "feature"),
    }
    assert got["features"] == np.stack([table["f1"], table["f2"]], 1).tolist()
    assert got["half"] == [float(x) for x in table["half"].to_pylist()]
    assert got["flag"] == [int(x) for x in table["flag"].to_pylist()]
    assert got["money"] == [(i - 150) / 100 for i in range(rows)]
    assert got["day"] == [(day - datetime.date(1970, 1, 1)).days - i for i in range(rows)]
    assert got["at"] == [i - 1_000_000 for i in range(rows)]
    zones = manifest.tensor("zone").dictionary
    assert list(zones) == sorted(zones)
    assert [zones[code] for code in got["zone"]] == table["zone"].to_pylist()
    for name in ("byte", "image", "even", "tokens", "matrix"):
        assert got[name] == table[name].to_pylist(), name


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any),
    block_rows=st.integers(1, 40),
    block_bytes=st.sampled_from([200, 1 << 20]),
    seed=st.integers(0, 9),
)
def test_rows_survive_any_batching_and_the_cuts_ignore_it(tmp_path_factory, lengths, block_rows, block_bytes, seed):
    rows = sum(lengths)
    table = pa.table(
        {
            "id": np.arange(rows),
            "r": pa.array([list(range(i % 4)) for i in range(rows)], pa.list_(pa.int64())),
            "b": [b"x" * (i % 9) for i in range(rows)],
        }
    )
    starts = np.cumsum([0, *lengths])
    cut = pa.Table.from_batches(
        [b for a, n in zip(starts, lengths, strict=False) for b in table.slice(a, n).to_batches()]
    )
    config = ShardConfig(block_rows=block_rows, block_bytes=block_bytes, shard_bytes=3000, seed=seed)
    one = write_table_shards(table, tmp_path_factory.mktemp("one"), config=config)
    two = write_table_shards(cut, tmp_path_factory.mktemp("two"), config=config)
    assert one.content_hash == two.content_hash
    assert max(b.rows for s in one.shards for b in s.blocks) <= block_rows
    got = rows_of(two)
    assert {name: got[name] for name in table.schema.names} == table.to_pydict()


def test_the_seed_decides_the_order(tmp_path):
    table = pa.table({"id": np.arange(1000), "x": np.arange(1000.0)})
    first = write_table_shards(table, tmp_path / "a", labels=["id"])
    again = write_table_shards(table, tmp_path / "b", labels=["id"])
    other = write_table_shards(table, tmp_path / "c", labels=["id"], config=ShardConfig(seed=1))
    assert first.content_hash == again.content_hash != other.content_hash
    assert first.spread
    assert [*in_order(first, "id")] != list(range(1000))


def test_rows_that_are_not_spread_keep_their_order(tmp_path):
    table = pa.table({"id": np.arange(1000), "x": np.arange(1000.0)})
    config = ShardConfig(block_rows=100, spread_rows=False)
    manifest = write_table_shards(table, tmp_path, labels=["id"], config=config)
    assert not manifest.spread
    assert in_order(manifest, "id") == list(range(1000))


def in_order(manifest, name):
    return [value for block in blocks(manifest) for value in block[name]]


def test_shards_come_out_near_the_target_size(tmp_path):
    table = pa.table({f"x{i}": np.random.rand(50_000) for i in range(4)})
    config = ShardConfig(shard_bytes=400_000, block_rows=500, spread_rows=False)
    manifest = write_table_shards(table, tmp_path, config=config)
    *full, _ = [shard.bytes for shard in manifest.shards]
    assert len(full) == 3
    assert all(400_000 <= size < 420_000 for size in full)


def test_statistics_equal_numpy(tmp_path):
    rng = np.random.default_rng(0)
    columns = {"a": rng.normal(1e9, 1, 5000), "b": rng.normal(size=5000), "i": rng.integers(-(2**62), 2**62, 5000)}
    columns["b"][:3] = [np.nan, np.inf, -np.inf]
    manifest = write_table_shards(pa.table(columns), tmp_path, config=ShardConfig(block_rows=100))
    for name, values in columns.items():
        stats, finite = manifest.statistics[name], values[np.isfinite(values)]
        assert (stats.min, stats.max, stats.count) == (finite.min(), finite.max(), finite.size)
        assert stats.mean == pytest.approx(finite.mean(), rel=1e-12)
        assert stats.variance == pytest.approx(finite.var(), rel=1e-9)
    b = manifest.statistics["b"]
    assert (b.nan_count, b.inf_count, b.null_count) == (1, 2, 0)
    assert isinstance(manifest.statistics["i"].max, int)


def test_a_set_of_the_least_and_the_greatest_number_can_be_read(tmp_path):
    most = np.finfo(np.float64).max
    parts = [pa.record_batch({"id": [n, n], "x": [x, x]}) for n, x in enumerate([most, -most])]
    manifest = write_table_shards(pa.Table.from_batches(parts), tmp_path, config=ShardConfig(spread_rows=False))
    assert rows_of(manifest)["x"] == [most, most, -most, -most]
    stats = manifest.statistics["x"]
    assert (stats.min, stats.max, stats.mean, stats.variance) == (-most, most, 0, np.inf)
    assert Manifest.load(tmp_path) == manifest


NULLS = {
    "id": [0, 1, 2],
    "a": [1.0, None, 3.0],
    "b": [None, None, 6.0],
    "s": ["u", None, "t"],
    "v": [[1], None, [2, 3]],
}


def test_nulls_are_refused_by_name_and_number(tmp_path):
    with pytest.raises(DataError, match=r"'a' has 1 nulls \(also b: 2, s: 1, v: 1\), allowed are 0"):
        write_table_shards(pa.table(NULLS), tmp_path)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == []


def test_nulls_are_filled_by_column(tmp_path):
    layout = Layout(nulls="fill", fill={"a": 9.0, "b": -1.0})
    got = rows_of(write_table_shards(pa.table(NULLS), tmp_path, labels=["id"], layout=layout))
    assert got["features"] == [[1, -1], [9, -1], [3, 6]]
    assert got["s"] == [1, 2, 0]  # t, u, and the code behind the last one
    assert got["v"] == [[1], [], [2, 3]]


def test_nulls_are_masked(tmp_path):
    manifest = write_table_shards(pa.table(NULLS), tmp_path, labels=["id"], layout=Layout(nulls="mask"))
    got = rows_of(manifest)
    assert got["features"] == [[1, 0], [0, 0], [3, 6]]
    assert got["features__mask"] == [[1, 0], [0, 0], [1, 1]]
    assert got["s__mask"] == got["v__mask"] == [1, 0, 1]
    assert manifest.tensor("v__mask").mask_of == "v"
    assert manifest.statistics["b"].null_count == 2


def test_nulls_inside_fixed_arrays(tmp_path):
    table = pa.table({"id": [0, 1, 2], "v": [[1.0, None], None, [3.0, 4.0]]})
    layout = Layout(nulls={"v": "mask"}, shapes={"v": (2,)}, fill=7)
    got = rows_of(write_table_shards(table, tmp_path, labels=["id"], layout=layout))
    assert got["v"] == [[1, 7], [7, 7], [3, 4]]
    assert got["v__mask"] == [[1, 0], [0, 0], [1, 1]]


@pytest.mark.parametrize("policy", ["fill", "mask"])
def test_a_column_of_all_nulls(tmp_path, policy):
    table = pa.table(
        {"id": [0, 1], "x": pa.array([None, None], pa.float32()), "v": pa.array([None, None], pa.list_(pa.int32()))}
    )
    layout = Layout(nulls=policy, shapes={"v": (3,)})
    manifest = write_table_shards(table, tmp_path, labels=["id"], layout=layout)
    got = rows_of(manifest)
    assert (got["x"], got["v"]) == ([0, 0], [[0, 0, 0]] * 2)
    assert manifest.statistics["x"].null_count == 2
    assert manifest.statistics["x"].mean is None


def test_packs_dtypes_and_shapes_are_the_users(tmp_path):
    table = pa.table({"id": [0, 1], "i": [3, 4], "x": [0.5, 1.5], "y": [True, False], "v": [[1, 2], [3, 4]]})
    layout = Layout(
        pack={"inputs": ["x", "i"], "x1": ["y"]}, dtypes={"inputs": "float32", "v": "float16"}, shapes={"v": "ragged"}
    )
    manifest = write_table_shards(table, tmp_path, labels=["id"], layout=layout)
    got = rows_of(manifest)
    assert got["inputs"] == [[0.5, 3], [1.5, 4]]
    assert got["x1"] == [[1], [0]]
    assert got["v"] == [[1, 2], [3, 4]]
    assert [(s.name, s.dtype, s.shape, s.ragged) for s in manifest.tensors] == [
        ("id", "int64", (), False),
        ("inputs", "float32", (2,), False),
        ("x1", "bool", (1,), False),
        ("v", "float16", (), True),
    ]


@pytest.mark.parametrize(
    ("values", "dtype", "message"),
    [
        ([300], "uint8", "'c' holds 300, which uint8 cannot hold"),
        ([-1], "uint64", "'c' holds -1, which uint64"),
        ([0.5], "int32", "'c' holds 0.5, which int32"),
        ([math.nan], "int32", "'c' holds nan, which int32"),
        ([2.0**63], "int64", "which int64 cannot hold"),
        ([1e39], "float32", "'c' holds 1e.39, which float32"),
        ([70000.0], "float16", "'c' holds 70000.0, which float16"),
        ([2], "bool", "'c' holds 2, which bool"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, values, dtype, message):
    with pytest.raises(DataError, match=message):
        write_table_shards(pa.table({"c": values}), tmp_path, layout=Layout(dtypes={"c": dtype}))


@pytest.mark.parametrize(
    ("table", "arguments", "message"),
    [
        ({"a": [1]}, {"columns": ["aa"]}, "'aa' is missing, the frame has a"),
        ({"a": [1]}, {"labels": ["y"]}, "'y' is missing"),
        ({"a": [{"k": 1}]}, {}, "'a' is struct<k: int64>, which no tensor can hold"),
        ({"a": pa.array([None])}, {}, "'a' is null"),
        ({"a": [["t"]]}, {}, "'a' is list<.*string>, no array of numbers"),
        ({"a": pa.array([1], pa.duration("s"))}, {}, "'a' is duration"),
        (
            {"a": [1], "b": [1.0]},
            {"layout": Layout(pack={"p": ["a", "b"]})},
            "'p' mixes int64 .*'a'.* and float64 .*'b'",
        ),
        ({"a": [1], "b": [1]}, {"layout": Layout(pack={"b": ["a"]})}, "two tensors would be called 'b'"),
        ({"a": [1]}, {"layout": Layout(nulls={"z": "fill"})}, "names column 'z', which is not written"),
        ({"a": [1]}, {"layout": Layout(shapes={"a": (2,)})}, "'a' is a scalar but has shape"),
        ({"a": [[1, 2]]}, {"layout": Layout(shapes={"a": (3,)})}, r"'a' has a row of shape \(2,\), expected \(3,\)"),
        ({"a": ["x"]}, {"layout": Layout(dtypes={"a": "int64"})}, "'a' holds a string, not int64"),
    ],
)
def test_schema_errors_name_the_column(tmp_path, table, arguments, message):
    with pytest.raises(SchemaError, match=message):
        write_table_shards(pa.table(table), tmp_path / "set", **arguments)
    assert not (tmp_path / "set" / "manifest.json").exists()


def test_rows_of_several_lengths_are_refused_where_a_tensor_needs_one(tmp_path):
    with pytest.raises(DataError, match="'a' has rows of 1 and of 2 elements"):
        write_table_shards(pa.table({"a": [[[1], [1, 2]]]}), tmp_path)


@pytest.mark.parametrize("kind", [pa.list_(pa.list_(pa.float32())), pa.list_(pa.float32(), 0)], ids=str)
@pytest.mark.parametrize("spread", [True, False], ids=["spread", "in order"])
def test_arrays_that_are_all_empty_are_refused_and_end_no_process(tmp_path, kind, spread):
    """Arrow divides by the length of a list of no elements, and the signal for that takes the whole process away."""
    table = pa.table({"a": pa.array([[], []], kind), "id": [1, 2]})
    with pytest.raises(DataError, match=r"^column 'a' has no number in any row of a batch"):
        write_table_shards(table, tmp_path, config=ShardConfig(spread_rows=spread))


def test_settings_are_checked_where_they_are_made():
    for make, message in (
        (lambda: ShardConfig(format="csv"), "format='csv'"),
        (lambda: ShardConfig(block_rows=0), "block_rows=0"),
        (lambda: ShardConfig(seed=-1), "seed=-1"),
        (lambda: Layout(nulls="drop"), "nulls='drop'"),
        (lambda: Layout(dtypes={"a": "float"}), "'float' is not one of"),
        (lambda: Layout(shapes={"a": (0,)}), "not positive lengths"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


def test_no_rows_is_an_error(tmp_path):
    with pytest.raises(DataError, match="0 rows to write"):
        write_table_shards(pa.table({"a": pa.array([], pa.int64())}), tmp_path)


def test_a_stream_is_written_batch_by_batch(tmp_path):
    table = pa.table({"id": np.arange(100), "s": ["a"] * 100})
    with pytest.raises(SchemaError, match="'s' is a string in a stream"):
        write_table_shards(table.to_reader(), tmp_path)
    manifest = write_table_shards(table.to_reader(7), tmp_path, layout=Layout(dictionaries={"s": ["b", "a"]}))
    assert set(rows_of(manifest)["s"]) == {1}


def test_a_dictionary_from_another_set_refuses_or_fills_what_it_does_not_hold(tmp_path):
    train = write_table_shards(pa.table({"id": [0, 1], "s": ["a", "c"]}), tmp_path / "t")
    table = pa.table({"id": [0, 1, 2], "s": ["c", "new", "a"]})
    with pytest.raises(DataError, match="'s' has 1 values that are none of the 2 of its dictionary"):
        write_table_shards(table, tmp_path / "v", layout=Layout(dictionaries=train.dictionaries))
    layout = Layout(dictionaries=train.dictionaries, nulls={"s": "fill"})
    assert rows_of(write_table_shards(table, tmp_path / "v", layout=layout))["s"] == [1, 2, 0]


def test_too_many_strings_for_a_dictionary(tmp_path):
    table = pa.table({"s": ["a", "b", "c"]})
    with pytest.raises(DataError, match="'s' has 3 or more strings, above max_dictionary_values=2"):
        write_table_shards(table, tmp_path, config=ShardConfig(max_dictionary_values=2))


TABLE = pa.table({"a": [1.0, 2.0], "b": [3.0, 4.0]})
SOURCE = Source(uri="/lake/t", version="3")


def test_a_second_write_of_the_same_thing_is_found(tmp_path):
    first = write_table_shards(TABLE, tmp_path, source=SOURCE)
    assert write_table_shards(TABLE, tmp_path, source=SOURCE) == first


@pytest.mark.parametrize(
    "change",
    [
        {"source": Source(uri="/lake/t", version="4")},
        {"source": Source(uri="/lake/u", version="3")},
        {"source": Source(uri="/lake/t", version="3", transformation="scaled")},
        {"source": Source(uri="/lake/t", version="3", table_id="made later")},
        {"source": None},
        {"columns": ["a"]},
        {"labels": ["b"]},
        {"layout": Layout(dtypes={"a": "float32"})},
        {"layout": Layout(nulls="mask")},
        {"layout": Layout(pack=None)},
        {"config": ShardConfig(seed=1)},
        {"config": ShardConfig(compression="zstd")},
    ],
)
def test_anything_else_is_never_taken_for_it(tmp_path, change):
    first = write_table_shards(TABLE, tmp_path, source=SOURCE)
    arguments = {"source": SOURCE, **change}
    with pytest.raises(ConflictError, match="holds another shard set of 2 rows: pass overwrite=True"):
        write_table_shards(TABLE, tmp_path, **arguments)
    second = write_table_shards(TABLE, tmp_path, overwrite=True, **arguments)
    assert second.content_key != first.content_key
    assert Manifest.load(tmp_path) == second


def test_a_found_set_that_lost_a_shard_is_written_again(tmp_path):
    first = write_table_shards(TABLE, tmp_path, source=SOURCE)
    (tmp_path / first.shards[0].path).unlink()
    second = write_table_shards(TABLE, tmp_path, source=SOURCE)
    assert second.content_hash == first.content_hash
    assert len(rows_of(second, order="features")["features"]) == 2


def test_an_altered_manifest_is_noticed(tmp_path):
    write_table_shards(TABLE, tmp_path)
    file = tmp_path / "manifest.json"
    text = file.read_text()
    for altered in (text.replace('"rows":2', '"rows":3', 1), text[:-20], "", "{}", text[::-1]):
        file.write_text(altered)
        with pytest.raises(IntegrityError, match="write the set again"):
            Manifest.load(tmp_path)
    with pytest.raises(StorageError, match="holds no committed shard set"):
        Manifest.load(tmp_path / "elsewhere")


def test_an_unwritable_target_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot .*file/set.*a file stands where a directory is needed"):
        write_table_shards(TABLE, tmp_path / "file" / "set")


def test_a_full_target_is_named_and_left_empty(tmp_path):
    script = """
        import resource, sys
        import numpy as np, pyarrow as pa
        from sparkdl.errors import StorageError
        from sparkdl.shards.files import write_table_shards
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            write_table_shards(pa.table({"a": np.random.rand(1 << 20)}), sys.argv[1])
        except StorageError as full:
            print(full)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "set")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout
    assert "full" in done.stdout
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
