"""The features of the Delta protocol that delta-rs reads and writes right; a table with others is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from sparkdl.compat.arrow_streams import read_stream
from sparkdl.errors import StorageError
from sparkdl.storage import Storage
from sparkdl.tables.record import check_inside, path_in_log

# What is not listed here is refused by name, so that a feature of tomorrow is, too.
_READ = {"timestampNtz", "deletionVectors", "columnMapping", "v2Checkpoint", "vacuumProtocolCheck"}
_SCANNED = {*_READ, "variantType", "variantType-preview"} - {"vacuumProtocolCheck"}
_WRITTEN = {
    *("appendOnly", "invariants", "checkConstraints", "changeDataFeed", "generatedColumns"),
    *("timestampNtz", "deletionVectors", "columnMapping", "v2Checkpoint"),
}
"""The features whose use by a table ``check_writable`` finds out, and those that ask nothing."""
_IDENTITY_COLUMNS = 6  # the version of the protocol for writers that brings them

_UUID_LETTERS = 20  # of the name of a deletion vector's file; what stands before is a folder of the table

_SPARK = "open it in a Spark session with Delta's extension (io.delta:delta-spark)"


def refused_at_opening(cause: Exception, uri: str) -> StorageError | None:
    """Why delta-rs does not open a table at all, where that is a feature; None where it is something else."""
    text = str(cause)
    if "catalog-managed" in text:
        return StorageError(
            f"the Delta table {uri} is managed by a catalog (feature catalogManaged), which alone knows its newest "
            "version: open it by its catalog name (catalog.schema.table) in a Spark session with that catalog"
        )
    feature_names = re.findall(r"[Ff]eature '([^']+)' is not supported", text)
    return _refusal(uri, "readers", feature_names) if feature_names else None


def check_readable(table: DeltaTable, root: Storage, allowed: Sequence[str] = ()) -> None:
    """Refuse a table that Spark's Parquet reader does not read right, even with its vectors and names.

    Raises:
        StorageError: names the features that the table needs.
        IntegrityError: a file lies neither in the table's folder nor in one that is ``allowed``.
    """
    _check_readers(table, root, allowed, _READ)


def check_scannable(table: DeltaTable, root: Storage, allowed: Sequence[str] = ()) -> None:
    """Refuse a table that delta-rs's own engine does not read.

    Raises:
        StorageError: names the features that the table needs.
        IntegrityError: a file lies neither in the table's folder nor in one that is ``allowed``.
    """
    _check_readers(table, root, allowed, _SCANNED)


def check_files(table: DeltaTable, root: Storage, allowed: Sequence[str] = ()) -> None:
    """Refuse a table with a file or a deletion vector that lies neither in its folder nor in one that is ``allowed``.

    Raises:
        IntegrityError: names the file.
    """
    if "deletionVectors" in (table.protocol().reader_features or ()):
        check_inside(root.uri, _vector_files(table.version(), root.child("_delta_log")), allowed)
    paths = read_stream(table.get_add_actions()).column("path")
    odd = paths.filter(pc.match_substring_regex(paths, r"%|\.\.|:|^/"))  # of the others no reader leaves the folder
    check_inside(root.uri, odd.to_pylist(), allowed)


def _vector_files(version: int, log: Storage) -> list[str]:
    """The paths of the deletion vectors of a version, and of more, by its newest checkpoint and what came after."""
    names = [
        entry.name for entry in log.list() if re.match(r"\d{20}\.", entry.name) and int(entry.name[:20]) <= version
    ]
    start = max((int(name[:20]) for name in names if ".checkpoint" in name), default=-1)
    files = [log.child(name) for name in names if ".checkpoint" in name and int(name[:20]) == start]
    files += [log.child(name) for name in names if re.fullmatch(r"\d{20}\.json", name) and int(name[:20]) > start]
    with ThreadPoolExecutor(16) as pool:
        actions = [action for actions in pool.map(_actions, files) for action in actions]
        sidecars = [action["sidecar"]["path"] for action in actions if action.get("sidecar")]
        actions += [
            action for actions in pool.map(_actions, map(log.child("_sidecars").child, sidecars)) for action in actions
        ]
    vectors = [action["add"]["deletionVector"] for action in actions if (action.get("add") or {}).get("deletionVector")]
    absolute = [vector["pathOrInlineDv"] for vector in vectors if vector["storageType"] == "p"]
    relative = [vector["pathOrInlineDv"] for vector in vectors if vector["storageType"] == "u"]
    return [*absolute, *(f"{path[:-_UUID_LETTERS]}/x.bin" for path in relative if path[:-_UUID_LETTERS])]


def _actions(file: Storage) -> list[dict[str, Any]]:
    """The actions of one file of a log; of a checkpoint's, what they say of deletion vectors and sidecars."""
    if file.uri.endswith(".json"):
        return [json.loads(line) for line in file.read_bytes().splitlines() if line.strip()]
    with file.open_input() as stream:
        columns = ["add.deletionVector", "sidecar.path"]
        return list(pq.ParquetFile(stream).read(columns=columns).to_pylist())


