"""What has been done is found again: results of steps by a key over everything that decides them.

Enters: a step's name, the values that decide its result, and a function that does the work. Leaves: the result, from
the function or from an earlier run, and a note of which it was.

A result is one small document, ``<folder>/<step>/<key>.json``, written last and never changed; what is large (a table's
version, a shard set, a bundle) lies elsewhere, and the result says where. A run that is killed leaves no result, so
its step is done again, and each step is built to bear that. A result counts only while what it names is still there.

Of some steps the last result counts, in place of the one before: what the table of predictions holds of a window, say.
These are receipts, rows of a Delta table, so that its log refuses those of a run that has lost its lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa

from sparkdl.documents.typed import Source, convert, encode, parse, read
from sparkdl.errors import IntegrityError
from sparkdl.observe import emit, logger
from sparkdl.pipeline.state.lease import Lease
from sparkdl.storage import Storage, sha256_hex
from sparkdl.tables.table import Table

__all__ = ["IN_PLACE", "StepNote", "Steps", "content_key"]

T = TypeVar("T")

IN_PLACE = ("score", "live", "vacuum", "run")
"""Steps whose last result counts."""
_RECEIPTS = pa.schema([("step", pa.string()), ("key", pa.string()), ("document", pa.string()), ("epoch", pa.int64())])
_COMPACT_EVERY = 32
_AGAIN = "delete it, and the step is done again"

_MAX_BYTES = 256 << 20
"""Of a result: vocabularies of fitted features are the largest."""


def content_key(step: str, inputs: Mapping[str, Any]) -> str:
    """The key of a step's result: 32 hexadecimal digits that follow from its name and inputs, whatever their order.

    Args:
        step: name of the step; raise a number in ``inputs`` when what the step does changes.
        inputs: JSON values and dataclasses of them.

    Raises:
        TypeError: a value is no JSON value, so that it has no one spelling.
    """
    return sha256_hex(encode([step, _sorted(inputs)]))[:32]


@dataclass(frozen=True, kw_only=True)
class StepNote:
    """What a run did about one step.

    Attributes:
        name: of the step.
        key: of its result; empty where a step keeps it elsewhere.
        kept: whether an earlier run's result was taken.
        seconds: it took, wall-clock.
    """

    name: str
    key: str
    kept: bool
    seconds: float


class Steps:
    """The steps of one pipeline, with their results.

    Args:
        folder: where the results lie.
        receipts: table of the results that are replaced.
        lease: under which results are kept; None where nobody else can be at work.
    """

    def __init__(self, folder: Storage, receipts: Table, lease: Lease | None = None) -> None:
        self._folder, self._table, self._lease = folder, receipts, lease
        self._documents: dict[tuple[str, str], str | None] | None = None
        self.notes: list[StepNote] = []

    def hold(self, lease: Lease) -> None:
        """Keep results under a lease, and believe what was kept until it was taken."""
        self._lease, self._documents = lease, None
        if lease.claims_due:
            self._table.claim(lease.fence.transaction(), _RECEIPTS)

    def find(
        self, step: str, inputs: Mapping[str, Any], kind: type[T], holds: Callable[[T], bool] = lambda _: True
    ) -> T | None:
        """The result that an earlier run left for these inputs; None where there is none that still holds.

        Args:
            step: its name.
            inputs: everything that decides the result.
            kind: the dataclass of the result.
            holds: whether what the result names is still there.
        """
        found = self.result(step, content_key(step, inputs), kind)
        return found if found is not None and holds(found) else None

    def result(self, step: str, key: str, kind: type[T]) -> T | None:
        """The result of a step by its key; None where there is none that can be read."""
        try:
            if step in IN_PLACE:
                document, source = self._receipts().get((step, key)), Source(self._table.uri, _AGAIN)
                return None if document is None else convert(parse(document.encode(), source, _MAX_BYTES), kind, source)
            place = self._place(step, key)
            return read(place, kind, _AGAIN, _MAX_BYTES) if place.exists() else None
        except IntegrityError as error:
            logger.warning("%s: the step is done again", error)
            return None

    def known(self, step: str, inputs: Mapping[str, Any]) -> bool:
        """Whether a result for these inputs was kept; ``find`` says, too, whether it holds."""
        key = content_key(step, inputs)
        return self._receipts().get((step, key)) is not None if step in IN_PLACE else self._place(step, key).exists()

    def do(
        self,
        step: str,
        inputs: Mapping[str, Any],
        kind: type[T],
        work: Callable[[], T],
        holds: Callable[[T], bool] = lambda _: True,
    ) -> T:
        """Return the result for these inputs; do the work only if no earlier run did, or what it left is gone.

        Raises:
            StorageError: results cannot be read or written.
        """
        started = time.perf_counter()
        result = self.find(step, inputs, kind, holds)
        if result is not None:
            self._note(step, content_key(step, inputs), True, time.perf_counter() - started)
            return result
        emit("step", name=step, state="started")
        result = work()
        self.put(step, inputs, result, time.perf_counter() - started)
        return result

    def put(self, step: str, inputs: Mapping[str, Any], result: Any, seconds: float) -> None:
        """Keep a result, of a step that makes several at once.

        Args:
            step: its name.
            inputs: everything that decides the result.
            result: a dataclass.
            seconds: that it took.

        Raises:
            FencedError: a later run has taken over.
            LeaseLostError: likewise.
        """
        key = content_key(step, inputs)
        if step in IN_PLACE:
            self.replace(step, [(inputs, result)])
        else:
            if self._lease is not None:
                self._lease.check()
            self._place(step, key).write_atomic(encode(result))
        self._note(step, key, False, seconds)

    def replace(self, step: str, results: Iterable[tuple[Mapping[str, Any], Any]]) -> None:
        """Replace receipts of a step, in one commit, which is no work that a run has done.

        Args:
            step: one of ``IN_PLACE``.
            results: by inputs; None takes one away, before what it names is overwritten.

        Raises:
            FencedError: a later run has taken over.
        """
        made = {
            (step, content_key(step, inputs)): None if each is None else encode(each).decode()
            for inputs, each in results
        }
        transaction = None if self._lease is None else self._lease.fence.transaction()
        epoch = None if self._lease is None else self._lease.number
        rows = [{"step": name, "key": key, "document": text, "epoch": epoch} for (name, key), text in made.items()]
        content = pa.Table.from_pylist(rows, schema=_RECEIPTS)
        before = self._receipts()
        if self._table.exists():
            version = self._table.merge(content, on=["step", "key"], transaction=transaction)
        else:
            version = self._table.append(content, expected_version=-1, transaction=transaction)
        self._documents = {**before, **made}
        if version % _COMPACT_EVERY == _COMPACT_EVERY - 1:
            self._table.compact()

    def timed(self, step: str, kept: bool, seconds: float, key: str = "") -> None:
        """Note a step that keeps its results itself, as ingestion does in the ledger."""
        self._note(step, key, kept, seconds)

    def _receipts(self) -> Mapping[tuple[str, str], str | None]:
        """The documents of all receipts, as they were when this run first asked under its lease, with its own."""
        if self._documents is None:
            rows = self._table.rows().to_pylist() if self._table.exists() else []
            self._documents = {(row["step"], row["key"]): row["document"] for row in rows}
        return self._documents

    def _note(self, step: str, key: str, kept: bool, seconds: float) -> None:
        self.notes.append(StepNote(name=step, key=key, kept=kept, seconds=seconds))
        emit("step", name=step, state="kept" if kept else "done", seconds=seconds)

    def _place(self, step: str, key: str) -> Storage:
        return self._folder.child(step).child(f"{key}.json")


def _sorted(value: Any) -> Any:
    """The value with the keys of every mapping in order, as plain lists, dicts and scalars."""
    if isinstance(value, Mapping):
        return {str(name): _sorted(value[name]) for name in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_sorted(each) for each in value]
    if isinstance(value, set | frozenset):
        raise TypeError(f"{value!r} has no order: give a sorted list")
    return value
