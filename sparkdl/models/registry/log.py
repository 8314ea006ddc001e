"""The log of a registry: questions to what its events add up to, and one more event after them.

Enters: questions, decisions. Leaves: answers, and events that commit on exactly the state they were decided on. That
state is the one of the checkpoint and the few commits since; where these do not tell, all events are folded.

    <registry>/registry.json   {"format": 1}; registries of the first sparkdl have none
    <registry>/events/         Delta table: one row an event
    <registry>/state/          the checkpoint
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TypeVar

import pyarrow as pa

from sparkdl.documents.typed import Source, encode, parse
from sparkdl.errors import ConflictError, FencedError, SparkdlError, StorageError
from sparkdl.models.registry.checkpoint import Checkpoint, Checkpoints
from sparkdl.models.registry.event_log import EVENTS, SIGNED_EVENTS, Event
from sparkdl.models.registry.model import UnusableError
from sparkdl.models.registry.state import State, fold
from sparkdl.observe import logger
from sparkdl.storage import Entry, Storage
from sparkdl.tables.table import Fence, Table

__all__ = ["FORMAT", "EventLog"]

T = TypeVar("T")

FORMAT = 1
_DOCUMENT = "registry.json"
_TRIES = 60
_CHECKPOINT_EVERY = 16
"""Events; a question reads so many commits at most, unless a checkpoint failed."""
_COMPACT_EVERY = 64
"""Commits; how many small files a fold of all events reads at most."""
_FILE_BYTES = 256 << 10
"""Of a compacted file, which is then left alone: all of them together would be written again and again."""
_COMMITTED_WITHIN = timedelta(days=1)
"""How long a file of the table may wait for its commit; a table whose commit names a file that is gone is lost."""
_READ_FOR = timedelta(days=7)
"""How long files stay that were compacted: somebody may be reading them, or restore an earlier version."""


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """A state, and how it came about.

    Attributes:
        state: as the events say.
        version: of the table; -1 where there is none.
        proof: hash of that version's commit; empty where the table was opened as a whole.
        checkpoint: that it was folded from.
    """

    state: State
    version: int
    proof: str = ""
    checkpoint: Checkpoint | None = None

    @property
    def due(self) -> bool:
        """Whether a checkpoint shall be made of it."""
        return self.checkpoint is None or self.state.count - self.checkpoint.events >= _CHECKPOINT_EVERY


@dataclass(frozen=True)
class EventLog:
    """The events of one registry.

    Attributes:
        root: the registry's folder.
        table: of events.
        fence: that each event is committed under.
    """

    root: Storage
    table: Table
    fence: Fence | None = None

    def artifact(self, content_hash: str) -> Storage:
        """Where a bundle lies."""
        return self.root.child("artifacts").child(content_hash)

    def uri_of(self, content_hash: str) -> str:
        """The address of a bundle."""
        return self.artifact(content_hash).uri

    def ask(self, question: Callable[[State], T]) -> T:
        """Answer a question about the newest state.

        Raises:
            StorageError: the registry cannot be read, or is of a newer format.
            IntegrityError: it holds what no registry does.
        """
        return self._answer(question)[1]

    def events(self, where: str | None = None) -> list[Event]:
        """Events, oldest first.

        Args:
            where: a SQL predicate; all by default.
        """
        self._check_format()
        rows = self.table.rows(where=where).to_pylist() if self.table.exists() else []
        return sorted((Event.from_row(row) for row in rows), key=lambda event: event.sequence)

    def every_event(self) -> list[Event]:
        """The events, oldest first, for who removes what they do not name.

        Raises:
            StorageError: there are fewer than the checkpoint was made of: the table is of an earlier day, say.
        """
        checkpoint = self._checkpoints.newest()  # before the events, of which others commit more meanwhile
        events = self.events()
        if checkpoint and len(events) < checkpoint.events:
            raise StorageError(
                f"the registry {self.root.uri} has {len(events):,} events, its checkpoint was made of "
                f"{checkpoint.events:,}, so nobody knows what is needed: restore {self.table.uri}, or delete the "
                "checkpoint's folder 'state' if no others shall come back"
            )
        return events

    def has_begun(self) -> bool:
        """Whether somebody came as far as the first event, even if none is there; not known of the first sparkdl's."""
        return self.root.child(_DOCUMENT).exists()

    def events_of(self, name: str) -> list[Event]:
        """Every event of a model, oldest first."""
        quoted = name.replace("'", "''")
        return self.events(f"name = '{quoted}'")

    def events_from(self, sequence: int) -> list[Event]:
        """The events from a place in the log on."""
        return self.events(f"sequence >= {sequence}")

    def commit(
        self,
        decide: Callable[[State], Event | T],
        outcome: Callable[[State], T],
        *,
        seal: Callable[[Event], Event] = lambda event: event,
        dry_run: bool = False,
    ) -> T:
        """Decide on the newest state and commit the event on exactly that state; again, if somebody was faster.

        Args:
            decide: returns an event, or what comes of it without one.
            outcome: what comes of it, told of the state with the event.
            seal: the last word on the event, which has its place in the log by then.
            dry_run: do not commit.

        Raises:
            ConflictError: others were faster again and again.
            FencedError: a later run has claimed the registry.
            ConfigError: the event holds what no reader takes.
        """
        for turn in range(_TRIES):
            seen, decision = self._answer(decide)
            if not isinstance(decision, Event):
                return decision
            if dry_run:
                return outcome(seen.state)
            decision.check_readable()
            event = seal(decision.stamped(seen.state.count, datetime.now(UTC)))
            try:
                version, proof = self._append(event, seen)
            except FencedError:
                raise
            except ConflictError:
                time.sleep(random.uniform(0.5, 1.0) * min(0.1, 0.004 * 2 ** min(turn, 6)))
                continue
            seen.state.add(event)
            self._maintain(seen, version, proof)
            return outcome(seen.state)
        raise ConflictError(
            f"{_TRIES} commits to the registry {self.root.uri} lost against other writers: try again later"
        )

    def claim(self) -> None:
        """Commit the fence's next number, so that those before it are refused."""
        if self.fence is not None:
            if not self.table.exists():
                self._write_format()
            self.table.claim(self.fence.transaction(), EVENTS)

    def checkpoint(self) -> None:
        """Fold all events, and make a checkpoint of that."""
        self._check_format()
        seen = self._folded()
        if seen.version >= 0:
            self._write_checkpoint(seen, seen.version, "")

    def unused_pages(self) -> list[tuple[Storage, Entry]]:
        """Pages that the checkpoint does not name; none where that cannot be told."""
        try:
            return list(self._checkpoints.unused())
        except UnusableError:
            return []

    def remove_old_files(self, older_than: timedelta, dry_run: bool) -> list[str]:
        """Remove files of commits that never came, and those that were compacted a week ago; return their addresses.

        Args:
            older_than: younger ones stay; so do, in any case, those of a day and, if they were compacted, of a week.
            dry_run: only say which ones.
        """
        if not self.table.exists():
            return []
        never = self.table.vacuum(max(older_than, _COMMITTED_WITHIN), dry_run=dry_run)
        read = self.table.vacuum(max(older_than, _READ_FOR), versions=True, dry_run=dry_run)
        return sorted({*never, *read})

    @cached_property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.root.child("state"))

    def _answer(self, question: Callable[[State], T]) -> tuple[_Seen, T]:
        self._check_format()
        seen = self._resumed()
        if seen is not None:
            try:
                return seen, question(seen.state)
            except UnusableError as error:
                logger.warning("the checkpoint of %s is not used: %s", self.root.uri, error)
        seen = self._folded()
        return seen, question(seen.state)

    def _resumed(self) -> _Seen | None:
        """The state of the checkpoint and the commits since; None where these do not tell."""
        found = self._checkpoints.newest()
        tail = None if found is None else self.table.journal.since(found.version, found.proof)
        if found is None or tail is None:
            return None
        events = [Event.from_row(row) for rows in tail.rows for row in rows.to_pylist()]
        if [event.sequence for event in events] != list(range(found.events, found.events + len(events))):
            return None
        state = self._checkpoints.state_at(found, self.uri_of)
        for event in events:
            state.add(event)
        return _Seen(state=state, version=tail.version, proof=tail.proof, checkpoint=found)

    def _folded(self) -> _Seen:
        version, rows = self.table.snapshot()
        state = fold(rows.to_pylist() if rows is not None else [], self.uri_of, self._checkpoints)
        return _Seen(state=state, version=version)

    def _append(self, event: Event, seen: _Seen) -> tuple[int, str]:
        """Commit an event after the version that was seen; return the version, and the hash of the commit if known."""
        if seen.version < 0:
            self._write_format()
        columns = set(seen.checkpoint.columns) if seen.checkpoint else set()
        signed = event.signature is not None or "signature" in columns
        schema = SIGNED_EVENTS if signed else EVENTS
        row = pa.Table.from_pylist([event.to_row()], schema=schema)
        journal = self.table.journal
        if self.fence is None and seen.proof and columns == set(schema.names) and not journal.locks_elsewhere:
            return seen.version + 1, journal.append(row, seen.version)
        new_columns = seen.version >= 0 and set(self.table.columns()) != set(schema.names)
        mine = None if self.fence is None else self.fence.transaction()  # of which the whole log tells
        return self.table.append(row, expected_version=seen.version, new_columns=new_columns, transaction=mine), ""

    def _maintain(self, seen: _Seen, version: int, proof: str) -> None:
        """After a commit, which stands whatever comes of this."""
        try:
            if seen.due or not proof:
                self._write_checkpoint(seen, version, proof)
            if version % _COMPACT_EVERY == _COMPACT_EVERY - 1:
                self.table.compact(_FILE_BYTES)
        except (SparkdlError, UnusableError) as error:
            logger.warning("the registry %s is as it should be, but slower to read: %s", self.root.uri, error)

    def _write_checkpoint(self, seen: _Seen, version: int, proof: str) -> None:
        before = None if seen.checkpoint else self._checkpoints.newest()
        if before and before.events > seen.state.count:
            logger.warning(
                "the registry %s once had %d events and has %d: restore %s if others shall come back; what only they "
                "name, gc removes", self.root.uri, before.events, seen.state.count, self.table.uri,
            )  # fmt: skip
        columns = seen.checkpoint.columns if seen.checkpoint and proof else self.table.columns(version)
        self._checkpoints.write(seen.state, version, proof or self.table.journal.proof(version), columns)

    @cached_property
    def _format(self) -> int:
        file = self.root.child(_DOCUMENT)
        if not file.exists():
            return FORMAT
        source = Source(file.uri, "restore it")
        fields = parse(file.read_bytes(at_most=1 << 20), source)
        found = fields.get("format") if isinstance(fields, dict) else None
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise source.error("it says no format")
        return found

    def _check_format(self) -> None:
        if self._format > FORMAT:
            raise StorageError(
                f"the registry {self.root.uri} has the format {self._format}, this sparkdl reads up to {FORMAT}: use "
                "the sparkdl that wrote it, or a later one"
            )

    def _write_format(self) -> None:
        try:
            self.root.child(_DOCUMENT).write_if_absent(encode({"format": FORMAT}))
        except ConflictError:
            return
