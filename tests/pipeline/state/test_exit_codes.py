"""Every error ends a run with its exit code, and a record says which."""

from __future__ import annotations

import pytest

from sparkdl import errors
from sparkdl.pipeline.state.lease import LeaseTakenError
from sparkdl.pipeline.state.record import RunRecord, exit_code_of
from sparkdl.storage import Storage


@pytest.mark.parametrize(
    ("error", "code", "outcome"),
    [
        (errors.ConfigError("x"), 1, "refused"),
        (errors.DataError("x"), 1, "refused"),
        (errors.SchemaError("x"), 1, "refused"),
        (errors.StorageError("x"), 1, "refused"),
        (errors.PreflightError("x"), 1, "refused"),
        (errors.RankFailedError(1, "ValueError: x"), 2, "failed"),
        (errors.LaunchTimeoutError("x"), 2, "failed"),
        (errors.NonFiniteLossError("x"), 3, "failed"),
        (errors.BundleError("x"), 3, "failed"),
        (errors.StoreUnavailableError("x"), 5, "failed"),
        (errors.ConflictError("x"), 30, "lost"),
        (LeaseTakenError("x"), 30, "lost"),
        (errors.CancelledError("x"), 130, "failed"),
        (KeyboardInterrupt(), 130, "failed"),
        (RuntimeError("x"), 4, "failed"),
    ],
)
def test_every_error_has_its_exit_code(error, code, outcome):
    record = RunRecord(pipeline="shop", run_id="1", started="2026-03-02T00:00:00+00:00")
    record.fail(error)
    assert (exit_code_of(error), record.exit_code, record.outcome) == (code, code, outcome)
    assert record.error == type(error).__name__


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (RuntimeError(), "RuntimeError"),
        (OSError("cannot read caf\udce9.csv"), r"cannot read caf\udce9.csv"),  # a name that is no UTF-8
    ],
)
def test_a_record_says_what_happened_and_can_be_read_again(tmp_path, error, words):
    record = RunRecord(pipeline="shop", run_id="1", started="2026-03-02T00:00:00+00:00")
    record.fail(error)
    file = Storage.of(str(tmp_path / "record.json"))
    record.write(file)
    assert RunRecord.load(file).message == words
