"""From a model to the files it was trained on, and from a file to models."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sparkdl.errors import ConfigError
from sparkdl.models.registry import Lineage, ModelRegistry
from sparkdl.tables.table import Table


@pytest.fixture
def table(tmp_path):
    """A table with three versions: a file, another one, both rewritten as one."""
    table = Table(str(tmp_path / "features"), engine="delta-rs")
    table.append(pa.table({"x": [1.0]}))
    table.append(pa.table({"x": [2.0]}))
    table.compact()
    return table


@pytest.fixture
def trained(registry, bundle, table):
    """Versions 1 and 2 of ``m`` and 1 of ``n`` on versions 0, 1 and 2 of the table; ``other`` on something else."""
    for name, version, parent in (("m", 0, None), ("m", 1, 1), ("n", 2, None)):
        lineage = Lineage(
            source_table=table.uri, source_version=version, shard_key="k", code_version="c", parent=parent
        )
        registry.publish(name, bundle, lineage=lineage)
    registry.publish("other", bundle, lineage=Lineage(source_table=str(table.uri) + "2", source_version=0))
    registry.publish("none", bundle)
    return registry


def names(found):
    return [(each.name, each.version) for each in found]


def test_a_version_leads_to_the_files_of_its_table(trained, table):
    found = trained.lineage("m", 2)
    assert (found.table, found.table_version, found.shard_key, found.code_version) == (table.uri, 1, "k", "c")
    assert found.files == tuple(sorted(file.path for file in table.files(1)))
    assert len(found.files) == 2
    assert (found.missing, found.note, found.parent) == ((), "", 1)
    assert "torch" in found.software
    assert trained.lineage("n", 1).files == (table.files()[0].path,)
    with pytest.raises(ConfigError, match="no version 9"):
        trained.lineage("m", 9)


def test_what_is_gone_is_said(trained, table, tmp_path):
    old = [file.path for file in table.files(0)]
    (tmp_path / "features" / old[0]).unlink()
    found = trained.lineage("m", 2)
    assert found.missing == (old[0],)
    assert found.note == "1 of 2 files are gone: they were vacuumed, or moved away"
    for number in (0, 1):
        (tmp_path / "features" / "_delta_log" / f"{number:020d}.json").unlink()
    found = trained.lineage("m", 2)
    assert found.files is None
    assert "the files of version 1 cannot be told" in found.note
    other = trained.lineage("other", 1)
    assert other.files is None
    assert "there is no Delta table" in other.note
    assert trained.lineage("none", 1).note == "no table was noted"


def test_a_name_in_a_catalog_is_told_without_its_files(registry, bundle):
    registry.publish("m", bundle, lineage=Lineage(source_table="main.sales.rides", source_version=3))
    found = registry.lineage("m", 1)
    assert (found.table, found.files) == ("main.sales.rides", None)
    assert "is the name of a table in a catalog" in found.note
    assert names(registry.models_of("main.sales.rides").versions) == [("m", 1)]
    assert names(registry.models_of("main.sales.rides", 4).versions) == []
    assert names(registry.models_of("main.sales.rides", file="x").unknown) == [("m", 1)]


def test_a_table_leads_to_its_models(trained, table, tmp_path):
    for address in (table.uri, str(tmp_path / "features"), f"file://{tmp_path}/features"):
        assert names(trained.models_of(address).versions) == [("m", 1), ("m", 2), ("n", 1)]
    assert names(trained.models_of(table.uri, 1).versions) == [("m", 2)]
    assert names(trained.models_of(str(tmp_path / "nothing")).versions) == []


def test_a_file_leads_to_the_models_of_every_version_it_is_in(trained, table, tmp_path):
    (first,) = (file.path for file in table.files(0))
    (last,) = (file.path for file in table.files())
    assert names(trained.models_of(table.uri, file=first).versions) == [("m", 1), ("m", 2)]
    assert names(trained.models_of(table.uri, 0, file=first).versions) == [("m", 1)]
    assert names(trained.models_of(table.uri, file=f"{table.uri}/{last}").versions) == [("n", 1)]
    assert names(trained.models_of(str(tmp_path / "features"), file=str(tmp_path / "features" / last)).versions) == [
        ("n", 1)
    ]
    assert names(trained.models_of(table.uri, file="unheard-of.parquet").versions) == []
    for number in (0, 1):
        (tmp_path / "features" / "_delta_log" / f"{number:020d}.json").unlink()
    table.compact()
    found = ModelRegistry(trained.uri).models_of(table.uri, file=last)
    assert names(found.unknown) == [("m", 1), ("m", 2), ("n", 1)] or names(found.versions) == [("n", 1)]


@pytest.mark.parametrize("noted", [{"source_table": 5}, {"source_table": "\x00"}, {"versions": [1]}, {"parent": "x"}])
def test_lineage_that_no_sparkdl_notes_is_no_lineage(registry, bundle, noted):
    from datetime import UTC, datetime

    from sparkdl.models.registry.events import EVENTS, Event

    made = registry.publish("m", bundle)
    event = Event(kind="published", name="m", version=2, artifact=made.artifact, lineage=noted, publication="x")
    row = event.stamped(1, datetime.now(UTC)).to_row()
    registry._log.table.append(pa.Table.from_pylist([row], schema=EVENTS))
    found = registry.lineage("m", 2)
    assert (found.files, found.parent, found.software) == (None, None, {})
    assert registry.models_of(str(registry.uri)).versions == ()


def test_a_word_that_can_be_no_table_is_refused_unless_a_model_was_noted_with_it(trained, bundle):
    with pytest.raises(ConfigError, match="'clean' is neither an address"):
        trained.models_of("clean")
    trained.publish("odd", bundle, lineage=Lineage(source_table="clean"))
    assert names(trained.models_of("clean").versions) == [("odd", 1)]
