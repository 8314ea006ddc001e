"""One run at a time: a lease on a pipeline's folder that a killed run cannot keep, and the fence that goes with it.

A lease is a file with the next number, created only if it is absent, so of many who try one wins; nothing is ever
deleted to take one over. Its holder rewrites a second file every few seconds. A lease is over when it was given back;
when its process is gone, as far as this machine can tell, or YARN, of whose application a later attempt asks; or when
that second file has not changed for five minutes, by the clock of whoever watches it: two clocks are never compared.

The number is the run's epoch. A holder may live on and know nothing of a later one, so each commit to a table carries
the epoch, and is refused where a later one has committed (``tables/engine.py``, ``Fence``).
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from sparkdl import processes
from sparkdl.documents.typed import Count, encode, read
from sparkdl.errors import ConflictError, FencedError, IntegrityError, StorageError
from sparkdl.observe import logger
from sparkdl.storage import Storage
from sparkdl.tables.engine import Fence

BEAT_SECONDS = 15.0
"""How often a holder says that it lives."""
STALE_SECONDS = 300.0
"""Silence after which a lease is over."""

_REMEDY = "if no run is active, delete the folder of leases"
_KEPT = 20  # numbers are never used again; this many old ones stay, for people who look
_LOOKS = 60  # at a holder of another machine, spread over the silence that ends its lease
_YARN_CONTAINER = re.compile(r"container_(?:e\d+_)?(\d+_\d+)_(\d+)_\d+")


class LeaseTakenError(ConflictError):
    """Another run of the same pipeline is active."""


class LeaseLostError(ConflictError):
    """Another run has taken the lease of this one over, which may commit nothing more."""


@dataclass(frozen=True)
class Clock:
    """What time a holder is judged by.

    Attributes:
        now: seconds that only grow, the same for all processes of a machine until it starts anew.
        wait: lets so many of them pass.
    """

    now: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep


_MACHINE = Clock()


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who has a lease.

    Attributes:
        run_id: of the run.
        host: its machine.
        process: its number where it runs.
        since: when it began, ISO 8601 in UTC.
        beat: when it last said that it lives, by its machine's own clock that only grows.
        released: whether it gave the lease back.
        place: what its number counts in, and its clock; two containers may share the name of a host.
        started: when the process began, as ``processes.started`` tells.
        domain: whose epochs these are: an identity that the first holder made up, and all later ones take over.
        application: of YARN, in whose container it runs; empty elsewhere.
        attempt: of that application.
        claims_due: whether a run before it may live on whose commits are not refused yet, see ``Lease``.
    """

    run_id: str
    host: str
    process: Count
    since: str
    beat: float
    released: bool = False
    place: str = ""
    started: Count = 0
    domain: str = ""
    application: str = ""
    attempt: Count = 0
    claims_due: bool = False

    def over(self, now: float) -> bool:
        """Whether its lease is known to be over without watching it, by this machine's clock that only grows."""
        silent = self.place == processes.place() and now - self.beat > STALE_SECONDS
        return self.released or silent or processes.ended(self.place, self.process, self.started)

    def __str__(self) -> str:
        return f"run {self.run_id} (process {self.process} on {self.host}, since {self.since})"


@dataclass
class Lease:
    """A lease that this process holds, as far as it knows.

    Attributes:
        folder: of leases.
        number: the epoch.
        holder: this process.
        claims_due: whether a holder before has not given its lease back, so that it may live on, and the tables are
            still to be claimed before they are read: by this run, or by the next one if this one fails before.
        fence: of this epoch.
    """

    folder: Storage
    number: int
    holder: Holder
    claims_due: bool
    fence: Fence

    def check(self) -> None:
        """Refuse to go on where a later run has taken over; for what no table's log can refuse.

        Raises:
            LeaseLostError: one has, or the lease was deleted.
        """
        newest = max(_numbers(self.folder), default=0)
        if newest == self.number:
            return
        winner = _holder(self.folder, newest) if newest else None
        who = winner or ("another run" if newest else "somebody who deleted the folder of leases")
        raise LeaseLostError(
            f"run {self.holder.run_id} lost its lease to {who} while it stood still: nothing more of it is committed, "
            "what is due is left to that run or the next one"
        )


