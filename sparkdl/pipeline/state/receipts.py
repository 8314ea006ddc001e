"""The table of receipts, which is all the state that a pipeline has.

A step of a pipeline has partitions: windows of time for what is replaced in place, keys for what is made beside what
was there. A receipt says of one partition by which key it was made, a hash of everything that decides it. It is
written last, and invalidated before what it names is overwritten, so that a run that is killed leaves work that is
done again, and no receipt that lies. The table's log refuses receipts of a run that has lost its lease.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

import msgspec
import pyarrow as pa

from sparkdl.columns.numpy_arrow import from_rows, to_rows
from sparkdl.documents.typed import Source, convert, encode, parse, read
from sparkdl.errors import IntegrityError
from sparkdl.observe import logger
from sparkdl.pipeline.state.lease import Lease
from sparkdl.storage import Storage, sha256_hex
from sparkdl.tables.table import Table

T = TypeVar("T")

_SCHEMA = pa.schema(
    [
        ("step", pa.string()),
        ("partition", pa.string()),
        ("key", pa.string()),
        ("facts", pa.string()),
        ("epoch", pa.int64()),
        ("run_id", pa.string()),
        ("written_at", pa.string()),
    ]
)
_COMPACT_EVERY = 32
_AGAIN = "delete it, and the step is done again"
_MAX_BYTES = 256 << 20
"""The most bytes of a document: vocabularies of fitted features are the largest."""


def content_key(step: str, inputs: Any) -> str:
    """The key of what a step makes: 32 hexadecimal digits that follow from its name and inputs, whatever their order.

    Args:
        step: name of the step; raise a number in ``inputs`` when what the step does changes.
        inputs: JSON values, and dataclasses and sections of the file that hold them.

    Raises:
        TypeError: a value is no JSON value.
        ValueError: a number is none that JSON knows.
    """
    return sha256_hex(encode(msgspec.to_builtins([step, inputs], order="deterministic")))[:32]


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What is known of one partition of a step.

    Attributes:
        step: its name.
        partition: of the step: a window; the key itself where each key has a place of its own.
        key: a hash of everything that decided what was made; empty while that is being replaced, or was cut short.
        facts: about what was made, as JSON.
        run_id: of the run that made it.
        written_at: ISO 8601 in UTC.
    """

    step: str
    partition: str
    key: str
    facts: str = "{}"
    run_id: str = ""
    written_at: str = ""

    def read(self, kind: type[T]) -> T:
        """Its facts as a value of a dataclass.

        Raises:
            IntegrityError: they hold something else.
        """
        return cast(T, _facts(self, cast(Hashable, kind)))


@functools.lru_cache(maxsize=200_000)
def _facts(receipt: Receipt, kind: Any) -> Any:
    source = Source(f"the receipt of {receipt.step} {receipt.partition}", "restore an earlier version of the receipts")
    return convert(parse(receipt.facts.encode(), source, _MAX_BYTES), kind, source)


@dataclass(frozen=True, kw_only=True)
class StepNote:
    """What a run did about one step.

    Attributes:
        name: of the step.
        key: of what it made; empty where it made several things.
        kept: whether what an earlier run made was taken.
        seconds: it took, wall-clock; of a trial, since the one before was noted, as some train side by side.
    """

    name: str
    key: str
    kept: bool
    seconds: float


@contextmanager
def replacing(receipts: ReceiptTable, step: str, partitions: Iterable[str]) -> Iterator[dict[str, tuple[str, Any]]]:
    """Overwrite partitions: invalidate their receipts, let the block commit what replaces them, write new receipts.

    Nobody believes a receipt whose partition may hold something else by now, whenever the run is killed. The block
    leaves key and facts of each partition that it has made.

    Raises:
        FencedError: a later run has taken over.
    """
    receipts_of_step = receipts.of(step)
    valid = [receipts_of_step[name] for name in partitions if name in receipts_of_step and receipts_of_step[name].key]
    if valid:
        receipts.write([replace(receipt, key="") for receipt in valid])
    new_receipts: dict[str, tuple[str, Any]] = {}
    yield new_receipts
    if new_receipts:
        receipts.write(
            [
                Receipt(step=step, partition=name, key=key, facts=encode(facts).decode())
                for name, (key, facts) in new_receipts.items()
            ]
        )


