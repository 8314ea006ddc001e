"""A folder that executors do not share with the driver is found before work starts, in one sentence.

The executor's machine is played by a mount namespace, in which another disk lies over one folder.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from sparkdl.storage import Storage, executors

pyspark = pytest.importorskip("pyspark")

SCRIPT = """
import json, sys
import torch
from pyspark.sql import SparkSession
from sparkdl import TorchEstimator, run_on_dataframe, write_shards
from sparkdl.errors import StorageError
from sparkdl.tables.table import Table

master, own, shared = sys.argv[1:]
builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
for name, value in {
    "driver.memory": "512m", "executor.memory": "512m", "cores.max": "2",
    "driver.host": "127.0.0.1", "driver.bindAddress": "127.0.0.1",
}.items():
    builder = builder.config(f"spark.{name}", value)
spark = builder.getOrCreate()
rows = spark.range(64).selectExpr("CAST(id AS FLOAT) AS x", "CAST(id AS FLOAT) AS y")
unread = rows.selectExpr("CAST(raise_error('the rows were computed') AS FLOAT) x", "y")

def estimator(store):
    net = torch.nn.Linear(1, 1)
    return TorchEstimator(
        model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0001), loss=torch.nn.MSELoss(),
        feature_cols=["x"], label_cols=["y"], batch_size=8, num_proc=1, verbose=0, store=store,
    )

refused = {}
for name, work in {
    "fit": lambda: estimator(f"{own}/store").fit(unread),
    "shards": lambda: write_shards(unread, f"{own}/set", columns=["x"], labels=["y"]),
    "run": lambda: run_on_dataframe(print, unread, num_proc=1, store=f"{own}/store"),
    "table": lambda: Table(f"{own}/table").write(unread),
}.items():
    try:
        work()
    except StorageError as error:
        refused[name] = str(error)
fitted = estimator(f"{shared}/store").fit(rows)
print("RESULTS " + json.dumps([refused, fitted.transform(rows).count()]))
spark.stop()
"""


@pytest.fixture
def cluster(tmp_path):
    """The URL of a master whose only worker has an empty disk of its own at ``tmp_path/own``."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a disk of the executor's own needs unshare and the rights of root")
    from tests.launch.standalone import Worker, standalone_cluster

    own = tmp_path / "own"
    own.mkdir()
    apart = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {own} && exec "$0" "$@"')
    with standalone_cluster(tmp_path, [Worker(inside=apart)]) as url:
        yield url


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_folder_that_executors_do_not_share_is_refused_before_a_row_is_computed(cluster, tmp_path):
    own, shared = str(tmp_path / "own"), str(tmp_path / "shared")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, cluster, own, shared],
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "RESULTS" in done.stdout, done.stderr[-6000:]
    refused, rows = json.loads(done.stdout.rpartition("RESULTS ")[2].splitlines()[0])
    assert rows == 64
    assert set(refused) == {"fit", "shards", "run", "table"}
    for said in refused.values():
        assert re.search(rf"executor on \S+ has another disk at {own}/\S+ than the driver: give a folder that", said)
        assert "\n" not in said
    assert re.match(r"checkpoints: .*; logs: .*; store: ", refused["fit"])
    assert os.listdir(own) == []


def test_an_executor_says_what_it_finds(spark, tmp_path, monkeypatch):
    place = Storage.of(tmp_path / "new/store")
    monkeypatch.setattr(executors, "_all_here", lambda spark: False)
    monkeypatch.setattr(executors, "_known", executors.weakref.WeakKeyDictionary())
    found = executors.problems_on_executors({"store": place}, spark, lambda place: f"cannot write {place.uri}")
    assert list(found) == ["store"]
    assert re.fullmatch(rf"the executor on \S+ cannot write {place.uri}", found["store"])
    assert executors.problems_on_executors({"store": place}, spark, lambda place: "") == {}
    below = {"shards": place.child("shards/one")}  # of a folder that is known to be good nobody is asked
    assert executors.problems_on_executors(below, spark, lambda place: "never") == {}
    assert os.listdir(tmp_path) == []


def test_a_master_of_this_machine_is_not_asked(spark, tmp_path):
    place = {"store": Storage.of(tmp_path)}
    assert executors.problems_on_executors(place, spark, lambda place: "never") == {}
