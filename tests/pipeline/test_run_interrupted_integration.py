"""A run that is killed is finished by the next one, as if nothing had been; of two runs at once one leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from sparkdl.models.bundle import load_bundle
from sparkdl.models.registry import ModelRegistry
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.lease import LeaseTakenError, lease
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import ReceiptTable
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.storage import Storage
from sparkdl.tables.table import Table

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)
OWN = """
import time
from torch import nn


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, row):
        time.sleep(0.02)
        return self.layer(row["numbers"])


def build(features) -> nn.Module:
    return Slow()
"""
PROGRAM = """
import sys
from sparkdl.pipeline import Pipeline
done = Pipeline.load(sys.argv[1]).run()
print(done.outcome, *(note.name for note in done.steps if note.kept))
"""
WITHOUT_JAVA = """
import sys
from pyspark import SparkContext
from sparkdl.errors import ClusterError
from sparkdl.pipeline import Pipeline
from sparkdl.pipeline.steps.features import FeaturesStep
make = FeaturesStep.make
def make_without_java(*given):
    SparkContext._gateway.proc.kill()
    return make(*given)
FeaturesStep.make = make_without_java
try:
    Pipeline.load(sys.argv[1]).run()
except ClusterError as error:
    print(error)
"""


def text_of(folder, root):
    return f"""
    name: killed
    root: {root}
    source: {{kind: parquet, path: {folder}/rows, key: id}}
    features: {{x: number}}
    label: {{y: regression}}
    split: {{by: hash, train: 0.6, validate: 0.2, score: 0.2}}
    model: {{factory: "own_slow_network:build"}}
    train: {{epochs: 6, batch_size: 16, num_proc: 2, verbose: 0, checkpoint_every: 5, learning_rate: 0.05}}
    publish: {{gate: {{min_rows: 20, baseline: never}}}}
    spark: {{master: "local[2]", conf: {{spark.driver.memory: 1g}}}}
    """


@pytest.fixture
def place(tmp_path):
    (tmp_path / "rows").mkdir()
    x = np.random.default_rng(0).normal(size=800)
    pd.DataFrame({"id": range(800), "x": x, "y": 3 * x + 1}).to_parquet(tmp_path / "rows" / "rows.parquet")
    (tmp_path / "own_slow_network.py").write_text(OWN)
    return tmp_path


def start(place, root, program=PROGRAM):
    file = place / f"{root}.yaml"
    file.write_text(text_of(place, place / root))
    with (place / f"{root}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", program, str(file)], cwd=place, stdout=log, stderr=log, start_new_session=True
        )


def finished(place, root):
    process = start(place, root)
    assert process.wait(300) == 0, (place / f"{root}.log").read_text()
    return (place / f"{root}.log").read_text().splitlines()[-1].split()


def weights(place, root):
    version = ModelRegistry(f"{place}/{root}/killed/registry").get("killed", "champion")
    return load_bundle(version.uri, trusted=["own_slow_network"]).model.state_dict()


@pytest.mark.slow
def test_a_run_killed_in_training_goes_on_from_its_checkpoint_to_the_same_weights(place, monkeypatch):
    process = start(place, "killed-run")
    try:
        until = time.monotonic() + 200
        folder = Path(f"{place}/killed-run/killed/runs/training")
        while process.poll() is None and time.monotonic() < until:
            if len([*folder.rglob("step-*"), *folder.rglob("*checkpoint*/*")]) > 1:
                break
            time.sleep(0.05)
        assert process.poll() is None, (place / "killed-run.log").read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not ModelRegistry(f"{place}/killed-run/killed/registry").models()
    outcome = finished(place, "killed-run")
    assert outcome[0] == "promoted"
    assert {"features", "shards"} <= {*outcome[1:]}
    assert finished(place, "whole-run") == ["promoted"]
    monkeypatch.syspath_prepend(str(place))
    disturbed, whole = weights(place, "killed-run"), weights(place, "whole-run")
    for name, values in whole.items():
        assert torch.equal(values, disturbed[name]), name


@pytest.mark.slow
def test_a_java_that_ends_while_no_rank_runs_is_told_by_its_name(place):
    process = start(place, "root", WITHOUT_JAVA)
    log = place / "root.log"
    assert process.wait(200) == 0, log.read_text()
    sentence = log.read_text().splitlines()[-1]
    assert sentence.startswith("Spark's Java process on this machine has ended, by SIGKILL: it crashed, was killed, or")
    (file,) = Path(f"{place}/root/killed/runs").glob("*/record.json")
    record = RunRecord.load(Storage.of(str(file)))
    assert (record.outcome, record.exit_code, record.message) == ("failed", 2, sentence)


@pytest.mark.slow
def test_a_kill_between_the_clean_rows_and_their_receipts_loses_and_doubles_nothing(spark, place, monkeypatch):
    text = text_of(place, place / "root").replace('{factory: "own_slow_network:build"}', "{}")
    with monkeypatch.context() as patched:
        patched.setattr(ReceiptTable, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        cut = Run(Project(loads(text)), RunRequest(now=NOW))
        with pytest.raises(KeyboardInterrupt):
            execute(cut, spark)
    assert (cut.record.outcome, cut.record.exit_code) == ("failed", 130)
    assert len(Table(f"{place}/root/killed/tables/clean").rows()) == 800
    done = execute(Run(Project(loads(text)), RunRequest(now=NOW)), spark)
    assert (done.outcome, done.rows["read"], done.rows["kept"]) == ("promoted", 800, 800)
    assert len(Table(done.places["clean"]).rows()) == 800


def test_of_two_runs_at_once_one_leaves_with_who_is_at_work(place):
    text = text_of(place, place / "root").replace('{factory: "own_slow_network:build"}', "{}")
    run = Run(Project(loads(text)), RunRequest(now=NOW))
    with lease(run.project.runs.child("leases"), "the-first"), pytest.raises(LeaseTakenError, match="the-first"):
        execute(run)
    assert (run.record.outcome, run.record.exit_code) == ("lost", 30)
