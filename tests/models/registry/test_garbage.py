"""What a collection of garbage removes, and what it never does."""

from __future__ import annotations

import os
import shutil
import time
from datetime import UTC, datetime, timedelta

import pytest
from torch import nn

from sparkdl.errors import ConfigError, StorageError
from sparkdl.models.bundle import save_bundle
from sparkdl.models.copies import copy_bundle
from sparkdl.models.folder import read_bundle
from sparkdl.models.registry import ModelRegistry
from sparkdl.models.registry import garbage as module
from sparkdl.models.registry.events import Event
from sparkdl.models.registry.garbage import Holder, Leases, spare_versions
from sparkdl.storage import Storage

NOW, DAY = timedelta(0), 86400.0


@pytest.fixture
def bundles(tmp_path):
    """Different bundles, made when they are asked for."""

    def bundle(number):
        place = tmp_path / f"bundle-{number}"
        if not place.exists():
            save_bundle(nn.Linear(2, number), str(place))
        return str(place)

    return bundle


def kinds(removed):
    """What went and why."""
    return sorted((each.kind, each.reason) for each in removed)


def age(place, days):
    """Let a folder and all in it be older."""
    then = time.time() - days * DAY
    for file in [place, *place.rglob("*")]:
        os.utime(file, (then, then))


def test_a_dry_run_says_what_a_run_then_does(registry, bundles, tmp_path):
    for number in range(1, 6):
        registry.publish("m", bundles(number))
    registry.set_alias("m", "champion", 2, expected=None)
    said = registry.gc(NOW, keep_last=2, dry_run=True)
    assert [each.what for each in said if each.kind == "version"] == ["m 1", "m 3"]
    assert len(list((tmp_path / "registry" / "artifacts").iterdir())) == 5
    assert [each.version for each in registry.list("m")] == [1, 2, 3, 4, 5]
    done = registry.gc(NOW, keep_last=2)
    assert [each.what for each in done if each.kind == "version"] == ["m 1", "m 3"]
    assert [each.version for each in registry.list("m")] == [2, 4, 5]
    assert registry.history("m")[-1].reason == "gc: not among the last 2, and no alias points to it"
    artifacts = {each.what.rpartition("/")[2] for each in done if each.kind == "artifact"}
    assert len(artifacts) == 2
    assert sum(each.bytes for each in done) > 200
    left = {entry.name for entry in (tmp_path / "registry" / "artifacts").iterdir()}
    assert left == {each.artifact for each in registry.list("m")}
    for version in (2, 4, 5):
        registry.load("m", version)
    assert registry.gc(NOW, keep_last=2) == []


def test_what_somebody_may_still_use_stays_for_a_day(registry, bundles, tmp_path):
    for number in range(1, 5):
        registry.publish("m", bundles(number))
    assert registry.gc(keep_last=1) == []  # published today
    registry.set_alias("m", "champion", 1, expected=None)
    registry.set_alias("m", "champion", 2, expected=1)
    spared = registry.gc(timedelta(seconds=1e-6), keep_last=1)
    assert [each.what for each in spared if each.kind == "version"] == ["m 1", "m 3"]
    assert [each for each in registry.gc() if each.kind == "artifact"] == []  # deleted today
    for place in (tmp_path / "registry" / "artifacts").iterdir():
        age(place, 2)
    assert [each for each in registry.gc() if each.kind == "artifact"] == []


def test_a_version_that_had_the_alias_lately_stays():
    today = datetime.now(UTC)

    def event(kind, version, days, previous=None):
        fields = {"alias": "champion", "previous": previous} if kind == "aliased" else {"artifact": f"{version}" * 64}
        return Event(kind=kind, name="m", version=version, time=today - timedelta(days=days), **fields)

    def spared(moved):
        events = [event("published", 1, 9), event("aliased", 1, 9), event("published", 2, 9)]
        events += [event("aliased", 2, moved, 1), event("published", 3, 9)]
        return [each.version for each in spare_versions(events, set(), 1, timedelta(days=1), None)]

    assert spared(moved=0.5) == []  # whoever loaded it by the alias may be at work
    assert spared(moved=1.5) == [1]


def test_what_is_held_stays(registry, bundles):
    for number in (1, 2):
        registry.publish("m", bundles(number))
    with registry.hold("m", 1) as version:
        assert [each for each in registry.gc(NOW, keep_last=1) if each.kind == "version"] == []
        registry.delete("m", 1)
        assert registry.vacuum(NOW) == []
        assert read_bundle(version.uri).content_hash == version.artifact
    assert registry.vacuum(NOW) == [version.uri]
    with pytest.raises(ConfigError, match="no version 1"), registry.hold("m", 1):
        pass


