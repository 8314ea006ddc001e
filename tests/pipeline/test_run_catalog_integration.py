"""A pipeline whose source and predictions are tables of a catalog, in a session with Spark's Delta."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

TABLES = Path(__file__).resolve().parents[1] / "tables"
JARS = Path(__file__).resolve().parents[3] / "shared" / "jars" / "delta"

SCRIPT = """
import sys
from datetime import UTC, datetime
sys.path.insert(0, sys.argv[1])
import contract
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.tables.table import Table

if __name__ == "__main__":
    folder = sys.argv[2]
    spark = contract.session(folder)
    try:
        rows = spark.range(2000).selectExpr("id", "rand(1) - 0.5 a", "rand(2) - 0.5 b")
        rows = rows.selectExpr("*", "if(a + b > 0, 1, 0) good")
        source = Table("spark_catalog.default.rows")
        source.write(rows)
        file = loads(f'''
            name: names
            root: {folder}/p
            source: {{kind: delta, table: spark_catalog.default.rows, key: id}}
            features: {{a: number, b: number}}
            label: {{good: binary}}
            split: {{by: hash, train: 0.6, validate: 0.1, test: 0.15, score: 0.15}}
            train: {{epochs: 5, batch_size: 32, learning_rate: 0.01, num_proc: 1, verbose: 0}}
            publish: {{metric: auc, gate: {{floors: [auc >= 0.8], min_rows: 50}}}}
            score: {{target: spark_catalog.default.predicted}}
        ''')
        first = execute(Run(Project(file), RunRequest(now=datetime(2026, 3, 20, 12, tzinfo=UTC))), spark)
        assert (first.outcome, first.exit_code) == ("promoted", 0), first
        assert first.rows["read"] == 2000
        assert first.places["predictions"] == "spark_catalog.default.predicted"
        found = spark.table("spark_catalog.default.predicted")
        assert found.count() == sum(first.predictions.values()) > 200
        assert found.join(rows, "id").where("prediction = cast(good as string)").count() > 0.8 * found.count()
        assert spark.sql("DESCRIBE DETAIL spark_catalog.default.predicted").first()["partitionColumns"] == ["_window"]
        version = Table("spark_catalog.default.predicted").version()
        second = execute(Run(Project(file), RunRequest(now=datetime(2026, 3, 21, 12, tzinfo=UTC))), spark)
        assert (second.outcome, second.exit_code) == ("nothing new", 10), second
        assert not second.predictions
        assert Table("spark_catalog.default.predicted").version() == version
    finally:
        spark.stop()
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_pipeline_reads_and_predicts_tables_of_a_catalog(tmp_path):
    if not JARS.is_dir():
        pytest.skip("needs Delta's JARs: ../shared/jars/delta does not lie beside the project")
    if not pyspark.__version__.startswith("4.2."):
        pytest.skip(f"Delta's JARs are for Spark 4.2, this is {pyspark.__version__}")
    script = tmp_path / "names.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(TABLES), str(tmp_path)]
    done = subprocess.run(command, env={**os.environ}, cwd=tmp_path, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stderr[-5000:]
