"""What a question and an event read of a large registry; what makes that little is never believed blindly."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager

import pytest

from sparkdl.errors import StorageError
from sparkdl.models.registry import ModelRegistry
from sparkdl.storage.files import LocalStorage
from sparkdl.tables import delta, delta_rs


@pytest.fixture
def counted(monkeypatch):
    """Count what the block reads: files, bytes, and how often delta-rs opens a table."""

    @contextmanager
    def counted():
        found = {"files": 0, "bytes": 0, "tables": 0}
        read, opened = LocalStorage.read_bytes, delta.open_table

        def reading(self, *arguments, **options):
            data = read(self, *arguments, **options)
            found["files"] += 1
            found["bytes"] += len(data)
            return data

        def opening(*arguments):
            found["tables"] += 1
            return opened(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "read_bytes", reading)
            patch.setattr(delta_rs, "open_table", opening)
            yield found

    return counted


def operations(registry, bundle):
    """What is to cost the same: by name, a call that can be made once."""
    again = ModelRegistry(registry.uri)
    return {
        "models": again.models,
        "get a version": lambda: again.get("m0", 3),
        "get an alias": lambda: again.get("m0", "champion"),
        "aliases": lambda: again.aliases("m0"),
        "publish": lambda: again.publish("m0", bundle, metrics={"mae": 0.001}, publication="new"),
        "publish again": lambda: again.publish("m0", bundle, publication="m0-2"),
        "promote": lambda: again.promote_if_better("m0", "champion", 4, metric="mae"),
        "rollback": lambda: again.rollback("m0", "champion"),
    }


@pytest.mark.parametrize("shape", [(1000, 1), (10, 100)], ids=["many versions", "many models"])
def test_every_operation_reads_as_many_files_of_many_versions_as_of_ten(grown, bundle, counted, shape):
    small, large = grown(10), grown(*shape)
    for name, few in operations(small, bundle).items():
        many = operations(large, bundle)[name]
        with counted() as little:
            few()
        with counted() as much:
            many()
        assert much["tables"] == little["tables"] == 0, name
        assert much["files"] <= little["files"] + 3, name
        assert much["bytes"] <= little["bytes"] + 100 * 1000, name  # of the checkpoint, 100 an event
    assert large.get("m0", "champion").version == 1


def test_a_question_reads_a_few_commits_however_many_there_were(registry, bundle, counted):
    most = 0
    for _ in range(70):
        registry.publish("m", bundle)
        with counted() as found:
            registry.get("m", 1)
        most = max(most, found["files"])
        assert found["tables"] == 0
    assert most <= 2 * 8 + 6
    assert len(registry._log.table.files()) < 30  # a fold of all events reads few files, too


CHANGES = {
    "gone": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-5]),
    "another number": lambda file: file.write_bytes(file.read_bytes().replace(b"1", b"2")),
    "another document": lambda file: file.write_bytes(b'{"format": 1}'),
    "no JSON": lambda file: file.write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_damaged_checkpoint_changes_no_answer_and_is_made_anew(registry, bundle, counted, tmp_path, change):
    for number in range(12):
        registry.publish("m", bundle, publication=f"p{number}")
    registry.set_alias("m", "champion", 2, expected=None)
    change(tmp_path / "registry" / "state" / "checkpoint")
    damaged = ModelRegistry(registry.uri)
    assert damaged.get("m", "champion").version == 2
    assert [version.version for version in damaged.list("m")] == list(range(1, 13))
    assert damaged.publish("m", bundle, publication="p7").version == 8
    assert damaged.models() == ["m"]
    damaged.publish("m", bundle)
    with counted() as reads:
        assert registry.list("m")[-1].version == 13
    assert reads["tables"] == 0


def test_a_checkpoint_of_another_history_is_left_alone(registry, bundle, tmp_path, counted):
    for _ in range(20):
        registry.publish("m", bundle)
    kept = (tmp_path / "registry" / "state" / "checkpoint").read_bytes()
    for behind in ("cut back", "begun anew"):
        for file in (tmp_path / "registry" / "events").rglob("*"):  # restored from elsewhere, say
            if file.is_file():
                file.unlink()
        other = ModelRegistry(registry.uri)
        for number in range(2 if behind == "cut back" else 40):
            other.publish("n", bundle, publication=str(number))
        (tmp_path / "registry" / "state" / "checkpoint").write_bytes(kept)
        assert ModelRegistry(registry.uri).models() == ["n"], behind
        assert len(ModelRegistry(registry.uri).list("n")) == (2 if behind == "cut back" else 40)


def test_a_commit_stands_where_its_checkpoint_cannot_be_written(registry, bundle, monkeypatch, caplog):
    registry.publish("m", bundle)

    def denied(self, data):
        if "/state/" in self.uri:
            raise StorageError(f"cannot write {self.uri}: access is denied")
        return write(self, data)

    write = LocalStorage.write_atomic
    monkeypatch.setattr(LocalStorage, "write_atomic", denied)
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            registry.publish("m", bundle)
    assert "slower to read" in caplog.text
    assert len(ModelRegistry(registry.uri).list("m")) == 21


def test_a_registry_of_a_newer_format_is_refused_with_both_numbers(registry, bundle, tmp_path):
    registry.publish("m", bundle)
    document = tmp_path / "registry" / "registry.json"
    assert json.loads(document.read_text()) == {"format": 1}
    document.write_text('{"format": 2, "more": []}')
    newer = ModelRegistry(registry.uri)
    for refused in (newer.models, lambda: newer.publish("m", bundle), lambda: newer.history("m")):
        with pytest.raises(StorageError, match="has the format 2, this sparkdl reads up to 1"):
            refused()
    document.write_text('{"format": "new"}')
    with pytest.raises(StorageError, match="says no format"):
        ModelRegistry(registry.uri).models()


def test_a_registry_of_the_first_sparkdl_goes_on(registry, bundle, tmp_path, counted):
    for _ in range(3):
        registry.publish("m", bundle)
    registry.set_alias("m", "champion", 1, expected=None)
    (tmp_path / "registry" / "registry.json").unlink()
    for file in sorted((tmp_path / "registry" / "state").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    old = ModelRegistry(registry.uri)
    assert old.get("m", "champion").version == 1
    assert not (tmp_path / "registry" / "state" / "checkpoint").exists()  # who only reads writes nothing
    assert old.publish("m", bundle).version == 4
    with counted() as found:
        assert [each.version for each in ModelRegistry(registry.uri).list("m")] == [1, 2, 3, 4]
    assert found["tables"] == 0
