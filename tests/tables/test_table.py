"""Small tables, optimistic commits, refusals and vacuum, without Spark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from delta_log import HIDDEN, actions, commit, edited_metadata, hide_rows, map_columns, protocol
from deltalake import DeltaTable, Schema

from sparkdl.errors import ConfigError, ConflictError, DataError, SchemaError, StorageError
from sparkdl.storage import Storage
from sparkdl.tables import delta_rs as tables
from sparkdl.tables.delta import delta_schema, open_table
from sparkdl.tables.features import check_readable, check_writable
from sparkdl.tables.parquet import WriteTask, partition_text, split, statistics
from sparkdl.tables.table import AppTransaction, Table


@pytest.fixture
def table(tmp_path):
    return Table(str(tmp_path / "a table"))


def numbers(*values):
    return pa.table({"x": pa.array(values, pa.int64()), "day": pa.array(["d"] * len(values))})


def test_rows_go_in_and_come_out_at_every_version(table):
    assert not table.exists()
    assert table.transaction_version("app") is None
    assert [table.append(numbers(1)), table.append(numbers(2, 3))] == [0, 1]
    assert sorted(table.rows(["x"]).column("x").to_pylist()) == [1, 2, 3]
    assert table.rows(where="x > 2")["x"].to_pylist() == [3]
    assert table.rows(version=0)["x"].to_pylist() == [1]
    assert table.version() == 1
    assert table.columns() == ["x", "day"]
    assert [entry["version"] for entry in table.history()] == [1, 0]


def test_texts_and_bytes_come_out_as_the_types_they_had_also_inside_of_others(table):
    rows = pa.table(
        {
            "s": ["a", None],
            "b": pa.array([b"x", None]),
            "tags": pa.array([["q", None], None]),
            "inner": pa.array([{"z": b"1", "deep": [{"t": "u"}]}, None]),
            "m": pa.array([[("k", b"v")], None], pa.map_(pa.string(), pa.binary())),
        }
    )
    table.append(rows)
    for read in (table.rows(), table.rows(where="s = 'a' or s is null"), table.snapshot()[1]):
        assert str(read.schema.types) == str(rows.schema.types).replace("item:", "element:")
        assert read.to_pylist() == rows.to_pylist()
    assert table.append(table.rows()) == 1


def kept_as_int96(table, *moments):
    """Put the moments into a table of the columns ``id`` and ``at``, as Spark's Delta keeps them."""
    rows = pa.table({"id": range(len(moments)), "at": pa.array(moments, pa.timestamp("us", "UTC"))})
    table.append(rows)
    entries = actions(table.uri)
    add = next(action["add"] for action in entries if "add" in action)
    file = Path(table.uri) / add["path"]
    pq.write_table(rows, file, use_deprecated_int96_timestamps=True)
    add["size"] = file.stat().st_size
    commit(table.uri, 0, *entries)
    return rows


FAR = [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC), None]


def test_times_that_no_nanoseconds_hold_are_read_as_they_are(table):
    rows = kept_as_int96(table, *FAR)
    assert table.rows().to_pylist() == rows.to_pylist()
    assert table.snapshot()[1].to_pylist() == rows.to_pylist()
    assert table.rows(["at"], where="id = 1").to_pylist() == [{"at": FAR[1]}]


@pytest.mark.parametrize("change", ["merge", "compact"])
def test_times_that_no_nanoseconds_hold_are_not_copied_as_others(table, change):
    rows = kept_as_int96(table, *FAR)
    with pytest.raises(StorageError, match="holds times before 1677 or after 2262 as INT96"):
        table.compact() if change == "compact" else table.merge(rows.slice(2), ["id"])
    assert table.rows().to_pylist() == rows.to_pylist()


def test_other_times_of_spark_are_merged_and_compacted(table):
    rows = kept_as_int96(table, datetime(1700, 1, 1, tzinfo=UTC), None, datetime(2261, 1, 1, 0, 0, 0, 7, tzinfo=UTC))
    table.append(rows)
    table.compact()
    assert table.rows().to_pylist() == [*rows.to_pylist(), *rows.to_pylist()]
    assert len(table.files()) == 1
    table.merge(pa.table({"id": [0], "at": pa.array([None], rows.schema.field("at").type)}), ["id"])
    assert table.rows()["at"].null_count == 4


