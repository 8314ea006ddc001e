"""A version of a table read from the files that its log names: conditions, shares, and every odd file. No Spark."""

from __future__ import annotations

import dataclasses
import datetime as dt
import itertools
import os
import pickle
import zlib
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from delta_log import HIDDEN, actions, commit, edited_metadata, hide_rows, map_columns, protocol, remove
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.errors import ConfigError, DataError, IntegrityError, SchemaError, StorageError
from sparkdl.tables.record import TableFile
from sparkdl.tables.scan import plan
from sparkdl.tables.scan.conditions import conditions_of
from sparkdl.tables.scan.plan import shares_of
from sparkdl.tables.table import Table

LEFT = [x for x in range(40) if x not in HIDDEN]
UTC = dt.UTC


def read(table, columns=None, where=(), *, version=None, slots=2, batch_rows=7):
    """The rows of a scan, by a task that has travelled."""
    scan = table.scan(where, version)
    task = pickle.loads(pickle.dumps(scan.task(columns or scan.schema.names, slots=slots, batch_rows=batch_rows)))
    numbers = pa.record_batch({"id": pa.array(range(len(task.shares)), pa.int64())})
    batches = list(task(iter([numbers])))
    assert all(0 < batch.num_rows <= batch_rows for batch in batches)
    return pa.Table.from_batches(batches, task.schema)


@pytest.fixture(params=["table", "a é+b table"])
def table(tmp_path, request):
    return Table(str(tmp_path / request.param))


def numbers(start, count, day="2024-01-01"):
    when = dt.date.fromisoformat(day)
    return pa.table({"x": pa.array(range(start, start + count), pa.int64()), "day": pa.array([when] * count)})


def in_days(table):
    """Ten rows a day, on three days."""
    rows = [numbers(10 * n, 10, f"2024-01-0{n + 1}") for n in range(3)]
    write_deltalake(table.uri, pa.concat_tables(rows), partition_by=["day"])


SCHEMA = pa.schema(
    {
        "b": pa.int8(), "i": pa.int32(), "l": pa.int64(), "f": pa.float32(), "d": pa.float64(), "s": pa.string(),
        "t": pa.bool_(), "m": pa.decimal128(6, 2), "day": pa.date32(), "at": pa.timestamp("us", "UTC"),
        "clock": pa.timestamp("us"), "list": pa.list_(pa.int32()),
    }
)  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        "x > 1", [("l", ">")], [("l", "like", 1)], [("l", "=", None)], [("l", "is", 1)], [("l", "in", 3)],
        [("s", "in", "abc")], [("l", "in", [1, None])], [("l", "=", "1")], [("l", "=", 5.5)], [("l", "=", True)],
        [("l", "=", 2**63)], [("t", "=", 1)], [("s", "=", 1)], [("d", "=", float("nan"))], [("m", "=", "many")],
        [("m", "=", Decimal("1.234"))], [("day", "=", "yesterday")], [("day", "=", dt.datetime(2024, 1, 1))],
        [("at", "=", dt.datetime(2024, 1, 1))], [("at", "=", dt.date(2024, 1, 1))], [("at", "=", "2024-01-01 10:00")],
        [("clock", "=", dt.datetime(2024, 1, 1, tzinfo=UTC))], [("day", ">=", 20260301)], [("day", "=", 20000.0)],
        [("at", ">=", 1767225600)], [("clock", "<", np.int64(5))], [("day", "in", [1, 2])], [("day", "=", pd.NaT)],
        [("at", "=", pd.NaT)], [("clock", "=", np.datetime64("NaT"))], [("day", "=", pd.NA)], [("l", "=", pd.NA)],
        [("at", "=", np.datetime64("2024-01-01T00:00"))], [("f", "=", np.float32("nan"))],
        [("day", "=", np.datetime64("2024-01-01T10"))],
    ],
)  # fmt: skip
def test_a_condition_that_could_mean_two_things_is_refused(wrong):
    with pytest.raises(ConfigError, match="where") as refusal:
        conditions_of(wrong, SCHEMA)
    assert "\n" not in str(refusal.value)


