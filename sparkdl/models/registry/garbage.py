"""Garbage of a registry: what no version, no alias and nobody at work needs is removed.

Enters: a registry's events, its folder, an age. Leaves: what was removed, or would be. An artifact goes only if no
version names it, none that did was deleted within the age, none of its files is younger, and no lease names it:
``leases.py`` says how a publication of the same bundle at the same moment is kept safe. What is needed is told by all
events, never by a checkpoint.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from sparkdl.errors import StorageError
from sparkdl.models.folder import DOCUMENT
from sparkdl.models.registry.event_log import Event
from sparkdl.models.registry.leases import STALE_SECONDS, Leases
from sparkdl.models.registry.log import EventLog
from sparkdl.observe import logger
from sparkdl.storage import TEMPORARY, Entry, Storage

__all__ = ["Garbage", "Removed", "spare_versions"]

_ARTIFACT = re.compile("[0-9a-f]{64}")
_WORK = (TEMPORARY, ".sparkdl-bundle-")
"""How the names of what a killed publisher leaves begin, and a living one works in."""
_WRITTEN_WITHIN = timedelta(days=1)
"""A younger one may belong to somebody who lives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """One thing that was removed, or would be.

    Attributes:
        kind: ``"version"``, ``"artifact"``, ``"leftover"`` of a killed writer, ``"page"`` of an older checkpoint, or
            ``"file"`` of the table of events that it does not need.
        what: its address; of a version, name and number.
        bytes: what it took, 0 where that is not looked at.
        reason: why nobody needs it.
    """

    kind: Literal["version", "artifact", "leftover", "page", "file"]
    what: str
    bytes: int
    reason: str


def spare_versions(
    events: Sequence[Event], held: set[str], keep_last: int, older_than: timedelta, name: str | None
) -> Iterator[Event]:
    """The versions beyond the newest of each model that nobody needs.

    Args:
        events: all of the registry, in order.
        held: artifacts that somebody at work needs.
        keep_last: how many of each model stay in any case.
        older_than: those that were published, or had an alias, within this time stay, too.
        name: of the one model to look at; None looks at all.

    Returns:
        their publications.
    """
    limit = datetime.now(UTC) - older_than
    live: dict[tuple[str, int], Event] = {}
    pointing: dict[tuple[str, str | None], int] = {}
    needed: set[tuple[str, int]] = set()
    for event in events:
        recent = event.time is None or event.time > limit
        if event.kind == "published":
            live[event.name, event.version] = event
        elif event.kind == "deleted":
            live.pop((event.name, event.version), None)
        else:
            before = pointing.get((event.name, event.alias))
            if recent and before is not None:
                needed.add((event.name, before))  # whoever asked for the alias then may be at work with it
            pointing[event.name, event.alias] = event.version
        if recent:
            needed.add((event.name, event.version))
    needed |= {(model, version) for (model, _), version in pointing.items()}
    models: dict[str, list[int]] = {}
    for model, version in live:
        models.setdefault(model, []).append(version)
    for model, versions in sorted(models.items()):
        for version in sorted(versions)[:-keep_last] if name in (None, model) else ():
            event = live[model, version]
            if (model, version) not in needed and event.artifact not in held:
                yield event