def test_each_model_keeps_its_own_newest_versions(registry, bundles):
    for name in "mn":
        for number in (1, 2, 3):
            registry.publish(name, bundles(number))
    assert [each.what for each in registry.gc(NOW, keep_last=2, name="n", dry_run=True) if each.kind == "version"] == [
        "n 1"
    ]
    spared = registry.gc(NOW, keep_last=2)
    assert [each.what for each in spared if each.kind == "version"] == ["m 1", "n 1"]
    assert len([each for each in spared if each.kind == "artifact"]) == 1
    for wrong in ({"keep_last": 0}, {"name": "m"}):
        with pytest.raises(ConfigError):
            registry.gc(NOW, **wrong)


def test_what_killed_writers_leave_goes_once_it_is_old(registry, bundles, tmp_path):
    registry.publish("m", bundles(1))
    artifacts = tmp_path / "registry" / "artifacts"
    for name in (".sparkdl-bundle-1", ".sparkdl-tmp-2", "c" * 64):
        (artifacts / name).mkdir()
        (artifacts / name / "weights.safetensors").write_bytes(b"half")
    (artifacts / "notes.txt").write_text("mine")
    assert registry.gc() == []
    for place in artifacts.iterdir():
        age(place, 2) if place.is_dir() else None
    assert kinds(registry.gc()) == [
        ("artifact", "no version names it"),
        ("leftover", "a writer was killed"),
        ("leftover", "a writer was killed"),
    ]
    assert {place.name for place in artifacts.iterdir()} == {registry.get("m", 1).artifact, "notes.txt"}
    orphan = tmp_path / "registry" / "events" / "part-00000-left-c000.snappy.parquet"
    orphan.write_bytes(b"never committed")
    assert kinds(registry.gc(NOW)) == []  # a commit may be under way
    then = time.time() - 2 * DAY
    os.utime(orphan, (then, then))
    assert [kind for kind, _ in kinds(registry.gc(NOW, dry_run=True))] == ["file"]
    assert [kind for kind, _ in kinds(registry.gc(NOW))] == ["file"]
    assert not orphan.exists()
    registry.load("m", 1)


def folders(place):
    return sorted(each.name for each in place.iterdir())


@pytest.mark.parametrize("left", ["all but the events", "the artifacts alone", "events of an earlier day"])
def test_nothing_is_removed_where_events_are_missing(registry, bundles, tmp_path, left):
    home, kept = tmp_path / "registry", tmp_path / "kept"
    registry.publish("m", bundles(1))
    shutil.copytree(home / "events", tmp_path / "earlier")
    for number in range(20):
        registry.publish("m", bundles(1 + number % 3))
    shutil.copytree(home, kept)
    for name in ("events", "state", "leases") if left == "the artifacts alone" else ("events",):
        shutil.rmtree(home / name)
    if left == "the artifacts alone":
        (home / "registry.json").unlink()
    elif left == "events of an earlier day":
        shutil.copytree(tmp_path / "earlier", home / "events")
    found = ModelRegistry(registry.uri)
    for how in ({"dry_run": True}, {"keep_last": 1}, {}):
        with pytest.raises(
            StorageError, match=r"so nobody knows what is needed: restore .*/registry/events, or delete "
        ):
            found.gc(NOW, **how)
    assert folders(home / "artifacts") == folders(kept / "artifacts")
    shutil.rmtree(home)
    shutil.copytree(kept, home)
    assert kinds(ModelRegistry(registry.uri).gc(NOW)) == []
    assert len(registry.list("m")) == 21


def test_a_registry_without_versions_is_collected_without_a_word(tmp_path, registry, bundles):
    assert registry.gc(NOW) == []
    artifacts = tmp_path / "registry" / "artifacts"
    (artifacts / ".sparkdl-bundle-1").mkdir(parents=True)
    age(artifacts / ".sparkdl-bundle-1", 2)
    assert kinds(registry.gc(NOW)) == [("leftover", "a writer was killed")]
    registry.publish("m", bundles(1))
    registry.delete("m", 1)
    assert kinds(registry.gc(NOW)) == [("artifact", "no version names it")]
    assert kinds(registry.gc(NOW)) == []


def test_a_publication_after_fewer_events_than_there_were_says_so(registry, bundles, tmp_path, caplog):
    registry.publish("m", bundles(1))
    shutil.copytree(tmp_path / "registry" / "events", tmp_path / "earlier")
    for _ in range(20):
        registry.publish("m", bundles(1))
    assert "once had" not in caplog.text
    shutil.rmtree(tmp_path / "registry" / "events")
    shutil.copytree(tmp_path / "earlier", tmp_path / "registry" / "events")
    assert ModelRegistry(registry.uri).publish("m", bundles(1)).version == 2
    assert "once had 17 events and has 2: restore" in caplog.text


