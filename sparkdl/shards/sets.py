"""The shard sets below a directory, and what of them can go: ``sparkdl shards list`` and ``shards gc``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sparkdl.config import require
from sparkdl.errors import IntegrityError, SchemaError
from sparkdl.shards.manifest import MANIFEST_NAME, Manifest
from sparkdl.shards.transaction import ORPHAN_SECONDS, orphans
from sparkdl.storage import Storage


@dataclass(frozen=True, kw_only=True, slots=True)
class SetInfo:
    """One directory with shards.

    Attributes:
        uri: of the set.
        manifest: None if nothing was committed there, or ``problem`` says why it cannot be read.
        orphan_files: files that the manifest does not name.
        orphan_bytes: their size.
        problem: empty if all is well.
    """

    uri: str
    manifest: Manifest | None
    orphan_files: int
    orphan_bytes: int
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """One file, or one whole set, that was removed, or would be.

    Attributes:
        uri: of the file or set.
        bytes: freed.
        reason: why.
    """

    uri: str
    bytes: int
    reason: str


def list_sets(uri: str | Storage) -> list[SetInfo]:
    """The shard sets at ``uri`` and in the directories below it, two levels deep.

    Raises:
        StorageError: the directory cannot be listed.
    """
    return [_info(root) for root in _roots(Storage.of(uri), depth=2)]


def collect_garbage(
    uri: str | Storage,
    *,
    orphan_seconds: float = ORPHAN_SECONDS,
    set_seconds: float | None = None,
    dry_run: bool = False,
) -> list[Removed]:
    """Remove what nobody can read any more, and, if asked, sets that are old.

    Args:
        uri: of a set, or of a directory of sets.
        orphan_seconds: files that no manifest names go when they are older than this; a writer that is slower than this
            would lose its files.
        set_seconds: whole sets written longer ago than this go too; None keeps them all.
        dry_run: only say what would be removed.

    Returns:
        what was removed, or would be. Sets whose manifest is damaged are left alone.

    Raises:
        ConfigError: an age is below 0.
        StorageError: something cannot be listed or removed.
    """
    for name, age in (("orphan_seconds", orphan_seconds), ("set_seconds", set_seconds)):
        require(age is None or age >= 0, f"{name}={age} must be at least 0 seconds: give a positive age")
    removed = []
    for root in _roots(Storage.of(uri), depth=2):
        manifest, problem = _load(root)
        if problem:
            continue
        if manifest is not None and set_seconds is not None and time.time() - manifest.created > set_seconds:
            removed.append(Removed(uri=root.uri, bytes=manifest.bytes, reason=f"older than {set_seconds:g} s"))
            if not dry_run:
                root.child(MANIFEST_NAME).delete()  # first: a set without shards must never be visible
                root.child("shards").delete(recursive=True)
            continue
        for name, size, age in orphans(root, manifest):
            if age >= orphan_seconds:
                removed.append(Removed(uri=root.child(name).uri, bytes=size, reason="named by no manifest"))
                if not dry_run:
                    root.child(name).delete()
    return removed


def _roots(root: Storage, depth: int) -> Iterator[Storage]:
    entries = {entry.name: entry for entry in root.list()}
    if MANIFEST_NAME in entries or ("shards" in entries and entries["shards"].is_dir):
        yield root
    elif depth:
        for entry in entries.values():
            if entry.is_dir:
                # What the disk calls a folder is no name from a document: any will do.
                yield from _roots(replace(root, uri=f"{root.uri.rstrip('/')}/{entry.name}"), depth - 1)


def _load(root: Storage) -> tuple[Manifest | None, str]:
    try:
        return (Manifest.load(root) if root.child(MANIFEST_NAME).exists() else None), ""
    except (IntegrityError, SchemaError) as cause:
        return None, str(cause)


def _info(root: Storage) -> SetInfo:
    manifest, problem = _load(root)
    lost = [] if problem else orphans(root, manifest)
    size = sum(size for _, size, _ in lost)
    return SetInfo(uri=root.uri, manifest=manifest, orphan_files=len(lost), orphan_bytes=size, problem=problem)
