"""Checkpoints: written by rank 0 beside training, whole or not at all, and checked when read."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar, cast

import msgspec
import torch

from sparkdl.config import CheckpointConfig
from sparkdl.documents import typed as documents
from sparkdl.documents.tensors import load_tensors
from sparkdl.documents.trees import Decoder, Encoder, Layout
from sparkdl.errors import CheckpointError, IntegrityError, SparkdlError, StorageError
from sparkdl.observe import emit, logger
from sparkdl.storage import Storage, storage_errors, xxh3_hex

T = TypeVar("T")

_FORMAT = 1
_HEAD, _HASH = b'{"checkpoint":', b',"xxh3":"'
MAX_BYTES = 256 << 20
"""The most bytes of the JSON file; tensors lie in the other one."""

Check = Callable[[dict[str, Any]], None]

_NAME = re.compile(r"step-(\d{10})\.json")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint, read and found whole.

    Attributes:
        step: its number: optimizer steps it was taken after, those before a warm start included.
        epoch: epoch it was taken in; at the end of an epoch, the next one.
        best: whether its epoch was the best so far.
        state: what ``save`` was given.
    """

    step: int
    epoch: int
    best: bool
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Body:
    """The JSON file: of the state all but the tensors, and the file that holds these."""

    format: documents.Count
    step: documents.Count
    epoch: documents.Count
    best: bool
    state: dict[str, Any]
    tensors: Annotated[str, msgspec.Meta(pattern=r"^step-[0-9]{10}\.[0-9a-f]{8}\.safetensors$")]
    bytes: documents.Count
    xxh3: str


@dataclass(slots=True)
class _Entry:
    step: int
    best: bool
    tensors: str
    bytes: int


