"""What a run in MLflow says of a version, as plain values: names and sizes that MLflow takes, nothing lost."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime

import pytest

from sparkdl.interchange.mlflow import (
    IDENTITY,
    batches,
    curves_of,
    identity_of,
    params_of,
    table_of,
    tags_of,
)
from sparkdl.models.registry import ModelVersion


def version(**fields):
    given = {
        "name": "churn", "version": 3, "uri": "/r/artifacts/a", "artifact": "a" * 64, "metrics": {}, "parameters": {},
        "lineage": {}, "published": datetime(2026, 3, 4, tzinfo=UTC), "publication": "p",
    }  # fmt: skip
    return ModelVersion(**{**given, **fields})


def test_parameters_are_flat_texts_under_names_that_mlflow_takes():
    found = params_of(
        version(
            parameters={
                "optimizer": {"name": "Adam", "betas": [0.9, 0.99]}, "epochs": 3, "none": None, "empty": {},
                "a%": 1, "a$": 2, "..": 3, "größe": "ß", "long": "x" * 7000, "k" * 300: 4,
            }
        )
    )  # fmt: skip
    long = found.pop("long")
    assert (len(long), long[-4:]) == (6000, "x...")
    assert found.pop("k" * 240) == "4"
    assert found == {
        "optimizer.name": "Adam", "optimizer.betas": "[0.9,0.99]", "epochs": "3", "none": "null", "empty": "{}",
        "a_": "1", "a_ 2": "2", "_..": "3", "größe": "ß",
    }  # fmt: skip


def test_the_curve_of_a_metric_does_not_hide_the_figure_of_the_kept_weights():
    history = [{"epoch": 0, "step": 4, "rows": 9, "loss": 2.0, "val_loss": None}, {"epoch": 1, "loss": 1, "lr": 0.1}]
    points = curves_of(version(metrics={"val_loss": 0.5, "auc": 0.9}), history)
    assert [(one.key, one.value, one.step) for one in points if not math.isnan(one.value)] == [
        ("val_loss", 0.5, 0), ("auc", 0.9, 0), ("epoch.loss", 2.0, 0), ("epoch.loss", 1.0, 1), ("epoch.lr", 0.1, 1),
    ]  # fmt: skip
    assert [(one.key, one.step) for one in points if math.isnan(one.value)] == [("epoch.val_loss", 0)]


@pytest.mark.parametrize(("points", "params", "tags", "requests"), [(0, 0, 0, 0), (1, 0, 0, 1), (2500, 250, 7, 4)])
def test_requests_keep_to_the_limits_of_mlflow_and_lose_nothing(points, params, tags, requests):
    metrics = curves_of(version(), [{"epoch": n, "loss": float(n)} for n in range(points)])
    given = {f"p{n}": "v" for n in range(params)}, {f"t{n}": "v" for n in range(tags)}
    made = list(batches(metrics, *given))
    assert len(made) == requests
    for some, *others in made:
        assert len(some) + sum(map(len, others)) <= 1000
        assert all(len(one) <= 100 for one in others)
    assert [one for some, _, _ in made for one in some] == metrics
    assert {key: one for _, some, _ in made for key, one in some.items()} == given[0]
    assert {key: one for _, _, some in made for key, one in some.items()} == given[1]


def test_requests_of_long_texts_stay_below_a_million_bytes():
    params = {f"p{n}": "ß" * 6000 for n in range(60)}
    made = list(batches([], params, {f"t{n}": "ß" * 6000 for n in range(30)}))
    assert {key for _, some, _ in made for key in some} == set(params)
    assert max(len(json.dumps(some)) for some in made) < 1_000_000


def test_a_version_is_known_by_what_it_is_and_not_by_where_it_lies():
    one = identity_of(version())
    assert (len(one), identity_of(version(uri="s3://elsewhere", metrics={"auc": 1.0}))) == (64, one)
    assert len({one, *(identity_of(version(**{key: "9"})) for key in ("name", "version", "publication"))}) == 4


def test_tags_say_where_a_version_lies_and_what_made_it():
    lineage = {"versions": {"torch": "2.13"}, "code_version": "abc", "shard_key": None}
    found = tags_of("s3://models", version(lineage=lineage))
    assert found[IDENTITY] == identity_of(version())
    assert (found["sparkdl.registry"], found["sparkdl.model"], found["sparkdl.version"]) == (
        "s3://models",
        "churn",
        "3",
    )
    assert (found["sparkdl.software.torch"], found["mlflow.source.git.commit"]) == ("2.13", "abc")
    assert "sparkdl.shard_key" not in found


def test_the_table_keeps_its_version_even_the_first():
    table = table_of(version(lineage={"source_table": "s3://lake/t", "source_version": 0, "shard_key": "f" * 64}))
    assert table is not None
    assert (json.loads(table.source), len(table.digest)) == ({"path": "s3://lake/t", "delta_table_version": 0}, 36)
    named = table_of(version(lineage={"source_table": "main.sales.t", "source_version": None}))
    assert named is not None
    assert json.loads(named.source) == {"delta_table_name": "main.sales.t"}
    other = table_of(version(lineage={"source_table": "main.sales.t", "source_version": 1}))
    assert other is not None
    assert other.digest != named.digest
    assert table_of(version()) is None
