"""A Delta table as a journal: its newest commits are read, and one is added, without opening the table."""

from __future__ import annotations

import io
import itertools
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from sparkdl.errors import ConflictError, SparkdlError, StorageError
from sparkdl.storage import Storage, sha256_hex

_LOG = "_delta_log"
_MOST_BYTES = 64 << 20
"""The most bytes of an entry or a file of a commit that is read here; what is larger is delta-rs's."""
_AT_ONCE = 16
"""Commits that are asked for together where each answer takes a journey."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tail:
    """What a table got since a version.

    Attributes:
        version: the newest one.
        proof: hash of its entry in the log: no other table, and no other history of this one, has the same.
        rows: of each commit that appended some, oldest first; the columns are those of its file.
    """

    version: int
    proof: str
    rows: tuple[pa.Table, ...] = ()


@dataclass(frozen=True, slots=True)
class _Commit:
    """One entry: its hash, and the rows that it appended; None where it did something else."""

    proof: str
    rows: tuple[pa.Table, ...] | None


@dataclass(frozen=True)
class Journal:
    """The log of one table.

    The commits since a known version set its cost, not all there ever were: delta-rs lists the whole log for each
    append, which makes one of 10 ms take 127 after 6,000 commits (``tests/bench/bench_registry.py``). Whatever is not a
    plain append, and a log that begins later, is for delta-rs: a journal then says that it cannot tell. An entry is a
    line of JSON an action: https://github.com/delta-io/delta/blob/master/PROTOCOL.md#actions

    Attributes:
        root: the table's folder.
        options: delta-rs's own for the store.
    """

    root: Storage
    options: Mapping[str, str] | None = None

    def proof(self, version: int) -> str:
        """The hash of a version's entry.

        Raises:
            StorageError: it is not there.
        """
        return sha256_hex(self._entry(version).read_bytes(at_most=_MOST_BYTES))

    def since(self, version: int, proof: str) -> Tail | None:
        """What was appended after a version; None where that cannot be told from the log's newest entries.

        Args:
            version: known to have been committed.
            proof: its entry's hash.
        """
        try:
            least = self._checkpointed()  # first: what is committed later may have a checkpoint, too
            if self.proof(version) != proof:
                return None
            commits = list(self._commits(version + 1))
        except (SparkdlError, pa.ArrowException, ValueError, KeyError, TypeError, AttributeError):
            return None
        newest = version + len(commits)
        if newest < least:  # entries before a checkpoint of the log may be removed
            return None
        rows: list[pa.Table] = []
        for commit in commits:
            if commit.rows is None:
                return None
            rows += commit.rows
        return Tail(version=newest, proof=commits[-1].proof if commits else proof, rows=tuple(rows))

    def append(self, rows: pa.Table, version: int) -> str:
        """Commit rows as ``version + 1``; return the hash of its entry.

        The caller knows that ``version`` is the newest, and that the columns are the table's. No other entry is equal,
        for each names a file of its own: so a store's client that sends it twice is not taken for somebody else.

        Args:
            rows: a few.
            version: the newest one.

        Raises:
            ConflictError: somebody else has committed it.
            StorageError: it cannot be written.
        """
        buffer = io.BytesIO()
        pq.write_table(rows, buffer, compression="snappy")
        file = self.root.child(f"part-00000-{uuid.uuid4()}-c000.snappy.parquet")
        file.write_atomic(buffer.getvalue())
        entry = _entry_of(file.uri.rpartition("/")[2], buffer.tell(), rows.num_rows, version)
        try:
            self._entry(version + 1).write_if_absent(entry)
        except ConflictError:
            file.delete()
            raise
        return sha256_hex(entry)

    @property
    def locks_elsewhere(self) -> bool:
        """Whether writers of this store agree through something else than its files, which only delta-rs knows."""
        names = {name.upper() for name in (*(self.options or {}), *os.environ)}
        return "AWS_S3_LOCKING_PROVIDER" in names

    def _entry(self, version: int) -> Storage:
        return self.root.child(_LOG).child(f"{version:020d}.json")

    def _commits(self, first: int) -> Iterator[_Commit]:
        """The entries from a version on, up to the newest."""
        if self.root.local_path() is not None:
            yield from _there(map(self._commit, itertools.count(first)))
            return
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="sparkdl-journal") as pool:
            starts = itertools.count(first, _AT_ONCE)
            pages = (pool.map(self._commit, range(start, start + _AT_ONCE)) for start in starts)
            yield from _there(itertools.chain.from_iterable(pages))

    def _commit(self, version: int) -> _Commit | None:
        file = self._entry(version)
        try:
            text = file.read_bytes(at_most=_MOST_BYTES)
        except StorageError:
            if file.exists():
                raise
            return None
        appended_files = _appended(json.loads(line) for line in text.splitlines() if line.strip())
        rows = None if appended_files is None else tuple(map(self._rows, appended_files))
        return _Commit(sha256_hex(text), rows)

    def _rows(self, add: Mapping[str, Any]) -> pa.Table:
        file = self.root.child(unquote(add["path"]))
        data = pa.BufferReader(file.read_bytes(at_most=_MOST_BYTES))
        return pq.ParquetFile(data).read(use_threads=False)  # read_table takes five times as long for a row

    def _checkpointed(self) -> int:
        """The newest version that the log has a checkpoint of, -1 without one."""
        file = self.root.child(_LOG).child("_last_checkpoint")
        return int(json.loads(file.read_bytes(at_most=_MOST_BYTES))["version"]) if file.exists() else -1


def _there(commits: Iterable[_Commit | None]) -> Iterator[_Commit]:
    for commit in commits:
        if commit is None:
            return
        yield commit


def _appended(actions: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """The files that a commit appended to the rows; None where it did something else to rows or table."""
    appended_files = []
    for action in actions:
        for kind, facts in action.items():
            if kind == "add" and facts["dataChange"]:
                if facts.get("deletionVector") or facts.get("partitionValues"):
                    return None
                appended_files.append(facts)
            elif kind not in ("add", "remove", "commitInfo", "txn") or (
                kind == "remove" and facts.get("dataChange", True)
            ):
                return None
    return appended_files


def _entry_of(file: str, size: int, rows: int, read_version: int) -> bytes:
    """An entry that adds one file, after a look at a version."""
    now = int(time.time() * 1000)
    metrics = {"numFiles": "1", "numOutputRows": str(rows), "numOutputBytes": str(size)}
    info = {
        "timestamp": now,
        "operation": "WRITE",
        "operationParameters": {"mode": "Append"},
        "readVersion": read_version,
        "isolationLevel": "Serializable",
        "isBlindAppend": False,
        "operationMetrics": metrics,
        "engineInfo": "sparkdl",
    }
    add = {
        "path": file,
        "partitionValues": {},
        "size": size,
        "modificationTime": now,
        "dataChange": True,
        "stats": json.dumps({"numRecords": rows}),
    }
    return b"\n".join(json.dumps(action).encode() for action in ({"commitInfo": info}, {"add": add}))