def test_names_and_partitions_that_cannot_be_meant_are_one_sentence_and_make_no_table(table):
    schema = json.dumps({"type": "struct", "fields": [
        {"name": name, "type": "long", "nullable": True, "metadata": {}} for name in "ab"]})  # fmt: skip
    for given, sentence in (
        ({"partition_by": ["a", "a"]}, r"^partition_by=\['a', 'a'\] names a column twice"),
        ({"partition_by": "ab"}, r"^partition_by='ab' is one string: give a list of names, as in \['ab'\]"),
        ({"mode": "replace", "partition_by": ["a"], "partitions": {"a": 1}}, r"^partitions=\{'a': 1\} is no list of"),
        ({"mode": "replace", "partition_by": ["a"], "partitions": ["a"]}, r"^partitions=\['a'\] is no list of dicts"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            table.stage(schema, **given)
    with pytest.raises(ConfigError, match=r"^on='ab' is one string"):
        table.merge(pa.table({"a": [1], "b": [1]}), "ab")
    with pytest.raises(ConfigError, match=r"^columns='ab' is one string"):
        table.rows("ab")
    with pytest.raises(ConfigError, match=r"^limit=-1 is no number of commits"):
        table.history(-1)
    assert not table.exists()


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pa.array([1], pa.time64("us")), "Time64"),
        (pa.array([1], pa.float16()), "Float16"),
        (pa.array([1], pa.duration("s")), "Duration"),
        (None, "Duplicate field name"),
    ],
)
def test_a_small_table_that_delta_cannot_hold_is_one_sentence(table, column, reason):
    rows = pa.table([[1], [1] if column is None else column], names=["x", "x" if column is None else "y"])
    words = rf"^the rows cannot be those of a Delta table \([^\n]*{reason}[^\n]*: rename or cast columns$"
    with pytest.raises(SchemaError, match=words):
        table.append(rows)
    assert not table.exists()
    table.append(numbers(1))
    for change in (table.append, lambda rows: table.merge(rows, ["x"])):
        with pytest.raises(SchemaError, match=words):
            change(rows)


def test_what_is_not_there_is_said(table):
    for ask in (table.version, table.rows, table.history, table.vacuum):
        with pytest.raises(StorageError, match="no Delta table"):
            ask()
    table.append(numbers(1))
    with pytest.raises(StorageError, match=r"version 7 .* newest is 0"):
        table.rows(version=7)
    with pytest.raises(StorageError, match="predicate"):
        table.rows(where="nothing = 1")
    for ask in (table.rows, table.scan):
        with pytest.raises(StorageError, match=r"version -1 .* begin at 0"):
            ask(version=-1)


def test_a_fact_of_the_history_may_have_any_other_name(table):
    facts = {"transaction": "42", "metadata": "mine"}
    table.append(numbers(1), metadata=facts)
    table.stage(table.schema_json(), "overwrite", metadata=facts).commit([])
    assert [entry["transaction"] for entry in table.history()] == ["42", "42"]


@pytest.mark.parametrize("name", ["version", "timestamp", "operation", "readVersion"])
def test_facts_under_the_names_of_the_log_are_refused(table, name):
    table.append(numbers(1), metadata={"job": "etl"})
    assert table.history()[0]["job"] == "etl"
    schema = table.schema_json()
    for write in (
        lambda facts: table.append(numbers(2), metadata=facts),
        lambda facts: table.stage(schema, metadata=facts),
    ):
        with pytest.raises(ConfigError, match=rf"metadata names \['{name}'\]"):
            write({name: 7})
    assert table.version() == 0


def replaced(table, rows, day):
    """Let rows of a day take the place of those that there are, as tasks and a driver do it."""
    schema = {"type": "struct", "fields": json.loads(Schema.from_arrow(rows.schema).to_json())["fields"]}
    staged = table.stage_partitions(json.dumps(schema), ["day"], [{"day": day}])
    with staged.task.open() as writer:
        for batch in rows.to_batches():
            writer.write(batch)
        files = writer.finish()
    return staged.commit(files)


def test_partitions_are_replaced_by_rows_with_other_columns_and_null_stands_where_none_is(table):
    replaced(table, numbers(1, 2), "d")
    replaced(table, pa.table({"day": ["e"], "note": ["new"]}), "e")
    assert table.columns() == ["x", "day", "note"]
    found = sorted(table.rows(["day", "note", "x"]).to_pylist(), key=str)
    assert found == [
        {"day": "d", "note": None, "x": 1}, {"day": "d", "note": None, "x": 2}, {"day": "e", "note": "new", "x": None},
    ]  # fmt: skip
    version = table.version()
    replaced(table, numbers(3), "d")
    assert table.version() == version + 1  # no commit for columns that are there
    assert sorted(row["x"] or 0 for row in table.rows().to_pylist()) == [0, 3]
    assert [row["x"] for row in table.rows(version=0).to_pylist()] == [1, 2]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (pa.table({"x": ["a"], "day": ["d"]}), r"column 'x' is string now, and long in the Delta table .*: change"),
        (pa.table({"X": [1], "day": ["d"]}), r"column 'X' is called 'x' in the Delta table"),
        (pa.table({"x": [[1]], "day": ["d"]}), r"column 'x' is .*array.* now, and long in"),
    ],
)
def test_columns_that_one_table_cannot_hold_are_refused_before_anything_is_written(table, rows, words):
    replaced(table, numbers(1), "d")
    with pytest.raises(SchemaError, match=words):
        replaced(table, rows, "d")
    assert table.version() == 0
    assert table.rows(["x"])["x"].to_pylist() == [1]


