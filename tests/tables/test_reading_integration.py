"""Tables of other engines read by Spark's Parquet reader: hidden rows, mapped columns, odd folders. No JAR."""

from __future__ import annotations

import datetime as dt
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from delta_log import HIDDEN, actions, commit, edited_metadata, hide_rows, map_columns, protocol, remove

from sparkdl.errors import IntegrityError, StorageError
from sparkdl.tables.table import Table

LEFT = [x for x in range(40) if x not in HIDDEN]


@pytest.fixture(params=["table", "a é+b table"])
def table(tmp_path, request):
    return Table(str(tmp_path / request.param))


def numbers(start, count, day="2024-01-01"):
    when = dt.date.fromisoformat(day)
    return pa.table({"x": pa.array(range(start, start + count), pa.int64()), "day": pa.array([when] * count)})


def values(frame, column="x"):
    return sorted(row[0] for row in frame.select(column).collect())


def test_rows_that_a_vector_hides_are_left_out(spark, table):
    table.append(numbers(0, 40))
    table.append(numbers(40, 3))
    commit(table.uri, 2, protocol(["deletionVectors"], []))
    hide_rows(table.uri, 3)
    frame = table.read(spark)
    assert values(frame) == [*LEFT, 40, 41, 42]
    assert frame.columns == ["x", "day"]
    assert values(frame.where("x > 17 and x < 31"), "x") == [x for x in LEFT if 17 < x < 31]
    assert frame.count() == 37
    assert frame.select("day").distinct().count() == 1
    assert values(table.read(spark, version=2)) == list(range(43))


@pytest.mark.slow
def test_hidden_rows_are_told_by_their_place_in_a_file_of_many_row_groups(spark, tmp_path):
    table = Table(str(tmp_path / "table"))
    rows = 3 << 20  # three row groups as delta-rs writes them, of which filters skip some
    table.append(numbers(0, rows))
    commit(table.uri, 1, protocol(["deletionVectors"], []))
    hide_rows(table.uri, 2)
    frame = table.read(spark)
    assert frame.count() == rows - len(HIDDEN)
    assert values(frame.where(f"x < 9 or x >= {rows - 2}")) == [0, 1, 2, 5, 6, 8, rows - 2, rows - 1]


