"""Both shard sets come of one reading of the clean rows, and hold the labelled rows of their part and no others."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import numpy as np
import pandas as pd
import pytest

from sparkdl.batches.reading.loader import ShardedDataset
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.rows.parts import parts_of, rows_of
from sparkdl.pipeline.run import execute
from sparkdl.pipeline.state.project import Project
from sparkdl.pipeline.state.run import Run, RunRequest
from sparkdl.pipeline.steps.shards import ShardsStep
from sparkdl.shards.manifest import Manifest

FILE = """
name: trips
root: {rows}-p
source: {{kind: parquet, path: {rows}, time: at{key}}}
features: {{x: number, town: category}}
label: {{y: regression}}
weight: w
split: {split}
"""
KEYED = ", key: id"
SPLITS = {
    "time": (KEYED, "{by: time, train: all, validate: 1 day, score: 1 day}", {}),
    "key": (KEYED, "{by: hash, train: 0.5, validate: 0.3, test: 0.1, score: 0.1}", {}),
    "group": ("", "{by: hash, group: town, train: 0.5, validate: 0.3, score: 0.2}", {}),
    "content": ("", "{by: hash, train: 0.5, validate: 0.3, score: 0.2}", {}),
    "copies": ("", "{by: hash, copies: spread, train: 0.5, validate: 0.3, score: 0.2}", {}),
    "column": ("", "{by: column, column: fold, train: [a, b], validate: [c]}", {}),
    "repartitioned": (KEYED, "{by: hash, train: 0.5, validate: 0.3, score: 0.2}", {"partitions_per_process": 2}),
    "in order": (KEYED, "{by: hash, train: 0.5, validate: 0.3, score: 0.2}", {"spread_rows": "false"}),
}
QUICK = ("time", "key", "content")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Three days of 400 rows, each row twice but for its id; some have no label yet."""
    number = np.arange(1200)
    content = number // 2
    frame = pd.DataFrame(
        {
            "id": number,
            "at": pd.to_datetime("2026-03-01", utc=True) + pd.to_timedelta(content // 200, unit="D"),
            "x": np.random.default_rng(3).normal(size=600)[content],
            "town": np.char.add("t", (content % 40).astype(str)),
            "fold": np.array(list("abcd"))[content % 4],
            "w": 1.0 + content % 3,
            "y": np.where(content % 9 == 7, np.nan, content),
        }
    )
    folder = tmp_path_factory.mktemp("trips")
    for name, table in (("keyed", frame), ("unkeyed", frame.drop(columns="id"))):
        (folder / name).mkdir()
        table.to_parquet(folder / name / "rows.parquet")
    return folder


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in SPLITS]
)
def test_each_set_holds_the_labelled_rows_of_its_part(spark, rows, kind):
    key, split, train = SPLITS[kind]
    text = FILE.format(rows=rows / ("keyed" if key else "unkeyed"), key=key, split=split)
    file = loads(text, [f"train.{name}={value}" for name, value in train.items()])
    run = Run(Project(file), RunRequest(now=datetime(2026, 3, 4, tzinfo=UTC), until="shards"))
    record = execute(run, spark)
    parts = parts_of(file.spec, run.windows())
    shards = ShardsStep().kept(run, parts)
    for part in ("train", "validate"):
        uri = getattr(shards, part)
        of_part = rows_of(run.clean(spark), file.spec, part, parts.windows(part)).select("y", "w").toPandas()
        labelled = of_part.dropna()
        written = Counter()
        for batch in ShardedDataset(uri).loader(batch_size=64):
            written.update(zip(batch["y"].flatten().tolist(), batch["w"].flatten().tolist(), strict=True))
        assert written == Counter(zip(labelled.y, labelled.w, strict=True))
        assert record.rows[part] == len(labelled) > 50
        assert record.unlabelled[part] == len(of_part) - len(labelled) > 0
        source = Manifest.load(uri).source
        assert source.uri == record.places["clean"]
        assert source.transformation == f"{ShardsStep().key(run, parts)} {part}"