def test_what_lies_beside_the_checkpoint_goes_once_it_is_old(registry, bundles, tmp_path):
    registry.publish("m", bundles(1))
    state = tmp_path / "registry" / "state"
    (state / "pages").mkdir()  # an earlier sparkdl's checkpoint
    for name in ("checkpoint.json", "pages/a.json", ".sparkdl-tmp-1"):
        (state / name).write_text("{}")
    assert registry.gc(NOW) == []  # a publisher may be about to write it
    age(state, 2)
    assert kinds(registry.gc(NOW, dry_run=True)) == [("leftover", "it is no part of the checkpoint")] * 3
    assert len(registry.gc(NOW)) == 3
    assert folders(state) == ["checkpoint"]
    assert registry.gc(NOW) == []
    assert len(ModelRegistry(registry.uri).list("m")) == 1


def test_a_bundle_of_which_a_part_is_left_is_published_whole(registry, bundles, tmp_path):
    made = registry.publish("m", bundles(1))
    place = tmp_path / "registry" / "artifacts" / made.artifact
    for damage in (
        lambda: (place / "bundle.json").unlink(),
        lambda: (place / "weights.safetensors").unlink(),
        lambda: (place / "weights.safetensors").write_bytes(b"x" * (place / "weights.safetensors").stat().st_size),
    ):
        damage()
        registry.publish("m", bundles(1))
        registry.load("m", 1)


def holder(**changes):
    here = Holder.here("a" * 64, "a test")
    return Holder(**{name: getattr(here, name) for name in here.__dataclass_fields__} | changes)


def test_a_holder_is_gone_when_its_process_is_or_it_is_silent():
    now = time.time()
    assert holder().lives(now)
    assert not holder(beat=now - 301).lives(now)
    assert holder(beat=now + 600).lives(now)  # a clock that goes ahead
    assert not holder(beat=now + 1e9).lives(now)
    assert not holder(process=2**22 + 1).lives(now)
    assert not holder(started=1).lives(now)  # another process has the number now
    assert holder(process=2**22 + 1, place="another machine").lives(now)
    assert holder(process=2**22 + 1, place="").lives(now)


def test_a_publication_waits_for_a_collection_of_its_artifact(tmp_path, monkeypatch):
    leases = Leases(Storage.of(tmp_path / "leases"))
    waited = []
    monkeypatch.setattr(module.time, "sleep", lambda seconds: waited.append(seconds) or marks.pop().close())
    other = leases.collecting("b" * 64)
    mark = leases.collecting("a" * 64)

    class Block:
        def __init__(self, context):
            self.context = context
            context.__enter__()

        def close(self):
            self.context.__exit__(None, None, None)

    keep, marks = Block(other), [Block(mark)]
    with leases.hold("a" * 64, "a publication"):
        assert len(waited) == 1
        assert list(leases.held()) == ["a" * 64]
    keep.close()
    assert leases.folder.list() == []


def test_a_lease_that_is_none_stops_a_collection(registry, bundles, tmp_path):
    registry.publish("m", bundles(1))
    registry.delete("m", 1)
    (tmp_path / "registry" / "leases" / "x.json").write_text("{}")
    with pytest.raises(StorageError, match="it is a lease, delete it if nobody publishes"):
        registry.gc(NOW)
    assert len(list((tmp_path / "registry" / "artifacts").iterdir())) == 1
    assert registry.publish("m", bundles(1)).version == 2  # and nobody else
    with registry.hold("m", 2) as held:
        assert held.version == 2
    (tmp_path / "registry" / "leases" / "collecting-x.json").write_text("{}")
    with pytest.raises(StorageError, match="it is a lease"):  # which artifact it removes, nobody knows
        registry.publish("m", bundles(1))


def test_a_dead_holders_lease_protects_nothing_and_goes(registry, bundles, tmp_path):
    registry.publish("m", bundles(1))
    artifact = registry.get("m", 1).artifact
    registry.delete("m", 1)
    from sparkdl.documents.typed import encode

    document = tmp_path / "registry" / "leases" / "x.json"
    document.write_bytes(encode(holder(artifact=artifact, process=2**22 + 1)))
    assert kinds(registry.gc(NOW)) == [("artifact", "no version names it"), ("leftover", "its holder is gone")]
    assert not document.exists()


def test_a_copy_replaces_what_is_left_beside_a_running_copy(tmp_path, bundles):
    info = read_bundle(bundles(1))
    place = tmp_path / "copy"
    place.mkdir()
    (place / "weights.safetensors").write_bytes(b"half")
    copy_bundle(info, str(place))
    assert read_bundle(str(place)).content_hash == info.content_hash


def test_what_a_publisher_is_writing_just_now_stays(registry, bundles, tmp_path):
    registry.publish("m", bundles(1))
    writing = tmp_path / "registry" / "artifacts" / ".sparkdl-bundle-1"
    writing.mkdir()
    assert kinds(registry.gc(NOW)) == []
    assert writing.exists()
