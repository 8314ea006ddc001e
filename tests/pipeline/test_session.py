"""What a session that a run opens is set to: small work and large work on one machine want different things."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkdl.errors import ConfigError
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.session import SMALL, configured_elsewhere, settings_of, storage_to_come
from sparkdl.storage import Storage

FILE = "source: {kind: csv, path: wine.csv}\nfeatures: {alcohol: number}\nlabel: {quality: regression}\n"
QUICK, TASKS = "spark.driver.defaultJavaOptions", "spark.sql.shuffle.partitions"


@pytest.fixture(autouse=True)
def no_archive(monkeypatch):
    """Whether this environment has an archive of Java's classes decides nothing here."""
    monkeypatch.setattr("sparkdl.pipeline.session.java_options", str)


def settings(size, *overrides, submitted=None):
    return settings_of(loads(FILE, overrides).spec, size, [("spark-submit", submitted or {})])


def test_a_small_source_is_read_with_the_quick_compiler_and_few_tasks():
    small, large = settings(SMALL - 1), settings(SMALL)
    assert small[QUICK] == "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    assert QUICK not in large
    assert [settings(size)[TASKS] for size in (1, SMALL, 1 << 30, 1 << 40)] == ["4", "8", "64", "200"]


@pytest.mark.parametrize("overrides", [["spark.master=yarn"], ["spark.master=k8s://https://host"]])
def test_a_cluster_is_left_as_it_is(overrides):
    assert not {QUICK, TASKS} & set(settings(0, *overrides))
    assert not {QUICK, TASKS} & set(settings(0, submitted={"spark.master": "yarn"}))


def test_nothing_is_set_for_a_source_that_only_spark_can_measure():
    assert not {QUICK, TASKS} & set(settings(None))


def test_java_takes_the_archive_of_classes_where_there_is_one(monkeypatch):
    monkeypatch.setattr("sparkdl.pipeline.session.java_options", lambda: "-XX:SharedArchiveFile=/a.jsa")
    assert settings(0)[QUICK] == "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:SharedArchiveFile=/a.jsa"
    assert settings(SMALL)[QUICK] == settings(0, "spark.master=yarn")[QUICK] == "-XX:SharedArchiveFile=/a.jsa"


@pytest.mark.parametrize("chosen", ["-XX:+UseG1GC", "-Xss4m -XX:+UseZGC", "-XX:-UseSerialGC"])
def test_the_user_chooses_javas_collector(chosen, monkeypatch):
    options = "spark.driver.extraJavaOptions"
    assert settings(0, f"spark.conf.{options}={chosen}")[QUICK] == "-XX:TieredStopAtLevel=1"
    assert settings(0, submitted={options: chosen})[QUICK] == "-XX:TieredStopAtLevel=1"
    assert "SerialGC" in settings(0, submitted={options: "-Xss4m -XX:GCTimeRatio=9"})[QUICK]
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", chosen)
    assert settings(0)[QUICK] == "-XX:TieredStopAtLevel=1"


