"""What the Python workers of a run can import, and what they have loaded when they are born."""

from __future__ import annotations

import os
import sys

import pytest

from sparkdl.pipeline.file import loads
from sparkdl.pipeline.session import code_for_workers, settings_of, start_torch_daemon, torch_for_workers

FILE = """
source: {kind: csv, path: wine.csv}
transform: cellar_of_workers:better
features: {alcohol: number}
label: {quality: regression}
"""


def test_workers_import_from_the_folder_of_the_file_for_the_time_of_a_run(spark, tmp_path):
    (tmp_path / "cellar_of_workers.py").write_text("BOTTLES = 7\n")
    spec = loads(FILE, folder=tmp_path).spec

    def bottles(batches):
        import cellar_of_workers
        import pyarrow as pa

        yield pa.RecordBatch.from_pydict({"bottles": [cellar_of_workers.BOTTLES]})

    before = dict(spark.sparkContext.environment)
    with code_for_workers(spark, spec):
        assert spark.range(1).mapInArrow(bottles, "bottles long").first().bottles == 7
    assert spark.sparkContext.environment == before


def modules_of_a_worker(spark):
    def loaded(batches):
        import pyarrow as pa

        names = [name for name in ("torch", "pyspark.worker") if name in sys.modules]
        yield pa.RecordBatch.from_pydict({"name": names})

    return {row.name for row in spark.range(0, 1, 1, 1).mapInArrow(loaded, "name string").collect()}


@pytest.mark.slow
def test_workers_of_etl_do_not_wait_for_torch_and_those_of_a_training_have_it(spark, monkeypatch):
    monkeypatch.delenv("SPARKDL_PRELOAD")
    preload = settings_of(loads(FILE.replace("transform: cellar_of_workers:better", "")).spec, None, [])
    monkeypatch.setitem(spark.sparkContext.environment, "SPARKDL_PRELOAD", preload["spark.executorEnv.SPARKDL_PRELOAD"])
    assert modules_of_a_worker(spark) == {"pyspark.worker"}
    start_torch_daemon(spark)
    assert modules_of_a_worker(spark) == {"pyspark.worker"}, "it is loaded beside the work that follows"
    torch_for_workers(spark)
    assert modules_of_a_worker(spark) == {"torch", "pyspark.worker"}


def test_work_goes_on_while_the_daemon_loads_what_a_training_needs(spark, monkeypatch, tmp_path):
    """Spark lets no task have a worker while a daemon starts: this one answers first, and loads then."""
    go, loaded = tmp_path / "go", "slow_to_load_in_workers"
    (tmp_path / f"{loaded}.py").write_text(
        f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists():\n    time.sleep(.02)\n"
    )
    environment = spark.sparkContext.environment
    monkeypatch.setattr("sparkdl.pipeline.session.DEFAULT_PRELOAD", (loaded,))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(environment, "PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setitem(environment, "SPARKDL_PRELOAD", "pyspark.worker")
    monkeypatch.setitem(environment, "SPARKDL_PRELOAD_LATER", "")

    def has_it(batches):
        import pyarrow as pa

        for batch in batches:
            yield pa.RecordBatch.from_pydict({"id": [loaded in sys.modules] * len(batch)})

    start_torch_daemon(spark)
    for _ in range(3):
        assert spark.range(0, 2, 1, 2).mapInArrow(has_it, "id boolean").collect() == [(False,), (False,)]
    go.touch()
    torch_for_workers(spark)
    assert spark.range(0, 2, 1, 2).mapInArrow(has_it, "id boolean").collect() == [(True,), (True,)]


@pytest.mark.parametrize("chosen", [None, "json"])
def test_a_session_that_others_opened_keeps_its_workers(spark, monkeypatch, chosen):
    environment = spark.sparkContext.environment
    if chosen is not None:
        monkeypatch.setitem(environment, "SPARKDL_PRELOAD", chosen)
    before = dict(environment)
    start_torch_daemon(spark)
    torch_for_workers(spark)
    assert environment == before
