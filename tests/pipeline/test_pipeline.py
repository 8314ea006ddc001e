"""The way in: what is refused before anything starts, where modules are found, and where a pipeline stands."""

from __future__ import annotations

import importlib
import sys
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

import sparkdl
from sparkdl.errors import ConfigError, DataError, PipelineFileError
from sparkdl.pipeline import Pipeline
from sparkdl.pipeline.code import importable, named_functions
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.rows.parts import parts_of
from sparkdl.pipeline.rows.window_receipt import WindowReceipt
from sparkdl.pipeline.state.lease import lease
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import replacing
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.state.results import Drifted
from sparkdl.pipeline.state.run import Run
from sparkdl.pipeline.steps.evaluate import publish_inputs
from sparkdl.pipeline.summary import plan_lines
from sparkdl.pipeline.windows import Parts

FILE = """\
name: wine
root: data
source: {kind: csv, path: rows, partition: day}
features: {alcohol: number, colour: category}
label: {quality: regression}
"""

GONE = "the source no longer holds it: its rows are removed"


@pytest.fixture
def folder(tmp_path):
    """A pipeline file with two days of rows beside it."""
    (tmp_path / "wine.yaml").write_text(FILE)
    for day in ("2026-03-01", "2026-03-02"):
        (tmp_path / "rows" / f"day={day}").mkdir(parents=True)
        (tmp_path / "rows" / f"day={day}" / "a.csv").write_text("alcohol,colour,quality\n12.5,red,6\n")
    return tmp_path


def test_mlflow_that_is_not_installed_is_named_before_anything_runs(folder, monkeypatch):
    pytest.importorskip("mlflow")
    mirrored = "publish.mlflow='sqlite:////data/mlflow.db'"
    assert Pipeline.load(folder / "wine.yaml", [mirrored]).spec.publish.mlflow == "sqlite:////data/mlflow.db"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PipelineFileError, match=r"publish.mlflow: MLflow is not installed: pip install"):
        Pipeline.load(folder / "wine.yaml", [mirrored])


def test_where_a_version_is_mirrored_does_not_decide_whether_it_is_published_again(folder):
    keys = []
    for word in ("", "publish.mlflow='sqlite:////data/mlflow.db'", "publish.alias=best"):
        run = Run(Project(loads(FILE, [f"root={folder}/data", *([word] if word else [])])))
        keys.append(publish_inputs(run, Parts(train=(), validate=(), score=())))
    assert keys[0] == keys[1] != keys[2]


def test_a_gate_that_nothing_could_pass_is_refused_before_a_training(folder):
    with pytest.raises(PipelineFileError, match=r"publish.gate.margin=0 with rule 'not_worse' can never be shown"):
        Pipeline.load(folder / "wine.yaml", ["publish.gate.rule=not_worse"])
    with pytest.raises(PipelineFileError, match=r"confidence=0.5 is not above 0.5"):
        Pipeline.load(folder / "wine.yaml", ["publish.gate.confidence=0.5"])


def test_functions_that_are_not_there_are_told_all_at_once_with_their_lines(folder):
    (folder / "wine.yaml").write_text(f"{FILE}train: {{optimizer: 'absent:g'}}\nmodel: absent:f\n")
    with pytest.raises(PipelineFileError) as refused:
        Pipeline.load(folder / "wine.yaml")
    assert [problem.split(" is ")[0] for problem in refused.value.problems] == [
        "wine.yaml:6: train.optimizer: absent:g names the module absent, which",
        "wine.yaml:7: model.factory: absent:f names the module absent, which",
    ]


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        (
            "features.words={type: text, tokens: 'shlex:split'}",
            r"features.words: shlex:split.*Python's standard library",
        ),
        ("model=torch.hub:load", r"model.factory: torch.hub:load.* is part of torch outside of torch.nn"),
        ("model=sparkdl.doctor:checks", r"model.factory: sparkdl.doctor:checks.* is sparkdl itself"),
    ],
)
def test_what_no_saved_model_may_name_is_refused_before_a_training(folder, word, reason):
    with pytest.raises(PipelineFileError, match=f"{reason}.*write a function of your own that calls it"):
        Pipeline.load(folder / "wine.yaml", [word])


