"""Where a session's tasks run, of sessions on this machine and elsewhere."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sparkdl.compat.spark_master import is_connect, is_local
from sparkdl.storage.executors import on_one_machine


def session(master, host=None):
    kind = type("SparkSession", (), {"__module__": f"pyspark.sql.{'' if host is None else 'connect.'}session"})
    spark = kind()
    spark.conf, spark.client = {"spark.master": master} if master else {}, SimpleNamespace(host=host)
    return spark


@pytest.mark.parametrize(
    ("master", "local", "one_machine"),
    [("local", True, True), ("local[2]", True, True), ("local-cluster[2,1,1024]", False, True), ("yarn", False, False),
     ("k8s://https://localhost:443", False, False), ("", False, False)],
)  # fmt: skip
def test_the_master_tells_where_tasks_run(master, local, one_machine):
    assert (is_local(session(master)), on_one_machine(session(master))) == (local, one_machine)
    assert not is_connect(session(master))


def test_a_server_elsewhere_shares_no_disk_whatever_its_own_master_is():
    here, elsewhere = session("local[2]", "localhost"), session("local[2]", "192.0.2.1")
    assert is_connect(here)
    assert is_connect(elsewhere)
    assert on_one_machine(here)
    assert not on_one_machine(elsewhere)
