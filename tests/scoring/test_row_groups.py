"""Parquet files as Spark would read them: every row once, in order, under the wanted names and types, or a refusal."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import SchemaError, StorageError
from sparkdl.scoring.row_groups import Field, Piece, PieceReader
from sparkdl.scoring.scan import packed_into_tasks


def read(path, *fields, parts=1, part=0, values=(), case_sensitive=False):
    reader = PieceReader((Piece(str(path), part, parts, tuple(values)),), fields, case_sensitive)
    return pa.Table.from_batches(list(reader), pa.schema([(field.name, field.kind) for field in fields]))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.parquet"


def test_the_parts_of_a_file_are_its_rows_once_and_in_order(path):
    pq.write_table(pa.table({"a": range(1000)}), path, row_group_size=90)
    field = Field("a", "a", pa.int64())
    for parts in (1, 2, 5, 12, 40):
        rows = [row for part in range(parts) for row in read(path, field, parts=parts, part=part)["a"].to_pylist()]
        assert rows == list(range(1000)), parts


def test_batches_of_wide_rows_have_few_rows(path):
    pq.write_table(pa.table({"a": [bytes(1 << 20)] * 40}), path, compression="none", use_dictionary=False)
    reader = PieceReader((Piece(str(path), 0, 1),), (Field("a", "a", pa.binary()),))
    assert max(batch.num_rows for batch in reader) <= 4


def test_columns_come_under_the_wanted_names_and_wider_types(path):
    table = pa.table({
        "Small": pa.array([1, None, -3], pa.int8()),
        "unsigned": pa.array([1, 2, 2**32 - 1], pa.uint32()),
        "half": pa.array([0.5, None, 2.0], pa.float32()),
        "words": pa.array(["a", None, "a"]).dictionary_encode(),
        "large": pa.array(["a", None, "a"], pa.large_string()),
        "list": pa.array([[1.0], None, [2.0, None]], pa.list_(pa.float32())),
    })  # fmt: skip
    pq.write_table(table, path)
    wanted = [
        Field("small", "small", pa.int32()),
        Field("u", "unsigned", pa.int64()),
        Field("h", "half", pa.float64()),
        Field("w", "words", pa.string()),
        Field("l", "large", pa.string()),
        Field("v", "list", pa.list_(pa.float64())),
        Field("absent", "absent", pa.float32()),
    ]
    found = read(path, *wanted)
    assert found.to_pydict() == {
        "small": [1, None, -3],
        "u": [1, 2, 2**32 - 1],
        "h": [0.5, None, 2.0],
        "w": ["a", None, "a"],
        "l": ["a", None, "a"],
        "v": [[1.0], None, [2.0, None]],
        "absent": [None, None, None],
    }


def test_case_counts_where_the_session_says_so(path):
    pq.write_table(pa.table({"A": [1]}), path)
    field = Field("a", "a", pa.int64())
    assert read(path, field)["a"].to_pylist() == [1]
    assert read(path, field, case_sensitive=True)["a"].to_pylist() == [None]


def test_values_of_the_path_fill_their_columns(path):
    pq.write_table(pa.table({"a": [1, 2]}), path)
    fields = [
        Field("a", "a", pa.int64()),
        Field("day", "day", pa.date32(), from_path=True),
        Field("n", "n", pa.int32(), from_path=True),
    ]
    found = read(path, *fields, values=[("day", "2024-02-29"), ("n", None)])
    assert found["day"].to_pylist() == [datetime.date(2024, 2, 29)] * 2
    assert found["n"].to_pylist() == [None, None]


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (pa.array([1], pa.int64()), pa.int32()),
        (pa.array([1], pa.uint32()), pa.int32()),
        (pa.array([1], pa.int32()), pa.float32()),
        (pa.array([1.0], pa.float64()), pa.float32()),
        (pa.array(["1"]), pa.int32()),
        (pa.array([1]), pa.string()),
        (pa.array([True]), pa.int32()),
        (pa.array([1], pa.timestamp("ns")), pa.timestamp("us")),
        (pa.array([1], pa.timestamp("us", "UTC")), pa.timestamp("us")),
        (pa.array([[1]]), pa.int64()),
    ],
)
def test_a_type_that_spark_reads_otherwise_is_refused(path, stored, wanted):
    pq.write_table(pa.table({"a": stored}), path, version="2.6")
    with pytest.raises(SchemaError, match=r"column 'a' of .*read_files=False"):
        read(path, Field("a", "a", wanted))


@pytest.mark.parametrize(
    "marks", [{"org.apache.spark.version": "2.4.8"}, {"org.apache.spark.legacyDateTime": ""}], ids=["Spark 2", "legacy"]
)
def test_dates_of_the_old_calendar_are_left_to_spark(path, marks):
    dates = pa.table({"a": pa.array([datetime.date(1500, 1, 1)])})
    pq.write_table(dates.replace_schema_metadata(marks), path)
    with pytest.raises(SchemaError, match="read_files=False"):
        read(path, Field("a", "a", pa.date32()))


def test_instants_as_spark_writes_them_by_default_are_read(path):
    instant = datetime.datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=datetime.UTC)
    table = pa.table({"a": pa.array([instant], pa.timestamp("us", "UTC"))})
    pq.write_table(table, path, use_deprecated_int96_timestamps=True)
    assert read(path, Field("a", "a", pa.timestamp("us", "UTC")))["a"].to_pylist() == [instant]


def test_a_file_that_is_gone_or_damaged_is_named(path):
    field = Field("a", "a", pa.int64())
    with pytest.raises(StorageError, match=f"cannot read {path}"):
        read(path, field)
    path.write_bytes(b"PAR1 nothing of the kind PAR1")
    with pytest.raises(StorageError, match=f"cannot read {path}"):
        read(path, field)


@given(
    sizes=st.lists(st.integers(1, 10_000), min_size=1, max_size=30),
    largest=st.integers(1, 5_000),
    opening=st.integers(0, 500),
    slots=st.integers(1, 64),
)
def test_every_part_of_every_file_is_in_one_task(sizes, largest, opening, slots):
    files = [(f"{n:03}", size) for n, size in enumerate(sizes)]
    tasks = list(packed_into_tasks(files, largest=largest, opening=opening, slots=slots))
    pieces = [piece for task in tasks for piece in task]
    assert [(piece.path, piece.part) for piece in pieces] == sorted((piece.path, piece.part) for piece in pieces)
    for path, size in files:
        mine = [piece for piece in pieces if piece.path == path]
        assert [piece.part for piece in mine] == list(range(mine[0].parts))
        assert size / mine[0].parts <= largest
    assert all(tasks)