def test_a_factory_that_does_not_say_what_it_returns_is_refused_before_a_row_is_read(folder):
    (folder / "cellar.py").write_text("def network(features):\n    return Net()\nclass Net: ...\n")
    with pytest.raises(PipelineFileError, match=r"model.factory=cellar:network does not say that it returns a module"):
        Pipeline.load(folder / "wine.yaml", ["model=cellar:network"])
    Pipeline.load(folder / "wine.yaml", ["model=cellar:Net"])
    (folder / "cellar.py").write_text("def network(features) -> 'Net':\n    return Net()\nclass Net: ...\n")
    Pipeline.load(folder / "wine.yaml", ["model=cellar:network"])


def test_packages_of_functions_that_models_name_are_trusted_and_no_others(folder):
    (folder / "cellar.py").write_text("def sgd(model): ...\ndef read(spark): ...\n")
    words = ["train.optimizer=cellar:sgd", "label.quality.loss=torch.nn.functional:huber_loss"]
    assert Project(Pipeline.load(folder / "wine.yaml", words).file).trusted == []
    words += ["features.words={type: text, tokens: 'numpy.strings:upper'}", "model=torch.nn:Linear"]
    assert Project(Pipeline.load(folder / "wine.yaml", words).file).trusted == ["numpy", "torch.nn"]


def test_functions_among_the_settings_of_a_search_are_functions_of_the_file(folder):
    split = "split: {by: hash, train: 0.6, validate: 0.2, test: 0.1, score: 0.1}\n"
    text = f"{FILE}{split}search:\n  space:\n    train.optimizer: [adam, 'cellar:sgd']\n"
    (folder / "wine.yaml").write_text(text)
    with pytest.raises(PipelineFileError, match=r"wine.yaml:9: search.space.train.optimizer.*cellar, which is neither"):
        Pipeline.load(folder / "wine.yaml")
    found = set()
    for rate in (0.1, 0.2):
        (folder / "cellar.py").write_text(f"def sgd(model): return SGD(model.parameters(), {rate})\n")
        made = Pipeline.load(folder / "wine.yaml")
        with importable(made.spec.code):
            found |= Project(made.file).code.items()
    assert [target for target, _ in found] == ["cellar:sgd"] * 2
    assert any(named_functions(made.spec))  # and workers get the folder


def test_functions_are_found_beside_the_file_and_a_missing_one_is_told_with_its_line(folder):
    (folder / "wine.yaml").write_text(f"{FILE}model: cellar:network\n")
    with pytest.raises(PipelineFileError, match=r"wine.yaml:6: model.factory.*cellar, which is neither in the folder"):
        Pipeline.load(folder / "wine.yaml")
    (folder / "code").mkdir()
    (folder / "code" / "cellar.py").write_text("def network(features) -> Module: ...\n")
    with pytest.raises(PipelineFileError, match="neither in the folder"):
        Pipeline.load(folder / "wine.yaml")
    path = list(sys.path)
    Pipeline.load(folder / "wine.yaml", ["code=code"])
    assert sys.path == path
    with pytest.raises(PipelineFileError, match="cellar has no 'netwerk': did you mean network"):
        Pipeline.load(folder / "wine.yaml", ["code=code", "model=cellar:netwerk"])
    with pytest.raises(ConfigError, match="elsewhere is no folder"):
        Pipeline.load(folder / "wine.yaml", ["code=elsewhere"])


def test_modules_of_one_pipeline_are_not_taken_for_those_of_another(tmp_path):
    found = []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "cellar_of_test.py").write_text(f"NUMBER = {number}\n")
        with importable(str(tmp_path / str(number))):
            found.append(importlib.import_module("cellar_of_test").NUMBER)
    assert found == [1, 2]
    assert "cellar_of_test" not in sys.modules


