"""Files that lie in a table's folder and belong to no version of it.

Enters: a table and its folder. Leaves: what may be deleted. No Spark, no torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

from deltalake import DeltaTable

from sparkdl.storage import Entry, Storage

__all__ = ["orphans", "written_by"]


def written_by(folder: Storage, write_id: str, depth: int) -> list[Storage]:
    """The files of one write, ``depth`` partition folders deep."""
    return [storage for storage, entry in _files(folder, depth) if entry.name.startswith(f"part-{write_id}-")]


def orphans(table: DeltaTable, folder: Storage, older_than: timedelta) -> list[Storage]:
    """Data files of sparkdl's writers that no version names and that are older than ``older_than``.

    delta-rs lists, without deleting, all files outside the newest version ("full") and those of them that older
    versions name ("lite"); what is in the first list alone was never committed.
    """
    everything = set(table.vacuum(retention_hours=0, dry_run=True, enforce_retention_duration=False, full=True))
    once_committed = set(table.vacuum(retention_hours=0, dry_run=True, enforce_retention_duration=False, full=False))
    candidates = {path.rsplit("/", 1)[-1] for path in everything - once_committed}
    limit = time.time() - older_than.total_seconds()
    depth = len(table.metadata().partition_columns)
    return [
        storage
        for storage, entry in _files(folder, depth)
        if entry.name in candidates and entry.name.startswith("part-") and (entry.modified or 0) < limit
    ]


def _files(folder: Storage, depth: int) -> Iterator[tuple[Storage, Entry]]:
    for entry in folder.list():
        if not entry.is_dir:
            yield folder.child(entry.name), entry
        elif depth and "=" in entry.name:
            yield from _files(folder.child(entry.name), depth - 1)