def test_a_column_that_forbids_nulls_must_be_among_the_rows(table):
    strict = pa.schema([pa.field("x", pa.int64(), nullable=False), pa.field("day", pa.string())])
    DeltaTable.create(table.uri, strict, partition_by=["day"])
    with pytest.raises(SchemaError, match=r"column 'x' of the Delta table .* forbids nulls, and is missing"):
        replaced(table, pa.table({"day": ["d"], "note": ["new"]}), "d")


@pytest.mark.parametrize("fact", [date(2024, 1, 2), float("nan"), {"keys": {1, 2}}])
def test_facts_that_json_cannot_hold_are_refused_before_anything_is_written(table, fact):
    table.append(numbers(1))
    for write in (
        lambda: table.append(numbers(2), metadata={"job": fact}),
        lambda: table.stage(table.schema_json(), metadata={"job": fact}),
    ):
        with pytest.raises(ConfigError, match=r"^metadata\['job'\]=.* is nothing that JSON can hold .*give text"):
            write()
    assert table.version() == 0


@pytest.mark.parametrize("names", [("we`ird", "x"), ("k", "`"), ("a.b", "it's"), ("Id", "\N{GRINNING FACE}")])
def test_a_merge_finds_columns_of_any_name(table, names):
    table.append(pa.table({name: [1, 2] for name in names}))
    table.merge(pa.table({name: [2, 3] for name in reversed(names)}), on=names[:1])
    assert sorted(table.rows().column(names[1]).to_pylist()) == [1, 2, 3]


def test_merge_updates_and_inserts(table):
    table.append(pa.table({"k": [1, 2], "v": ["a", "b"]}))
    table.merge(pa.table({"k": [2, 3], "v": ["B", "C"]}), on=["k"])
    assert sorted(table.rows().to_pylist(), key=lambda row: row["k"]) == [
        {"k": 1, "v": "a"},
        {"k": 2, "v": "B"},
        {"k": 3, "v": "C"},
    ]


def test_a_merge_that_is_ambiguous_is_one_sentence(table):
    table.append(pa.table({"k": [1, 2], "v": ["a", "b"]}))
    for on in ([], ["z"]):
        with pytest.raises(ConfigError, match=r"name the columns .*\['k', 'v'\]"):
            table.merge(pa.table({"k": [1], "v": ["c"]}), on=on)
    with pytest.raises(DataError, match=r"^several of these rows agree in \['k'\] with one row [^\n]*keep one$"):
        table.merge(pa.table({"k": [1, 1], "v": ["c", "d"]}), on=["k"])
    assert table.version() == 0


def test_small_tables_with_forbidden_nulls_are_one_sentence(table):
    inner = pa.struct([pa.field("n", pa.int64(), nullable=False)])
    DeltaTable.create(table.uri, pa.schema([pa.field("k", pa.int64(), nullable=False), pa.field("s", inner)]))
    table.append(pa.table({"k": [1], "s": [{"n": 1}]}))
    for rows, column in (
        (pa.table({"k": [1, None], "s": [{"n": 1}, {"n": 2}]}), "`k`"),
        (pa.table({"k": [1, 2], "s": [{"n": 1}, {"n": None}]}), "`s`.`n`"),
    ):
        for write in (table.append, lambda rows: table.merge(rows, ["k"])):
            with pytest.raises(
                DataError, match=f"^column {column} of the Delta table .* and 1 are in these rows: drop"
            ):
                write(rows)
    assert table.version() == 1


def test_an_append_made_for_another_version_is_refused(table):
    table.append(numbers(1), expected_version=-1)
    with pytest.raises(ConflictError, match="at version 0, this commit was made for -1"):
        table.append(numbers(1), expected_version=-1)
    assert table.append(numbers(2), expected_version=0) == 1


