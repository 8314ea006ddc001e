"""What goes after a training, and what stays."""

import itertools
from datetime import timedelta

import pyarrow as pa
import pytest

from sparkdl.features.spec import Number
from sparkdl.pipeline.file import PipelineFile
from sparkdl.pipeline.spec import Label, PipelineSpec
from sparkdl.pipeline.spec.operation import Keep, Places
from sparkdl.pipeline.spec.source import ParquetSource
from sparkdl.pipeline.state.cleanup import clean_up
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.receipts import StepNote, content_key
from sparkdl.pipeline.state.results import Trained
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.state.runs import add_run

STRANGER = "train-of-somebody-else"


class Home:
    """A pipeline's folders; trainings 0, 1, 2, ... lie there, each newer than the one before."""

    def __init__(self, root):
        self.root, self.places = root, {name: f"{root}/{name}" for name in ("runs", "tables", "shards", "registry")}

    def new_run(self, **keep):
        spec = PipelineSpec(
            source=ParquetSource(path=str(self.root)), features={"x": Number()}, label={"y": Label(type="binary")},
            places=Places(**self.places), keep=Keep(**keep),
        )  # fmt: skip
        run = Run(Project(PipelineFile("pipeline.yaml", spec, {})))
        run.project.table("clean").append(pa.table({"x": [1]}))
        return run

    def train(self, number, run=None, bundle=None):
        run = run or self.new_run()
        inputs = {"number": number}
        for step in ("features", "shards", "train"):
            key, result = content_key(step, inputs), {}
            if step == "train":
                bundle = bundle or key
                where = f"{self.root}/runs/models/{bundle}"
                numbers = {"epochs": 1, "best_epoch": 0, "steps": 1, "rows": 1, "ranks": 1}
                result = Trained(bundle=where, content_hash="", history=(), metrics={}, backend="torch", **numbers)
                self.put(f"runs/models/{bundle}/bundle.json", number)
            self.keep(run, step, key, result)
            if step == "shards":
                for part in ("train", "validate"):
                    self.put(f"shards/{part}-{key}/manifest.json", number)
        return bundle

    def keep(self, run, step, key, result):
        """What a run leaves once it has made what a key decides."""
        run.receipts.keep(step, key, result)
        run.record.steps.append(StepNote(name=step, key=key, kept=False, seconds=0.0))

    def put(self, path, number):
        file = self.root / path
        file.parent.mkdir(parents=True)
        file.write_text("{}")

    def names(self, path):
        return {entry.name for entry in (self.root / path).iterdir()}


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path)


def sets_of(*numbers):
    return {f"{part}-{content_key('shards', {'number': n})}" for part in ("train", "validate") for n in numbers}


def test_shards_features_and_bundles_of_the_newest_trainings_stay(home):
    for number in range(6):
        home.train(number)
    home.put(f"shards/{STRANGER}/manifest.json", 0)
    home.put("runs/models/mine/bundle.json", 0)
    run = home.new_run(trainings=2)
    home.train(6, run)
    clean_up(run)
    assert home.names("shards") == {*sets_of(5, 6), STRANGER}
    assert home.names("runs/models") == {*(content_key("train", {"number": n}) for n in (5, 6)), "mine"}
    assert home.names("runs/steps/features") == {f"{content_key('features', {'number': n})}.json" for n in (5, 6)}
    assert len(home.names("runs/steps/train")) == 7, "what a model was trained on is known for ever"


def test_what_this_run_used_stays_however_old_it_is(home):
    run = home.new_run(trainings=1)
    home.train(0, run)
    for number in (1, 2):
        home.train(number)
    clean_up(run)
    assert home.names("shards") == sets_of(0, 2)


