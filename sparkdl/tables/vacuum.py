"""Files that lie in a table's folder and belong to no version of it; no Spark, no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from urllib.parse import unquote

from deltalake import DeltaTable

from sparkdl.errors import StorageError
from sparkdl.storage import Entry, Storage


def written_by(folder: Storage, write_id: str, depth: int) -> list[Storage]:
    """The files of one write, ``depth`` partition folders deep."""
    return [storage for storage, entry in _files(folder, depth) if entry.name.startswith(f"part-{write_id}-")]


def orphans(table: DeltaTable, folder: Storage, older_than: timedelta) -> list[Storage]:
    """Data files of sparkdl's writers that no version names and that are older than ``older_than``.

    delta-rs lists, without deleting, all files outside the newest version ("full") and those of them that older
    versions name ("lite"), as far as the log knows of their removal: a checkpoint forgets it after a week, while
    entries stay for a month, and let older versions be read. So what an entry adds or removes is spared, too: a file of
    a version that can be read, and not of the newest one, was removed by an entry between them.

    Raises:
        StorageError: an entry of the log cannot be read.
    """
    everything = set(table.vacuum(retention_hours=0, dry_run=True, enforce_retention_duration=False, full=True))
    once_committed = set(table.vacuum(retention_hours=0, dry_run=True, enforce_retention_duration=False, full=False))
    candidates = {path.rsplit("/", 1)[-1] for path in everything - once_committed}
    if candidates:
        candidates -= _named(folder.child("_delta_log"))
    limit = time.time() - older_than.total_seconds()
    depth = len(table.metadata().partition_columns)
    return [
        storage
        for storage, entry in _files(folder, depth)
        if entry.name in candidates and entry.name.startswith("part-") and (entry.modified or 0) < limit
    ]


def _named(log: Storage) -> set[str]:
    """Names of the files that the entries which are left of a log add or remove."""
    entries = [log.child(entry.name) for entry in log.list() if entry.name.endswith(".json")]
    with ThreadPoolExecutor(16, thread_name_prefix="sparkdl-vacuum") as pool:
        return set().union(*pool.map(_named_by, entries))


def _named_by(entry: Storage) -> set[str]:
    try:
        actions = [json.loads(line) for line in entry.read_bytes().splitlines() if line.strip()]
        paths = [action[kind]["path"] for action in actions for kind in ("add", "remove") if kind in action]
        return {unquote(path).rpartition("/")[2] for path in paths}
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise StorageError(
            f"nothing is deleted, since {entry.uri} may name files of older versions, and is no entry of a log "
            f"({cause!r}): restore it"
        ) from cause


def _files(folder: Storage, depth: int) -> Iterator[tuple[Storage, Entry]]:
    for entry in folder.list():
        if not entry.is_dir:
            yield folder.child(entry.name), entry
        elif depth and "=" in entry.name:
            yield from _files(folder.child(entry.name), depth - 1)
