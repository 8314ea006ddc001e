"""The log of a registry: questions to what its events add up to, and one more event after them."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.columns.numpy_arrow import to_rows
from sparkdl.documents.typed import Count, Source, decode, encode, parse
from sparkdl.errors import ConflictError, FencedError, IntegrityError, SparkdlError, StorageError
from sparkdl.models.registry.events import EVENTS, LOG, SIGNED_EVENTS, Event, State, event_rows
from sparkdl.observe import logger
from sparkdl.storage import Entry, Storage, sha256_hex
from sparkdl.tables.engine import Fence
from sparkdl.tables.table import Table

T = TypeVar("T")

FORMAT = 1
_DOCUMENT = "registry.json"
_TRIES = 60
_CHECKPOINT, _COMMIT = "checkpoint", b"sparkdl.commit"
"""Name of the file, and the key of its Parquet metadata under which the version of the table stands."""
_CHECKPOINT_BYTES = 256 << 20
_CHECKPOINT_EVERY = 8
"""Events; a question reads so many commits at most, unless a checkpoint failed."""
_COMPACT_EVERY = 64
"""Commits; how many small files a fold of all events reads at most."""
_FILE_BYTES = 256 << 10
"""The bytes of a compacted file that is left alone: all of them together would be written again and again."""
_COMMITTED_WITHIN = timedelta(days=1)
"""How long a file of the table may wait for its commit; a table whose commit names a file that is gone is lost."""
_READ_FOR = timedelta(days=7)
"""How long files stay that were compacted: somebody may be reading them, or restore an earlier version."""


@dataclass(frozen=True, kw_only=True)
class _Commit:
    """A version of the table of events, as a checkpoint names it.

    Attributes:
        version: of the table.
        proof: hash of that version's commit, as ``Journal`` has it.
        columns: of the table.
    """

    version: Count
    proof: str
    columns: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Checkpoint:
    """All events up to a version of their table.

    Attributes:
        commit: the version.
        rows: the events, as the file holds them.
    """

    commit: _Commit
    rows: pa.Table


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    """The state at a version of the table.

    Attributes:
        state: as the events say.
        version: of the table; -1 where there is none.
        columns: of the table.
        proof: hash of that version's commit; empty where the table was opened as a whole.
        saved: how many of the events are in the checkpoint; None where it was of no use.
    """

    state: State
    version: int
    columns: tuple[str, ...]
    proof: str = ""
    saved: int | None = None


@dataclass(frozen=True)
class EventLog:
    """The events of one registry.

    A question reads a checkpoint, one file with all events up to a version of the table, and the few commits since. A
    checkpoint is never needed: where it is gone, altered, or of another table, the whole table is read.

        <registry>/registry.json      {"format": 1}; registries of the first sparkdl have none
        <registry>/events/            Delta table: one row an event
        <registry>/state/checkpoint   SHA-256 of the rest, a line feed, the events as a Parquet file

    Attributes:
        root: the registry's folder.
        table: of events.
        fence: that each event is committed under.
    """

    root: Storage
    table: Table
    fence: Fence | None = None

    def artifact(self, content_hash: str) -> Storage:
        """The address of a bundle."""
        return self.root.child("artifacts").child(content_hash)

    def ask(self, question: Callable[[State], T]) -> T:
        """Answer a question about the newest state.

        Raises:
            StorageError: the registry cannot be read, or is of a newer format.
            IntegrityError: it holds what no registry does.
        """
        return question(self._newest().state)

    def events(self, where: str | None = None) -> list[Event]:
        """Events of the table, oldest first, without a look at the checkpoint.

        Args:
            where: a SQL predicate; all by default.
        """
        self._check_format()
        rows = self.table.rows(where=where) if self.table.exists() else EVENTS.empty_table()
        return [Event.from_row(row) for row in to_rows(event_rows(rows))]

    def every_event(self) -> list[Event]:
        """The events, oldest first, for who removes what they do not name.

        Raises:
            StorageError: there are fewer than the checkpoint was made of: the table is of an earlier day, say.
        """
        checkpoint = self._read_checkpoint()  # before the events, of which others commit more meanwhile
        events = self.events()
        if checkpoint and len(events) < len(checkpoint.rows):
            raise StorageError(
                f"the registry {self.root.uri} has {len(events):,} events, its checkpoint was made of "
                f"{len(checkpoint.rows):,}, so nobody knows what is needed: restore {self.table.uri}, or delete the "
                "checkpoint's folder 'state' if no others shall come back"
            )
        return events

    def has_begun(self) -> bool:
        """Whether somebody came as far as the first event, even if none is there; not known of the first sparkdl's."""
        return self.root.child(_DOCUMENT).exists()

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
            newest = self._newest()
            decision = decide(newest.state)
            if not isinstance(decision, Event):
                return decision
            if dry_run:
                return outcome(newest.state)
            decision.check_readable()
            event = seal(decision.stamped(newest.state.count, datetime.now(UTC)))
            signed = event.signature is not None or "signature" in newest.columns
            row = pa.Table.from_pylist([event.to_row()], schema=SIGNED_EVENTS if signed else EVENTS)
            try:
                version, proof = self._append(row, newest)
            except FencedError:
                raise
            except ConflictError:
                time.sleep(random.uniform(0.5, 1.0) * min(0.1, 0.004 * 2 ** min(turn, 6)))
                continue
            newest.state.add(row)
            columns = tuple(dict.fromkeys((*newest.columns, *row.column_names)))
            self._maintain(replace(newest, version=version, proof=proof, columns=columns))
            return outcome(newest.state)
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
        """Read the whole table, and make a checkpoint of it."""
        self._check_format()
        newest = self._read_table()
        if newest.version >= 0:
            self._write_checkpoint(newest)

    def unused_state(self) -> list[tuple[Storage, Entry]]:
        """What lies beside the checkpoint: pages that an earlier sparkdl made it of, and what killed writers left."""
        folder = self.root.child("state")
        return [(folder.child(entry.name), entry) for entry in folder.list() if entry.name != _CHECKPOINT]

    def remove_old_files(self, older_than: timedelta, dry_run: bool) -> list[str]:
        """Remove files of commits that never came, and those that were compacted a week ago; return their addresses.

        Args:
            older_than: younger ones stay; so do, in any case, those of a day and, if they were compacted, of a week.
            dry_run: only say which ones.
        """
        if not self.table.exists():
            return []
        uncommitted = self.table.vacuum(max(older_than, _COMMITTED_WITHIN), dry_run=dry_run)
        compacted = self.table.vacuum(max(older_than, _READ_FOR), versions=True, dry_run=dry_run)
        return sorted({*uncommitted, *compacted})

    def _newest(self) -> _Snapshot:
        """The newest state: of the checkpoint and the commits since or, where these do not tell, of the whole table."""
        self._check_format()
        checkpoint = self._read_checkpoint()
        tail = checkpoint and self.table.journal.since(checkpoint.commit.version, checkpoint.commit.proof)
        if not checkpoint or not tail:
            return self._read_table()
        saved = len(checkpoint.rows)
        try:
            state = self._state_of(pa.concat_tables([checkpoint.rows, *tail.rows], promote_options="default"))
        except (IntegrityError, pa.ArrowException) as error:
            logger.warning("the checkpoint of %s is not used: %s", self.root.uri, error)
            return self._read_table()
        return _Snapshot(
            state=state, version=tail.version, columns=checkpoint.commit.columns, proof=tail.proof, saved=saved
        )

    def _read_table(self) -> _Snapshot:
        version, rows = self.table.snapshot()
        columns = tuple(rows.column_names) if rows is not None else ()
        rows = pa.Table.from_batches([], EVENTS) if rows is None else rows
        return _Snapshot(state=self._state_of(rows), version=version, columns=columns)

    def _state_of(self, rows: pa.Table) -> State:
        state = State(rows, lambda content_hash: self.artifact(content_hash).uri)
        numbers = state.rows["sequence"].to_pylist()
        # Each event signs its number: without one of them, an alias would go back to a version it was taken from.
        if numbers != list(range(state.count)):
            first = next(count for count, number in enumerate(numbers) if count != number)
            raise LOG.error(f"event {first} is missing, or stands there twice")
        return state

    def _append(self, row: pa.Table, newest: _Snapshot) -> tuple[int, str]:
        """Commit an event after the newest version; return its version, and the hash of the commit if known."""
        if newest.version < 0:
            self._write_format()
        same_columns = set(newest.columns) == set(row.column_names)
        journal = self.table.journal
        if self.fence is None and newest.proof and same_columns and not journal.locks_elsewhere:
            return newest.version + 1, journal.append(row, newest.version)
        version = self.table.append(
            row,
            expected_version=newest.version,
            new_columns=newest.version >= 0 and not same_columns,
            transaction=self.fence.transaction() if self.fence else None,  # of which only the whole log tells
        )
        return version, ""

    def _maintain(self, newest: _Snapshot) -> None:
        """Make a checkpoint and compact the table where that is due; the commit stands whatever comes of this."""
        try:
            if newest.saved is None or not newest.proof or newest.state.count - newest.saved >= _CHECKPOINT_EVERY:
                self._write_checkpoint(newest)
            if newest.version % _COMPACT_EVERY == _COMPACT_EVERY - 1:
                self.table.compact(_FILE_BYTES)
        except SparkdlError as error:
            logger.warning("the registry %s is as it should be, but slower to read: %s", self.root.uri, error)

    def _read_checkpoint(self) -> _Checkpoint | None:
        """The checkpoint, if there is one that can be used."""
        file = self.root.child("state").child(_CHECKPOINT)
        source = Source(file.uri, "it is not needed, delete it")
        try:
            if not file.exists():
                return None
            digest, _, data = file.read_bytes(at_most=_CHECKPOINT_BYTES).partition(b"\n")
            if digest != sha256_hex(data).encode():
                raise source.error("it does not match its hash")
            rows = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
            commit = decode((rows.schema.metadata or {}).get(_COMMIT, b""), _Commit, source)
            return _Checkpoint(commit=commit, rows=rows)
        except (SparkdlError, pa.ArrowException, OSError, ValueError) as cause:
            error = cause if isinstance(cause, SparkdlError) else source.error(cause)
            logger.warning("%s; until the next commit, the whole table is read", error)
            return None

    def _write_checkpoint(self, newest: _Snapshot) -> None:
        """Make a state the checkpoint.

        Raises:
            StorageError: it cannot be written, or is too large.
        """
        checkpoint = self._read_checkpoint() if newest.saved is None else None
        if checkpoint and len(checkpoint.rows) > newest.state.count:
            logger.warning(
                "the registry %s once had %d events and has %d: restore %s if others shall come back; what only they "
                "name, gc removes", self.root.uri, len(checkpoint.rows), newest.state.count, self.table.uri,
            )  # fmt: skip
        proof = newest.proof or self.table.journal.proof(newest.version)
        commit = _Commit(version=newest.version, proof=proof, columns=newest.columns)
        buffer = io.BytesIO()
        rows = newest.state.rows.replace_schema_metadata({_COMMIT: encode(commit)})
        pq.write_table(rows, buffer, compression="zstd")
        data = buffer.getvalue()
        if len(data) >= _CHECKPOINT_BYTES:
            raise StorageError(
                f"the {newest.state.count:,} events of {self.root.uri} take {len(data):,} bytes, and a checkpoint "
                f"has at most {_CHECKPOINT_BYTES:,}: publish shorter parameters and lineage"
            )
        self.root.child("state").child(_CHECKPOINT).write_atomic(sha256_hex(data).encode() + b"\n" + data)

    @cached_property
    def _format(self) -> int:
        file = self.root.child(_DOCUMENT)
        if not file.exists():
            return FORMAT
        source = Source(file.uri, "restore it")
        fields = parse(file.read_bytes(at_most=1 << 20), source)
        number = fields.get("format") if isinstance(fields, dict) else None
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise source.error("it says no format")
        return number

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
