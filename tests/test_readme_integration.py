"""The README tells the truth: every command and every snippet in it runs, as a reader would run it."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.cli import _parser, main
from sparkdl.pipeline import Pipeline
from sparkdl.pipeline.state.record import EXIT_CODES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SMALL = (
    "--set split.train=3days --set split.validate=1day --set train.epochs=2 --set train.batch_size=64 "
    "--set publish.gate.floors=[]"
)


def fences(language):
    return [body for kind, body in FENCE.findall(README) if kind == language]


def commands():
    lines = [line.split("#")[0].strip() for body in fences("bash") for line in body.splitlines()]
    return [line for line in lines if line]


def shell(command, cwd, **variables):
    env = os.environ | variables | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env["JAVA_TOOL_OPTIONS"] = "-XX:TieredStopAtLevel=1"  # short jobs: the optimising compiler costs more than it gains
    for name in ("PYSPARK_PYTHON", "MAKELEVEL", "MAKEFLAGS", "MFLAGS"):
        env.pop(name, None)
    return subprocess.run(command, shell=True, cwd=cwd, env=env, capture_output=True, text=True)


def test_every_fence_is_of_a_kind_that_is_tested():
    assert {kind for kind, _ in FENCE.findall(README)} == {"bash", "python", "text", "yaml"}
    known = {"make run", "make test"}
    strangers = [
        line for line in commands() if line not in known and not line.startswith(("spark-submit ", "sparkdl "))
    ]
    assert not strangers


def test_the_python_snippets_run_one_after_the_other(spark, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(fences("python")), "README.md", "exec"), {"__name__": "notebook"})
    told = capsys.readouterr().out
    assert "minutes__output" in told
    assert "torch.Size([512, 2])" in told
    assert "[1.0, 1.0]" in told


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The options of a root in which ``make run`` has made everything, and the folder of its rides."""
    root = tmp_path_factory.mktemp("data")
    options, rides = f"{SMALL} --set root={root}", str(root / "raw")
    done = shell(make_run(options), ROOT, RIDES=rides)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rides: promoted" in done.stdout
    assert "above it" in done.stdout.splitlines()[-1]
    return options, rides


def make_run(options):
    return f"make run ARGS={shlex.quote(f'--days 5 --rows-per-day 300 {options}')}"


def submits():
    """The lines that start a job of the rides."""
    return [line for line in commands() if line.startswith("spark-submit ") and "rides.yaml" in line]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_after_make_run_another_one_and_a_spark_submit_line_find_nothing_new(made):
    options, rides = made
    again = shell(make_run(options), ROOT, RIDES=rides)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "rides: nothing new" in again.stdout
    assert "made" not in again.stdout
    for line in submits()[-1:]:
        done = shell(f"{line} {options}", ROOT, RIDES=rides)
        assert done.returncode == 10, f"{line}\n{done.stderr[-3000:]}"
        assert "nothing new" in done.stdout


@pytest.mark.timeout(900)
def test_every_spark_submit_line_names_a_job_and_options_that_it_takes(made, monkeypatch, capsys):
    """Those lines, as far as they are the job's, in this process: the whole of each is slow."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RIDES", made[1])
    assert len(submits()) == 4
    for line in submits():
        _, _, master, script, *arguments = shlex.split(f"{line} {made[0]}")
        assert master == "local[2]"
        monkeypatch.setattr("sys.argv", [script, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(script, run_name="__main__")
        told = capsys.readouterr()
        assert ended.value.code == 10, told.err
        assert "nothing new" in told.out


def test_the_pipeline_file_is_sound_and_its_commands_take_it(tmp_path, monkeypatch, capsys):
    """All but ``sparkdl run`` for real; that one has tests of its own."""
    (pipeline,) = fences("yaml")
    (tmp_path / "churn.yaml").write_text(pipeline)
    (tmp_path / "customers" / "day=2026-03-01").mkdir(parents=True)
    columns = {"customer_id": [1, 2], "amount": [2.5, 3.5], "age": [30, 40], "plan": ["a", "b"]}
    columns["churned"] = [True, False]
    joined = pa.array([0, 1], pa.date32())
    pq.write_table(pa.table({**columns, "joined": joined}), tmp_path / "customers" / "day=2026-03-01" / "a.parquet")
    monkeypatch.chdir(tmp_path)
    lines = [shlex.split(line)[1:] for line in commands() if line.startswith("sparkdl ")]
    assert {words[0] for words in lines} >= {"check", "plan", "run", "status"}
    for words in lines:
        if words[0] == "init":
            assert _parser().parse_args(words).command  # of a table that is not here
        elif words[0] == "run":
            options = _parser().parse_args(words)
            assert Pipeline.load(options.file, options.overrides).spec.name == "churn"
        elif words[0] == "report":
            assert main(words) == 1
            assert "no run of churn has done anything yet" in capsys.readouterr().err
        else:
            assert main(words) == 0, capsys.readouterr().err
    (submit,) = (line for line in commands() if line.startswith("spark-submit") and "churn.yaml" in line)
    assert submit.split()[1:] == ["jobs/retrain.py", "--config", "churn.yaml"]


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


def test_every_exit_code_is_documented():
    text = README[README.index("Exit codes") :].partition("\n\n")[0]
    assert set(map(int, re.findall(r"\b\d+\b", text))) == {*EXIT_CODES.values(), 1, 2, 3, 4, 5, 130}