class Checkpointer:
    """Saves and loads the checkpoints of one run; only rank 0 calls it.

    A checkpoint is two files. ``step-<n>.<token>.safetensors`` holds the tensors. ``step-<n>.json`` holds everything
    else, with the size and the xxh3 hash of the first file and of itself; it is written last, in one atomic operation,
    and what it does not name does not exist. There is no pickle in either. A snapshot is one copy into a buffer that is
    kept; hashing, writing and deleting happen on a thread of their own.

    Args:
        config: where, when, how many.
        identity: what decides the run, see ``identity``: written into each checkpoint, and compared before a run goes
            on from one; None compares nothing.

    Attributes:
        offset: the number of the checkpoint that a warm start took its weights from, else 0. Those that follow are
            numbered from there, so that the newest one always has the highest number.

    Raises:
        ConfigError: the URI is of an unknown kind.
    """

    def __init__(self, config: CheckpointConfig, identity: dict[str, str] | None = None) -> None:
        self.config, self.identity = config, identity
        self.offset = 0
        self.folder = Storage.of(cast("str | Storage", config.uri))
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._layout: Layout | None = None
        self._entries: dict[int, _Entry] | None = None
        self._abandoned: list[int] = []
        self._vacuumed = False

    def __getstate__(self) -> tuple[CheckpointConfig, dict[str, str] | None]:
        return replace(self.config, uri=self.folder), self.identity  # what was resolved here means the same elsewhere

    def __setstate__(self, state: tuple[CheckpointConfig, dict[str, str] | None]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def save(self, state: dict[str, Any], *, step: int, epoch: int, best: bool = False) -> None:
        """Take a snapshot of ``state`` now, and write it in the background.

        Waits for the checkpoint before, if that is still being written.

        Args:
            state: nested dicts, lists, numbers, strings and tensors; tensors may change once this returns.
            step: optimizer steps so far; with ``offset`` the checkpoint's number.
            epoch: epoch in which a resumed run goes on.
            best: keep it until there is a better one.

        Raises:
            CheckpointError: the state holds what a checkpoint cannot, or the one before could not be written.
        """
        self.wait()
        encoder = Encoder()
        tree, tensors = encoder.encode(state), encoder.tensors
        if self._layout is None or self._layout.signature != Layout.signature_of(tensors):
            self._layout = None  # free the old buffer first
            self._layout = Layout.for_tensors(tensors)
        self._layout.fill(tensors)
        ready = None
        if any(tensor.is_cuda for tensor in tensors.values()):
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        if self._writer is None:
            self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sparkdl-checkpoint")
        body = {"format": _FORMAT, "step": self.offset + step, "epoch": epoch, "best": best, "state": tree}
        self._pending = self._writer.submit(self._write, body, self._layout, ready)

    def wait(self) -> None:
        """Return once everything saved is durable.

        Raises:
            CheckpointError: it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except SparkdlError as cause:
            raise CheckpointError(f"a checkpoint could not be written to {self.folder.uri}: {cause}") from cause

    def close(self) -> None:
        """Wait for the writer and end it; the object can be used again."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None
            self._layout = None

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, damaged ones included, in order."""
        names = (_NAME.fullmatch(entry.name) for entry in self.folder.list())
        return sorted(int(match.group(1)) for match in names if match)

    def latest(self, check: Check | None = None) -> Checkpoint | None:
        """Read the newest whole checkpoint; None if there is none at all.

        A damaged one is skipped with a warning.

        Args:
            check: raises ``IntegrityError`` for a state that is no use.

        Raises:
            CheckpointError: there are checkpoints, and none of them is whole.
        """
        self.wait()
        steps = self.steps()
        newest = self._first_whole(list(reversed(steps)), "checkpoint", lambda step: self.load(step, check))
        self._abandoned = [step for step in steps if newest is not None and step > newest.step]
        return newest

    def peek(self, part: str) -> tuple[int, Any] | None:
        """Read one part of the newest state, without its tensors.

        Returns:
            The checkpoint's step, and the part, None where its state has none of that name; None without checkpoints.

        Raises:
            CheckpointError: there are checkpoints, and none can be read; or the part holds tensors.
        """
        self.wait()

        def read(step: int) -> tuple[int, Any]:
            with self._told_as_damage(step):
                return step, Decoder({}).decode(self._body(step).state.get(part))

        return self._first_whole(list(reversed(self.steps())), "checkpoint", read)

    def best(self, check: Check | None = None) -> Checkpoint | None:
        """Read the best checkpoint since the last warm start, or an earlier best if that is damaged.

        None if none was ever marked as best.

        Args:
            check: raises ``IntegrityError`` for a state that is no use.

        Raises:
            CheckpointError: there were some, and none of them is whole.
        """
        self.wait()
        entries = self._index()
        bests = sorted((s for s, e in entries.items() if e.best and s > self.offset), reverse=True)
        return self._first_whole(bests, "best checkpoint", lambda step: self.load(step, check))

    def load(self, step: int, check: Check | None = None) -> Checkpoint:
        """Read the checkpoint of ``step`` and check every byte of it, and its state by ``check``.

        Raises:
            CheckpointError: it is missing or damaged, or a later version wrote it.
        """
        with self._told_as_damage(step):
            body = self._body(step)
            file = self.folder.child(body.tensors)
            data = file.read_bytes(at_most=body.bytes)
            if len(data) != body.bytes or xxh3_hex(data) != body.xxh3:
                raise IntegrityError(f"{body.tensors} has {len(data)} bytes that do not match the recorded hash")
            state = Decoder(load_tensors(data, file.uri)).decode(body.state)
            if check is not None:
                check(state)
        return Checkpoint(body.step, body.epoch, body.best, state)

    @contextmanager
    def _told_as_damage(self, step: int) -> Iterator[None]:
        try:
            yield
        except StorageError as cause:
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.folder.uri} is damaged ({cause}): resume from another one"
            ) from cause

    def _first_whole(self, steps: list[int], what: str, read: Callable[[int], T]) -> T | None:
        for step in steps:
            try:
                return read(step)
            except CheckpointError as error:
                logger.warning("skipping a %s: %s", what, error)
                emit("log", message=f"skipping a {what}: {error}")
        if steps:
            raise CheckpointError(
                f"none of the {len(steps)} {what}s in {self.folder.uri} is whole (steps {sorted(steps)}): restore the "
                "files, or start afresh in an empty folder"
            )
        return None

    def _body(self, step: int) -> _Body:
        """The JSON file of a checkpoint, checked against its own hash."""
        file = self.folder.child(_file(step))
        source = documents.Source(file.uri, "resume from another one")
        data = file.read_bytes(at_most=MAX_BYTES)
        text, separator, hash_part = data.removeprefix(_HEAD).rpartition(_HASH)
        if not data.startswith(_HEAD) or not separator or hash_part != b'%s"}' % xxh3_hex(text).encode():
            raise source.error("it does not match its hash")
        fields = documents.parse(text, source, MAX_BYTES)
        format_number = fields.get("format") if isinstance(fields, dict) else None
        if isinstance(format_number, int) and format_number > _FORMAT:
            raise source.error(f"format {format_number} is newer than {_FORMAT}, the newest this version reads")
        body = documents.convert(fields, _Body, source)
        if body.step != step or not body.tensors.startswith(f"step-{step:010d}."):
            raise source.error(f"it is of step {body.step} and names {body.tensors!r}", "$.step")
        return body

    def _write(self, body: dict[str, Any], layout: Layout, ready: torch.cuda.Event | None) -> None:
        start = time.perf_counter()
        if ready is not None:
            ready.synchronize()
        data, step, head = layout.data, int(body["step"]), documents.encode(body)
        documents.check_characters(head, CheckpointError, f"the state of step {step}, of callbacks perhaps,")
        name = f"step-{step:010d}.{uuid.uuid4().hex[:8]}.safetensors"
        target = self.folder.child(name)
        try:
            with storage_errors(target.uri, "write"), target.open_output() as file:
                file.write(data)
        except StorageError:
            with suppress(StorageError):  # what was half-written would keep a full disk full
                target.delete()
            raise
        text = head[:-1] + b"," + documents.encode({"tensors": name, "bytes": len(data), "xxh3": xxh3_hex(data)})[1:]
        self.folder.child(_file(step)).write_atomic(b'%s%s%s%s"}' % (_HEAD, text, _HASH, xxh3_hex(text).encode()))
        self._retain(_Entry(step, bool(body["best"]), name, len(data)))
        seconds = time.perf_counter() - start
        emit("checkpoint", step=step, epoch=body["epoch"], best=body["best"], bytes=len(data), seconds=seconds)

    def _retain(self, new: _Entry) -> None:
        """Delete all but the last ones and the best; the JSON file first, so that nothing half-deleted is seen."""
        entries = self._index()
        obsolete = [entries.pop(step) for step in (*self._abandoned, new.step) if step in entries]
        for step in self._abandoned:  # damaged, and newer than what the run continued from
            if step != new.step:
                self.folder.child(_file(step)).delete()
        self._abandoned = []
        entries[new.step] = new
        keep = set(sorted(entries)[-self.config.keep_last :])
        bests = [step for step, entry in entries.items() if entry.best]
        if self.config.keep_best and bests:
            keep.add(max(bests))
        for step in sorted(set(entries) - keep):
            self.folder.child(_file(step)).delete()
            obsolete.append(entries.pop(step))
        if not self._vacuumed:
            self._vacuum({entry.tensors for entry in entries.values()})
            self._vacuumed = True
            return
        for entry in obsolete:
            with suppress(StorageError):
                self.folder.child(entry.tensors).delete()

    def _vacuum(self, held: set[str]) -> None:
        """Delete tensors that no checkpoint names: leftovers of writers that died; once, since looking takes time."""
        for file in self.folder.list():
            if file.name.startswith("step-") and file.name.endswith(".safetensors") and file.name not in held:
                with suppress(StorageError):
                    self.folder.child(file.name).delete()

    def _index(self) -> dict[int, _Entry]:
        """What is there, read once; a checkpoint whose JSON is damaged does not count."""
        if self._entries is None:
            self._entries = {}
            for step in self.steps():
                with suppress(StorageError):
                    body = self._body(step)
                    self._entries[step] = _Entry(step, body.best, body.tensors, body.bytes)
        return self._entries


def _file(step: int) -> str:
    return f"step-{step:010d}.json"