@dataclass(frozen=True)
class Garbage:
    """One collection.

    Attributes:
        root: the registry's folder.
        log: its events.
        leases: who needs an artifact just now.
        older_than: what is younger stays.
        dry_run: only say what would be removed.
    """

    root: Storage
    log: EventLog
    leases: Leases
    older_than: timedelta
    dry_run: bool

    def artifacts(self, events: Sequence[Event]) -> Iterator[Removed]:
        """Remove artifacts that nobody needs, and what killed publishers left beside them.

        Args:
            events: all of the registry, in order.

        Raises:
            StorageError: there are none where some have been: every artifact would go.
        """
        folder, needed = self.root.child("artifacts"), self._needed(events)
        for entry in folder.list():
            place = folder.child(entry.name)
            if entry.name.startswith(_WORK) and self._is_old(entry, place, _WRITTEN_WITHIN):
                yield self._removed("leftover", place, "a writer was killed")
            elif _ARTIFACT.fullmatch(entry.name) and entry.name not in needed and self._is_old(entry, place):
                if not events:
                    self._check_never_named(place, entry.name)
                size = sum(found.bytes for found in place.list())
                if self.dry_run or self._collect(place, entry.name, len(events)):
                    yield Removed(kind="artifact", what=place.uri, bytes=size, reason="no version names it")

    def leftovers(self) -> Iterator[Removed]:
        """Remove what killed writers left elsewhere, and what neither events nor checkpoint need any more."""
        for file in self.leases.left():
            yield self._removed("leftover", file, "its holder is gone")
        for file, entry in self.log.unused_pages():
            if self._is_old(entry, file, _WRITTEN_WITHIN):
                yield self._removed("page", file, "the checkpoint does not name it", entry.bytes)
        for uri in self.log.remove_old_files(self.older_than, self.dry_run):
            yield Removed(kind="file", what=uri, bytes=0, reason="the table of events does not need it")

    def _needed(self, events: Sequence[Event]) -> set[str]:
        """Artifacts that a version names, did until lately, or somebody at work needs."""
        limit = datetime.now(UTC) - self.older_than
        published: dict[tuple[str, int], str] = {}
        lately: set[str] = set()
        for event in events:
            key = (event.name, event.version)
            if event.kind == "published" and event.artifact is not None:
                published[key] = event.artifact
            elif event.kind == "deleted" and key in published:
                artifact = published.pop(key)
                if event.time is None or event.time > limit:
                    lately.add(artifact)
        return {*published.values(), *lately, *self.leases.held()}

    def _check_never_named(self, place: Storage, artifact: str) -> None:
        """Refuse an artifact of a registry without events, unless the registry's first publisher was killed over it.

        Such a one leaves a lease, and no ``registry.json`` yet; half a copy of a registry has artifacts without leases.
        """
        killed = artifact in self.leases.named() and not self.log.has_begun()
        if not killed and not self.log.events():
            raise StorageError(
                f"the registry {self.root.uri} has artifacts and no events, so nobody knows what is needed: restore "
                f"{self.log.table.uri}, or delete {place.uri} if nothing was ever published there"
            )

    def _collect(self, place: Storage, artifact: str, seen: int) -> bool:
        """Remove an artifact, unless somebody turns out to need it once the mark stands.

        Args:
            place: its folder.
            artifact: its content hash.
            seen: how many events were looked at before.
        """
        with self.leases.collecting(artifact):
            start = time.monotonic()
            if artifact in self.leases.held():
                return False
            if any(event.artifact == artifact for event in self.log.events_from(seen)):
                return False
            if time.monotonic() - start > STALE_SECONDS / 2:  # by now the mark may be taken for a killed one's
                logger.warning("%s is left alone, its registry answers too slowly", place.uri)
                return False
            _remove(place)
        return True

    def _is_old(self, entry: Entry, place: Storage, least: timedelta = timedelta(0)) -> bool:
        """Whether neither a file nor, of a folder, anything in it was written within the age, ``least`` at any rate."""
        inside = place.list() if entry.is_dir else []
        newest = max([entry.modified or 0.0, *(found.modified or 0.0 for found in inside)])
        return newest < time.time() - max(self.older_than, least).total_seconds()

    def _removed(self, kind: Literal["leftover", "page"], place: Storage, reason: str, size: int = 0) -> Removed:
        if not self.dry_run:
            place.delete(recursive=True)
        return Removed(kind=kind, what=place.uri, bytes=size, reason=reason)


def _remove(place: Storage) -> None:
    """Remove a bundle so that no reader finds half of one, and its name is free at once."""
    if place.local_path() is None:
        place.child(DOCUMENT).delete()
        place.delete(recursive=True)
        return
    aside = place.sibling(f"{TEMPORARY}{uuid.uuid4().hex}")
    try:
        place.move_to(aside)
    except StorageError:
        if place.exists():
            raise
        return  # another collection was faster
    aside.delete(recursive=True)
