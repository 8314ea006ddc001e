"""Every feature of the Delta protocol, on tables made by hand: read and written right, or refused at once by name."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pytest
from delta_log import commit, edited_metadata, protocol

from sparkdl.errors import ConflictError, StorageError
from sparkdl.storage import Storage
from sparkdl.tables import delta
from sparkdl.tables.delta import open_table
from sparkdl.tables.features import check_readable, check_writable
from sparkdl.tables.table import Table

READERS = {  # every feature that readers must know: whether Table.read reads it, whether Table.rows does
    "adaptiveMetadata-preview": (False, False),
    "columnMapping": (True, True),
    "deletionVectors": (True, True),
    "geospatial": (False, False),
    "geospatial-dev": (False, False),
    "timestampNtz": (True, True),
    "typeWidening": (False, False),
    "typeWidening-preview": (False, False),
    "v2Checkpoint": (True, True),
    "vacuumProtocolCheck": (True, False),
    "variantShredding": (False, False),
    "variantShredding-preview": (False, False),
    "variantType": (False, True),
    "variantType-preview": (False, True),
    "ofTheFuture": (False, False),
}
CATALOG_FEATURES = ["catalogManaged", "catalogOwned-preview"]
WRITTEN = ["appendOnly", "invariants", "checkConstraints", "changeDataFeed", "generatedColumns"]
WRITTEN_WITH_READERS = ["columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint"]
NOT_WRITTEN = [
    *("allowColumnDefaults", "checkpointProtection", "clustering", "coordinatedCommits-preview", "domainMetadata"),
    *("icebergCompatV1", "icebergCompatV2", "icebergCompatV3", "identityColumns", "inCommitTimestamp"),
    *("materializePartitionColumns", "rowTracking", "ofTheFuture"),
]
ROWS = pa.table({"x": [1, 2]})


@pytest.fixture
def table(tmp_path):
    found = Table(str(tmp_path / "table"))
    found.append(ROWS)
    return found


@pytest.fixture
def tries(monkeypatch):
    """How often a commit was tried."""
    seen = []
    monkeypatch.setattr(delta, "time", SimpleNamespace(sleep=seen.append))  # and not the sleep of all threads
    return seen


def changes(table):
    return [lambda: table.append(ROWS), lambda: table.merge(ROWS, ["x"]), table.compact]


@pytest.mark.parametrize("feature", READERS)
def test_a_feature_for_readers_is_read_or_refused_by_name(table, feature):
    by_files, by_scan = READERS[feature]
    commit(table.uri, 1, protocol([feature], []))
    for works, read in (
        (by_files, lambda: check_readable(open_table(table.uri, None), Storage.of(table.uri))),
        (by_scan, table.rows),
    ):
        if works:
            read()
        else:
            with pytest.raises(StorageError, match=rf"readers for \['{feature}'\].*Spark session.*DROP FEATURE"):
                read()


@pytest.mark.parametrize("feature", CATALOG_FEATURES)
def test_a_table_that_a_catalog_manages_is_to_be_opened_by_its_name(table, feature):
    commit(table.uri, 1, protocol([feature], ["inCommitTimestamp"]))
    for touch in (table.exists, table.version, table.rows, *changes(table)):
        with pytest.raises(StorageError, match=r"catalogManaged.*open it by its catalog name"):
            touch()


@pytest.mark.parametrize("feature", [*WRITTEN, *WRITTEN_WITH_READERS])
def test_a_feature_that_this_table_makes_no_use_of_does_not_keep_rows_out(table, feature):
    readers = [feature] if feature in WRITTEN_WITH_READERS else []
    commit(table.uri, 1, protocol(readers, [] if readers else [feature]))
    assert table.append(ROWS) == 2
    assert table.rows().num_rows == 4


@pytest.mark.parametrize("feature", NOT_WRITTEN)
def test_a_feature_that_cannot_be_written_is_refused_at_once_by_name(table, feature, tries):
    commit(table.uri, 1, protocol([], [feature]))
    for change in changes(table):
        with pytest.raises(StorageError, match=rf"writers for \['{feature}'\].*Spark session.*DROP FEATURE") as refusal:
            change()
        assert not isinstance(refusal.value, ConflictError)
    assert not tries
    assert table.rows().num_rows == 2
    assert table.version() == 1


@pytest.mark.parametrize("feature", [name for name, (by_files, _) in READERS.items() if not by_files])
def test_what_is_not_read_is_not_written(table, feature, tries):
    commit(table.uri, 1, protocol([feature], []))
    for change in changes(table):
        with pytest.raises(StorageError, match=rf"readers for \['{feature}'\]"):
            change()
    assert not tries


def test_identity_columns_of_an_older_protocol_are_refused_at_once(table, tries):
    commit(table.uri, 1, {"protocol": {"minReaderVersion": 1, "minWriterVersion": 6}})
    with pytest.raises(StorageError, match=r"writers for \['identityColumns'\]"):
        table.append(ROWS)
    assert not tries


def test_an_append_only_table_loses_no_rows_and_says_why(table, tries):
    only_appends = {"configuration": {"delta.appendOnly": "true"}}
    older = {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}}
    commit(table.uri, 1, older, edited_metadata(table.uri, lambda metadata: metadata.update(only_appends)))
    stages = [lambda: table.stage(table.schema_json(), "overwrite").commit([])]
    for change in (*stages, lambda: table.merge(ROWS, ["x"])):
        with pytest.raises(StorageError, match=r"delta.appendOnly=true.*append, or set that property") as refusal:
            change()
        assert not isinstance(refusal.value, ConflictError)
    assert not tries
    assert table.append(ROWS) == 2
    table.compact()
    assert table.rows().num_rows == 4


def test_every_feature_at_once_names_all_that_are_lacking(table):
    commit(table.uri, 1, protocol([], [*WRITTEN, *NOT_WRITTEN]))
    with pytest.raises(StorageError) as refusal:
        check_writable(open_table(table.uri, None), table.uri)
    assert all(f"'{feature}'" in str(refusal.value) for feature in NOT_WRITTEN)
    assert not any(f"'{feature}'" in str(refusal.value) for feature in WRITTEN)
