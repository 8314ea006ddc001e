"""Which part a row belongs to: every row to one at most, and rows of one group to the same."""

from __future__ import annotations

from sparkdl.pipeline.file import loads
from sparkdl.pipeline.rows.parts import rows_of
from sparkdl.pipeline.rows.source import WINDOW

TEXT = """
source: {kind: parquet, path: /none, key: id}
features: {x: number}
label: {y: binary}
split: {by: hash, train: 0.6, validate: 0.2, score: 0.2}
"""


def ids_of(frame, spec):
    return {
        part: {row["id"]: row["customer"] for row in rows_of(frame, spec, part, ["all"]).collect()}
        for part in ("train", "validate", "score")
    }


def test_a_hash_gives_each_row_one_part_and_keeps_the_rows_of_a_group_together(spark):
    frame = spark.range(3000).selectExpr("id", "cast(id % 500 AS string) AS customer", f"'all' AS {WINDOW}")
    by_key, by_group = (ids_of(frame, loads(TEXT, over).spec) for over in ([], ["split.group=customer"]))
    for parts in (by_key, by_group):
        assert sorted(key for part in parts.values() for key in part) == list(range(3000))
        assert abs(len(parts["train"]) / 3000 - 0.6) < 0.08
    customers = [set(part.values()) for part in by_group.values()]
    assert sum(map(len, customers)) == 500
    assert sum(len(set(part.values())) for part in by_key.values()) > 500  # without a group they are torn apart