@pytest.mark.parametrize(
    "kind",
    [
        pa.timestamp("us", "Europe/Berlin"),
        pa.timestamp("s"),
        pa.timestamp("ns", "UTC"),
        pa.list_(pa.timestamp("ms", "+02:00")),
        pa.struct([("at", pa.timestamp("us", "Europe/Berlin"))]),
    ],
    ids=str,
)
def test_times_of_every_zone_and_unit_are_appended_and_merged(tmp_path, kind):
    noon = datetime(2024, 7, 2, 12, tzinfo=UTC if "tz" in str(kind) else None)
    value = [noon] if pa.types.is_list(kind) else {"at": noon} if pa.types.is_struct(kind) else noon
    times, table = pa.array([value], kind), Table(str(tmp_path / "t"))
    for k in (1, 2):
        table.append(pa.table({"k": [k], "time": times}))
    table.merge(pa.table({"k": [3], "time": times}), on=["k"])
    assert sorted(table.rows().to_pylist(), key=lambda row: row["k"]) == [{"k": k, "time": value} for k in (1, 2, 3)]


def test_a_time_between_two_microseconds_is_refused(tmp_path):
    table = Table(str(tmp_path / "t"))
    with pytest.raises(SchemaError, match="would lose data"):
        table.append(pa.table({"time": pa.array([1], pa.timestamp("ns"))}))
    assert not table.exists()


def test_the_same_transaction_appends_once(table):
    for _ in range(3):
        table.append(numbers(1), transaction=AppTransaction(application="app", version=4))
    table.append(numbers(1), transaction=AppTransaction(application="app", version=3))
    assert table.rows().num_rows == 1
    assert table.transaction_version("app") == 4


def test_other_columns_are_refused_by_name(table):
    table.append(numbers(1))
    with pytest.raises(SchemaError, match=r"'x' has the type string.*it is long"):
        table.append(pa.table({"x": ["a"], "day": ["d"]}))
    with pytest.raises(SchemaError, match=r"'day' .* is missing"):
        table.append(pa.table({"x": [1]}))
    assert table.version() == 0


def test_new_columns_are_taken_where_they_are_asked_for(table):
    table.append(pa.table({"a": [1], "b": ["x"]}))
    with pytest.raises(SchemaError, match="'c'"):
        table.append(pa.table({"a": [2], "c": [0.5]}))
    table.append(pa.table({"a": [2], "c": [0.5]}), new_columns=True)
    rows = sorted(table.rows().to_pylist(), key=lambda row: row["a"])
    assert rows == [{"a": 1, "b": "x", "c": None}, {"a": 2, "b": None, "c": 0.5}]
    with pytest.raises(SchemaError, match="'a' has the type string"):
        table.append(pa.table({"a": ["3"]}), new_columns=True)


def test_appends_from_many_threads_are_all_there(table):
    def work(start):
        for i in range(5):
            table.append(numbers(start + i))

    threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert table.rows().num_rows == 20
    assert table.version() == 19
    table.compact()
    assert sorted(table.rows()["x"].to_pylist()) == sorted(10 * n + i for n in range(4) for i in range(5))


def test_a_table_that_somebody_else_creates_meanwhile_gets_the_rows_all_the_same(table, monkeypatch):
    look, looked = tables.open_table, []

    def before_the_other(*where):
        found = look(*where)
        if not looked:
            looked.append(where)
            table.append(numbers(1))
        return found

    monkeypatch.setattr(tables, "open_table", before_the_other)
    assert table.append(numbers(2)) == 1
    assert sorted(table.rows().column("x").to_pylist()) == [1, 2]


def test_reading_lets_the_interpreter_end_in_peace(table):
    table.append(numbers(*range(1000)))
    code = "import sys; from sparkdl.tables.table import Table; print(Table(sys.argv[1]).rows().num_rows)"
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code, table.uri], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.strip()) == (0, "1000"), done.stderr


def test_vacuum_deletes_files_of_a_writer_that_died_and_no_others(table, tmp_path):
    table.append(numbers(1))
    dead = WriteTask(root=Storage.of(table.uri), write_id="dead", partition_by=())
    rows = dead.write(iter(numbers(7, 8).to_batches()))
    assert rows[0].rows == 2
    assert table.rows()["x"].to_pylist() == [1]
    assert table.vacuum() == []  # it may still be running
    (tmp_path / "a table" / "notes.txt").write_text("mine")
    assert [path.rsplit("/", 1)[-1] for path in table.vacuum(timedelta(seconds=-1))] == [rows[0].path]
    assert table.rows()["x"].to_pylist() == [1]
    assert (tmp_path / "a table" / "notes.txt").exists()


@pytest.mark.parametrize(("minutes", "files"), [(59, 0), (0.5, 0), (0, 1), (-1, 1)])
def test_vacuum_of_versions_spares_what_was_removed_of_late(table, minutes, files):
    table.append(numbers(1))
    table.stage(table.schema_json(), "overwrite").commit([])
    time.sleep(0.01)
    assert len(table.vacuum(timedelta(minutes=minutes), versions=True)) == files
    if not files:
        assert table.rows(version=0)["x"].to_pylist() == [1]


