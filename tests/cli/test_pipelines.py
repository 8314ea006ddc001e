"""The commands of a pipeline: exit codes, one sentence for an error, nothing loaded that is not needed."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from datetime import timedelta

import pytest
from rich.console import Console

from sparkdl.cli import main
from sparkdl.cli.words import print_lines, with_exit_codes
from sparkdl.errors import DataError
from sparkdl.pipeline.file import load
from sparkdl.pipeline.report.report import GENERATOR
from sparkdl.pipeline.run import leave
from sparkdl.pipeline.state.lease import lease
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.storage import Storage

FILE = """\
name: wine
root: data
source: {kind: csv, path: wine.csv}
features: {alcohol: number, colour: category}
label: {quality: regression}
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "wine.csv").write_text("alcohol,colour,quality\n12.5,red,6\n11.5,white,5\n")
    (tmp_path / "wine.yaml").write_text(FILE)
    return str(tmp_path / "wine.yaml")


def test_texts_of_the_data_do_not_steer_a_terminal(capsys):
    hostile = "a\x1b[2Jb\x07\u202ec"
    out = io.StringIO()
    print_lines(Console(file=out, force_terminal=True), [("why", hostile), (hostile, "[bold]x[/bold] é")])

    def refuse(*_):
        raise DataError(hostile)

    assert with_exit_codes(refuse)(argparse.Namespace(), Console()) == 1
    shown = out.getvalue() + capsys.readouterr().err
    assert all(letter.isprintable() or letter == "\n" for letter in shown)
    assert shown.count("a\\x1b[2Jb\\x07\\u202ec") == 3
    assert "[bold]x[/bold] é" in shown