def test_a_column_that_is_not_there_or_has_no_order_is_refused():
    with pytest.raises(SchemaError, match="'z', the table has"):
        conditions_of([("z", "=", 1)], SCHEMA)
    with pytest.raises(SchemaError, match="'list' of type list"):
        conditions_of([("list", "=", 1)], SCHEMA)
    assert conditions_of([("list", "is", None)], SCHEMA)[0].mask(pa.array([[1], None])).to_pylist() == [False, True]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("day", "2026-03-01"), ("day", dt.date(2026, 3, 1)), ("day", np.datetime64("2026-03-01")),
        ("clock", "2026-03-01"), ("clock", dt.datetime(2026, 3, 1)), ("clock", pd.Timestamp("2026-03-01")),
        ("clock", np.datetime64("2026-03-01", "ns")), ("at", pd.Timestamp("2026-03-01", tz="UTC")),
        ("at", "2026-03-01T01:00:00+01:00"),
    ],
)  # fmt: skip
def test_a_day_or_a_moment_is_what_it_says(column, value):
    [found] = conditions_of([(column, "=", value)], SCHEMA)
    assert str(found.value.as_py())[:10] == "2026-03-01"


def test_truth_of_numpy_is_a_truth_value_and_no_number():
    [condition] = conditions_of([("t", "=", np.bool_(True))], SCHEMA)
    assert condition.value.as_py() is True
    with pytest.raises(ConfigError, match="give a value of its type"):
        conditions_of([("l", "=", np.bool_(True))], SCHEMA)


VALUES = {
    "i": st.integers(-50, 50),
    "l": st.integers(-(2**63), 2**63 - 1),
    "s": st.text(max_size=3),
    "day": st.dates(),
    "at": st.datetimes(timezones=st.just(UTC)),
    "clock": st.datetimes(),
    "f": st.floats(width=32, allow_nan=False),
}


@settings(deadline=None, max_examples=300)
@given(data=st.data(), name=st.sampled_from(sorted(VALUES)))
def test_no_file_with_a_row_of_interest_is_left_out(data, name):
    values = data.draw(st.lists(st.one_of(st.none(), VALUES[name]), min_size=1, max_size=4))
    sign = data.draw(st.sampled_from(["=", "!=", "<", "<=", ">", ">=", "in", "not in", "is", "is not"]))
    wanted = data.draw(st.lists(VALUES[name], max_size=3) if "in" in sign else VALUES[name])
    column = pa.array(values, SCHEMA.field(name).type)
    [one] = conditions_of([(name, sign, None if sign.startswith("is") else wanted)], SCHEMA)
    bounds = [value for value in values if value is not None]
    least, greatest = (pa.array([pick(bounds) if bounds else None], column.type) for pick in (min, max))
    if pa.types.is_timestamp(column.type):  # as Spark's Delta keeps it
        greatest = greatest.cast(pa.timestamp("ms", column.type.tz), safe=False).cast(column.type)
    met = one.mask(column)
    assert met.null_count == 0
    assert one.possible(least, greatest)[0].as_py() or not any(met.to_pylist())


def test_statistics_leave_files_out(table):
    for start in (0, 10, 20):
        table.append(numbers(start, 10))
    for where, files in {
        ("x", "=", 5): 1, ("x", ">", 9): 2, ("x", ">=", 9): 3, ("x", "<", 20): 2, ("x", "<=", 20): 3,
        ("x", "in", (3, 25)): 2, ("x", "!=", 5): 3, ("x", "=", 99): 0, ("day", ">", "2024-01-01"): 0,
    }.items():  # fmt: skip
        scan = table.scan([where])
        assert (len(scan.files), scan.skipped) == (files, 3 - files), where
        assert sorted(read(table, ["x"], [where]).column("x").to_pylist()) == sorted(
            table.rows(where=_sql(*where)).column("x").to_pylist()
        )


def _sql(column, sign, value):
    return f"{column} {sign} " + (f"'{value}'" if isinstance(value, str) else str(value))


def test_partitions_leave_files_out_and_give_their_values(table):
    in_days(table)
    scan = table.scan([("day", ">=", "2024-01-02"), ("x", "<", 25)])
    assert (len(scan.files), scan.skipped) == (2, 1)
    found = read(table, ["day", "x"], [("day", ">=", "2024-01-02"), ("x", "<", 25)])
    assert sorted(found.column("x").to_pylist()) == list(range(10, 25))
    assert {tuple(row.values()) for row in found.to_pylist()} == {
        (dt.date(2024, 1, 1 + x // 10), x) for x in range(10, 25)
    }
    assert read(table, ["day"]).column("day").to_pylist().count(dt.date(2024, 1, 3)) == 10
    assert table.scan([("day", "is", None)]).files == ()


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1, -2, None], pa.int64()), pa.array([1, -2, None], pa.int8()), pa.array(["a=b/c d", "é%", None]),
        pa.array([dt.date(2024, 2, 29), dt.date(1, 1, 1), None]), pa.array([True, False, None]),
    ],
)  # fmt: skip
def test_partition_values_have_the_type_of_their_column(table, values):
    rows = pa.table({"x": [1, 2, 3], "p": values})
    write_deltalake(table.uri, rows, partition_by=["p"])
    assert sorted(read(table).to_pylist(), key=str) == sorted(rows.to_pylist(), key=str)
    found = read(table, ["x"], [("p", "=", values[0].as_py())])
    assert found.column("x").to_pylist() == [1]
    assert read(table, ["x"], [("p", "is", None)]).column("x").to_pylist() == [3]