@pytest.mark.parametrize("move", ["aB", "day=2030-01-01"])
def test_partition_values_are_the_logs_wherever_the_file_lies(spark, table, move):
    from deltalake import write_deltalake

    write_deltalake(table.uri, pa.concat_tables([numbers(0, 2), numbers(2, 2, "2024-01-02")]), partition_by=["day"])
    add = next(action["add"] for action in actions(table.uri) if "add" in action)
    os.makedirs(f"{table.uri}/{move}")
    path = f"{move}/{os.path.basename(add['path'])}"
    os.rename(f"{table.uri}/{add['path']}", f"{table.uri}/{path}")
    commit(table.uri, 1, remove(add), {"add": {**add, "path": path}})
    found = {tuple(row) for row in table.read(spark).collect()}
    assert found == {(x, dt.date(2024, 1, 1 + x // 2)) for x in range(4)}
    assert found == {tuple(row.values()) for row in table.rows().to_pylist()}


@pytest.mark.parametrize("scheme", ["file:", "file://"])
def test_a_clone_is_read_from_the_files_of_its_original(spark, table, tmp_path, scheme):
    table.append(numbers(0, 2))
    table.append(numbers(2, 2))
    add = next(action["add"] for action in actions(table.uri) if "add" in action)
    os.rename(f"{table.uri}/{add['path']}", tmp_path / "other.parquet")
    commit(table.uri, 2, remove(add), {"add": {**add, "path": f"{scheme}{tmp_path}/other.parquet"}})
    with pytest.raises(IntegrityError, match="does not lie in the table's folder"):
        table.read(spark)
    allowed = Table(table.uri, allow_folders=[f"file://{tmp_path}"])
    assert values(allowed.read(spark)) == [0, 1, 2, 3]
    with pytest.raises(StorageError, match="does not lie in its folder"):  # workers leave it to Spark
        allowed.scan()


def test_mapped_columns_have_the_names_of_the_table(spark, table):
    inner = pa.array([[{"c": 1}], None])
    table.append(pa.table({"a": [1, 2], "b": [{"p": 1, "q": "x"}, None], "l": inner}))
    renamed = {"a": "b", "b": "a", "p": "q", "q": "p", "c": "new name"}  # crosswise: any mix-up shows
    features = protocol(["columnMapping"], [])
    commit(table.uri, 1, features, edited_metadata(table.uri, lambda found: map_columns(found, renamed=renamed)))
    frame = table.read(spark)
    assert frame.columns == ["b", "a", "l"]
    assert [row.asDict(recursive=True) for row in frame.orderBy("b").collect()] == [
        {"b": 1, "a": {"q": 1, "p": "x"}, "l": [{"new name": 1}]},
        {"b": 2, "a": None, "l": None},
    ]
    assert [row.b for row in frame.where("a.q = 1").collect()] == [1]
    assert not any(field.metadata for field in frame.schema)


def by_id(table, **files):
    """A table that finds columns by id: x has 1, y 2; each file has these columns, by name with their id."""
    table.append(pa.table({"x": [1, 2], "y": [10, 20]}))
    first = next(action["add"] for action in actions(table.uri) if "add" in action)
    added = []
    for name, ids in files.items():
        fields = [pa.field(one, pa.int64(), metadata=ids[one] and {"PARQUET:field_id": str(ids[one])}) for one in ids]
        pq.write_table(pa.table([[5, 6], [50, 60]], schema=pa.schema(fields)), f"{table.uri}/{name}.parquet")
        size = os.path.getsize(f"{table.uri}/{name}.parquet")
        added.append({"add": {**first, "path": f"{name}.parquet", "size": size, "stats": None}})
    mapped = edited_metadata(table.uri, lambda found: map_columns(found, "id", renamed={"x": "y", "y": "x"}))
    commit(table.uri, 1, protocol(["columnMapping"], []), mapped, remove(first), *added)


def test_a_table_that_maps_columns_by_id_is_read_where_its_files_have_the_names_of_these_ids(spark, table):
    by_id(table, one={"x": 1, "y": 2}, other={"y": 2, "z": 3})
    assert {tuple(row) for row in table.read(spark).collect()} == {(5, 50), (6, 60), (None, 5), (None, 6)}
    assert {tuple(row.values()) for row in table.rows().to_pylist()} == {(5, 50), (6, 60), (None, 5), (None, 6)}


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ({"y": 1, "x": 2}, "calls a column 'y' that has the id 1, of 'x'"),
        ({"x": 1, "b": 2}, "calls a column 'b' that has the id 2, of 'y'"),
        ({"x": 7, "y": 2}, "calls a column 'x' that has the id 7, of no column"),
        ({"x": 1, "y": None}, "has no id for its column 'y'"),
    ],
)
def test_a_table_that_maps_columns_by_id_is_refused_where_a_file_has_other_names(spark, table, ids, said):
    by_id(table, sound={"x": 1, "y": 2}, wrong=ids)
    for read in (lambda: table.read(spark), table.rows, table.snapshot, table.check_readable, table.scan):
        with pytest.raises(StorageError, match=rf"its file wrong.parquet {said}, while.*Spark session with Delta"):
            read()


def test_mapping_hidden_rows_and_odd_folders_go_together(spark, table):
    from deltalake import write_deltalake

    write_deltalake(table.uri, pa.concat_tables([numbers(0, 40), numbers(40, 2, "2024-01-02")]), partition_by=["day"])
    first, second = sorted((action["add"] for action in actions(table.uri) if "add" in action), key=lambda a: a["path"])
    mapped = edited_metadata(table.uri, lambda found: map_columns(found, renamed={"x": "y", "day": "when"}))
    commit(table.uri, 1, protocol(["columnMapping", "deletionVectors"], []), mapped, remove(second))
    hide_rows(table.uri, 2, first)
    os.makedirs(f"{table.uri}/Zz")
    os.rename(f"{table.uri}/{second['path']}", f"{table.uri}/Zz/f.parquet")
    commit(table.uri, 3, {"add": {**second, "path": "Zz/f.parquet"}})
    frame = table.read(spark)
    assert values(frame, "y") == [*LEFT, 40, 41]
    assert {row.when: row["count"] for row in frame.groupBy("when").count().collect()} == {
        dt.date(2024, 1, 1): len(LEFT),
        dt.date(2024, 1, 2): 2,
    }