def test_vacuum_spares_what_an_older_version_names(table):
    table.append(numbers(1))
    table.append(numbers(2))
    table.compact()
    assert table.vacuum(timedelta(seconds=-1)) == []
    assert table.rows(version=0)["x"].to_pylist() == [1]


def test_vacuum_spares_what_an_older_version_names_even_where_a_checkpoint_forgot_the_removal(table):
    table.append(numbers(1))
    forgets = {"configuration": {"delta.deletedFileRetentionDuration": "interval 0 seconds"}}
    commit(table.uri, 1, edited_metadata(table.uri, lambda metadata: metadata.update(forgets)))
    table.stage(table.schema_json(), "overwrite").commit([])
    time.sleep(0.01)
    open_table(table.uri, None).create_checkpoint()
    dead = WriteTask(root=Storage.of(table.uri), write_id="dead").write(iter(numbers(7).to_batches()))
    assert [path.rsplit("/", 1)[-1] for path in table.vacuum(timedelta(seconds=-1))] == [dead[0].path]
    assert table.rows(version=0)["x"].to_pylist() == [1]
    WriteTask(root=Storage.of(table.uri), write_id="dead").write(iter(numbers(7).to_batches()))
    Path(table.uri.removeprefix("file://"), "_delta_log", f"{0:020d}.json").write_text('{"add": 1')
    with pytest.raises(StorageError, match=r"nothing is deleted.*0\.json"):
        table.vacuum(timedelta(seconds=-1))


def test_a_task_that_fails_removes_its_files(table, tmp_path):
    def batches():
        yield from numbers(1, 2).to_batches()
        raise OSError(28, "No space left on device")

    task = WriteTask(root=Storage.of(table.uri), write_id="w", partition_by=("day",))
    with pytest.raises(OSError, match="No space"):
        task.write(batches())
    assert list(tmp_path.rglob("*.parquet")) == []
    with pytest.raises(ConfigError, match="compression"):
        WriteTask(root=Storage.of(table.uri), write_id="w", compression="rar")


def test_large_files_are_cut_and_many_partitions_do_not_stay_open(table, tmp_path):
    days = pa.array([f"d{i % 50}" for i in range(500)])
    batch = pa.RecordBatch.from_pydict({"x": pa.array(range(500)), "day": days})
    task = WriteTask(root=Storage.of(table.uri), write_id="w", partition_by=("day",))
    rows = task.write(iter([batch, batch]))
    assert sum(row.rows for row in rows) == 1000
    assert len({row.partition for row in rows}) == 50
    assert all(os.path.getsize(f"{table.uri}/{row.path}") == row.bytes for row in rows)
    small = WriteTask(root=Storage.of(table.uri), write_id="v", file_bytes=1)
    big = pa.RecordBatch.from_pydict({"x": pa.array(range(200_000))})
    assert len(small.write(iter([big, big, big]))) == 3


def test_small_batches_become_large_row_groups(table, tmp_path):
    task = WriteTask(root=Storage.of(str(tmp_path)), write_id="w", partition_by=("day",))
    days = np.array(["1", "2"])
    batches = [pa.record_batch({"day": days[np.arange(1000) % 2], "n": np.arange(1000) + k}) for k in range(30)]
    files = task.write(iter(batches))
    assert [file.rows for file in files] == [15_000, 15_000]
    for file in files:
        read = pq.ParquetFile(tmp_path / file.path)
        assert read.metadata.num_row_groups == 1  # a reader pays for each, and each has its own dictionary
        assert json.loads(file.statistics)["numRecords"] == 15_000
    found = pq.read_table(tmp_path / files[0].path, partitioning=None).column("n").to_pylist()
    assert found == [n + k for k in range(30) for n in range(0, 1000, 2)]  # in the order they came in


def test_a_batch_is_split_by_every_combination_of_partition_values():
    batch = pa.RecordBatch.from_pydict(
        {"a": [1, 1, None, 2, None], "b": ["x", "y", "x", "x", "x"], "v": [0, 1, 2, 3, 4]}
    )
    parts = {values: part.column("v").to_pylist() for values, part in split(batch, ("a", "b"))}
    assert parts == {("1", "x"): [0], ("1", "y"): [1], (None, "x"): [2, 4], ("2", "x"): [3]}


def test_partition_values_are_spelled_as_delta_does():
    values = [None, "", "a", True, 3, date(2024, 1, 2), b"", "é".encode()]
    texts = [None, None, "a", "true", "3", "2024-01-02", None, "é"]
    assert [partition_text(value) for value in values] == texts