def test_rows_that_a_vector_hides_are_left_out_in_every_row_group(table):
    table.append(numbers(0, 40))
    [add] = [action["add"] for action in actions(table.uri) if "add" in action]
    path = os.path.join(table.uri, add["path"])
    pq.write_table(numbers(0, 40), path, row_group_size=9)
    commit(table.uri, 1, protocol(["deletionVectors"], []))
    hide_rows(table.uri, 2, {**add, "size": os.path.getsize(path)})
    assert read(table, ["x"]).column("x").to_pylist() == LEFT
    assert read(table, ["x"], [("x", ">", 17)]).column("x").to_pylist() == [x for x in LEFT if x > 17]
    assert read(table, ["x"], version=1).num_rows == 40


def test_a_vector_that_hides_rows_far_behind_its_first_group_hides_these(table, monkeypatch):
    monkeypatch.setattr(plan, "_SMALLEST_PIECE", 1 << 20)
    rows, far = 3 << 20, 3
    table.append(numbers(0, rows))  # three row groups as delta-rs writes them
    [add] = [action["add"] for action in actions(table.uri) if "add" in action]
    assert pq.ParquetFile(os.path.join(table.uri, add["path"])).metadata.num_row_groups > 1
    task = table.scan().task(["x"], slots=2, batch_rows=1 << 16)
    bits = np.zeros(rows // 8, np.uint8)
    bits[-1] = 1 << far
    deleted = zlib.compress(bits.tobytes())
    parts = [dataclasses.replace(part, deleted=deleted) for share in task.shares for part in share]
    assert len(parts) > 1
    found = pa.Table.from_batches(batch for part in parts for batch in task.read(part))
    assert set(range(rows)) - set(found.column("x").to_pylist()) == {rows - 8 + far}


def test_a_column_that_a_file_lacks_is_null_and_one_by_another_case_is_found(table):
    table.append(numbers(0, 2))
    table.append(pa.table({"x": [2], "Y": ["new"]}), new_columns=True)
    assert sorted(map(str, read(table).to_pylist())) == sorted(map(str, table.rows().to_pylist()))
    assert read(table, ["x"], [("Y", "is", None)]).column("x").to_pylist() == [0, 1]
    assert read(table, ["x"], [("Y", "=", "new")]).column("x").to_pylist() == [2]
    [add] = [action["add"] for action in actions(table.uri, 1) if "add" in action]
    pq.write_table(pa.table({"X": [2], "y": ["new"]}), os.path.join(table.uri, add["path"]))
    assert read(table, ["x", "Y"], [("Y", "=", "new")]).to_pylist() == [{"x": 2, "Y": "new"}]


def test_mapped_columns_are_read_filtered_and_left_out_by_their_names_in_the_table(table):
    write_deltalake(table.uri, pa.table({"a": [1, 2], "b": [20, 10], "s": [{"p": 1}, None], "q": ["u", "v"]}),
                    partition_by=["q"])  # fmt: skip
    renamed = {"a": "b", "b": "a", "q": "r"}  # crosswise: any mix-up shows
    mapped = edited_metadata(table.uri, lambda found: map_columns(found, renamed=renamed))
    commit(table.uri, 1, protocol(["columnMapping"], []), mapped)
    wanted = [{"r": "u", "a": 20, "b": 1}, {"r": "v", "a": 10, "b": 2}]
    assert sorted(read(table, ["r", "a", "b"]).to_pylist(), key=str) == sorted(wanted, key=str)
    for where in ([("a", ">", 15)], [("b", "<", 2)], [("r", "=", "u")]):
        assert read(table, ["r", "a", "b"], where).to_pylist() == wanted[:1], where
    with pytest.raises(StorageError, match=r"maps what is inside of the columns \['s'\]"):
        read(table, ["s"])


def test_a_table_that_this_reader_does_not_know_is_refused_by_name(table):
    table.append(numbers(0, 2))
    commit(table.uri, 1, protocol(["typeWidening"], []))
    with pytest.raises(StorageError, match="typeWidening"):
        table.scan()
    with pytest.raises(StorageError, match="does not exist"):
        table.scan(version=9)
    with pytest.raises(ConfigError, match="name of a table in a catalog"):
        Table("spark_catalog.default.rides").scan()


@pytest.mark.parametrize("scheme", ["file:", "file://"])
def test_files_that_lie_elsewhere_are_not_opened(table, tmp_path, scheme):
    table.append(numbers(0, 2))
    [add] = [action["add"] for action in actions(table.uri) if "add" in action]
    commit(table.uri, 1, remove(add), {"add": {**add, "path": f"{scheme}{tmp_path}/other.parquet"}})
    with pytest.raises(StorageError, match="does not lie in the table's folder"):
        table.scan()
    os.rename(os.path.join(table.uri, add["path"]), tmp_path / "other.parquet")
    commit(table.uri, 1, remove(add), {"add": {**add, "path": "../other.parquet"}})
    with pytest.raises(IntegrityError, match="does not lie in the table's folder"):
        read(table)


@pytest.mark.parametrize("where", ["entry", "checkpoint"])
@pytest.mark.parametrize(
    "vector",
    [("p", "file:///etc/hostname"), ("p", "/etc/hostname"), ("u", "../../../etc/ab^-aqEH.-t@S}K{vb[*k^")],
)
def test_a_deletion_vector_that_lies_elsewhere_is_not_opened(table, vector, where):
    table.append(numbers(0, 2))
    [add] = [action["add"] for action in actions(table.uri) if "add" in action]
    commit(table.uri, 1, protocol(["deletionVectors"], []))
    told = {"storageType": vector[0], "pathOrInlineDv": vector[1], "offset": 1, "sizeInBytes": 4, "cardinality": 1}
    commit(table.uri, 2, remove(add), {"add": {**add, "deletionVector": told}})
    if where == "checkpoint":
        DeltaTable(table.uri).create_checkpoint()
        commit(table.uri, 3, {"commitInfo": {}})
    for action in (table.scan, table.files, table.rows, table.check_readable, table.compact):
        with pytest.raises(IntegrityError, match="does not lie in the table's folder"):
            action()


def test_a_file_that_is_a_link_out_of_the_table_or_broken_is_one_sentence(table, tmp_path):
    table.append(numbers(0, 2))
    [add] = [action["add"] for action in actions(table.uri) if "add" in action]
    path = os.path.join(table.uri, add["path"])
    os.rename(path, tmp_path / "secret")
    os.symlink(tmp_path / "secret", path)
    with pytest.raises(IntegrityError, match="is a link"):
        read(table)
    os.unlink(path)
    with pytest.raises(StorageError, match="does not exist"):
        read(table)
    with open(path, "wb") as file:
        file.write(b"no parquet" * 200)
    with pytest.raises(StorageError, match="cannot read") as refusal:
        read(table)
    assert "\n" not in str(refusal.value)


def replace(table, rows, **how):
    """Put other rows into the only file of a table, as another writer would have written them."""
    [add] = [action["add"] for action in actions(table.uri) if "add" in action]
    pq.write_table(rows, os.path.join(table.uri, add["path"]), **how)


def test_times_are_those_of_the_table_however_a_file_keeps_them(table):
    moments = [dt.datetime(1600, 1, 1, tzinfo=UTC), dt.datetime(2500, 1, 1, 0, 0, 0, 1, tzinfo=UTC), None]
    rows = pa.table({"at": pa.array(moments, pa.timestamp("us", "UTC")), "day": [dt.date(1, 1, 1)] * 3})
    table.append(rows)
    replace(table, rows, use_deprecated_int96_timestamps=True)
    assert read(table).to_pylist() == rows.to_pylist()
    assert read(table, ["at"], [("at", ">", moments[0])]).column("at").to_pylist() == moments[1:2]
    replace(table, rows.replace_schema_metadata({"org.apache.spark.legacyDateTime": ""}))
    with pytest.raises(DataError, match="calendar of before 1582"):
        read(table, ["day"])
    replace(table, pa.table({"at": ["noon"] * 3, "day": rows.column("day")}))
    with pytest.raises(SchemaError, match=r"'at' is string in the file .* and timestamp\[us, tz=UTC\] in the table"):
        read(table, ["at"])


def test_structs_lists_and_names_with_dots_arrive_whole(table):
    rows = pa.table(
        {
            "a.b": [1, 2],
            "a": [{"b": 3, "c": "x"}, None],
            "l": [[1, None], []],
            "m": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
        }
    )
    table.append(rows)
    assert read(table).to_pylist() == rows.to_pylist()
    assert read(table, ["a.b"], [("a.b", ">", 1)]).to_pylist() == [{"a.b": 2}]
    replace(table, rows.set_column(1, "a", pa.array([{"c": "x"}, None])))  # before the field b was added
    assert read(table, ["a"]).to_pylist() == [{"a": {"b": None, "c": "x"}}, {"a": None}]


def test_a_table_without_rows_has_no_shares(table):
    table.append(numbers(0, 0))
    assert read(table).num_rows == 0
    assert table.scan().task(["x"], slots=2, batch_rows=5).shares == ()


@settings(deadline=None)
@given(
    sizes=st.lists(st.one_of(st.integers(1, 1 << 12), st.integers(1, 1 << 32)), max_size=30),
    slots=st.integers(1, 64),
)
def test_every_byte_of_every_file_is_in_one_share_and_shares_are_even(sizes, slots):
    files = [TableFile(f"f{n}", size, {}) for n, size in enumerate(sizes)]
    shares = shares_of(files, {"f0": b"v"}, slots)
    seen = {}
    for part in (part for share in shares for part in share):
        assert part.start == seen.get(part.path, 0)
        assert part.deleted == (b"v" if part.path == "f0" else None)
        seen[part.path] = part.end
    assert seen == {file.path: file.bytes for file in files}
    assert all(share for share in shares)
    assert max((sum(part.end - part.start for part in share) for share in shares), default=0) < 256 << 20
    costs = [sum(part.end - part.start + (1 << 20) for part in share) for share in shares]
    assert all(first + second > 5 << 20 for first, second in itertools.pairwise(costs))


def test_many_small_files_share_a_task(table):
    in_days(table)
    assert len(table.scan().task(["x"], slots=2, batch_rows=5).shares) == 1


def test_batches_of_long_rows_have_fewer_of_them_whatever_else_the_table_holds(table, monkeypatch):
    monkeypatch.setattr("sparkdl.tables.scan.read._BATCH_BYTES", 64 << 10)
    texts = [f"{number} ".ljust(4096, "x") for number in range(100)]
    inside = [{"text": text} for text in texts]
    write_deltalake(table.uri, pa.table({"a.b": list(range(100)), "text": texts, "inside": inside}))
    scan = table.scan()
    [share] = scan.task(scan.schema.names, slots=1, batch_rows=1000).shares

    def lengths(*columns):
        task = scan.task(columns, slots=1, batch_rows=1000)
        batches = [batch for part in share for batch in task.read(part)]
        rows = pa.Table.from_batches(batches)
        assert rows.num_rows == 100
        assert all(sorted(rows[name].to_pylist(), key=str) == sorted(told[name], key=str) for name in columns)
        return {batch.num_rows for batch in batches[:-1]} or {batches[0].num_rows}

    told = {"a.b": list(range(100)), "text": texts, "inside": inside}
    assert lengths("a.b") == {100}
    assert lengths("a.b", "text") == lengths("inside") == {15}
    monkeypatch.setattr("sparkdl.tables.scan.read._BATCH_BYTES", 1)
    assert lengths("text") == {1}


def test_row_groups_of_a_file_are_read_once_however_many_tasks_share_it(table, monkeypatch):
    monkeypatch.setattr(plan, "_SMALLEST_PIECE", 1 << 20)
    count = 1 << 20
    rows = pa.table({"x": np.arange(count), "y": np.random.default_rng(0).random(count)})
    table.append(rows)
    replace(table, rows, row_group_size=50_000, compression="none", use_dictionary=False)
    [add] = [action["add"] for action in actions(table.uri) if "add" in action]
    size = os.path.getsize(os.path.join(table.uri, add["path"]))
    commit(table.uri, 1, remove(add))
    commit(table.uri, 2, {"add": {**add, "size": size}})
    task = table.scan().task(["x"], slots=4, batch_rows=10_000)
    assert len(task.shares) >= 3
    counts = [sum(batch.num_rows for part in share for batch in task.read(part)) for share in task.shares]
    assert min(counts) > 0
    assert sorted(read(table, ["x"], batch_rows=10_000).column("x").to_pylist()) == list(range(count))