def _check_readers(table: DeltaTable, root: Storage, allowed: Sequence[str], understood: set[str]) -> None:
    check_files(table, root, allowed)
    lacking = set(table.protocol().reader_features or ()) - understood
    if lacking:
        raise _refusal(root.uri, "readers", lacking)
    if maps_columns(table) == "id":
        check_names_by_id(table, root)


def check_names_by_id(table: DeltaTable, root: Storage) -> None:
    """Refuse a table that finds columns by id, and has a file in which another name has a column's id.

    The footers of all files are read.

    Column mapping by id lets a file call a column as it likes, and delta-rs and we find columns by their physical names
    all the same. Writers of such tables are to use these (Delta's PROTOCOL.md, "Writer Requirements for Column
    Mapping"), and Spark's Delta does; files that came from elsewhere, such as Iceberg's, need not. So the files of such
    a table are asked.

    Raises:
        StorageError: names the file and the column.
    """
    ids = dict(_of_table(json.loads(table.schema().to_json())))
    paths = sorted({path_in_log(path) for path in read_stream(table.get_add_actions()).column("path").to_pylist()})
    with ThreadPoolExecutor(16) as pool:
        for path, wrong in zip(paths, pool.map(partial(_misnamed, root, ids), paths), strict=True):
            if wrong:
                raise StorageError(
                    f"the Delta table {root.uri} finds columns by id (feature columnMapping), and its file {path} "
                    f"{wrong}, while delta-rs goes by names: {_SPARK}"
                )


def _misnamed(root: Storage, ids: dict[str, int], path: str) -> str:
    """What in a file contradicts the table's names and ids; empty where nothing does."""
    file = Storage.of(path) if "://" in path else root.child(path)
    with file.open_input() as stream:
        file_names = dict(_of_file(pq.read_schema(stream)))
    names = {number: name for name, number in ids.items()}
    for name, number in file_names.items():
        if number is None:
            return f"has no id for its column {name!r}"
        if ids.get(name, number) != number or names.get(number, name) != name:
            of = f"of {names[number]!r}" if number in names else "of no column"
            return f"calls a column {name!r} that has the id {number}, {of}"
    return ""


def check_times(table: DeltaTable, root: Storage) -> None:
    """Refuse to let delta-rs copy rows whose times it takes for others, before 1677 or after 2262.

    Spark's Delta writes instants as INT96 unless told otherwise, and delta-rs reads these as nanoseconds in 64 bits.
    The footers of all files are read, and such columns.

    Raises:
        StorageError: names the file.
    """
    if '"timestamp"' not in table.schema().to_json():
        return
    paths = sorted({path_in_log(path) for path in read_stream(table.get_add_actions()).column("path").to_pylist()})
    with ThreadPoolExecutor(16) as pool:
        for path, fits in zip(paths, pool.map(partial(_times_fit, root), paths), strict=True):
            if not fits:
                raise StorageError(
                    f"the file {path} of the Delta table {root.uri} holds times before 1677 or after 2262 as INT96, "
                    f"which delta-rs would write as others: {_SPARK} to change or compact it"
                )


