"""Attempts, conflicts, orphans: what is visible when writers fail, race or die."""

import os
import time

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.columns.layout import Layout, plan_tensors
from sparkdl.config import ShardConfig
from sparkdl.errors import ConflictError, DataError, SchemaError, StorageError
from sparkdl.shards.files import PartWriter, write_table_shards
from sparkdl.shards.manifest import Manifest
from sparkdl.shards.sets import collect_garbage, list_sets
from sparkdl.shards.transaction import PartReport, Transaction
from sparkdl.storage import Storage

BATCH = pa.record_batch({"id": np.arange(10), "x": np.arange(10.0)})
TENSORS = plan_tensors(BATCH.schema)
CONFIG = ShardConfig(block_rows=4, spread_rows=False)


def begin(path, **options):
    arguments = {"layout": Layout(), "source": None, "config": CONFIG, "key": "", "overwrite": False, **options}
    return Transaction(str(path), **arguments)


def attempt(transaction, partition=0, batch=BATCH, tensors=TENSORS):
    """One task attempt, as its report reaches the driver."""
    writer = PartWriter(transaction.root, tensors, CONFIG, partition=partition, tag=transaction.tag)
    writer.write(batch)
    return PartReport.from_json(writer.finish().to_json())


def files(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def test_of_two_attempts_of_a_task_only_the_reported_one_stays(tmp_path):
    transaction = begin(tmp_path)
    with transaction:
        lost, won = attempt(transaction), attempt(transaction)
        assert lost.shards[0].path != won.shards[0].path
        assert [b.hash for b in lost.shards[0].blocks] == [b.hash for b in won.shards[0].blocks]
        assert not (tmp_path / "manifest.json").exists()
        manifest = transaction.commit([won], TENSORS, [])
    assert manifest.rows == 10
    assert files(tmp_path) == sorted(["manifest.json", won.shards[0].path])


def test_a_set_whose_commit_got_no_answer_keeps_its_shards(lost_answers):
    with begin(lost_answers) as transaction:
        made = transaction.commit([attempt(transaction)], TENSORS, [])
    with pytest.raises(ConflictError), begin(lost_answers) as other:
        other.commit([attempt(other)], TENSORS, [])
    assert [f"shards/{entry.name}" for entry in transaction.root.child("shards").list()] == [made.shards[0].path]


def test_reports_in_any_order_give_the_same_set(tmp_path):
    hashes = []
    for name, order in (("a", (0, 1, 2)), ("b", (2, 0, 1))):
        with begin(tmp_path / name) as transaction:
            reports = [attempt(transaction, partition) for partition in order]
            hashes.append(transaction.commit(reports, TENSORS, []).content_hash)
    assert hashes[0] == hashes[1]


def test_files_that_another_machine_has_written_to_its_own_disk_make_no_set(tmp_path):
    with begin(tmp_path / "driver") as transaction:
        elsewhere = PartWriter(Storage.of(tmp_path / "executor"), TENSORS, CONFIG, partition=0, tag=transaction.tag)
        elsewhere.write(BATCH)
        with pytest.raises(StorageError, match=r"what executors wrote to .*/driver is not there on the driver: give a"):
            transaction.commit([elsewhere.finish()], TENSORS, [])
    assert files(tmp_path / "driver") == []


def test_a_transaction_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), begin(tmp_path) as transaction:  # noqa: PT012
        attempt(transaction)
        raise RuntimeError
    assert files(tmp_path) == []


def test_an_error_of_one_task_is_raised_and_the_files_of_the_others_go(tmp_path):
    with pytest.raises(SchemaError, match="of this column"), begin(tmp_path) as transaction:  # noqa: PT012
        bad = PartReport(partition=1, error=("SchemaError", "of this column"))
        transaction.commit([attempt(transaction), bad], TENSORS, [])
    assert files(tmp_path) == []