class ReceiptTable:
    """The receipts of one pipeline in a Delta table, and beside it documents of what is made once for each key.

    Args:
        table: of the receipts.
        folder: of the documents, ``<step>/<key>.json``.
        run_id: of the run that writes receipts.
    """

    def __init__(self, table: Table, folder: Storage, run_id: str) -> None:
        self._table, self._folder, self._run_id = table, folder, run_id
        self._lease: Lease | None = None
        self._receipts: dict[str, dict[str, Receipt]] | None = None
        self._results: dict[tuple[str, str], Any] = {}
        self._writing = threading.Lock()  # of trials that end side by side: commits of one epoch are numbered

    def hold(self, lease: Lease) -> None:
        """Write under a lease from now on, and read again what was written until it was taken."""
        self._lease, self._receipts = lease, None
        if lease.claims_due:
            self._table.claim(lease.fence.transaction(), _SCHEMA)

    def of(self, step: str) -> Mapping[str, Receipt]:
        """The receipts of a step by partition, in order, as they were when this run first asked, with its own.

        Raises:
            StorageError: the table cannot be read.
            IntegrityError: it is another table than this one.
        """
        return self._all().get(step, {})

    def _all(self) -> dict[str, dict[str, Receipt]]:
        """All receipts by step and partition."""
        if self._receipts is None:
            rows = to_rows(self._table.rows()) if self._table.exists() else []
            if rows and set(rows[0]) != set(_SCHEMA.names):
                raise IntegrityError(
                    f"the receipts {self._table.uri} have the columns {', '.join(rows[0])}, and not "
                    f"{', '.join(_SCHEMA.names)}: another sparkdl wrote them; delete the table, and all is made again"
                )
            self._receipts = {}
            for row in sorted(rows, key=lambda row: (row["step"], row["partition"])):
                del row["epoch"]
                self._receipts.setdefault(row["step"], {})[row["partition"]] = Receipt(**row)
        return self._receipts

    def write(self, receipts: Sequence[Receipt]) -> None:
        """Insert or replace receipts, in one commit.

        Raises:
            FencedError: a later run has taken over.
            StorageError: the table cannot be written.
        """
        with self._writing:
            written_at, run_id = datetime.now(UTC).isoformat(timespec="microseconds"), self._run_id
            stamped = [replace(receipt, run_id=run_id, written_at=written_at) for receipt in receipts]
            epoch = None if self._lease is None else self._lease.number
            rows = from_rows([{**vars(receipt), "epoch": epoch} for receipt in stamped], _SCHEMA)
            transaction = None if self._lease is None else self._lease.fence.transaction()
            if self._table.exists():
                version = self._table.merge(rows, on=["step", "partition"], transaction=transaction)
            else:
                version = self._table.append(rows, expected_version=-1, transaction=transaction)
            if self._receipts is not None:
                self._remember(stamped)
            if version % _COMPACT_EVERY == _COMPACT_EVERY - 1:
                self._table.compact()

    def _remember(self, receipts: Sequence[Receipt]) -> None:
        """Put receipts among those that are known, in a new mapping of each step that they are of."""
        receipts_by_step = self._all()
        for step in {receipt.step for receipt in receipts}:
            written = {receipt.partition: receipt for receipt in receipts if receipt.step == step}
            receipts_by_step[step] = dict(sorted({**receipts_by_step.get(step, {}), **written}.items()))

    def keep(self, step: str, key: str, result: Any) -> None:
        """Keep what was made for a key: its document first, then the receipt.

        Args:
            step: its name.
            key: a hash of everything that decided it.
            result: a dataclass.

        Raises:
            FencedError: a later run has taken over.
            LeaseLostError: likewise.
        """
        if self._lease is not None:
            self._lease.check()
        self.document(step, key).write_atomic(encode(result))
        self._results.pop((step, key), None)
        self.write([Receipt(step=step, partition=key, key=key)])

    def result(self, step: str, key: str, kind: type[T]) -> T | None:
        """What was made for a key; None where there is no receipt, or its document cannot be read."""
        receipt = self.of(step).get(key)
        if receipt is None or receipt.key != key:
            return None
        if (step, key) not in self._results:
            document = self.document(step, key)
            try:
                facts = read(document, kind, _AGAIN, _MAX_BYTES) if document.exists() else None
            except IntegrityError as error:
                logger.warning("%s: the step is done again", error)
                facts = None
            self._results[step, key] = facts
        result: T | None = self._results[step, key]
        return result

    def document(self, step: str, key: str) -> Storage:
        """Where the document of a key lies."""
        return self._folder.child(step).child(f"{key}.json")


class AssumedReceipts(ReceiptTable):
    """Receipts as they will be once what is planned has been made; what is written stays in memory.

    Args:
        known: the receipts that there are.
    """

    def __init__(self, receipts: ReceiptTable) -> None:
        super().__init__(receipts._table, receipts._folder, receipts._run_id)
        self._receipts, self._results = dict(receipts._all()), receipts._results

    def write(self, receipts: Sequence[Receipt]) -> None:
        """Assume receipts."""
        self._remember(receipts)
