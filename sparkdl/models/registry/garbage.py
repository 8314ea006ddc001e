"""Garbage of a registry: what no version, no alias and nobody at work needs is removed."""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Literal

from sparkdl import processes
from sparkdl.documents.typed import Count, encode, read
from sparkdl.errors import StorageError
from sparkdl.models.folder import DOCUMENT
from sparkdl.models.registry.events import Event, Hash
from sparkdl.models.registry.log import EventLog
from sparkdl.observe import logger
from sparkdl.storage import TEMPORARY, Entry, Storage

STALE_SECONDS = 300.0
"""Silence after which a holder on another machine is gone."""
_FASTEST_CLOCK_SECONDS = 86400.0
"""How far the clock of another machine may go ahead of this one's."""
_BEAT_SECONDS = 30.0
_POLL_SECONDS = 0.02
_MARK = "collecting-"
_ARTIFACT = re.compile("[0-9a-f]{64}")
_WORK = (TEMPORARY, ".sparkdl-bundle-")
"""How the names of what a killed publisher leaves begin, and a living one works in."""
_WRITTEN_WITHIN = timedelta(days=1)
"""A younger one may belong to somebody who lives."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who needs an artifact, and for what.

    Attributes:
        artifact: content hash of the bundle.
        purpose: for people.
        place: what process numbers count in.
        process: its number there.
        started: when it began, as ``processes.started`` tells.
        beat: when it was last known to live, by its own clock.
    """

    artifact: Hash
    purpose: str
    place: str
    process: Count
    started: Count
    beat: float

    @staticmethod
    def here(artifact: str, purpose: str) -> Holder:
        """This process."""
        pid = os.getpid()
        return Holder(
            artifact=artifact, purpose=purpose, place=processes.place(), process=pid,
            started=processes.started(pid) or 0, beat=time.time(),
        )  # fmt: skip

    def lives(self, now: float) -> bool:
        """Whether it may still need the artifact."""
        silent = not -_FASTEST_CLOCK_SECONDS < now - self.beat < STALE_SECONDS
        return not silent and not processes.ended(self.place, self.process, self.started)

    def __str__(self) -> str:
        return f"{self.purpose} (process {self.process})"