def test_two_writers_at_once_leave_one_whole_set(tmp_path):
    first, second = begin(tmp_path), begin(tmp_path)
    assert first.existing() is second.existing() is None
    with pytest.raises(ConflictError), first, second:  # noqa: PT012
        one, two = attempt(first), attempt(second)
        committed = first.commit([one], TENSORS, [])
        second.commit([two], TENSORS, [])
    assert Manifest.load(str(tmp_path)) == committed
    assert files(tmp_path) == sorted(["manifest.json", one.shards[0].path])


def test_a_dead_writers_files_are_invisible_and_go_when_they_are_a_day_old(tmp_path):
    dead = begin(tmp_path)
    attempt(dead)
    attempt(dead, partition=1)
    with pytest.raises(StorageError, match="no committed shard set"):
        Manifest.load(str(tmp_path))
    [info] = list_sets(tmp_path)
    assert (info.manifest, info.orphan_files) == (None, 2)
    old, young = files(tmp_path)
    yesterday = time.time() - 90_000
    os.utime(tmp_path / old, (yesterday, yesterday))
    with begin(tmp_path) as transaction:
        report = attempt(transaction)
        transaction.commit([report], TENSORS, [])
    assert files(tmp_path) == sorted(["manifest.json", young, report.shards[0].path])


def test_tasks_that_disagree_on_a_vectors_length_are_named(tmp_path):
    schema = pa.schema(
        [
            (
                "v",
                pa.struct(
                    [
                        ("type", pa.int8()),
                        ("size", pa.int32()),
                        ("indices", pa.list_(pa.int32())),
                        ("values", pa.list_(pa.float64())),
                    ]
                ),
            )
        ]
    )
    tensors = plan_tensors(schema)
    with begin(tmp_path) as transaction:
        reports = []
        for partition, length in ((0, 2), (3, 4)):
            vector = {"type": 1, "size": None, "indices": None, "values": [1.0] * length}
            batch = pa.RecordBatch.from_pylist([{"v": vector}], schema=schema)
            reports.append(attempt(transaction, partition, batch, tensors))
        with pytest.raises(
            DataError, match=r"'v' has rows of shape \(2,\) in partition 0 and of \(4,\) in partition 3"
        ):
            transaction.commit(reports, tensors, [])
    assert files(tmp_path) == []


def test_a_frame_that_changes_between_its_two_readings_is_refused(tmp_path):
    with begin(tmp_path) as transaction:
        report = attempt(transaction)
        report.unseen["s"] = 4
        tensors = plan_tensors(pa.schema([("s", pa.string())]))
        with pytest.raises(
            DataError, match=r"'s' has 4 values that were not there .* changes each time it is computed"
        ):
            transaction.commit([report], tensors, ["s"])


def test_list_and_garbage_collection(tmp_path):
    table = pa.Table.from_batches([BATCH])
    keep = write_table_shards(table, tmp_path / "a" / "keep")
    write_table_shards(table, tmp_path / "b")
    (tmp_path / "b" / "shards" / "x.arrow").write_bytes(b"123")
    (tmp_path / "b" / ".sparkdl-tmp-dead").write_bytes(b"12")
    broken = write_table_shards(table, tmp_path / "broken")
    (tmp_path / "broken" / "manifest.json").write_text("{")
    infos = {info.uri.rsplit("/", 1)[-1]: info for info in list_sets(tmp_path)}
    assert infos.keys() == {"keep", "b", "broken"}
    assert infos["keep"].manifest == keep
    assert (infos["b"].orphan_files, infos["b"].orphan_bytes) == (2, 5)
    assert "write the set again" in infos["broken"].problem

    assert collect_garbage(tmp_path) == []
    assert len(collect_garbage(tmp_path, orphan_seconds=0, dry_run=True)) == 2
    assert sum(removed.bytes for removed in collect_garbage(tmp_path, orphan_seconds=0)) == 5
    assert files(tmp_path / "broken") == sorted(["manifest.json", *(shard.path for shard in broken.shards)])
    assert len(collect_garbage(tmp_path, set_seconds=0)) == 2
    assert [info.uri for info in list_sets(tmp_path)] == [str(tmp_path / "broken")]
