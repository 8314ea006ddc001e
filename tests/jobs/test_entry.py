from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.entry import exit_code_of, run_job
from sparkdl import errors

ROOT = Path(__file__).resolve().parents[2]


def records(root):
    return [json.loads(path.read_text()) for path in sorted(Path(root).glob("runs/*/record.json"))]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x"), 1),
        (errors.DataError("x"), 1),
        (errors.SchemaError("x"), 1),
        (errors.StorageError("x"), 1),
        (errors.PreflightError("x"), 1),
        (errors.RankFailedError(1, "ValueError: x"), 2),
        (errors.LaunchTimeoutError("x"), 2),
        (errors.NonFiniteLossError("x"), 3),
        (errors.BundleError("x"), 3),
        (errors.CancelledError("x"), 130),
        (KeyboardInterrupt(), 130),
        (RuntimeError("x"), 4),
    ],
)
def test_every_error_has_its_exit_code(error, code):
    assert exit_code_of(error) == code


def test_a_run_leaves_a_record_whatever_happens(tmp_path, capsys):
    option = [f"--set.paths.root={tmp_path}"]

    def works(run):
        with run.stage("first"):
            run.record.results["answer"] = 42

    def refuses(run):
        raise errors.DataError("3 rows are wrong:\n  correct them")

    def breaks(run):
        raise RuntimeError("line one\nline two")

    assert [run_job("job", body, option) for body in (works, refuses, breaks)] == [0, 1, 4]
    by_status = {record["status"]: record for record in records(tmp_path)}
    assert by_status["done"]["results"] == {"answer": 42}
    assert by_status["done"]["stages"]["first"] >= 0
    assert by_status["done"]["settings"]["paths"]["root"] == str(tmp_path)
    assert by_status["refused"]["error"] == "DataError"
    assert by_status["refused"]["message"] == "3 rows are wrong: correct them"
    assert by_status["failed"]["exit_code"] == 4
    assert by_status["failed"]["message"] == "line one"
    assert "job: DataError: 3 rows are wrong: correct them" in capsys.readouterr().err


def test_a_record_that_cannot_be_written_is_an_error_of_its_own(tmp_path, capsys):
    (tmp_path / "runs").write_text("a file where a folder is needed")
    assert run_job("job", lambda run: None, [f"--set.paths.root={tmp_path}"]) == 1
    assert "runs" in capsys.readouterr().err


@pytest.mark.parametrize("start", [["jobs/make_events.py"], ["-m", "jobs.make_events"]])
def test_a_job_starts_as_a_file_and_as_a_module_and_returns_its_exit_code(tmp_path, start):
    small = [f"--set.paths.root={tmp_path}", "--set.events.rows=1700"]
    command = [sys.executable, *start, *small]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "noise floor" in done.stdout
    refused = subprocess.run([*command, "--set.events.rows=x"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr.strip().startswith("make_events: ConfigError: events.rows='x'")
    assert refused.stderr.count("\n") == 1
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0
    assert sorted(record["status"] for record in records(tmp_path))[:2] == ["done", "nothing new"]


def test_secrets_of_the_settings_stand_in_no_record():
    from jobs.record import without_secrets

    given = {
        "spark": {
            "master": "local[2]",
            "conf": {"spark.hadoop.fs.s3a.secret.key": "S3CR", "spark.hadoop.fs.s3a.access.key": "S3CR"},
        },
        "list": [{"password": "S3CR", "user": "me"}, {"token": "S3CR"}, {"fs.azure.account.key.x": "S3CR"}],
        "tokens": 3,
    }
    shown = without_secrets(given)
    assert "S3CR" not in str(shown)
    assert (shown["spark"]["master"], shown["list"][0]["user"], shown["tokens"]) == ("local[2]", "me", 3)


def test_a_job_records_no_secret_of_its_command_line(tmp_path):
    argv = [f"--set.paths.root={tmp_path}", "--set.spark.conf={spark.hadoop.fs.s3a.secret.key: S3CR}"]
    assert run_job("retrain", lambda run: None, argv) == 0
    (place,) = tmp_path.rglob("record.json")
    assert "S3CR" not in place.read_text()
