"""The journal of a table: what it says is what delta-rs says, or nothing."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from delta_log import actions, commit, edited_metadata, protocol, remove

from sparkdl.errors import ConflictError, StorageError
from sparkdl.storage import Storage
from sparkdl.tables.journal import Journal
from sparkdl.tables.table import Table


def rows(*values):
    return pa.table({"x": pa.array(values, pa.int64())})


def values(tail):
    return [value for each in tail.rows for value in each.column("x").to_pylist()]


@pytest.fixture
def table(tmp_path):
    """A table at version 0, with one row."""
    table = Table(str(tmp_path / "table"), engine="delta-rs")
    table.append(rows(0))
    return table


@pytest.fixture
def journal(table):
    return table.journal


def test_what_it_appends_delta_rs_reads_and_the_other_way_round(table, journal):
    begin = journal.proof(0)
    first = journal.append(rows(1, 2), 0)
    assert table.append(rows(3), expected_version=1) == 2
    last = journal.append(rows(4), 2)
    assert sorted(table.rows().column("x").to_pylist()) == [0, 1, 2, 3, 4]
    assert table.version() == 3
    assert [file.rows for file in table.files()].count(2) == 1
    assert table.history(1)[0]["operation"] == "WRITE"
    tail = journal.since(0, begin)
    assert (tail.version, tail.proof, values(tail)) == (3, last, [1, 2, 3, 4])
    assert values(journal.since(1, first)) == [3, 4]
    assert journal.since(3, last).rows == ()


def test_of_those_who_append_to_one_version_one_succeeds_and_nothing_is_left_of_the_others(table, journal, tmp_path):
    def append(value):
        try:
            return journal.append(rows(value), 0) and value
        except ConflictError:
            return None

    with ThreadPoolExecutor(8) as pool:
        done = [value for value in pool.map(append, range(1, 9)) if value]
    assert len(done) == 1
    assert sorted(table.rows().column("x").to_pylist()) == [0, *done]
    assert len(list((tmp_path / "table").glob("*.parquet"))) == 2
    with pytest.raises(ConflictError):
        table.append(rows(9), expected_version=0)


def test_a_commit_whose_answer_was_lost_stands_with_its_rows(lost_answers):
    journal = Journal(Storage.of(lost_answers).child("table"))
    begin = journal.append(rows(0), -1)
    last = journal.append(rows(1), 0)
    with pytest.raises(ConflictError):
        journal.append(rows(2), 0)
    tail = journal.since(0, begin)
    assert (tail.version, tail.proof, values(tail)) == (1, last, [1])
    assert len([entry for entry in journal.root.list() if not entry.is_dir]) == 2


def test_a_file_that_is_gone_is_one_sentence(table, tmp_path):
    for file in (tmp_path / "table").glob("*.parquet"):
        file.unlink()
    for read in (table.snapshot, table.rows):
        with pytest.raises(StorageError, match=r"cannot read from the Delta table .*/table: .*\.parquet"):
            read()


def test_a_compaction_changes_no_rows(table, journal):
    begin = journal.proof(0)
    for value in range(1, 6):
        journal.append(rows(value), value - 1)
    table.compact(1 << 20)
    assert table.version() == 6
    assert len(table.files()) == 1
    assert values(journal.since(0, begin)) == [1, 2, 3, 4, 5]
    newest = journal.since(4, journal.proof(4))
    assert (newest.version, values(newest)) == (6, [5])
    journal.append(rows(6), 6)
    assert table.rows().num_rows == 7


@pytest.mark.parametrize("proofs", ["of another table", "of another version"])
def test_another_history_is_noticed(table, journal, tmp_path, proofs):
    journal.append(rows(1), 0)
    other = Table(str(tmp_path / "other"), engine="delta-rs")
    other.append(rows(0))
    proof = other.journal.proof(0) if proofs == "of another table" else journal.proof(1)
    assert journal.since(0, proof) is None
    assert journal.since(7, proof) is None


def test_what_is_no_append_is_not_told(table, journal):
    begin = journal.proof(0)
    add = next(action["add"] for action in actions(table.uri) if "add" in action)
    for change in (
        remove(add),
        protocol(["deletionVectors"], []),
        edited_metadata(table.uri, lambda metadata: metadata.update(name="other")),
        {"add": {**add, "deletionVector": {"storageType": "u"}}},
        {"add": {**add, "partitionValues": {"day": "1"}}},
        {"add": {**add, "path": "missing.parquet"}},
        {"add": {**add, "path": "../table/outside.parquet"}},
        {"add": {**add, "path": "/etc/passwd"}},
        {"add": {}},
        {"add": None},
        {"something new": {}},
        "text",
    ):
        commit(table.uri, 1, change)
        assert journal.since(0, begin) is None, change
    (table._address.root.child("_delta_log").child(f"{1:020d}.json")).write_atomic(b"{cut sho")
    assert journal.since(0, begin) is None


def test_a_log_that_begins_later_is_not_told(table, journal):
    begin = journal.proof(0)
    for value in range(1, 4):
        journal.append(rows(value), value - 1)
    table.compact()
    table.append(rows(9))
    log = os.path.join(table.uri.removeprefix("file://"), "_delta_log")
    os.remove(os.path.join(log, f"{2:020d}.json"))  # as delta-rs does with what a checkpoint covers and is old
    assert json.loads((Path(log) / "_last_checkpoint").read_text())["version"] == 4
    assert journal.since(0, begin) is None
    assert journal.since(3, journal.proof(3)).version == 5
    assert sorted(table.rows().column("x").to_pylist()) == [0, 1, 2, 3, 9]


def test_a_lock_that_only_delta_rs_knows_is_named(tmp_path, monkeypatch):
    assert not Table(str(tmp_path / "t")).journal.locks_elsewhere
    assert Table(str(tmp_path / "t"), {"aws_s3_locking_provider": "dynamodb"}).journal.locks_elsewhere
    monkeypatch.setenv("AWS_S3_LOCKING_PROVIDER", "dynamodb")
    assert Table(str(tmp_path / "t")).journal.locks_elsewhere