@pytest.mark.parametrize(
    ("kind", "value", "given"),
    [
        (pa.date32(), date(2024, 1, 2), datetime(2024, 1, 2)),
        (pa.date32(), date(2024, 1, 2), np.datetime64("2024-01-02T00:00:00", "ns")),
        (pa.date32(), date(2024, 1, 2), "2024-1-2"),
        (pa.int64(), 3, 3.0),
        (pa.int8(), -3, "-03"),
        (pa.bool_(), True, 1),
        (pa.bool_(), False, np.bool_(False)),
        (pa.string(), "3.0", 3.0),
    ],
)
def test_a_partition_is_replaced_however_its_value_is_spelled(table, kind, value, given):
    rows = pa.table({"x": [1, 2], "day": pa.array([value, None], kind)})
    schema = Schema.from_arrow(rows.schema).to_json()
    staged = table.stage(schema, partition_by=["day"])
    staged.commit(staged.task.write(iter(rows.to_batches())))
    assert table.stage(schema, "replace", partitions=[{"day": given}]).commit([]).committed
    assert table.rows()["x"].to_pylist() == [2]


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (pa.date32(), datetime(2024, 1, 2, 13)),
        (pa.date32(), date(2024, 1, 2).toordinal()),
        (pa.date32(), "2024-06-31"),
        (pa.int64(), 3.5),
        (pa.int64(), True),
        (pa.int64(), float("nan")),
        (pa.bool_(), "perhaps"),
    ],
)
def test_a_value_that_no_partition_can_have_is_refused(table, kind, given):
    rows = pa.table({"x": [1], "day": pa.array([None], kind)})
    schema = Schema.from_arrow(rows.schema).to_json()
    table.stage(schema, partition_by=["day"]).commit([])
    with pytest.raises(ConfigError, match=r"partitions name day=.*give a value of this type"):
        table.stage(schema, "replace", partitions=[{"day": given}])


def test_a_table_keeps_its_partition_columns_when_its_columns_change(table):
    table.stage(Schema.from_arrow(numbers(1).schema).to_json(), partition_by=["day"]).commit([])
    other = pa.table({"y": [1.5], "day": ["d"]})
    staged = table.stage(Schema.from_arrow(other.schema).to_json(), "overwrite", overwrite_schema=True)
    staged.commit(staged.task.write(iter(other.to_batches())))
    assert (table.partition_columns(), table.rows().to_pylist()) == (["day"], other.to_pylist())
    lacking = Schema.from_arrow(other.select(["y"]).schema).to_json()
    with pytest.raises(SchemaError, match=r"partitioned by \['day'\].* lack \['day'\].*another table"):
        table.stage(lacking, "overwrite", overwrite_schema=True)


def test_columns_that_an_overwrite_brings_may_be_times_without_a_zone(table):
    written(table, numbers(1))
    clock = pa.array([[datetime(2024, 1, 1)]], pa.list_(pa.timestamp("us")))
    result = written(table, pa.table({"c": clock}), mode="overwrite", overwrite_schema=True)
    assert result.version == table.version()
    assert table.rows()["c"].to_pylist() == clock.to_pylist()
    version = table.version()
    written(table, pa.table({"c": clock}))
    assert table.version() == version + 1  # no commit for a feature that is there


def test_statistics_hold_bounds_of_ordered_columns_and_none_of_floats(tmp_path):
    rows = pa.table(
        {"i": [3, None, 1], "f": [1.0, float("nan"), 2.0], "s": ["b" * 40, "a", None], "n": [[1], [2], None]}
    )
    path = tmp_path / "f.parquet"
    pq.write_table(rows, path, write_statistics=["i", "s"])
    found = statistics(pq.read_metadata(path), rows.schema, {"f": 0})
    assert found["numRecords"] == 3
    assert found["minValues"] == {"i": 1, "s": "a"}
    assert found["maxValues"]["i"] == 3
    assert found["maxValues"]["s"] > "b" * 40
    assert {name: found["nullCount"][name] for name in "ifs"} == {"i": 1, "f": 0, "s": 1}