@contextmanager
def lease(folder: Storage, run_id: str, *, clock: Clock = _MACHINE) -> Iterator[Lease]:
    """Hold the lease of a pipeline for the time of the block.

    A living holder on another machine is told by its beat, so that a second run waits for up to ``BEAT_SECONDS`` before
    it is refused, and for ``STALE_SECONDS`` before it takes over from one that is dead.

    Args:
        folder: for leases alone.
        run_id: shown to whoever comes second.
        clock: that tells how long a holder is silent.

    Raises:
        LeaseTakenError: another run holds it; says which.
        LeaseLostError: another run took it over in the block, and something in there was refused or failed since.
        StorageError: the folder cannot be read or written.
    """
    own_lease = _take(folder, run_id, clock)
    end_event = threading.Event()

    def beat(*, released: bool = False) -> None:
        holder = replace(own_lease.holder, beat=clock.now(), released=released, claims_due=own_lease.claims_due)
        folder.child(f"{own_lease.number:09d}.beat.json").write_atomic(encode(holder))

    def keep() -> None:
        while not end_event.wait(BEAT_SECONDS):
            with suppress(StorageError):  # the next one may get through; without any, the lease ends by itself
                beat()

    keeper = threading.Thread(target=keep, name="sparkdl-lease", daemon=True)
    keeper.start()
    try:
        yield own_lease
    except LeaseLostError:
        raise
    except Exception as error:  # what the run that took over has changed or removed may be why
        try:
            own_lease.check()
        except LeaseLostError as lost:
            raise lost from error
        except StorageError:
            raise error from None
        if isinstance(error, FencedError):
            raise LeaseLostError(f"run {run_id} may commit nothing more: {error}") from error
        raise
    finally:
        end_event.set()
        keeper.join()
        try:
            beat(released=True)
        except StorageError as error:  # the work is done, or has an error of its own that matters more
            logger.warning("the lease %d of %s was not given back: %s", own_lease.number, folder.uri, error)


def holder_of(folder: Storage) -> Holder | None:
    """Who has the lease now, as far as one look tells; None where nobody has.

    Raises:
        StorageError: the folder cannot be read.
    """
    number = max(_numbers(folder), default=0)
    holder = _holder(folder, number) if number else None
    return None if holder is None or holder.over(time.monotonic()) else holder


def _take(folder: Storage, run_id: str, clock: Clock) -> Lease:
    numbers = sorted(_numbers(folder))
    last = numbers[-1] if numbers else 0
    earlier = _holder(folder, last) if last else None
    container = _YARN_CONTAINER.fullmatch(os.environ.get("CONTAINER_ID", ""))
    application, attempt = (container[1], int(container[2])) if container else ("", 0)
    domain = earlier.domain if earlier is not None and earlier.domain else uuid.uuid4().hex
    if earlier is not None and not (application and application == earlier.application and attempt > earlier.attempt):
        earlier = _watched(folder, last, earlier, clock)  # else YARN started this one since that one has failed
    if earlier is not None and not earlier.released:
        logger.warning("%s is gone without giving its lease back: this run takes over", earlier)
    claims_due = last > 0 and (earlier is None or not earlier.released or earlier.claims_due)
    process_id = os.getpid()
    holder = Holder(
        run_id=run_id,
        host=socket.gethostname(),
        process=process_id,
        since=datetime.now(UTC).isoformat(timespec="seconds"),
        beat=clock.now(),
        place=processes.place(),
        started=processes.started(process_id) or 0,
        domain=domain,
        application=application,
        attempt=attempt,
        claims_due=claims_due,
    )
    try:
        folder.child(f"{last + 1:09d}.json").write_if_absent(encode(holder))
    except ConflictError:
        winner = _holder(folder, last + 1)
        raise LeaseTakenError(f"{winner or 'another run'} was first in {folder.parent().uri}: wait for it") from None
    for old_number in numbers[:-_KEPT]:
        for name in (f"{old_number:09d}.json", f"{old_number:09d}.beat.json"):
            with suppress(StorageError):
                folder.child(name).delete()
    fence = Fence(f"sparkdl-pipeline-{holder.domain}", last + 1)
    return Lease(folder, last + 1, holder, claims_due, fence)


def _watched(folder: Storage, number: int, earlier: Holder, clock: Clock) -> Holder:
    """Wait until a lease is over; what its holder said last.

    Raises:
        LeaseTakenError: the holder lives.
    """
    refused = LeaseTakenError(f"{earlier} is at work in {folder.parent().uri}: wait for it, or end it")
    silent_since = clock.now()
    if earlier.over(silent_since):
        return earlier
    if earlier.place == processes.place():
        raise refused
    logger.warning("%s has the lease: this run watches for up to %.0f s whether it lives", earlier, STALE_SECONDS)
    while not earlier.over(clock.now()) and clock.now() - silent_since <= STALE_SECONDS:
        clock.wait(STALE_SECONDS / _LOOKS)
        current = _holder(folder, number)
        if current is not None and not current.released and current.beat != earlier.beat:
            raise refused
        earlier = current or earlier
    return earlier


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