def test_the_file_and_spark_submit_win():
    found = settings(0, f"spark.conf.{TASKS}=7", f"spark.conf.{QUICK}=-Xss4m", submitted={"spark.driver.memory": "9g"})
    assert (found[TASKS], found[QUICK], found["spark.driver.memory"]) == ("7", "-Xss4m", "9g")


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """Write spark-defaults.conf and core-site.xml into folders of this process, which has no session."""
    for name in ("PYSPARK_GATEWAY_PORT", "PYSPARK_SUBMIT_ARGS", "MASTER", "SPARK_REMOTE", "YARN_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sparkdl.storage.session._context", lambda: None)
    for name in ("SPARK_CONF_DIR", "HADOOP_CONF_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))

    def write(defaults="", default_filesystem="", folder="HADOOP_CONF_DIR"):
        (tmp_path / "SPARK_CONF_DIR" / "spark-defaults.conf").write_text(defaults)
        if default_filesystem:
            site = f"<property><name>fs.defaultFS</name><value>{default_filesystem}</value></property>"
            (tmp_path / folder / "core-site.xml").write_text(f"<configuration>{site}</configuration>")

    return write


def test_what_the_user_configured_wins_over_our_defaults(configured, monkeypatch):
    configured("spark.master  yarn\nspark.driver.memory=7g\n# spark.ui.enabled true\nspark.sql.x a\\\n  b\n")
    spec = loads(FILE).spec
    found = settings_of(spec, 0, configured_elsewhere())
    assert (found["spark.master"], found["spark.driver.memory"], found["spark.ui.enabled"]) == ("yarn", "7g", "false")
    assert found["spark.sql.x"] == "ab"
    assert not {QUICK, TASKS} & set(found)
    assert (
        settings_of(loads(FILE, ["spark.master=local[3]"]).spec, 0, configured_elsewhere())["spark.master"]
        == "local[3]"
    )
    monkeypatch.setenv("MASTER", "local[5]")
    assert settings_of(spec, 0, configured_elsewhere())["spark.master"] == "local[5]"
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--master=k8s://h --conf spark.a='b c' --driver-memory 9g pyspark-shell")
    found = settings_of(loads(FILE, ["spark.master=local[3]"]).spec, 0, configured_elsewhere())
    assert (found["spark.master"], found["spark.a"], found["spark.driver.memory"]) == ("k8s://h", "b c", "9g")
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--conf 'x")
    with pytest.raises(ConfigError, match="PYSPARK_SUBMIT_ARGS are no words of spark-submit"):
        configured_elsewhere()


def test_a_session_is_opened_as_spark_defaults_say_and_the_log_says_from_where(configured, tmp_path):
    configured(
        "spark.master local[1]\nspark.driver.memory 700m\nspark.app.name mine\nspark.secret.token hunter2\n"
        "spark.submit.deployMode cluster\n"
    )
    program = (
        "import json, logging, sys\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stderr)\n"
        "from sparkdl.pipeline.file import loads\n"
        "from sparkdl.pipeline.session import open_session\n"
        f"spark = open_session(loads({FILE!r}).spec, 0)\n"
        "context = spark.sparkContext\n"
        "memory = context._jvm.java.lang.Runtime.getRuntime().maxMemory() >> 20\n"
        "print(json.dumps([context.master, context.appName, memory, context.getConf().get('spark.ui.enabled')]))\n"
        "spark.stop()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    master, name, memory, ui = json.loads(done.stdout)
    assert (master, name, ui) == ("local[1]", "mine", "false")
    assert 500 < memory < 800
    told = next(line for line in done.stderr.splitlines() if "the Spark session takes" in line)
    place = tmp_path / "SPARK_CONF_DIR" / "spark-defaults.conf"
    taken = "spark.app.name=mine, spark.driver.memory=700m, spark.master=local[1], spark.secret.token=(hidden), "
    taken += "spark.submit.deployMode=cluster"
    assert f"from {place} {taken}" in told
    assert "from sparkdl " in told
    assert "hunter2" not in done.stderr


@pytest.mark.parametrize("folder", ["HADOOP_CONF_DIR", "SPARK_CONF_DIR", "spark.conf"])
def test_a_plain_path_means_before_spark_starts_what_it_will_mean_to_spark(configured, folder):
    overrides = []
    if folder == "spark.conf":
        overrides = ["spark.conf.spark.hadoop.fs.defaultFS=hdfs://name:8020/"]
    else:
        configured(default_filesystem="hdfs://name:8020", folder=folder)
    with storage_to_come(loads(FILE, overrides).spec):
        assert Storage.of("/data/x").uri == "hdfs://name:8020/data/x"
        assert Storage.of("file:///data/x").local_path() == Path("/data/x")
        assert Storage.of(Path("/data/x")).local_path() == Path("/data/x")
    assert Storage.of("/data/x").local_path() == Path("/data/x")


def test_a_default_filesystem_that_cannot_be_told_asks_for_the_whole_address(configured):
    configured(default_filesystem="hdfs://${env.NAMENODE}:8020")
    with (
        storage_to_come(loads(FILE).spec),
        pytest.raises(ConfigError, match=r"/data/x is a plain path.*write the whole"),
    ):
        Storage.of("/data/x")


def test_a_plain_path_is_not_looked_for_here_where_the_server_of_spark_connect_is_elsewhere(configured, monkeypatch):
    monkeypatch.setenv("SPARK_REMOTE", "sc://192.0.2.1:15002/;token=hunter2")
    with (
        storage_to_come(loads(FILE).spec),
        pytest.raises(ConfigError, match="/data/x is a path on the disk of the Spark"),
    ):
        Storage.of("/data/x")
    monkeypatch.setenv("SPARK_REMOTE", "sc://127.0.0.1:15002")
    with storage_to_come(loads(FILE).spec):
        assert Storage.of("/data/x").local_path() == Path("/data/x")


@pytest.mark.slow
def test_torch_is_loaded_beside_the_start_of_spark():
    """The thread that loads it may meet the imports of pyspark: both must end."""
    program = (
        "import importlib, threading\n"
        "loading = threading.Thread(target=importlib.import_module, args=('sparkdl.pipeline.work.search',))\n"
        "loading.start()\n"
        "import pyspark.sql, pyspark.sql.functions\n"
        "loading.join()\n"
        "from sparkdl.pipeline.work.search import TrialSearch\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_import_lock_that_an_interrupt_left_taken_does_not_keep_a_run_from_ending():
    program = (
        "import _imp, sparkdl.pipeline.run as run; run._LOADING_SECONDS = 0.2\n"
        "_imp.acquire_lock()\nwith run._loading('colorsys') as loading: pass\nassert loading.is_alive()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
