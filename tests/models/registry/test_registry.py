"""The registry: numbers without a gap, aliases that never dangle, moves by compare-and-set."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
import torch
from torch import nn

from sparkdl.errors import BundleError, ConfigError, ConflictError, FencedError, IntegrityError
from sparkdl.models.bundle import save_bundle
from sparkdl.models.registry import Lineage, ModelRegistry
from sparkdl.models.registry.events import EVENTS, Event
from sparkdl.tables.table import Fence


def test_a_published_version_says_everything_about_itself(registry, bundle):
    lineage = Lineage(source_table="/data/features", source_version=7, code_version="abc", shard_key="k")
    made = registry.publish("rides", bundle, metrics={"mae": 1.5}, parameters={"lr": 0.1}, lineage=lineage)
    assert (made.version, made.metrics, made.parameters) == (1, {"mae": 1.5}, {"lr": 0.1})
    assert made.lineage["source_table"] == "/data/features"
    assert made.lineage["source_version"] == 7
    assert made.lineage["versions"]["torch"] == str(torch.__version__)
    assert registry.get("rides", 1) == made
    assert registry.models() == ["rides"]
    assert isinstance(registry.load("rides", 1).model, nn.Linear)


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"parameters": {"lr": 1, "path": "caf\udce9.csv"}}, "'path' of parameters.*half a character"),
        ({"parameters": {"caf\udce9": 1}}, "parameters.*half a character"),
        ({"parameters": {"lr": 1, "deep": nested(120)}}, "'deep' of parameters.*deeper than 100"),
        ({"parameters": {"lr": 1, "deep": nested(100)}}, "'deep' of parameters.*deeper than 100"),
        ({"parameters": {"lr": 1, "deep": nested(5000)}}, "parameters"),
        ({"parameters": {"lr": 1, "ids": "x" * (17 << 20)}}, "'ids' of parameters.*1782[0-9]+ bytes"),
        ({"parameters": {"one": "x" * (3 << 20), "two": "x" * (3 << 20)}}, "have 6,291,[0-9]+ bytes as JSON"),
        ({"metrics": {"caf\udce9": 1.0}}, "of metrics.*half a character"),
        ({"lineage": Lineage(source_table="caf\udce9")}, "'source_table' of lineage.*half a character"),
        ({"publication": "caf\udce9"}, "publication of 'other'.*half a character"),
    ],
)
def test_what_no_reader_would_take_is_not_published(registry, bundle, facts, message):
    registry.publish("m", bundle)
    with pytest.raises(ConfigError, match=message):
        registry.publish("other", bundle, **facts)
    assert registry.models() == ["m"]
    with pytest.raises(ConfigError, match=r"reason of 'm'.*half a character"):
        registry.set_alias("m", "champion", 1, expected=None, reason="caf\udce9")
    with pytest.raises(ConfigError, match=r"reason of 'm'.*half a character"):
        registry.delete("m", 1, reason="caf\udce9")
    assert [each.kind for each in registry.history("m")] == ["published"]


def test_the_largest_that_is_published_is_read_from_a_checkpoint(registry, bundle, caplog):
    parameters = {"deep": nested(99), "ids": "x" * (4_000_000)}
    registry.publish("m", bundle, parameters=parameters)
    registry._log.checkpoint()
    assert ModelRegistry(registry.uri).get("m", 1).parameters == parameters
    assert not caplog.records


def test_numbers_have_no_gap_and_are_not_used_twice(registry, bundle):
    assert [registry.publish("m", bundle).version for _ in range(3)] == [1, 2, 3]
    assert registry.publish("other", bundle).version == 1
    registry.delete("m", 3)
    assert registry.publish("m", bundle).version == 4
    assert [one.version for one in registry.list("m")] == [1, 2, 4]


def test_the_same_publication_is_published_once(registry, bundle):
    first = registry.publish("m", bundle, publication="run-7")
    assert registry.publish("m", bundle, publication="run-7") == first
    assert registry.publish("m", bundle, publication="run-8").version == 2


def test_an_alias_moves_only_from_where_it_was_expected(registry, bundle):
    for _ in range(3):
        registry.publish("m", bundle)
    registry.set_alias("m", "champion", 1, expected=None)
    with pytest.raises(ConflictError, match="points to 1, None was expected"):
        registry.set_alias("m", "champion", 2, expected=None)
    assert registry.set_alias("m", "champion", 2, expected=1).moved
    with pytest.raises(ConflictError):
        registry.set_alias("m", "champion", 3, expected=1)
    assert registry.get("m", "champion").version == 2
    assert registry.get("m", 2).aliases == ("champion",)


@pytest.mark.parametrize(
    ("mode", "min_delta", "old", "new", "moved"),
    [
        ("min", 0.0, 1.0, 0.9, True),
        ("min", 0.0, 1.0, 1.0, False),
        ("min", 0.0, 1.0, 1.1, False),
        ("min", 0.2, 1.0, 0.9, False),
        ("min", 0.1, 1.0, 0.75, True),
        ("max", 0.0, 1.0, 1.1, True),
        ("max", 0.0, 1.0, 0.9, False),
        ("min", 0.0, 1.0, math.nan, False),
        ("min", 0.0, math.nan, 1.0, True),
        ("max", 0.0, math.nan, math.nan, False),
    ],
)
def test_only_a_better_version_is_promoted(registry, bundle, mode, min_delta, old, new, moved):
    registry.publish("m", bundle, metrics={"score": old})
    registry.publish("m", bundle, metrics={"score": new})
    registry.set_alias("m", "champion", 1, expected=None)
    verdict = registry.promote_if_better("m", "champion", 2, metric="score", mode=mode, min_delta=min_delta)
    assert verdict.moved is moved
    assert registry.aliases("m") == {"champion": 2 if moved else 1}
    assert verdict.version == (2 if moved else 1)
    assert verdict.previous == 1
    assert "score" in verdict.reason


def test_the_first_version_becomes_champion_but_never_with_a_metric_of_nan(registry, bundle):
    registry.publish("m", bundle, metrics={"mae": math.nan})
    assert not registry.promote_if_better("m", "champion", 1, metric="mae").moved
    registry.publish("m", bundle, metrics={"mae": 2.0})
    assert registry.promote_if_better("m", "champion", 2, metric="mae").moved
    assert "already" in registry.promote_if_better("m", "champion", 2, metric="mae").reason
    with pytest.raises(ConfigError, match=r"no metric 'rmse', only \['mae'\]"):
        registry.promote_if_better("m", "champion", 2, metric="rmse")


def test_rollback_goes_back_move_by_move_and_skips_deleted_versions(registry, bundle):
    for _ in range(4):
        registry.publish("m", bundle)
    before = None
    for version in (1, 2, 3, 4):
        registry.set_alias("m", "champion", version, expected=before)
        before = version
    assert registry.rollback("m", "champion").version == 3
    registry.delete("m", 2)
    assert registry.rollback("m", "champion", reason="worse in the evening").version == 1
    with pytest.raises(ConfigError, match="no earlier version"):
        registry.rollback("m", "champion")
    kinds = [event.kind for event in registry.history("m")]
    assert kinds == ["published"] * 4 + ["aliased"] * 4 + ["rolled_back", "deleted", "rolled_back"]
    assert registry.history("m")[-1].reason == "worse in the evening"


def test_a_version_with_an_alias_is_not_deleted(registry, bundle):
    registry.publish("m", bundle)
    registry.set_alias("m", "champion", 1, expected=None)
    with pytest.raises(ConflictError, match="champion"):
        registry.delete("m", 1)
    assert registry.get("m", "champion").version == 1


def test_what_is_not_there_is_named_beside_what_is(registry, bundle):
    assert registry.models() == []
    with pytest.raises(ConfigError, match="no model 'm'"):
        registry.get("m", 1)
    registry.publish("m", bundle)
    with pytest.raises(ConfigError, match=r"no version 2, only \[1\]"):
        registry.get("m", 2)
    with pytest.raises(ConfigError, match=r"no alias 'champion' nor any other: name a version, such as m@1, or give"):
        registry.get("m", "champion")
    with pytest.raises(ConfigError, match="no version 5"):
        registry.set_alias("m", "champion", 5, expected=None)
    with pytest.raises(ConfigError, match="unusable"):
        registry.publish("../m", bundle)
    with pytest.raises(ConfigError, match="looks like a version"):
        registry.set_alias("m", "7", 1, expected=None)
    with pytest.raises(ConfigError, match="not a number"):
        registry.publish("m", bundle, metrics={"mae": "low"})
    with pytest.raises(BundleError):
        registry.publish("m", bundle + "-missing")
    assert len(registry.history("m")) == 1


def test_equal_bundles_are_stored_once_and_swept_when_nothing_names_them(registry, bundle, tmp_path):
    registry.publish("m", bundle)
    registry.publish("n", bundle)
    folder = tmp_path / "registry" / "artifacts"
    assert len(list(folder.iterdir())) == 1
    registry.delete("m", 1)
    assert registry.vacuum(timedelta(0)) == []
    registry.delete("n", 1)
    assert registry.vacuum() == []  # too young
    assert len(registry.vacuum(timedelta(0))) == 1
    assert list(folder.iterdir()) == []
    assert registry.publish("m", bundle).version == 2
    registry.load("m", 2)


def test_an_altered_artifact_is_refused(registry, bundle, tmp_path):
    made = registry.publish("m", bundle)
    save_bundle(nn.Linear(2, 1), str(tmp_path / "other"))
    for name in ("bundle.json", "weights.safetensors"):  # a whole other bundle, consistent in itself
        target = tmp_path / "registry" / "artifacts" / made.artifact / name
        target.write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(IntegrityError):
        registry.load("m", 1)
    (tmp_path / "bundle" / "weights.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(IntegrityError):
        registry.publish("m", bundle)


def test_many_events_stay_readable_after_compaction(registry, bundle):
    for _ in range(40):
        registry.publish("m", bundle)
    assert [one.version for one in registry.list("m")] == list(range(1, 41))
    assert [event.sequence for event in registry.history("m")] == list(range(40))


@pytest.mark.parametrize("name", ["/{}", "../../victim", "../victim", "artifacts", "A" * 64, "a" * 63 + "/"])
def test_a_row_that_names_no_hash_makes_nothing_of_what_it_names(registry, bundle, tmp_path, name):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "bundle.json").touch()
    registry.publish("m", bundle)
    row = Event(kind="published", name="n", version=1, artifact="a" * 64, publication="x")
    row = row.stamped(1, datetime.now(UTC)).to_row() | {"artifact": name.format(victim)}
    registry._log.table.append(pa.Table.from_pylist([row], schema=EVENTS))
    with pytest.raises(IntegrityError, match="artifact"):
        registry.vacuum(timedelta(0))
    with pytest.raises(IntegrityError, match="artifact"):
        registry.load("n", 1)
    assert (victim / "bundle.json").exists()


@pytest.mark.parametrize("place", ["folder", "inside"])
def test_sweeping_follows_no_link_out_of_the_registry(registry, bundle, tmp_path, place):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "bundle.json").touch()
    registry.publish("m", bundle)
    folder = tmp_path / "registry" / "artifacts" / ("b" * 64)
    if place == "folder":
        folder.symlink_to(victim)
    else:
        folder.mkdir()
        (folder / "more").symlink_to(victim)
    registry.vacuum(timedelta(0))
    assert (victim / "bundle.json").exists()


def test_of_a_run_that_was_taken_over_nothing_is_published_and_no_alias_moves(registry, bundle):
    first, second = (replace(registry, fence=Fence("shop", epoch)) for epoch in (1, 2))
    first.claim()
    assert not registry.models()
    assert [first.publish("m", bundle).version for _ in range(2)] == [1, 2]
    assert first.set_alias("m", "champion", 1, expected=None).moved
    second.claim()
    events = len(registry.history("m"))
    for action in (
        lambda: first.publish("m", bundle),
        lambda: first.set_alias("m", "champion", 2, expected=1),
        lambda: first.delete("m", 2),
        first.claim,
    ):
        with pytest.raises(FencedError, match=r"shop \(epoch 2\)"):
            action()
    assert len(registry.history("m")) == events
    assert second.set_alias("m", "champion", 2, expected=1).moved
    assert registry.publish("m", bundle).version == 3, "who has no epoch is not asked for one"
    assert replace(registry, fence=Fence("another", 1)).publish("m", bundle).version == 4


def test_a_run_that_was_taken_over_before_there_was_a_registry_makes_none(registry, bundle):
    first, second = (replace(registry, fence=Fence("shop", epoch)) for epoch in (1, 2))
    second.claim()
    with pytest.raises(FencedError, match=r"shop \(epoch 2\)"):
        first.publish("m", bundle)
    assert not registry.models()
    assert second.publish("m", bundle).version == 1
    assert registry.get("m", 1).version == 1