def test_the_winner_of_a_search_stays_and_losers_of_earlier_ones_go(home):
    lost, won = "a" * 32, "b" * 32
    home.put(f"runs/models/{lost}/bundle.json", 0)
    home.put(f"runs/training/runs/{lost}/step-1", 0)
    run = home.new_run(trainings=1)
    home.train(0, run, bundle=won)
    tried = content_key("trial", {"n": 1})
    home.keep(run, "trial", tried, {})
    home.put(f"runs/models/{tried}/bundle.json", 0)
    clean_up(run)
    assert home.names("runs/models") == {won, tried}
    assert home.names("runs/training/runs") == set()


@pytest.mark.parametrize("keep", [{"trainings": None, "days": None}, {"trainings": 9}])
def test_all_stays_where_all_is_to_be_kept(home, keep):
    for number in range(4):
        home.train(number)
    run = home.new_run(**keep)
    home.train(4, run)
    clean_up(run)
    assert home.names("shards") == sets_of(*range(5))
    assert len(home.names("runs/models")) == 5


def test_a_run_that_did_not_train_deletes_nothing(home):
    for number in range(3):
        home.train(number)
    run = home.new_run(trainings=1)
    clean_up(run)
    assert home.names("shards") == sets_of(0, 1, 2)


def test_versions_of_own_tables_go_after_their_days_and_the_newest_can_be_read(home, monkeypatch):
    monkeypatch.setattr("sparkdl.pipeline.state.cleanup._VACUUM_EVERY", 1)
    monkeypatch.setattr("sparkdl.pipeline.state.cleanup.timedelta", lambda days: __import__("datetime").timedelta(0))
    run = home.new_run()
    clean = run.project.table("clean")
    before = len(home.names("tables/clean"))
    clean.compact()
    clean.append(pa.table({"x": [2]}))
    clean.compact()
    assert len(home.names("tables/clean")) > before
    home.train(0, run)
    clean_up(run)
    assert len([name for name in home.names("tables/clean") if name.endswith(".parquet")]) == 1
    assert sorted(clean.rows()["x"].to_pylist()) == [1, 2]


def test_versions_go_however_many_runs_did_not_train_since_the_last_vacuum(home, monkeypatch):
    monkeypatch.setattr("sparkdl.pipeline.state.cleanup._VACUUM_EVERY", 4)
    vacuumed = []
    monkeypatch.setattr(
        "sparkdl.tables.table.Table.vacuum",
        lambda table, *_, **__: vacuumed.append(table.version()) if table.uri.endswith("clean") else None,
    )
    for day in range(6):  # 5 versions a day, and a training at its end
        for _ in range(4):
            home.new_run()
        run = home.new_run()
        home.train(day, run)
        clean_up(run)
    assert vacuumed == [4, 9, 14, 19, 24, 29]
    clean_up(run)
    (home.root / "tables" / "clean").rename(home.root / "old")
    run = home.new_run()
    home.train(9, run)
    clean_up(run)
    assert vacuumed[6:] == [0]


def test_what_cannot_be_deleted_does_not_fail_the_run(home, monkeypatch, caplog):
    for number in range(3):
        home.train(number)
    run = home.new_run(trainings=1)
    home.train(3, run)

    def refuse(*_, **__):
        raise OSError("read-only")

    monkeypatch.setattr("sparkdl.pipeline.state.cleanup._delete", refuse)
    clean_up(run)
    assert "was not cleaned up: OSError: read-only" in caplog.text


def test_records_of_runs_that_found_nothing_new_go_after_their_days_and_their_rows_stay(home):
    run = home.new_run()
    table, made = run.project.table("runs"), {}
    for outcome, age in itertools.product(("nothing new", "promoted"), (1, 40)):
        record = Run(run.project, RunRequest(now=run.request.now - timedelta(days=age))).record
        record.end(outcome, "")
        record.write(run.project.runs.child(record.run_id).child("record.json"))
        add_run(table, record)
        made[outcome, age] = record.run_id
    home.train(0, run)
    clean_up(run)
    every = {*made.values()}
    assert home.names("runs") & every == every - {made["nothing new", 40]}
    assert {row["run_id"] for row in table.rows().to_pylist()} == every
