"""Which tables delta-rs reads and writes right, by the features of the Delta protocol; all others are refused by name.

Enters: an open table, or why it could not be opened. Leaves: nothing, or a typed refusal that says what the table
needs and what the caller can do. What is not listed here is refused, so that a feature of tomorrow is, too. No Spark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from deltalake import DeltaTable

from sparkdl.errors import StorageError

__all__ = ["check_readable", "check_scannable", "check_writable", "refused_at_opening"]

_READ = {"timestampNtz", "deletionVectors", "columnMapping", "v2Checkpoint", "vacuumProtocolCheck"}
_SCANNED = {*_READ, "variantType", "variantType-preview"} - {"vacuumProtocolCheck"}
_WRITTEN = {
    *("appendOnly", "invariants", "checkConstraints", "changeDataFeed", "generatedColumns"),
    *("timestampNtz", "deletionVectors", "columnMapping", "v2Checkpoint"),
}
"""Those of which ``check_writable`` finds out whether the table makes use of them, and those that ask nothing."""
_IDENTITY_COLUMNS = 6  # the version of the protocol for writers that brings them

_SPARK = "open it in a Spark session with Delta's extension (io.delta:delta-spark)"


def refused_at_opening(cause: Exception, uri: str) -> StorageError | None:
    """Why delta-rs does not open a table at all, where that is a feature; None where it is something else."""
    text = str(cause)
    if "catalog-managed" in text:
        return StorageError(
            f"the Delta table {uri} is managed by a catalog (feature catalogManaged), which alone knows its newest "
            "version: open it by its catalog name (catalog.schema.table) in a Spark session with that catalog"
        )
    found = re.findall(r"[Ff]eature '([^']+)' is not supported", text)
    return _refusal(uri, "readers", found) if found else None


def check_readable(table: DeltaTable, uri: str) -> None:
    """Refuse a table that Spark's Parquet reader does not read right, even with its vectors and names.

    Raises:
        StorageError: names the features that the table needs.
    """
    lacking = set(table.protocol().reader_features or ()) - _READ
    if maps_columns(table) == "id":
        lacking.add("columnMapping by id")
    if lacking:
        raise _refusal(uri, "readers", lacking)


def check_scannable(table: DeltaTable, uri: str) -> None:
    """Refuse a table that delta-rs's own engine does not read.

    Raises:
        StorageError: names the features that the table needs.
    """
    lacking = set(table.protocol().reader_features or ()) - _SCANNED
    if lacking:
        raise _refusal(uri, "readers", lacking)


def check_writable(table: DeltaTable, uri: str) -> None:
    """Refuse a table with promises that a plain append of files would break.

    Raises:
        StorageError: names the features that delta-rs does not write, or what else the table asks its writers for.
    """
    check_readable(table, uri)
    protocol = table.protocol()
    lacking = set(protocol.writer_features or ()) - _WRITTEN
    if protocol.min_writer_version == _IDENTITY_COLUMNS:
        lacking.add("identityColumns")
    if lacking:
        raise _refusal(uri, "writers", lacking)
    if holds_deletion_vectors(table):
        raise StorageError(
            f"the Delta table {uri} holds deletion vectors, which a writer of plain files would not carry along: "
            f"run REORG TABLE ... APPLY (PURGE) on it first, or {_SPARK} to write it"
        )
    promises = _promises(table)
    if promises:
        raise StorageError(
            f"the Delta table {uri} asks its writers to keep {promises}, sparkdl writes plain files only: "
            f"drop these from the table, or {_SPARK} to write it"
        )


def holds_deletion_vectors(table: DeltaTable) -> bool:
    """Whether rows of this version are hidden by vectors; the feature alone hides none."""
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return False
    return any(batch.num_rows for batch in table.deletion_vectors())


def maps_columns(table: DeltaTable) -> str | None:
    """How columns are found in files: by physical ``name`` or by ``id``; None where by their own names."""
    mode = table.metadata().configuration.get("delta.columnMapping.mode", "none")
    return None if mode == "none" else mode


def _promises(table: DeltaTable) -> list[str]:
    configuration = table.metadata().configuration
    found = [key for key in configuration if key.startswith("delta.constraints.")]
    switches = ("delta.enableChangeDataFeed", "delta.enableRowTracking")
    found += [key for key in switches if configuration.get(key) == "true"]
    if maps_columns(table):
        found.append("delta.columnMapping.mode")
    for field in json.loads(table.schema().to_json())["fields"]:
        kept = ("delta.generation", "delta.identity", "delta.invariants")
        found += [f"{key} of {field['name']}" for key in field.get("metadata", {}) if key.startswith(kept)]
    return found


def _refusal(uri: str, who: str, features: Iterable[str]) -> StorageError:
    return StorageError(
        f"the Delta table {uri} asks its {who} for {sorted(features)}, which delta-rs lacks: {_SPARK}, "
        "or drop them with ALTER TABLE ... DROP FEATURE"
    )
