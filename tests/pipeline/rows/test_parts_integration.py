"""Which part a row belongs to: every row to one at most, and rows of one group to the same."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from sparkdl.errors import DataError
from sparkdl.pipeline.file import loads
from sparkdl.pipeline.rows.expect import columns_of
from sparkdl.pipeline.rows.parts import PART, hashes_rows, parts_of, rows_of, rows_of_parts, unseen_rows, with_slots
from sparkdl.pipeline.windows import WINDOW

TEXT = """
source: {kind: parquet, path: /none, key: id}
features: {x: number}
label: {y: binary}
split: {by: hash, train: 0.6, validate: 0.2, score: 0.2}
"""


def test_a_source_without_rows_yet_is_told_as_one():
    with pytest.raises(DataError, match="the source has no rows, or none of a window that has begun: wait"):
        parts_of(loads(TEXT).spec, {})


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


THEN = loads(TEXT).spec
BY_DAY = "split={by: time, train: all, validate: 1 day, score: 1 day}"
BY_COLUMN = "split={by: column, column: fold, train: [a], validate: [b]}"


def untaught_ids(frame, spec, windows, split):
    rows = rows_of(frame, spec, "validate", ["one", "two"])
    condition = unseen_rows(rows, spec, windows, split, {}, ())
    return None if condition is None else {row.id for row in rows.where(condition).collect()}


@pytest.mark.parametrize("seed", [0, 7])
def test_rows_of_another_split_that_a_model_was_trained_on_do_not_judge_it(spark, seed):
    frame = spark.range(2000).selectExpr(
        "id", f"if(id < 1000, 'one', 'two') AS {WINDOW}", "if(id < 9, null, 'a') AS fold"
    )
    now = loads(TEXT, [f"split.seed={seed}"]).spec
    held_out = {row.id for row in rows_of(frame, now, "validate", ["one", "two"]).collect()}
    taught = {row.id for row in rows_of(frame, THEN, "train", ["one"]).collect()}
    found = untaught_ids(frame, now, ["one"], msgspec.to_builtins(THEN.split))
    if seed == 0:
        assert found is None  # of its own split it was trained on none of them
    else:
        assert found == held_out - taught
        assert 0.1 < len(held_out & taught) / len(held_out) < 0.5
    by_fold = msgspec.to_builtins(loads(TEXT, [BY_COLUMN]).spec.split)
    assert untaught_ids(frame, now, ["one"], by_fold) == {row for row in held_out if row >= 1000 or row < 9}
    by_day = msgspec.to_builtins(loads(TEXT, ["source.time=at", BY_DAY]).spec.split)
    assert untaught_ids(frame, now, ["two"], by_day) == {row for row in held_out if row < 1000}
    assert untaught_ids(frame.drop("fold"), now, ["one"], by_fold) == {row for row in held_out if row >= 1000}
    assert untaught_ids(frame, now, [], by_day) is None


def test_another_column_or_label_moves_rows_without_a_key_and_none_that_trained_judges(spark):
    then = loads(WITHOUT_KEY).spec
    frame = spark.range(2000).selectExpr("id", "id AS x", "id % 2 = 0 AS y", "id % 3 AS z", f"'all' AS {WINDOW}")
    taught = {row.x for row in rows_of(frame, then, "train", ["all"]).collect()}
    columns, split = columns_of(frame), msgspec.to_builtins(then.split)

    def judging(rows, *overrides, columns=columns, labels=("y",)):
        now = loads(WITHOUT_KEY, overrides).spec
        held_out = rows_of(rows, now, "validate", ["all"])
        condition = unseen_rows(held_out, now, ["all"], split, columns, labels)
        seen = {row.x for row in held_out.collect()} & taught
        return (
            condition,
            seen,
            {row.x for row in held_out.where(condition if condition is not None else "true").collect()},
        )

    assert judging(frame)[:2] == (None, set())
    wider = frame.selectExpr("id", "x", "y", "z", "'a' AS note", WINDOW)
    for rows, overrides in ((wider, []), (frame, ["label={y: binary, z: regression}"]), (frame, ["source.key=id"])):
        _, seen, judges = judging(rows, *overrides)
        assert len(seen) > 100
        assert len(judges) > 50
        assert not judges & taught
    for rows in (frame.drop("z"), frame.selectExpr("id", "x", "y", "CAST(z AS STRING) AS z", WINDOW)):
        assert judging(rows)[2] == set()  # nobody can tell which these were
    assert judging(wider, columns={}, labels=())[0] is None  # of a training that did not note them
    grouped = loads(WITHOUT_KEY, ["split.group=x"]).spec
    split = msgspec.to_builtins(grouped.split)
    assert unseen_rows(wider, grouped, ["all"], split, columns, ["y"]) is None
    assert wider.where(unseen_rows(wider.drop("x"), then, ["all"], split, columns, ["y"])).count() == 0


def test_windows_that_a_model_was_trained_on_do_not_judge_it(spark):
    frame = spark.range(20).selectExpr("id", f"if(id < 10, 'one', 'two') AS {WINDOW}")
    spec = loads(TEXT, ["source.time=at", BY_DAY]).spec
    assert untaught_ids(frame, spec, ["one"], {}) == set(range(10, 20))
    assert untaught_ids(frame, spec, ["one", "two"], msgspec.to_builtins(spec.split)) == set()


WITHOUT_KEY = """
source: {kind: parquet, path: /none}
features: {x: number}
label: {y: binary}
split: {by: hash, train: 0.6, validate: 0.2, score: 0.2}
"""


def counts_of(frame, spec, windows=("all",)):
    return {
        part: Counter((row["x"], row["y"]) for row in rows_of(frame, spec, part, windows).collect())
        for part in ("train", "validate", "score")
    }


@pytest.mark.parametrize(
    ("override", "by_content"),
    [
        ("split.seed=3", True),
        ("split.copies=spread", True),
        ("split.group=x", False),
        ("source.key=[x, z]", False),
        ("split={by: column, column: fold, train: [a], validate: [b], score: [c]}", False),
    ],
)
def test_rows_of_a_part_are_the_same_with_slots_that_were_known_before(spark, override, by_content):
    columns = "id AS x", "id % 2 = 0 AS y", "id % 3 AS z", "substr('abcd', CAST(id % 4 AS INT) + 1, 1) AS fold"
    frame = spark.range(900).selectExpr(*columns, f"if(id < 300, 'one', 'all') AS {WINDOW}")
    spec = loads(WITHOUT_KEY, [override]).spec
    assert hashes_rows(spec) == by_content
    slotted = with_slots(frame, spec)
    expected = counts_of(frame, spec)
    assert counts_of(slotted, spec) == expected
    assert all(expected.values())
    assert rows_of(slotted, spec, "train", ["all"]).columns == frame.columns
    windows = {"train": ["all"], "score": ["all"]}
    together = rows_of_parts(slotted, spec, windows)
    assert together.columns == [*frame.columns, PART]
    counts_by_part = {part: Counter() for part in (*windows, None)}
    for row in together.collect():
        counts_by_part[row[PART]][row.x, row.y] += 1
    of_no_part = counts_by_part.pop(None)
    assert counts_by_part == {part: expected[part] for part in windows}
    assert of_no_part == (expected["validate"] if by_content else {})


def test_copies_that_differ_in_the_label_alone_stay_together_whatever_it_is(spark):
    frame = spark.range(4000).selectExpr("id % 1000 AS x", "id >= 2000 AS y", f"'all' AS {WINDOW}")
    parts = counts_of(frame, loads(WITHOUT_KEY).spec)
    for part in parts.values():
        assert all(part[x, True] == part[x, False] == 2 for x, _ in part)
    assert abs(sum(parts["train"].values()) / 4000 - 0.6) < 0.08
    unlabelled = counts_of(frame.selectExpr("x", "CAST(NULL AS BOOLEAN) AS y", WINDOW), loads(WITHOUT_KEY).spec)
    assert {name: {x for x, _ in part} for name, part in unlabelled.items()} == {
        name: {x for x, _ in part} for name, part in parts.items()
    }


@pytest.mark.slow
def test_spread_copies_are_dealt_one_by_one(spark):
    spread = loads(WITHOUT_KEY, ["split.copies=spread"]).spec
    frame = spark.range(6000).selectExpr("id % 3 AS x", "id % 5 = 0 AS y", f"'all' AS {WINDOW}")
    parts = counts_of(frame, spread)
    assert sum(parts.values(), Counter()) == Counter((row["x"], row["y"]) for row in frame.collect())
    for name, share in (("train", 0.6), ("validate", 0.2), ("score", 0.2)):
        for (_, label), count in parts[name].items():
            assert abs(count / (400 if label else 1600) - share) < 0.1
    daily = spark.range(2000).selectExpr("0 AS x", "id % 2 = 0 AS y", f"CAST(id div 2 AS STRING) AS {WINDOW}")
    days = counts_of(daily, spread, [str(day) for day in range(1000)])  # one row of a kind each day
    assert all(abs(days["train"][0, label] / 1000 - 0.6) < 0.1 for label in (True, False))
    more = frame.union(spark.range(999).selectExpr("id % 3 AS x", "true AS y", f"'later' AS {WINDOW}"))
    assert counts_of(more.repartition(7), spread) == parts  # neither the order of rows nor what comes later moves any
    untaught = unseen_rows(
        more,
        spread,
        ["all"],
        msgspec.to_builtins(loads(WITHOUT_KEY, ["split.copies=spread", "split.seed=1"]).spec.split),
        {},
        (),
    )
    assert {row[WINDOW] for row in more.where(untaught).collect()} == {"later"}  # by another seed any may have trained