def test_no_bounds_of_floats_are_in_files_that_delta_rs_writes(table):
    """They are without NaN, which Spark takes for greater than any number: its filters would lose rows by them."""

    def check(version, name):
        assert table.version() == version
        for action in pa.table(open_table(table.uri, None).get_add_actions()).to_pylist():
            assert (action["min"]["k"], action["min"].get("x"), action["null_count"]["k"]) == (1, None, 0)
            footer = pq.read_metadata(f"{table.uri}/{action['path']}")
            columns = [footer.row_group(0).column(number) for number in range(footer.num_columns)]
            bounded = {one.path_in_schema for one in columns if one.statistics and one.statistics.has_min_max}
            assert bounded == {"k", name}

    rows = pa.table({"k": [1, 2], "a.b": ["p", "q"], "x": [1.0, float("nan")], "d.e": [float("nan"), 1.0]})
    rows = rows.append_column("s", [[{"f": 1.0}, {"f": float("nan")}]]).append_column("l", [[[1.0], [float("nan")]]])
    table.append(rows)
    check(0, "a.b")
    table.append(rows)
    table.merge(rows.slice(0, 1), on=["k"])
    check(2, "a.b")
    table.append(rows)
    table.compact()
    assert len(table.files()) == 1
    check(4, "a.b")


def written(table, rows, **how):
    """Let a task and a driver write rows, without Spark."""
    staged = table.stage(delta_schema_of(rows), **how)
    return staged.commit(staged.task.write(iter(rows.to_batches())))


def delta_schema_of(rows):
    fields = json.loads(Schema.from_arrow(rows.schema).to_json())["fields"]
    return json.dumps({"type": "struct", "fields": fields})


def test_bounds_of_a_column_with_a_dot_are_not_those_of_a_struct(table):
    inner = pa.struct([("b", pa.int64()), ("l", pa.list_(pa.int64())), ("m", pa.map_(pa.string(), pa.int64()))])
    struct = pa.array([{"b": 5, "l": [1, 2], "m": [("k", 1)]}, {"b": None}], inner)
    written(table, pa.table({"a.b": [-1, 7], "a": struct, "z": [1, 2]}))
    assert [table.scan([(name, "<", 2)]).skipped for name in ("a.b", "z")] == [0, 0]
    assert [table.scan([("a.b", sign, limit)]).skipped for sign, limit in (("<", -1), (">", 7))] == [1, 1]


@pytest.mark.parametrize("text", ["\U00020bb7", "\U0010ffff", "\U0001f600", "é", "b" * 40 + "\U00020bb7"])
def test_no_text_is_outside_of_its_own_bounds(table, text):
    written(table, pa.table({"s": [text]}))
    for sign in ("=", ">=", "<="):
        assert table.scan([("s", sign, text)]).skipped == 0, sign


@pytest.mark.parametrize(
    ("kind", "far", "near"),
    [
        (pa.timestamp("us", "UTC"), 253402300800_000_000 + 8 * 3600_000_000, datetime(2026, 1, 1, tzinfo=UTC)),
        (pa.timestamp("us", "UTC"), -62135596800_000_000 - 3600_000_000, datetime(2026, 1, 1, tzinfo=UTC)),
        (pa.date32(), 2932897, date(2026, 1, 1)),
        (pa.date32(), -719163, date(2026, 1, 1)),
    ],
)
def test_moments_that_python_does_not_know_are_written_and_never_left_out(table, kind, far, near):
    whole = pa.int32() if kind == pa.date32() else pa.int64()
    values = pa.concat_arrays([pa.array([far], whole).cast(kind), pa.array([near], kind)])
    written(table, pa.table({"x": [1, 2], "at": values}))
    assert table.rows(["at"])["at"].cast(whole).to_pylist()[0] == far
    for sign in ("=", "<=", ">=", "<" if far < 0 else ">"):
        assert table.scan([("at", sign, near)]).skipped == 0, sign


@pytest.mark.parametrize("mode", ["name", "id"])
def test_a_table_that_maps_columns_is_not_written(table, mode):
    table.append(numbers(1))
    older = {"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}
    commit(table.uri, 1, older, edited_metadata(table.uri, lambda metadata: map_columns(metadata, mode)))
    with pytest.raises(StorageError, match=r"columnMapping.*Spark session with Delta"):
        table.append(numbers(1))
    assert table.version() == 1


def test_a_table_with_deletion_vectors_is_read_and_not_written(table):
    table.append(numbers(*range(40)))
    commit(table.uri, 1, protocol(["deletionVectors"], []))
    hide_rows(table.uri, 2)
    assert sorted(table.rows().column("x").to_pylist()) == [x for x in range(40) if x not in HIDDEN]
    with pytest.raises(StorageError, match=r"deletion vectors.*PURGE"):
        table.append(numbers(1))
    assert table.version() == 2


@pytest.mark.parametrize("setting", [{"delta.constraints.positive": "x > 0"}, {"delta.enableChangeDataFeed": "true"}])
def test_a_table_whose_promises_plain_files_would_break_is_not_written(table, setting):
    table.append(numbers(1))
    older = {"protocol": {"minReaderVersion": 1, "minWriterVersion": 4}}
    commit(table.uri, 1, older, edited_metadata(table.uri, lambda metadata: metadata.update(configuration=setting)))
    check_readable(open_table(table.uri, None), Storage.of(table.uri))
    with pytest.raises(StorageError, match=next(iter(setting))):
        check_writable(open_table(table.uri, None), table.uri)
    with pytest.raises(StorageError, match="Spark session with Delta"):
        table.append(numbers(2))


def test_types_that_delta_cannot_hold_are_refused_by_name():
    for kind in ("interval day to second", "variant", "void"):
        spark = {"type": "struct", "fields": [{"name": "c", "type": kind, "nullable": True, "metadata": {}}]}
        with pytest.raises(SchemaError, match="column 'c'"):
            delta_schema(json.dumps(spark))


@pytest.mark.parametrize("text", ["features", "sales.orders", "a.b.c.d", "a b", "", ".", "1.2.3"])
def test_what_is_neither_an_address_nor_a_name_is_refused_and_makes_no_folder(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"neither an address.*\./"):
        Table(text)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["./a.b.c", "{}/a.b.c", "file://{}/a.b.c", "file:{}/a.b.c"])