def _times_fit(root: Storage, path: str) -> bool:
    """Whether the times that a file keeps as INT96 are the same in nanoseconds."""
    file = Storage.of(path) if "://" in path else root.child(path)
    with file.open_input() as stream:
        parquet = pq.ParquetFile(stream)
        leaves = map(parquet.schema.column, range(len(parquet.schema.names)))
        old = [leaf.path for leaf in leaves if leaf.physical_type == "INT96"]
        if not old:
            return True
        exact = pq.ParquetFile(stream, coerce_int96_timestamp_unit="us").read(columns=old)
        return bool(parquet.read(columns=old).cast(exact.schema, safe=False).equals(exact))


def _of_table(kind: Any, above: str = "") -> Iterator[tuple[str, int]]:
    """Physical names of a type's fields, with those around them, and their ids."""
    if isinstance(kind, dict):
        for field in kind.get("fields", ()):
            name = f"{above}{field['metadata']['delta.columnMapping.physicalName']}"
            yield name, field["metadata"]["delta.columnMapping.id"]
            yield from _of_table(field["type"], f"{name}.")
        for inner in ("elementType", "keyType", "valueType"):
            yield from _of_table(kind.get(inner), f"{above}{inner}.")


def _of_file(kind: Any, above: str = "") -> Iterator[tuple[str, int | None]]:
    """The names and ids of a Parquet file, whose ids Arrow keeps as metadata of its fields."""
    types = pa.types
    if isinstance(kind, pa.Schema) or types.is_struct(kind):
        for field in kind:
            number = (field.metadata or {}).get(b"PARQUET:field_id")
            yield f"{above}{field.name}", None if number is None else int(number)
            yield from _of_file(field.type, f"{above}{field.name}.")
    elif types.is_list(kind):
        yield from _of_file(kind.value_type, f"{above}elementType.")
    elif types.is_map(kind):
        yield from _of_file(kind.key_type, f"{above}keyType.")
        yield from _of_file(kind.item_type, f"{above}valueType.")


def check_writable(table: DeltaTable, uri: str, *, removes: bool = False) -> None:
    """Refuse a table with promises that a plain append of files would break.

    Args:
        table: as it is now.
        uri: its address, for messages.
        removes: whether rows are to be removed or changed, too.

    Raises:
        StorageError: names the features that delta-rs does not write, or what else the table asks its writers for.
    """
    protocol = table.protocol()
    unread = set(protocol.reader_features or ()) - _READ
    if unread:
        raise _refusal(uri, "readers", unread)
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
    if removes and table.metadata().configuration.get("delta.appendOnly", "").lower() == "true":
        raise StorageError(
            f"the Delta table {uri} lets nobody remove or change its rows (delta.appendOnly=true), which overwrite, "
            "replace and merge do: append, or set that property of the table to false first"
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
    constraints = [key for key in configuration if key.startswith("delta.constraints.")]
    switches = ("delta.enableChangeDataFeed", "delta.enableRowTracking")
    constraints += [key for key in switches if configuration.get(key) == "true"]
    if maps_columns(table):
        constraints.append("delta.columnMapping.mode")
    for field in json.loads(table.schema().to_json())["fields"]:
        prefixes = ("delta.generation", "delta.identity", "delta.invariants")
        constraints += [f"{key} of {field['name']}" for key in field.get("metadata", {}) if key.startswith(prefixes)]
    return constraints


def _refusal(uri: str, who: str, features: Iterable[str]) -> StorageError:
    return StorageError(
        f"the Delta table {uri} asks its {who} for {sorted(features)}, which delta-rs lacks: {_SPARK}, "
        "or drop them with ALTER TABLE ... DROP FEATURE"
    )
