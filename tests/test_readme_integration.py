"""The README tells the truth: every command and every snippet in it runs, as a reader would run it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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
    env.pop("PYSPARK_PYTHON", None)
    return subprocess.run(command, shell=True, cwd=cwd, env=env, capture_output=True, text=True, timeout=280)


def test_every_fence_is_of_a_kind_that_is_tested():
    assert {kind for kind, _ in FENCE.findall(README)} == {"bash", "python", "text"}
    known = {"make run", "make test"}
    strangers = [line for line in commands() if line not in known and not line.startswith("spark-submit ")]
    assert not strangers


def test_the_python_snippets_run_one_after_the_other(tmp_path):
    script = tmp_path / "notebook.py"
    script.write_text("\n".join(fences("python")))
    done = shell(f"{sys.executable} {script}", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "minutes__output" in done.stdout
    assert "torch.Size([512, 2])" in done.stdout
    assert "[1.0, 1.0]" in done.stdout


def test_make_run_and_then_every_spark_submit_line(tmp_path):
    """The first makes everything, so the others find nothing new; each must say so and return 0."""
    data = f"--set.paths.root={tmp_path / 'data'}"
    done = shell(f"make run ARGS={shlex.quote(f'{data} {SMALL}')}", ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "retrain: done" in done.stdout
    submits = [line for line in commands() if line.startswith("spark-submit ")]
    assert len(submits) == 4
    for line in submits:
        own = re.sub(r"--set\.paths\.root=\S+", "", line)
        done = shell(f"{own} {data} {SMALL}", ROOT)
        assert done.returncode == 0, f"{line}\n{done.stderr[-3000:]}"
        assert "nothing new" in done.stdout


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
