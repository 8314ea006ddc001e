"""Files that a Delta, Iceberg or Hudi table governs, told by what lies beside them: its log says which are alive."""

from __future__ import annotations

import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from sparkdl.errors import ConfigError, StorageError
from sparkdl.storage import Storage

_REMEDIES = {
    "Delta": "source: {{kind: delta, table: {root}}}",
    "Iceberg": "source: {{kind: spark, table: CATALOG.SCHEMA.TABLE}}, or format: iceberg with path: {root}",
    "Hudi": "source: {{kind: spark, format: hudi, path: {root}}}",
}
_MARKS = {"_delta_log": "Delta", ".hoodie": "Hudi", ".hoodie_partition_metadata": "Hudi"}
_ICEBERG = re.compile(r"(v\d+|\d+-[0-9a-f-]{36})(\.gz)?\.metadata\.json(\.gz)?")


class TableFilesError(ConfigError):
    """The files of a source are those of a table, whose log is not asked."""


def fixed_part(path: str) -> tuple[str, list[str]]:
    """The folder or file that a path names, and what follows from its first part that is a pattern on."""
    parts = path.split("/")
    first = next((index for index, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
    return "/".join(parts[:first]) or "/", parts[first:]


def check_names_in(folder: Storage, names: Collection[str]) -> None:
    """Refuse a folder that is a table's, or lies in one, by the names that were listed in it.

    Raises:
        TableFilesError: names the table, and the kind of source that reads it.
    """
    kind = next((_MARKS[name] for name in names if name in _MARKS), None)
    if kind is None and "metadata" in names:
        described = (_ICEBERG.fullmatch(entry.name) for entry in folder.child("metadata").list())
        kind = "Iceberg" if any(described) else None
    if kind is not None:
        raise TableFilesError(
            f"the source reads files of {folder.uri} as they lie, and they are those of a table ({kind}), whose log "
            f"says which rows it still has: write {_REMEDIES[kind].format(root=folder.uri)}"
        )


def check_no_table_at(folder: Storage) -> None:
    """Refuse a folder that is a table's, or lies in one, as its partitions do.

    Raises:
        TableFilesError: names the table, and the kind of source that reads it.
    """
    folders = [folder]
    for _ in folder.uri.rpartition("://")[2].strip("/").split("/")[1:]:
        folders.append(folders[-1].parent())
    with ThreadPoolExecutor(8, thread_name_prefix="sparkdl-tables") as pool:
        for above, names in zip(folders, pool.map(_telling_names, folders), strict=True):
            check_names_in(above, names)


def check_plain_files(path: str) -> None:
    """Refuse a table's folder that Spark is to read as plain files.

    Raises:
        TableFilesError: names the table, and the kind of source that reads it.
    """
    try:
        folder = Storage.of(fixed_part(path)[0])
    except ConfigError:  # no path, or of a scheme that is the format's own
        return
    check_no_table_at(folder)


def _telling_names(folder: Storage) -> list[str]:
    """Which of the names that tell a table are there; a folder above may hold millions, so it is not listed."""
    with suppress(StorageError):  # no right to see it
        return [name for name in (*_MARKS, "metadata") if folder.child(name).exists()]
    return []
