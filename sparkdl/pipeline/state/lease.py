"""One run at a time: a lease on a pipeline's folder that a killed run cannot keep.

Enters: a folder. Leaves: a lease for the time of a block, or ``LeaseTakenError`` with who has it.

A lease is a file with the next number, created only if it is absent, so of many who try one wins; nothing is ever
deleted to take one over. Its holder rewrites a second file every few seconds. A lease is over when it was given back,
when its process is gone (as far as this host can tell), or when that second file has not changed for ``stale_after``.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from sparkdl import processes
from sparkdl.documents.typed import Count, encode, read
from sparkdl.errors import ConflictError, IntegrityError, StorageError
from sparkdl.observe import logger
from sparkdl.storage import Storage

__all__ = ["Holder", "LeaseTakenError", "holder_of", "lease"]

STALE_SECONDS = 300.0
"""Silence after which a lease of another host is over."""

_REMEDY = "if no run is active, delete the folder of leases"
_KEPT = 20  # numbers are never used again; this many old ones stay, for people who look


class LeaseTakenError(ConflictError):
    """Another run of the same pipeline is active."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who has a lease.

    Attributes:
        run_id: of the run.
        host: its machine.
        process: its number where it runs.
        since: when it began, ISO 8601 in UTC.
        beat: seconds since the epoch when it was last known to be alive, by its own clock.
        released: whether it gave the lease back.
        place: what its number counts in; two containers may share the name of a host.
        started: when the process began, as ``processes.started`` tells.
    """

    run_id: str
    host: str
    process: Count
    since: str
    beat: float
    released: bool = False
    place: str = ""
    started: Count = 0

    def over(self, now: float, stale_after: float) -> bool:
        """Whether somebody else may take the lease."""
        silent = now - self.beat > stale_after
        return self.released or silent or processes.ended(self.place, self.process, self.started)

    def __str__(self) -> str:
        return f"run {self.run_id} (process {self.process} on {self.host}, since {self.since})"


@contextmanager
def lease(
    folder: Storage, run_id: str, *, beat_seconds: float = 15.0, stale_after: float = STALE_SECONDS
) -> Iterator[Holder]:
    """Hold the lease of a pipeline for the time of the block.

    Args:
        folder: for leases alone.
        run_id: shown to whoever comes second.
        beat_seconds: how often the holder says that it lives.
        stale_after: seconds of silence after which a lease of another host is over.

    Raises:
        LeaseTakenError: another run holds it; says which.
        StorageError: the folder cannot be read or written.
    """
    mine = _take(folder, run_id, stale_after)
    number, done = mine[0], threading.Event()
    holder = mine[1]

    def keep() -> None:
        while not done.wait(beat_seconds):
            with suppress(StorageError):  # the next one may get through; without any, the lease ends by itself
                _beat(folder, number, replace(holder, beat=time.time()))

    keeper = threading.Thread(target=keep, name="sparkdl-lease", daemon=True)
    keeper.start()
    try:
        yield holder
    finally:
        done.set()
        keeper.join()
        try:
            _beat(folder, number, replace(holder, beat=time.time(), released=True))
        except StorageError as error:  # the work is done, or has an error of its own that matters more
            logger.warning("the lease %d of %s was not given back: %s", number, folder.uri, error)


def holder_of(folder: Storage) -> Holder | None:
    """Who has the lease now; None where nobody has.

    Raises:
        StorageError: the folder cannot be read.
    """
    numbers = sorted(_numbers(folder))
    found = _holder(folder, numbers[-1]) if numbers else None
    return None if found is None or found.over(time.time(), STALE_SECONDS) else found


def _take(folder: Storage, run_id: str, stale_after: float) -> tuple[int, Holder]:
    now = time.time()
    numbers = sorted(_numbers(folder))
    if numbers:
        current = _holder(folder, numbers[-1])
        if current is not None and not current.over(now, stale_after):
            raise LeaseTakenError(f"{current} is at work in {folder.parent().uri}: wait for it, or end it")
        if current is not None and not current.released:
            logger.warning("%s is gone without giving its lease back: this run takes over", current)
    number = numbers[-1] + 1 if numbers else 1
    since = datetime.now(UTC).isoformat(timespec="seconds")
    mine = os.getpid()
    holder = Holder(
        run_id=run_id, host=socket.gethostname(), process=mine, since=since, beat=now, place=processes.place(),
        started=processes.started(mine) or 0,
    )  # fmt: skip
    try:
        folder.child(f"{number:09d}.json").write_if_absent(encode(holder))
    except ConflictError:
        winner = _holder(folder, number)
        raise LeaseTakenError(f"{winner or 'another run'} was first in {folder.parent().uri}: wait for it") from None
    for old in numbers[:-_KEPT]:
        for name in (f"{old:09d}.json", f"{old:09d}.beat.json"):
            with suppress(StorageError):
                folder.child(name).delete()
    return number, holder


def _numbers(folder: Storage) -> Iterator[int]:
    for entry in folder.list() if folder.exists() else []:
        stem = entry.name.removesuffix(".json")
        if stem.isdecimal():
            yield int(stem)


def _holder(folder: Storage, number: int) -> Holder | None:
    """What the holder of a lease last said; None if that is damaged, for instance half-deleted.

    A store that does not answer says nothing about the holder.
    """
    for name in (f"{number:09d}.beat.json", f"{number:09d}.json"):
        file = folder.child(name)
        try:
            if file.exists():
                return read(file, Holder, _REMEDY)
        except IntegrityError as error:
            logger.warning("%s", error)
    return None


def _beat(folder: Storage, number: int, holder: Holder) -> None:
    folder.child(f"{number:09d}.beat.json").write_atomic(encode(holder))
