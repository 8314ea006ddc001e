"""Who needs an artifact just now: publications under way, jobs that read one, a collection that removes it.

Enters: the content hash of a bundle, a block. Leaves: a document for the time of the block, which says that its holder
lives every half minute; a holder that is killed is known to be gone at once on its own machine, and after five minutes
of silence elsewhere.

A publication writes its lease, then looks for a mark of a collection; a collection writes its mark, then looks for
leases and for versions. So one of the two sees the other: the publication waits, or the collection leaves the artifact.

    <registry>/leases/<random>.json              a lease
    <registry>/leases/collecting-<random>.json   a mark
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from sparkdl import processes
from sparkdl.documents.typed import Count, encode, read
from sparkdl.errors import StorageError
from sparkdl.models.registry.model import Hash
from sparkdl.observe import logger
from sparkdl.storage import Storage

__all__ = ["STALE_SECONDS", "Holder", "Leases"]

STALE_SECONDS = 300.0
"""Silence after which a holder on another machine is gone."""
_FASTEST_CLOCK_SECONDS = 86400.0
"""How far the clock of another machine may go ahead of this one's."""
_BEAT_SECONDS = 30.0
_POLL_SECONDS = 0.02
_MARK = "collecting-"


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
        mine = os.getpid()
        return Holder(
            artifact=artifact, purpose=purpose, place=processes.place(), process=mine,
            started=processes.started(mine) or 0, beat=time.time(),
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
        with self._said("", artifact, purpose):
            while any(holder.artifact == artifact for _, holder in self._all(marks=True) if holder.lives(time.time())):
                time.sleep(_POLL_SECONDS)
            yield

    @contextmanager
    def collecting(self, artifact: str) -> Iterator[None]:
        """Mark an artifact that is about to be removed, for the time of the block."""
        with self._said(_MARK, artifact, "a collection of garbage"):
            yield

    def held(self) -> dict[str, Holder]:
        """The artifacts that somebody alive needs, and who does."""
        return {holder.artifact: holder for _, holder in self._all(marks=False) if holder.lives(time.time())}

    def named(self) -> set[str]:
        """The artifacts that somebody needs, or needed when he was killed."""
        return {holder.artifact for _, holder in self._all(marks=False)}

    def left(self) -> list[Storage]:
        """The documents of holders that are gone."""
        every = (*self._all(marks=False), *self._all(marks=True))
        return [file for file, holder in every if not holder.lives(time.time())]

    def _all(self, *, marks: bool) -> Iterator[tuple[Storage, Holder]]:
        """The marks, or the leases: whoever asks for one reads none of the other, which may be damaged."""
        for entry in self.folder.list():
            if not entry.name.endswith(".json") or entry.name.startswith(_MARK) is not marks:
                continue
            file = self.folder.child(entry.name)
            holder = _holder(file)
            if holder is not None:
                yield file, holder

    @contextmanager
    def _said(self, kind: str, artifact: str, purpose: str) -> Iterator[None]:
        file = self.folder.child(f"{kind}{uuid.uuid4().hex}.json")
        holder, done = Holder.here(artifact, purpose), threading.Event()
        file.write_atomic(encode(holder))

        def keep() -> None:
            while not done.wait(_BEAT_SECONDS):
                with suppress(StorageError):  # the next one may get through
                    file.write_atomic(encode(replace(holder, beat=time.time())))

        keeper = threading.Thread(target=keep, name="sparkdl-lease", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            done.set()
            keeper.join()
            try:
                file.delete()
            except StorageError as error:  # it ends by itself
                logger.warning("the lease %s was not given back: %s", file.uri, error)


def _holder(file: Storage) -> Holder | None:
    """Who a document names; None where there is none (any more)."""
    try:
        return read(file, Holder, "it is a lease, delete it if nobody publishes") if file.exists() else None
    except StorageError as error:
        if file.exists():
            raise
        logger.debug("%s", error)  # given back since the look
        return None