@dataclass(frozen=True)
class Leases:
    """The leases of one registry.

    A lease says that somebody needs an artifact just now: a publication under way, a job that reads one. Its holder
    says every half minute that he lives; one that was killed is known to be gone at once on its own machine, and after
    five minutes of silence elsewhere. A publication writes its lease, then looks for a mark of a collection; a
    collection writes its mark, then looks for leases and for versions. So one of the two sees the other: the
    publication waits, or the collection leaves the artifact.

        <registry>/leases/<random>.json              a lease
        <registry>/leases/collecting-<random>.json   a mark

    Attributes:
        folder: for them alone.
    """

    folder: Storage

    @contextmanager
    def hold(self, artifact: str, purpose: str) -> Iterator[None]:
        """Keep an artifact for the time of the block; waits for a collection that is removing it.

        Raises:
            StorageError: the lease cannot be written.
        """
        with self._document("", artifact, purpose):
            while any(holder.artifact == artifact for _, holder in self._all(marks=True) if holder.lives(time.time())):
                time.sleep(_POLL_SECONDS)
            yield

    @contextmanager
    def collecting(self, artifact: str) -> Iterator[None]:
        """Mark an artifact that is about to be removed, for the time of the block."""
        with self._document(_MARK, artifact, "a collection of garbage"):
            yield

    def held(self) -> dict[str, Holder]:
        """The artifacts that somebody alive needs, and who does."""
        return {holder.artifact: holder for _, holder in self._all(marks=False) if holder.lives(time.time())}

    def named(self) -> set[str]:
        """The artifacts that somebody needs, or needed when he was killed."""
        return {holder.artifact for _, holder in self._all(marks=False)}

    def abandoned(self) -> list[Storage]:
        """The documents of holders that are gone."""
        documents = (*self._all(marks=False), *self._all(marks=True))
        return [file for file, holder in documents if not holder.lives(time.time())]

    def _all(self, *, marks: bool) -> Iterator[tuple[Storage, Holder]]:
        """The marks, or the leases: whoever asks for one reads none of the other, which may be damaged."""
        for entry in self.folder.list():
            if not entry.name.endswith(".json") or entry.name.startswith(_MARK) is not marks:
                continue
            file = self.folder.child(entry.name)
            try:
                yield file, read(file, Holder, "it is a lease, delete it if nobody publishes")
            except StorageError as error:
                if file.exists():
                    raise
                logger.debug("%s", error)  # given back since the look

    @contextmanager
    def _document(self, prefix: str, artifact: str, purpose: str) -> Iterator[None]:
        """A lease or a mark, which says that its holder lives for the time of the block."""
        file = self.folder.child(f"{prefix}{uuid.uuid4().hex}.json")
        holder, ended = Holder.here(artifact, purpose), threading.Event()
        file.write_atomic(encode(holder))

        def beat() -> None:
            while not ended.wait(_BEAT_SECONDS):
                with suppress(StorageError):  # the next one may get through
                    file.write_atomic(encode(replace(holder, beat=time.time())))

        thread = threading.Thread(target=beat, name="sparkdl-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            try:
                file.delete()
            except StorageError as error:  # it ends by itself
                logger.warning("the lease %s was not given back: %s", file.uri, error)


@dataclass(frozen=True, kw_only=True, slots=True)
class Removed:
    """One thing that was removed, or would be.

    Attributes:
        kind: ``"version"``, ``"artifact"``, ``"leftover"`` of a killed writer or an earlier sparkdl, or ``"file"`` of
            the table of events that it does not need.
        what: its address; of a version, name and number.
        bytes: what it took, 0 where that is not looked at.
        reason: why nobody needs it.
    """

    kind: Literal["version", "artifact", "leftover", "file"]
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
            previous = pointing.get((event.name, event.alias))
            if recent and previous is not None:
                needed.add((event.name, previous))  # whoever asked for the alias then may be at work with it
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

    An artifact goes only if no version names it, none that did was deleted within the age, none of its files is
    younger, and no lease names it. What is needed is told by all events of the table, never by a checkpoint.

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
            artifact = folder.child(entry.name)
            if entry.name.startswith(_WORK) and self._is_old(entry, artifact, _WRITTEN_WITHIN):
                yield self._leftover(artifact, "a writer was killed")
            elif _ARTIFACT.fullmatch(entry.name) and entry.name not in needed and self._is_old(entry, artifact):
                if not events:
                    self._check_never_named(artifact, entry.name)
                size = sum(file.bytes for file in artifact.list())
                if self.dry_run or self._collect(artifact, entry.name, len(events)):
                    yield Removed(kind="artifact", what=artifact.uri, bytes=size, reason="no version names it")

    def leftovers(self) -> Iterator[Removed]:
        """Remove what killed writers left elsewhere, and files that the table of events does not need any more."""
        for file in self.leases.abandoned():
            yield self._leftover(file, "its holder is gone")
        for file, entry in self.log.unused_state():
            if self._is_old(entry, file, _WRITTEN_WITHIN):
                yield self._leftover(file, "it is no part of the checkpoint", entry.bytes)
        for uri in self.log.remove_old_files(self.older_than, self.dry_run):
            yield Removed(kind="file", what=uri, bytes=0, reason="the table of events does not need it")

    def _needed(self, events: Sequence[Event]) -> set[str]:
        """Artifacts that a version names, did until recently, or somebody at work needs."""
        limit = datetime.now(UTC) - self.older_than
        published: dict[tuple[str, int], str] = {}
        recently_deleted: set[str] = set()
        for event in events:
            key = (event.name, event.version)
            if event.kind == "published" and event.artifact is not None:
                published[key] = event.artifact
            elif event.kind == "deleted" and key in published:
                artifact = published.pop(key)
                if event.time is None or event.time > limit:
                    recently_deleted.add(artifact)
        return {*published.values(), *recently_deleted, *self.leases.held()}

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
            if any(event.artifact == artifact for event in self.log.events(f"sequence >= {seen}")):
                return False
            if time.monotonic() - start > STALE_SECONDS / 2:  # by now the mark may be taken for a killed one's
                logger.warning("%s is left alone, its registry answers too slowly", place.uri)
                return False
            _remove(place)
        return True

    def _is_old(self, entry: Entry, place: Storage, least: timedelta = timedelta(0)) -> bool:
        """Whether neither a file nor, of a folder, anything in it was written within the age, ``least`` at any rate."""
        inside = place.list() if entry.is_dir else []
        newest = max([entry.modified or 0.0, *(file.modified or 0.0 for file in inside)])
        return newest < time.time() - max(self.older_than, least).total_seconds()

    def _leftover(self, place: Storage, reason: str, size: int = 0) -> Removed:
        if not self.dry_run:
            place.delete(recursive=True)
        return Removed(kind="leftover", what=place.uri, bytes=size, reason=reason)


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