def test_an_address_has_a_slash_or_a_scheme(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    Table(form.format(tmp_path)).append(numbers(1))
    assert (tmp_path / "a.b.c" / "_delta_log").is_dir()


@pytest.mark.parametrize("name", ["a%20b", "100%25", "a\\b", "s3://bucket/run#1", "s3://bucket/run?1", "s3://b/50%/t"])
def test_an_address_that_delta_rs_takes_for_another_one_is_refused(tmp_path, name):
    table = Table(name if "://" in name else f"{tmp_path}/{name}")
    for touch in (table.exists, table.rows, lambda: table.append(numbers(1)), lambda: written(table, numbers(1))):
        with pytest.raises(ConfigError, match="takes for a part of a URL"):
            touch()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["50%", "a b", "é#1", "what?", "x[1]"])
def test_other_addresses_on_this_machine_are_what_they_say(tmp_path, name):
    written(Table(f"{tmp_path}/{name}"), numbers(1))
    assert Table(f"{tmp_path}/{name}").rows()["x"].to_pylist() == [1]
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["x[1]", "a|b", "^"])
def test_an_address_where_delta_rs_panics_when_it_appends_is_refused_then(tmp_path, name):
    with pytest.raises(ConfigError, match="in a folder's name, where delta-rs appends no rows"):
        Table(f"{tmp_path}/{name}/t").append(numbers(1))
    assert not list(tmp_path.iterdir())


def test_a_link_to_an_address_that_delta_rs_takes_for_another_one_is_refused(tmp_path):
    (tmp_path / "a%41b").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a%41b")
    with pytest.raises(ConfigError, match="has '%41', which delta-rs takes for a part of a URL"):
        Table(f"{tmp_path}/link/t").append(numbers(1))
    assert not list((tmp_path / "a%41b").iterdir())


def test_a_path_of_python_is_an_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Table(Path("a.b.c")).append(numbers(1))
    assert (tmp_path / "a.b.c" / "_delta_log").is_dir()


def test_a_name_is_for_a_session_alone():
    code = """
from sparkdl.errors import ConfigError
from sparkdl.tables.table import Table
table = Table("main.sales.orders")
assert table.uri == "main.sales.orders"
for touch in (table.exists, table.rows, table.history, table.files, table.compact, table.snapshot, table.vacuum):
    try:
        touch()
    except ConfigError as error:
        assert "is the name of a table in a catalog" in str(error), error
    else:
        raise AssertionError(touch)
for text, engine in (("main.sales.orders", "delta-rs"), ("./orders", "jvm")):
    try:
        Table(text, engine=engine)
    except ConfigError as error:
        assert "delta-rs" in str(error), error
    else:
        raise AssertionError(engine)
for text, engine in (("main.sales.orders", "auto"), ("./orders", "spark")):
    try:
        Table(text, {"AWS_REGION": "here"}, engine)
    except ConfigError as error:
        assert "storage_options are given" in str(error), error
    else:
        raise AssertionError(engine)
try:
    Table("./orders", engine="spark").version()
except ConfigError as error:
    assert "needs a session with Delta's extension" in str(error), error
import sys
assert "pyspark" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_which_engine_a_table_has_is_said_once(table, caplog):
    with caplog.at_level("INFO", logger="sparkdl"):
        table.append(numbers(1))
        table.append(numbers(2))
        assert table.rows().num_rows == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"the Delta table {table.uri} is read and written by delta-rs: the session has no Delta extension"
    ]
