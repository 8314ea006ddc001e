"""What cannot be learned from, or with, is refused in one sentence with exit code 1, and no model is published."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pandas as pd
import pytest

from sparkdl.errors import SparkdlError
from sparkdl.models.registry import ModelRegistry
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)
OWN = """
from torch import nn


def raises(features) -> nn.Module:
    raise ValueError("no such width")


def no_module(features) -> nn.Module:
    return 3


def not_annotated(features):
    return nn.Linear(1, 1)


class Hidden(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(1, width)

    def forward(self, row):
        return self.layer(row["numbers"])


def two_outputs(features) -> nn.Module:
    return Hidden(2)


made = []


def another_each_time(features) -> nn.Module:
    made.append(1)
    net = Hidden(1)
    net.extra = nn.ModuleList(nn.Linear(1, 1) for _ in made)
    return net


def no_frame(rows):
    return rows.count()
"""


@pytest.fixture(scope="module")
def own(spark, tmp_path_factory):
    """A module of the user's own that driver and workers can import; its name."""
    name = "own_refusals_of_a_run"
    file = tmp_path_factory.mktemp("own") / f"{name}.py"
    file.write_text(OWN)
    spark.sparkContext.addPyFile(str(file))
    return name


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    x = np.random.default_rng(0).normal(size=200)
    frame = pd.DataFrame({"id": range(200), "x": x, "y": 2 * x, "same": 1.0, "fold": np.arange(200) % 4})
    frame["lost"] = frame.y.where(frame.fold != 2)
    frame["wild"] = frame.y.where(frame.fold != 2, np.inf)
    frame["kind"] = np.where(frame.fold == 2, "new", np.where(frame.id % 3 == 0, "a", "b"))
    frame["three"] = np.where(frame.fold == 2, "d", np.array(["a", "b", "c"])[np.arange(200) % 3])
    frame["heavy"] = frame.x.where(frame.fold != 1)
    folder = tmp_path_factory.mktemp("rows")
    frame.to_parquet(folder / "rows.parquet")
    return folder


def refused(spark, rows, root, *overrides):
    text = f"""
    name: refused
    root: {root}
    source: {{kind: parquet, path: {rows}, key: id}}
    features: {{x: number}}
    label: {{y: regression}}
    split: {{by: column, column: fold, train: [0, 1], validate: [2], score: [3]}}
    train: {{epochs: 1, batch_size: 32, num_proc: 1, verbose: 0}}
    publish: {{gate: {{min_rows: 20, baseline: never}}}}
    """
    run = Run(Project(loads(text, overrides)), RunRequest(now=NOW))
    with pytest.raises(SparkdlError) as caught:
        execute(run, spark)
    assert run.record.exit_code == 1, run.record
    assert not ModelRegistry(f"{root}/refused/registry").models()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["label={same: regression}"], "label 'same' is 1 in all 100 training rows"),
        (["label={lost: regression}"], "none of the 50 rows to validate has a label yet"),
        (["label={wild: regression}"], "label 'wild': 50 of the rows to validate have one that is no finite float32"),
        (["label={kind: {type: binary, positive: a}}"], "have one that training never saw, such as 'new'"),
        (["label={three: multiclass}"], "training never saw, such as 'd': refuse them in expect, or name all classes"),
        (["weight=heavy"], "weight 'heavy' is missing, negative or not finite in"),
        (["expect.none={check: 'id < 0', action: fail}"], "all 200 rows of window all are refused"),
        (["split.train=[9]"], "split leaves no clean row to train"),
        (["split.validate=[9]"], "split leaves no clean row to validate"),
        (["model.factory={own}:raises"], "failed: ValueError: no such width"),
        (["model.factory={own}:no_module"], "returned a int: return a torch.nn.Module"),
        (["model.factory={own}:not_annotated"], "does not say that it returns a module"),
        (["model.factory={own}:two_outputs"], "2"),
        (["model.factory={own}:another_each_time"], "another_each_time"),
        (["model.factory={own}:absent"], "has no 'absent'"),
        (["transform={function: '{own}:no_frame'}"], "returned a int: return a DataFrame"),
        (["features.y2=number"], "y2"),
        (["score.keep=[absent]"], "absent"),
        (["report.slices=[absent]"], "absent"),
        (["source.key=absent"], "source.key[0]='absent' is no column of the source"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_what_cannot_be_learned_from_is_refused(spark, rows, own, tmp_path, overrides, message):
    said = refused(spark, rows, tmp_path, *(text.replace("{own}", own) for text in overrides))
    assert message in said, said


@pytest.mark.slow
def test_a_factory_that_failed_is_asked_again(spark, rows, own, tmp_path):
    refused(spark, rows, tmp_path, f"model.factory={own}:raises")
    assert "failed: ValueError" in refused(spark, rows, tmp_path, f"model.factory={own}:raises")