@pytest.mark.parametrize("command", ["check", "status"])
def test_a_file_is_checked_and_its_status_told_without_torch_and_spark(file, command):
    program = (
        "import sys, sparkdl.cli; code = sparkdl.cli.main(sys.argv[1:]); "
        "print([m for m in ('torch', 'pyspark', 'pandas', 'jinja2', 'scipy') if m in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program, command, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "wine" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_refused_file_is_told_with_all_its_lines(file, capsys):
    for command in ("check", "run", "status"):
        assert main([command, file, "--set", "train.epoch=3", "--set", "label.quality=regresion"]) == 1
        said = capsys.readouterr().err
        assert "2 mistakes" in said
        assert "write epochs" in said
        assert "regression" in said
        assert "Traceback" not in said


@pytest.mark.parametrize("command", ["check", "run"])
def test_columns_that_the_source_does_not_have_are_told_with_their_lines_before_spark_starts(file, command):
    program = (
        "import sys, sparkdl.cli; code = sparkdl.cli.main(sys.argv[1:]); "
        "print([m for m in ('torch', 'pyspark', 'scipy') if m in sys.modules]); sys.exit(code)"
    )
    overrides = ["--set", "label={qualty: regression}", "--set", "features={colour: number}"]
    words = [sys.executable, "-c", program, command, file, *overrides]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "qualty is no column of the source: write quality" in done.stderr
    assert "features.colour is a column of string, and numbers are needed" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_source_that_cannot_be_reached_is_said_and_the_file_is_sound_all_the_same(file, capsys):
    assert main(["check", file, "--set", "source.path=nowhere.csv"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "is valid" in said[0]
    assert "not looked at" in said[1]
    assert "nowhere.csv" in said[1]
    assert main(["check", file, "--set", "label={qualty: regression}", "--offline"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_columns_that_later_rows_may_have_are_said_and_not_refused(file, tmp_path, capsys):
    (tmp_path / "wine.json").write_text('{"alcohol": 12.5, "quality": 6}\n' * 20_000)
    assert main(["check", file, "--set", "source={kind: json, path: wine.json}"]) == 0
    assert "do not have 'colour': check the spelling" in capsys.readouterr().out


def test_a_source_that_is_not_there_is_refused_with_one_sentence(file, capsys):
    assert main(["run", file, "--set", "source.path=nowhere.csv"]) == 1
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "nowhere.csv" in said


def test_a_lease_that_is_taken_is_exit_code_30_and_says_by_whom(file, capsys):
    with lease(Project(load(file)).runs.child("leases"), "the-other"):
        assert main(["run", file]) == 30
    assert "run the-other" in capsys.readouterr().err


def test_a_span_that_is_none_is_refused_and_no_reason_to_try_again(file, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["run", file, "--backfill", "2026-03-01"])
    assert refused.value.code == 1
    assert "is no span of windows" in capsys.readouterr().err


def test_a_dry_run_prints_what_plan_prints_runs_nothing_and_exits_as_a_run_would(file, tmp_path, capsys):
    assert main(["plan", file]) == 0
    planned = capsys.readouterr().out
    assert main(["run", file, "--dry-run"]) == 0
    assert capsys.readouterr().out == planned
    assert not (tmp_path / "data").exists()
    with lease(Project(load(file)).runs.child("leases"), "the-other"):
        assert main(["run", file, "--dry-run"]) == 30
    assert "run the-other" in capsys.readouterr().out


def test_a_dry_run_tells_that_nobody_could_predict(file, capsys):
    assert main(["run", file, "--dry-run", "--without-training"]) == 1
    assert "nobody can predict" in capsys.readouterr().out
    assert main(["run", file, "--without-training"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_step_that_there_is_not_is_refused_with_the_nearest(file, capsys):
    assert main(["run", file, "--until", "training"]) == 1
    assert "until=training is no step: write train" in capsys.readouterr().err


@pytest.fixture
def refused(file):
    """A run that was refused, with its record."""
    run = Run(Project(load(file)))
    run.record.fail(DataError("no row is left"))
    leave(run)
    return run


def test_the_last_report_is_told_without_torch_and_spark(file, refused):
    program = (
        "import sys, sparkdl.cli; code = sparkdl.cli.main(sys.argv[1:]); "
        "print([m for m in ('torch', 'pyspark', 'pandas', 'matplotlib', 'jinja2') if m in sys.modules]); sys.exit(code)"
    )
    words = [sys.executable, "-c", program, "report", file]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    place, loaded = done.stdout.splitlines()
    assert place == refused.record.places["report"]
    assert loaded == "[]"


def test_a_report_that_is_gone_or_of_an_older_version_is_written_anew(file, refused, capsys):
    path = Storage.of(refused.record.places["report"]).local_path()
    whole = path.read_text()
    for spoiled in (None, whole.replace(GENERATOR, "sparkdl report 0")):
        path.unlink()
        if spoiled is not None:
            path.write_text(spoiled)
        assert main(["report", file, refused.record.run_id]) == 0
        assert capsys.readouterr().out.strip() == refused.record.places["report"]
        assert path.read_text() == whole


def test_a_report_that_is_there_is_left_as_it_is(file, refused, capsys):
    path = Storage.of(refused.record.places["report"]).local_path()
    path.write_text(path.read_text() + "<!-- seen -->")
    assert main(["report", file]) == 0
    assert "seen" in path.read_text()


def test_a_run_that_found_nothing_new_hides_no_report(file, refused, capsys):
    later = Run(Project(load(file)), RunRequest(now=refused.request.now + timedelta(hours=1)))
    later.record.end("nothing new", "as it was")
    leave(later)
    assert "report" not in later.record.places
    assert main(["report", file]) == 0
    assert capsys.readouterr().out.strip() == refused.record.places["report"]


@pytest.mark.parametrize("name", ["20260101T000000-nothin", "../other", "leases"])
def test_a_run_that_there_is_not_is_refused(file, refused, capsys, name):
    assert main(["report", file, name]) == 1
    said = capsys.readouterr().err
    assert f"has no run {name!r}" in said
    assert refused.record.run_id in said


def test_a_pipeline_that_never_ran_has_no_report(file, capsys):
    assert main(["report", file]) == 1
    assert "run it first" in capsys.readouterr().err
