"""``sparkdl run`` as people start it: a process of its own, which opens Spark itself."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sparkdl.pipeline import Pipeline
from sparkdl.tables.table import Table

FILE = """\
name: wine
root: data
source: {kind: csv, path: wine.csv, key: bottle, schema: "bottle BIGINT, alcohol DOUBLE, colour STRING, quality DOUBLE"}
features: {alcohol: number, colour: category}
label: {quality: regression}
split: {by: hash, train: 0.6, validate: 0.2, score: 0.2}
model: cellar:network
train: {epochs: 2, batch_size: 64, learning_rate: 0.01, num_proc: 1, verbose: 0}
publish: {gate: {min_rows: 20, baseline: never}}
score: {keep: [colour]}
spark: {master: "local[2]", conf: {spark.sql.shuffle.partitions: 2}}
"""
CODE = """\
import torch


class Cellar(torch.nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.colours, self.last = torch.nn.Embedding(rows, 2), torch.nn.Linear(3, 1)

    def forward(self, numbers, categories):
        return self.last(torch.cat([numbers, self.colours(categories[:, 0])], dim=1))


def network(features) -> torch.nn.Module:
    return Cellar(8)
"""
LOADED = (
    "import sys, sparkdl.cli; code = sparkdl.cli.main(sys.argv[1:]); "
    "print([m for m in ('torch', 'pyspark') if m in sys.modules]); sys.exit(code)"
)


@pytest.fixture
def folder(tmp_path):
    draw = random.Random(3)
    rows = [(n, draw.uniform(9, 15), draw.choice(["red", "white"])) for n in range(600)]
    lines = [f"{n},{alcohol:.3f},{colour},{alcohol / 2 + (colour == 'red'):.3f}" for n, alcohol, colour in rows]
    (tmp_path / "wine.csv").write_text("\n".join(["bottle,alcohol,colour,quality", *lines]) + "\n")
    (tmp_path / "wine.yaml").write_text(FILE)
    (tmp_path / "cellar.py").write_text(CODE)
    return tmp_path


def sparkdl(folder, *words, program=None):
    """Run a command in another folder than the file's; return exit code and output."""
    start = ["-m", "sparkdl.cli"] if program is None else ["-c", program]
    environment = {**os.environ, "COLUMNS": "200"}
    command = [sys.executable, *start, *words]
    return subprocess.run(command, cwd=folder / "data", capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_a_file_with_a_model_of_its_own_runs_from_the_shell_and_then_has_nothing_new(folder):
    (folder / "data").mkdir()
    file = "../wine.yaml"
    planned = sparkdl(folder, "plan", file)
    assert planned.returncode == 0, planned.stderr
    assert "only Spark can tell" in planned.stdout

    first = sparkdl(folder, "run", file)
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    assert len(lines) <= 20  # fits a screen
    assert lines[0].startswith("wine: promoted in ")
    assert "600 read = 600 kept + 0 quarantined + 0 duplicates" in first.stdout
    assert Table(f"{folder}/data/wine/tables/predictions").rows().num_rows > 50

    again = sparkdl(folder, "run", file, program=LOADED)
    assert again.returncode == 10, again.stderr
    assert again.stdout.startswith("wine: nothing new")
    assert again.stdout.splitlines()[-1] == "[]"
    assert sparkdl(folder, "run", file, "--ok-when-nothing").returncode == 0
    status = Pipeline.load(folder / "wine.yaml").status()
    assert status.last_run is not None
    assert status.last_run.outcome == "nothing new"
    assert status.champion is not None
    assert status.champion.version == 1
    plan = Pipeline.load(folder / "wine.yaml", ["train.epochs=3"]).plan()
    assert [(step.name, step.state) for step in plan.steps] == [
        ("drift", "kept"), ("features", "kept"), ("shards", "kept"), ("train", "done again"),
        ("evaluate", "done again"), ("publish", "open"), ("score", "kept"),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_row_that_sql_refuses_is_one_line_of_ours_and_no_trace_of_java(folder):
    (folder / "data").mkdir()
    done = sparkdl(folder, "run", "../wine.yaml", "--set", 'expect={colour: "CAST(colour AS INT) > 0"}')
    assert done.returncode == 1
    last, *earlier = done.stderr.splitlines()[::-1]
    assert last.startswith("sparkdl: CAST(colour AS INT) fails for a row: The value 'red'")
    assert not [line for line in earlier if "\tat " in line or " ERROR " in line or line.startswith("{")]


@pytest.mark.slow
def test_spark_submit_runs_the_same_file_with_its_own_settings(folder):
    command = [
        "spark-submit", "--master", "local[1]", "--conf", "spark.driver.memory=1g",
        str(Path(__file__).parents[2] / "jobs" / "retrain.py"), "--config", str(folder / "wine.yaml"),
    ]  # fmt: skip
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "wine: promoted in " in done.stdout


@pytest.mark.parametrize("sent", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_an_interrupted_run_is_exit_code_130_gives_its_lease_back_and_leaves_a_record(folder, sent):
    process = subprocess.Popen(
        [sys.executable, "-m", "sparkdl.cli", "run", str(folder / "wine.yaml")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    leases = Path(f"{folder}/data/wine/runs/leases")
    before = len(list(leases.glob("*"))) if leases.exists() else 0
    while process.poll() is None and len(list(leases.glob("*"))) == before:
        time.sleep(0.05)
    process.send_signal(sent)
    _, said = process.communicate(timeout=170)
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == "sparkdl: interrupted"
    assert "Traceback" not in said
    status = Pipeline.load(folder / "wine.yaml").status()
    assert status.holder is None
    assert status.last_run is not None
    assert (status.last_run.exit_code, status.last_run.error) == (130, "KeyboardInterrupt")


@pytest.mark.slow
def test_ctrl_c_ends_every_trial_of_a_search_and_leaves_nothing_running(folder):
    """As a terminal sends it: to the whole group of processes, Java and workers too."""
    changes = [
        "search={space: {train.learning_rate: [0.01, 0.02]}, slots: 2}", "train.epochs=100000", "train.verbose=1",
        "split={by: hash, train: 0.5, validate: 0.2, test: 0.1, score: 0.2}",
    ]  # fmt: skip
    words = [word for change in changes for word in ("--set", change)]
    process = subprocess.Popen(
        [sys.executable, "-m", "sparkdl.cli", "run", str(folder / "wine.yaml"), *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    trials = Path(f"{folder}/data/wine/runs/training/runs")
    while process.poll() is None and len(list(trials.glob("*/*"))) < 2:
        time.sleep(0.05)
    group = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=170)
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == "sparkdl: interrupted"
    assert "Traceback" not in said
    assert len(group) > 2
    assert psutil.wait_procs(group, timeout=30)[1] == []
    status = Pipeline.load(folder / "wine.yaml").status()
    assert status.holder is None
    assert (status.last_run.exit_code, status.last_run.error) == (130, "KeyboardInterrupt")
