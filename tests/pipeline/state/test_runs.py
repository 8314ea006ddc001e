"""The table of runs: a row a run, also of many at once, of a failed one, and of what an older version wrote."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from sparkdl.errors import DataError, SchemaError
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.runs import RUNS, add_run
from sparkdl.tables.table import Table


def record_of(number=0):
    record = RunRecord(pipeline="shop", run_id=f"run-{number}", started="2026-03-20T13:00:00+01:00")
    record.end("nothing new", "as it was")
    record.places["record"] = f"/runs/run-{number}/record.json"
    return record


@pytest.fixture
def table(tmp_path):
    return Table(str(tmp_path / "runs"))


def test_a_run_is_a_row_with_its_columns(table):
    record = record_of()
    record.fail(DataError("no row " + "x" * 5000))
    record.rows = {"read": 5, "kept": 3, "quarantined": 1, "duplicates": 1}
    record.model, record.predictions, record.seconds = {"version": 4, "champion": 3}, {"a": 2, "b": 5}, 1.5
    add_run(table, record)
    assert table.columns() == RUNS.names
    row = table.rows().to_pylist()[0]
    assert row["started"] == datetime(2026, 3, 20, 12, tzinfo=UTC)
    assert (row["outcome"], row["exit_code"], row["error"]) == ("refused", 1, "DataError")
    assert len(row["message"]) == 2000
    assert [row[name] for name in RUNS.names if name.startswith("rows_")] == [5, 3, 1, 1, 7]
    assert (row["version"], row["champion"], row["value"], row["report"]) == (4, 3, None, None)


def test_rows_of_steps_that_a_run_did_not_come_to_are_null(table):
    ingested, scored = record_of(1), record_of(2)
    ingested.rows = scored.rows = {"read": 5, "kept": 3, "quarantined": 1, "duplicates": 1}
    scored.windows["score"] = ["2026-03-01"]  # which an earlier run predicted
    for record in (record_of(0), ingested, scored):
        add_run(table, record)
    rows = sorted(table.rows().to_pylist(), key=lambda row: row["run_id"])
    assert [(row["rows_read"], row["rows_predicted"]) for row in rows] == [(None, None), (5, None), (5, 0)]


def test_a_run_that_was_judged_tells_both_values(table, record_of_task):
    record = record_of_task("binary", theirs=0.3)
    add_run(table, record)
    row, decision = table.rows().to_pylist()[0], record.evaluated.decision
    assert (row["label"], row["metric"]) == ("target", "auc")
    assert row["value"] == decision.challenger.values["auc"]
    assert row["champion_value"] == decision.champion.values["auc"]


def test_runs_that_end_at_once_are_all_there(table):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: add_run(table, record_of(number)), range(40)))
    assert sorted(table.rows(["run_id"])["run_id"].to_pylist()) == sorted(f"run-{n}" for n in range(40))
    assert len(table.files()) < 40, "the small files were never joined"


def test_rows_and_receipts_are_written_and_read_without_pandas(tmp_path):
    program = """
        import sys
        from sparkdl.pipeline.state.receipts import Receipt, ReceiptTable
        from sparkdl.pipeline.state.record import RunRecord
        from sparkdl.pipeline.state.runs import add_run
        from sparkdl.storage import Storage
        from sparkdl.tables.table import Table

        folder = sys.argv[1]
        for number in range(2):
            started = "2026-03-20T12:00:00+00:00"
            add_run(Table(folder + "/runs"), RunRecord(pipeline="shop", run_id=f"run-{number}", started=started))
            table = Table(folder + "/receipts")
            receipts = ReceiptTable(table, Storage.of(folder + "/steps"), f"run-{number}")
            receipts.write([Receipt(step="ingest", partition="2026-03-20", key=f"{number}" * 32)])
            assert receipts.of("ingest")["2026-03-20"].run_id == f"run-{number}"
        assert not {"pandas", "pyspark", "torch"} & sys.modules.keys()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(Table(str(tmp_path / "runs")).rows()) == 2


def test_a_table_of_an_older_version_gets_the_columns_that_it_lacks(table):
    older = pa.schema([field for field in RUNS if field.name not in ("drift", "sparkdl")])
    old = pa.Table.from_pylist([{"run_id": "old", "outcome": "promoted"}], schema=older)
    table.append(old)
    add_run(table, record_of())
    rows = {row["run_id"]: row for row in table.rows().to_pylist()}
    assert set(table.columns()) == set(RUNS.names)
    assert rows["old"]["outcome"] == "promoted"
    assert rows["old"]["drift"] is None
    assert rows["run-0"]["outcome"] == "nothing new"


def test_columns_of_a_later_version_stay_empty(table):
    later = RUNS.append(pa.field("carbon", pa.float64()))
    table.append(pa.Table.from_pylist([{"run_id": "later", "carbon": 3.0}], schema=later))
    add_run(table, record_of())
    rows = {row["run_id"]: row["carbon"] for row in table.rows().to_pylist()}
    assert rows == {"later": 3.0, "run-0": None}


def test_another_table_in_its_place_is_refused(table):
    table.append(pa.table({"run_id": pa.array([1], pa.int64())}))
    with pytest.raises(SchemaError, match="run_id"):
        add_run(table, record_of())