@pytest.mark.parametrize(
    ("backfill", "said"),
    [
        (("2026-3-1", "2026-03-02"), "'2026-3-1' is no day: write it like 2026-03-02"),
        (("2026-03-01T05", "2026-03-02"), "is no day"),
        (("2026-03-02", "2026-03-01"), "ends before it begins"),
        (("2025-01-01", "2025-01-02"), "names no window of the source, which has 2 windows"),
    ],
)
def test_a_backfill_that_means_nothing_is_refused_before_spark_starts(folder, backfill, said):
    with pytest.raises((ConfigError, DataError), match=said):
        Pipeline.load(folder / "wine.yaml").run(backfill=backfill)


def test_a_backfill_of_rows_without_time_and_a_time_without_zone_are_refused(folder):
    timeless = Pipeline(loads(FILE.replace(", partition: day", ""), folder=folder))
    with pytest.raises(ConfigError, match=r"write all\.\.all"):
        timeless.run(backfill=("2026-03-01", "2026-03-02"))
    with pytest.raises(ConfigError, match="has no time zone"):
        timeless.run(now=datetime(2026, 3, 1))


def test_a_plan_says_which_windows_are_due_and_what_follows(folder):
    pipeline = Pipeline.load(folder / "wine.yaml", ["split={by: hash}"])
    plan = pipeline.plan(now=datetime(2026, 3, 1, 12, tzinfo=UTC))
    assert plan.due == {"2026-03-01": "new"}
    assert plan.ahead == ("2026-03-02",)
    assert [(step.name, step.state) for step in plan.steps] == [
        ("drift", "open"),
        ("features", "done again"),
        ("shards", "done again"),
        ("train", "done again"),
        ("evaluate", "done again"),
        ("publish", "open"),
        ("score", "open"),
    ]
    assert not pipeline.plan().nothing_new
    assert not (folder / "data").exists()


def test_a_plan_says_that_a_run_would_be_refused(folder):
    plan = Pipeline.load(folder / "wine.yaml").plan()
    assert list(plan.due) == ["2026-03-01", "2026-03-02"]
    assert "split.train has no window with rows" in plan.stops


def books(window, **more):
    counts = {"read": 7, "kept": 7, "quarantined": 0, "duplicates": 0} | more
    return WindowReceipt(window=window, fingerprint="f", rules="r", content="c", **counts)


def ingested(pipeline, *windows):
    """What earlier runs know of some windows."""
    with replacing(Run(Project(pipeline.file)).receipts, "ingest", []) as made:
        for each in windows:
            made[each.window] = ("k", each)


def test_where_no_row_is_kept_it_is_said_what_became_of_them(folder):
    spec = Pipeline.load(folder / "wine.yaml").spec
    put_aside = books("none", kept=0, quarantined=7, outcomes={"no time that can be read": 7})
    with pytest.raises(DataError, match=r"no window with clean rows \(7 rows no time that can be read\): check source"):
        parts_of(spec, {"none": put_aside})


def test_a_plan_says_how_many_rows_the_transform_left_out(folder):
    pipeline = Pipeline.load(folder / "wine.yaml", ["split={by: hash}"])
    ingested(pipeline, books("2026-03-01", source_rows=7))
    assert "transform" not in dict(plan_lines(pipeline.plan()))
    ingested(pipeline, books("2026-03-01", source_rows=10_000))
    said = dict(plan_lines(pipeline.plan()))["transform"]
    assert said == "as last ingested: 10,000 rows in the source, 7 after the transform"


