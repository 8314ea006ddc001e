"""Both engines do the same: delta-rs in the session of all tests, Spark's Delta in a process with its extension."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import contract
import pyspark
import pytest
from features_of_tables import TABLES


@pytest.mark.parametrize("name", contract.CHECKS)
def test_delta_rs_keeps_the_contract(spark, tmp_path, name):
    from sparkdl.tables.table import Table

    contract.CHECKS[name](spark, lambda: Table(str(tmp_path / "table")))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What came of every check in a session with Delta's extension."""
    if not contract.JARS.is_dir():
        pytest.skip("needs Delta's JARs: ../shared/jars/delta does not lie beside the project")
    if not pyspark.__version__.startswith("4.2."):
        pytest.skip(f"Delta's JARs are for Spark 4.2, this is {pyspark.__version__}")
    folder = tmp_path_factory.mktemp("contract")
    result = folder / "result.json"
    script = [sys.executable, str(Path(contract.__file__)), str(result)]
    with (folder / "log").open("wb") as log:
        done = subprocess.run(script, cwd=folder, env={**os.environ}, stdout=log, stderr=log, timeout=1500, check=False)
    assert done.returncode == 0, (folder / "log").read_text()[-4000:]
    return json.loads(result.read_text())


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("kind", contract.KINDS)
@pytest.mark.parametrize("name", contract.CHECKS)
def test_every_engine_keeps_the_contract_and_reads_what_the_other_wrote(outcomes, name, kind):
    assert not outcomes[f"{name}[{kind}]"], outcomes[f"{name}[{kind}]"]


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("feature", TABLES)
def test_a_table_of_spark_is_read_right_or_refused_by_name(outcomes, feature):
    assert not outcomes[feature], outcomes[feature]


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("name", contract.APART)
def test_a_session_with_delta_knows_whose_words_and_whose_options_are_given(outcomes, name):
    assert not outcomes[name], outcomes[name]


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_nothing_is_lost_where_both_engines_append_at_once(outcomes):
    assert not outcomes["at once"], outcomes["at once"]
