"""A run whose rows are divided by a hash of all that they hold: by Spark, and by workers that read the files."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pandas as pd
import pytest

from sparkdl.pipeline.file import loads
from sparkdl.pipeline.rows import parts
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.work import file_rows
from sparkdl.tables.table import Table

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)


@pytest.fixture
def path(tmp_path):
    random = np.random.default_rng(5)
    x, day = random.normal(size=600), pd.Timestamp(2026, 3, 1)
    frame = pd.DataFrame(
        {"x": x, "é.kind": random.choice(["a", "b", None], 600), "at": day + pd.to_timedelta((x * 1000).round(), "s")}
    )
    frame["x"] = frame["x"].mask(frame.index % 7 == 0)
    frame["y"] = np.where(frame.index % 50 == 0, None, x > 0.3)
    frame = pd.concat([frame, frame[:20]])  # rows that are the same fall into the same part
    frame.to_parquet(tmp_path / "rows.parquet", coerce_timestamps="us")
    return tmp_path / "rows.parquet"


@pytest.mark.slow
def test_workers_and_spark_divide_the_rows_of_a_run_alike(spark, tmp_path, path, monkeypatch):
    runs, hashed_by_workers = {}, []
    monkeypatch.setattr(
        file_rows, "hash_parts", lambda *given: hashed_by_workers.append(given) or parts.hash_parts(*given)
    )
    for who, least_bytes in (("spark", 1 << 40), ("workers", 0)):
        monkeypatch.setattr(file_rows, "LEAST_BYTES", least_bytes)
        text = f"""
        name: hashed
        root: {tmp_path / who}
        source: {{kind: parquet, path: {path}}}
        features: {{x: number, "é.kind": category}}
        label: {{y: binary}}
        split: {{by: hash, train: 0.6, validate: 0.2, score: 0.2}}
        model: {{arguments: {{width: 8, depth: 1, dropout: 0}}}}
        score: {{keep: [x, at, "é.kind"]}}
        train: {{epochs: 2, batch_size: 32, learning_rate: 0.01, num_proc: 2, verbose: 0}}
        publish: {{gate: {{min_rows: 20, baseline: never, rule: not_worse, margin: 100}}}}
        """
        project = Project(loads(text))
        done = execute(Run(project, RunRequest(now=NOW)), spark)
        assert done.outcome == "promoted"
        assert (hashed_by_workers == []) == (who == "spark")
        scored = Table(done.places["predictions"]).rows().to_pandas().drop(columns=["run_id", "scored_at"])
        runs[who] = done, scored.sort_values(["x", "at", "é.kind"], ignore_index=True)
    (of_spark, scored_by_spark), (of_workers, scored_by_workers) = runs.values()
    assert of_workers.rows == of_spark.rows
    history, expected = ([row | {"seconds": 0} for row in done.trained.history] for done in (of_workers, of_spark))
    assert history == expected
    assert of_workers.evaluated.decision == of_spark.evaluated.decision
    assert 80 < len(scored_by_spark) < 160
    pd.testing.assert_frame_equal(scored_by_workers, scored_by_spark)
