"""What other readers find in the history of a table, without Spark."""

from __future__ import annotations

import itertools
from datetime import date

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema

from sparkdl.storage import Storage
from sparkdl.tables.commit import WritePlan
from sparkdl.tables.delta import optimistic
from sparkdl.tables.engine import WriteRequest
from sparkdl.tables.parquet import WriteTask, partition_text
from sparkdl.tables.record import partition_predicate


def write(path, rows, mode, by, partitions=None):
    """What ``Table.write`` does, with the rows at hand and no Spark."""
    plan = WritePlan(
        uri=str(path),
        options=None,
        schema=Schema.from_arrow(rows.schema),
        request=WriteRequest(mode=mode, partition_by=by, partitions=partitions),
    )
    files = WriteTask(root=Storage.of(str(path)), write_id=mode, partition_by=by).write(iter(rows.to_batches()))
    return optimistic(str(path), lambda: plan.commit(files, mode))


def days(*values, kind=None):
    return pa.table({"x": pa.array(range(len(values)), pa.int64()), "day": pa.array(values, kind)})


def last(path):
    return DeltaTable(path).history(1)[0]


def test_a_replacement_is_an_overwrite_of_a_predicate_with_its_numbers(tmp_path):
    write(tmp_path, days("a", "a", "b", "c"), "append", ("day",))
    before = {file.split("/")[-2]: (tmp_path / file).stat().st_size for file in DeltaTable(tmp_path).file_uris()}
    write(tmp_path, days("a", "b", "b"), "replace", ("day",))
    entry = last(tmp_path)
    assert entry["operation"] == "WRITE"
    assert entry["operationParameters"]["mode"] == "Overwrite"
    assert entry["operationParameters"]["predicate"] == "`day` IN ('a', 'b')"
    assert (entry["isBlindAppend"], entry["readVersion"]) == (False, 0)
    added = [file for file in DeltaTable(tmp_path).file_uris() if "day=c" not in file]
    assert entry["operationMetrics"] == {
        "numOutputRows": "3",
        "numFiles": "2",
        "numOutputBytes": str(sum((tmp_path / file).stat().st_size for file in added)),
        "numRemovedFiles": "2",
        "numRemovedBytes": str(before["day=a"] + before["day=b"]),
    }


def test_appends_and_overwrites_are_recorded_with_their_numbers(tmp_path):
    write(tmp_path, days("a"), "append", ("day",))
    write(tmp_path, days("a", "b"), "append", ("day",))
    entry = last(tmp_path)
    assert (entry["operationParameters"]["mode"], entry["isBlindAppend"]) == ("Append", True)
    assert (entry["operationMetrics"]["numOutputRows"], entry["operationMetrics"]["numRemovedFiles"]) == ("2", "0")
    write(tmp_path, days("z"), "overwrite", ("day",))
    entry = last(tmp_path)
    assert (entry["operationParameters"]["mode"], entry["isBlindAppend"]) == ("Overwrite", False)
    assert (entry["operationMetrics"]["numOutputRows"], entry["operationMetrics"]["numRemovedFiles"]) == ("1", "3")


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.string(), ["a/b", "it's", "50%", "x=y", "001", "é", "#", "in", "\\"]),
        (pa.int64(), [1, -2, 30, 2]),
        (pa.int8(), [1, -2, 30, 2]),
        (pa.date32(), [date(2024, 1, 1), date(2024, 1, 2), date(1969, 12, 31)]),
        (pa.bool_(), [True, False]),
    ],
)
def test_every_choice_of_partitions_is_replaced_and_no_other(tmp_path, kind, values):
    values = [*values, None]
    choices = [[value] for value in values] + [values[:2], values[1:], [values[0], None]]
    for number, choice in enumerate(choices):
        path = tmp_path / str(number)
        write(path, days(*values, kind=kind), "append", ("day",))
        partitions = tuple({"day": partition_text(value)} for value in choice)
        write(path, days(kind=kind), "replace", ("day",), partitions)
        left = pa.table(DeltaTable(path).scan()).column("day").to_pylist()
        assert sorted(map(str, left)) == sorted(str(value) for value in values if value not in choice)
        mixed = None in choice and len(choice) > 1  # delta-rs has no filter for it
        assert mixed or last(path)["operationParameters"]["mode"] == "Overwrite"


def test_any_set_of_pairs_is_replaced_and_no_other(tmp_path):
    pairs = [(a, b) for a in ("a", "b") for b in (1, 2)]
    rows = pa.table({"x": range(4), "a": [a for a, _ in pairs], "b": [b for _, b in pairs]})
    for count in range(5):
        for number, choice in enumerate(itertools.combinations(pairs, count)):
            path = tmp_path / f"{count}-{number}"
            write(path, rows, "append", ("a", "b"))
            version = DeltaTable(path).version()
            write(path, rows.slice(0, 0), "replace", ("a", "b"), tuple({"a": a, "b": str(b)} for a, b in choice))
            left = {(row["a"], row["b"]) for row in pa.table(DeltaTable(path).scan()).to_pylist()}
            assert left == set(pairs) - set(choice)
            assert DeltaTable(path).version() == version + bool(choice)


@pytest.mark.parametrize(
    ("partitions", "predicate"),
    [
        ((), "false"),
        (({"day": "a"},), "`day` IN ('a')"),
        (({"day": "it's"}, {"day": None}), r"`day` IN ('it\'s') OR `day` IS NULL"),
        (({"a": "1", "b": None},), "(`a` = '1' AND `b` IS NULL)"),
        (({"a": "1"}, {"a": "2", "b": "x"}), "(`a` = '1') OR (`a` = '2' AND `b` = 'x')"),
        (({},), "(true)"),
    ],
)
def test_a_predicate_says_which_partitions(partitions, predicate):
    assert partition_predicate(partitions) == predicate