def test_a_plan_says_which_windows_the_source_no_longer_holds_and_what_becomes_of_them(folder):
    kept = Pipeline.load(folder / "wine.yaml", ["split={by: hash}"])
    ingested(kept, books("2026-02-26"), books("2026-02-27"), books("none"))
    plan = kept.plan()
    assert plan.deleted == plan.unchanged == ("2026-02-26", "2026-02-27")
    assert plan.due == {"2026-03-01": "new", "2026-03-02": "new", "none": GONE}
    assert "--backfill 2026-02-26..2026-02-27 or source.deleted" in dict(plan_lines(plan))["deleted"]
    assert list(kept.plan(backfill=("2026-02-27", "2026-02-27")).due.values()).count(GONE) == 2
    remove = Pipeline.load(folder / "wine.yaml", ["split={by: hash}", "source.deleted_windows=remove"])
    plan = remove.plan()
    assert (plan.deleted, plan.unchanged, plan.stops) == ((), (), "")
    assert [name for name, why in plan.due.items() if why == GONE] == ["2026-02-26", "2026-02-27", "none"]
    assert plan.amounts["ingest"].bytes is not None  # of what is read
    assert "deleted" not in dict(plan_lines(plan))


def test_a_source_that_lost_all_its_windows_is_refused_before_spark_starts(folder):
    pipeline = Pipeline.load(folder / "wine.yaml", ["source.deleted_windows=remove"])
    ingested(pipeline, books("2026-02-26"))
    with pytest.raises(DataError, match="holds no rows of any window that has begun, and the clean rows are of window"):
        pipeline.run(now=datetime(2026, 2, 27, tzinfo=UTC))


def test_deleted_windows_of_a_source_without_windows_are_refused(folder):
    with pytest.raises(PipelineFileError, match=r"source.deleted_windows='remove' needs windows"):
        Pipeline.load(folder / "wine.yaml", ["source={kind: csv, path: rows, deleted_windows: remove}"])


def test_the_status_of_a_pipeline_that_never_ran(folder):
    status = sparkdl.Pipeline.load(folder / "wine.yaml").status()
    assert (status.last_run, status.champion, status.done, status.holder) == (None, None, (), None)
    assert status.due == ("2026-03-01", "2026-03-02")


def test_the_status_tells_a_refused_run_a_source_that_is_gone_and_who_is_at_work(folder):
    pipeline = Pipeline.load(folder / "wine.yaml", ["source.path=nowhere"])
    with pytest.raises(DataError, match="holds no files"):
        pipeline.run()
    with lease(Project(pipeline.file).runs.child("leases"), "the-other"):
        status = pipeline.status()
    assert status.last_run is not None
    assert (status.last_run.outcome, status.last_run.exit_code) == ("refused", 1)
    assert "holds no files" in status.source
    assert status.due is None
    assert status.holder is not None
    assert status.holder.run_id == "the-other"
    assert pipeline.status().holder is None


def test_the_status_does_not_say_of_a_champion_that_there_is_none_to_compare_with(folder, monkeypatch):
    pipeline = Pipeline.load(folder / "wine.yaml")
    record = RunRecord(pipeline="wine", run_id="20260301T000000-000000", started="2026-03-01T00:00:00+00:00")
    record.drift = Drifted(against=None, action="none", reason="there is no champion yet to compare with")
    record.write(Project(pipeline.file).runs.child(record.run_id).child("record.json"))
    assert pipeline.status().drift == record.drift
    monkeypatch.setattr(Run, "champion", lambda _: SimpleNamespace(version=1))
    assert pipeline.status().drift is None


@pytest.mark.parametrize("path", ["orders", "orders/day=1"])
def test_a_plain_source_in_a_tables_folder_is_no_sound_file(tmp_path, path):
    place = tmp_path / path
    place.mkdir(parents=True)
    (tmp_path / "orders" / "_delta_log").mkdir()
    (tmp_path / "p.yaml").write_text(
        f"source: {{kind: parquet, path: {path}}}\nfeatures: {{x: number}}\nlabel: {{y: regression}}\nroot: made\n"
    )
    with pytest.raises(ConfigError, match=r"those of a table \(Delta\).*write source: \{kind: delta, table: .*/orders"):
        Pipeline.load(tmp_path / "p.yaml").check()
