"""The README tells the truth: every command and every snippet in it runs, as a reader would run it."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.cli import main
from sparkdl.pipeline import Pipeline

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SMALL = (
    "--set.events.rows=4000 --set.events.days=5 --set.events.late_day=1 --set.etl.validation_days=1 "
    "--set.train.epochs=2 --set.train.batch_rows=64"
)


def fences(language):
    return [body for kind, body in FENCE.findall(README) if kind == language]


def commands():
    lines = [line.split("#")[0].strip() for body in fences("bash") for line in body.splitlines()]
    return [line for line in lines if line]


def shell(command, cwd):
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env["JAVA_TOOL_OPTIONS"] = "-XX:TieredStopAtLevel=1"  # short jobs: the optimising compiler costs more than it gains
    env.pop("PYSPARK_PYTHON", None)
    return subprocess.run(command, shell=True, cwd=cwd, env=env, capture_output=True, text=True)


def test_every_fence_is_of_a_kind_that_is_tested():
    assert {kind for kind, _ in FENCE.findall(README)} == {"bash", "python", "text", "yaml"}
    known = {"make run", "make test"}
    strangers = [
        line for line in commands() if line not in known and not line.startswith(("spark-submit ", "sparkdl "))
    ]
    assert not strangers


@pytest.mark.timeout(900)
def test_the_python_snippets_run_one_after_the_other(tmp_path):
    script = tmp_path / "notebook.py"
    script.write_text("\n".join(fences("python")))
    done = shell(f"{sys.executable} {script}", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "minutes__output" in done.stdout
    assert "torch.Size([512, 2])" in done.stdout
    assert "[1.0, 1.0]" in done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The options of a root in which ``make run`` has made everything."""
    options = f"--set.paths.root={tmp_path_factory.mktemp('data')} {SMALL}"
    done = shell(f"make run ARGS={shlex.quote(options)}", ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "retrain: done" in done.stdout
    return options


def submits():
    """The lines that start a job of the rides."""
    lines = [line for line in commands() if line.startswith("spark-submit ") and "jobs/retrain.yaml" in line]
    return [re.sub(r"--set\.paths\.root=\S+", "", line) for line in lines]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "number", [*(pytest.param(one, marks=pytest.mark.slow) for one in range(len(submits()) - 1)), len(submits()) - 1]
)
def test_after_make_run_a_spark_submit_line_finds_nothing_new(made, number):
    line = submits()[number]
    done = shell(f"{line} {made}", ROOT)
    assert done.returncode == 0, f"{line}\n{done.stderr[-3000:]}"
    assert "nothing new" in done.stdout


@pytest.mark.timeout(900)
def test_every_spark_submit_line_names_a_job_and_options_that_it_takes(made, spark, monkeypatch, capsys):
    """Those lines, as far as they are the job's, in this process: the whole of each is slow."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    from jobs.entry import run_job

    assert len(submits()) == 4
    for line in submits():
        _, _, master, script, *arguments = shlex.split(f"{line} {made}")
        assert master == "local[2]"
        assert (ROOT / script).exists()
        job = importlib.import_module(f"jobs.{Path(script).stem}")
        code = run_job(Path(script).stem, job._job, arguments, summary=True)
        told = capsys.readouterr()
        assert code == 0, told.err
        assert "nothing new" in told.out


def test_the_pipeline_file_is_sound_and_its_commands_take_it(tmp_path, monkeypatch, capsys):
    """All but ``sparkdl run`` for real; that one has tests of its own."""
    (pipeline,) = fences("yaml")
    (tmp_path / "churn.yaml").write_text(pipeline)
    (tmp_path / "customers" / "day=2026-03-01").mkdir(parents=True)
    pq.write_table(pa.table({"customer_id": [1]}), tmp_path / "customers" / "day=2026-03-01" / "a.parquet")
    monkeypatch.chdir(tmp_path)
    lines = [shlex.split(line)[1:] for line in commands() if line.startswith("sparkdl ")]
    assert [words[0] for words in lines] == ["check", "plan", "run", "status"]
    for words in lines:
        if words[0] == "run":
            assert Pipeline.load(words[1], words[3:]).spec.train.epochs == 10
        else:
            assert main(words) == 0, capsys.readouterr().err
    (submit,) = (line for line in commands() if line.startswith("spark-submit jobs/pipeline.py"))
    assert (ROOT / submit.split()[1]).exists()
    assert submit.split()[2:] == ["--config", "churn.yaml"]


def test_make_test_runs_the_suite_and_ci_calls_it():
    plan = shell("make --dry-run test", ROOT)
    assert "-m pytest" in plan.stdout
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_file_tree_names_what_is_there():
    (tree,) = (body for body in fences("text") if "worker.py" in body)
    for line in tree.splitlines():
        names = re.match(r"(\s*)((?:[\w.]+/? ?)+?)  ", line + "  ")
        folder = ROOT if not names[1] else ROOT / "sparkdl"
        for name in names[2].split():
            assert (folder / name).exists(), f"{name} in the README's tree is not there"


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 130])
def test_every_exit_code_is_documented(code):
    text = (ROOT / "jobs" / "entry.py").read_text()
    assert re.search(rf"^    {code}\s", text, re.MULTILINE)
    assert re.search(rf"\b{code}\b", README[README.index("**Exit codes**") :])
