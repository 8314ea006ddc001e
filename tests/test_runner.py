"""What the options of ``horovod.spark.run`` become, and which values of them are refused, without a rank."""

from __future__ import annotations

import io
import sys

import pytest

from sparkdl.config import LaunchConfig
from sparkdl.errors import ConfigError, SchemaError
from sparkdl.runner import launch_config, run_on_dataframe


def test_horovods_own_defaults_change_nothing(monkeypatch):
    monkeypatch.delenv("HOROVOD_SPARK_START_TIMEOUT", raising=False)
    inert = {
        "start_timeout": None,
        "use_mpi": None,
        "use_gloo": None,
        "extra_mpi_args": None,
        "env": None,
        "verbose": 1,
    }
    inert |= {"stdout": None, "stderr": None, "nics": None, "prefix_output_with_timestamp": False, "executable": None}
    assert launch_config(**inert) == LaunchConfig()
    assert launch_config(use_gloo=False, use_mpi=False, executable=sys.executable, nics=[]) == LaunchConfig()


def test_what_an_option_says_is_what_the_launch_gets(monkeypatch):
    stream = io.StringIO()
    config = launch_config(
        LaunchConfig(env={"A": "1", "B": "1"}), env={"B": "2"}, start_timeout=5, stderr=stream, nics={"eth0"}
    )
    assert (config.env, config.start_timeout_seconds, config.interface) == ({"A": "1", "B": "2"}, 5, "eth0")
    assert (config.stdout, config.stderr) == (None, stream)
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", "77")
    assert launch_config().start_timeout_seconds == 77
    assert launch_config(start_timeout=5).start_timeout_seconds == 5
    assert launch_config(LaunchConfig(start_timeout_seconds=9)).start_timeout_seconds == 9
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="HOROVOD_SPARK_START_TIMEOUT='soon' is no number of seconds"):
        launch_config()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"use_mpi": True}, "nobody starts mpirun; leave it out"),
        ({"use_gloo": "yes"}, "use_gloo='yes' is a str: give True or False"),
        ({"extra_mpi_args": "-x A"}, "extra_mpi_args='-x A' are for mpirun.*env sets variables"),
        ({"nics": ["eth1", "eth0"]}, r"nics=\['eth0', 'eth1'\] names 2 interfaces, and ranks use one"),
        ({"nics": 3}, "nics=3 is a int: give the name of one interface"),
        ({"config": {}}, "config={} is a dict: give a sparkdl.config.LaunchConfig"),
        ({"executable": "/opt/python"}, "executable='/opt/python' is not .*: set PYSPARK_PYTHON"),
        ({"stdout": "out.log"}, "stdout='out.log' is a str that takes no text: give an open text stream"),
        ({"stderr": io.BytesIO()}, "stderr=.* is a BytesIO that takes no text"),
        ({"verbose": "loud"}, "verbose='loud' is no level of output"),
        ({"env": ["A"]}, r"env=\['A'\] is a list: give a dict"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_what_to_do(wrong, words):
    with pytest.raises(ConfigError, match=words):
        launch_config(**wrong)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"fn": "train"}, ConfigError, "give the function"),
        ({"args": "ab"}, ConfigError, "args='ab' is a str"),
        ({"kwargs": [1]}, ConfigError, r"kwargs=\[1\] is a list"),
        ({"num_proc": "2"}, ConfigError, "num_proc='2' is no number of ranks"),
        ({"args": ["ab"], "kwargs": None}, SchemaError, "takes a Spark DataFrame, not a builtins.list"),
    ],
)
def test_what_run_on_dataframe_cannot_mean_is_refused_before_anything_is_written(settings, error, words):
    with pytest.raises(error, match=words):
        run_on_dataframe(**{"fn": print, "df": [1, 2]} | settings)
