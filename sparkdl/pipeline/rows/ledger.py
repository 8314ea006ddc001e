"""What was written for which input: the pipeline's memory of its windows.

Enters: windows that were ingested. Leaves: for each the fingerprint of its input, the rules it was cleaned by, and its
books: rows in the source, and of those that the transform makes of them rows read = kept + quarantined + duplicates.
One small Delta table, a row a window, committed after the window's rows are; those of a window that is replaced are
struck out before: a run that is cut short leaves windows that count as not done, and they are simply done again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import pyarrow as pa

from sparkdl.documents.typed import Count, Source, convert, encode, parse
from sparkdl.errors import DataError
from sparkdl.observe import logger
from sparkdl.pipeline.windows import span
from sparkdl.tables.table import AppTransaction, Table

__all__ = ["Ledger", "Tables", "WindowBooks", "transformed"]

_SCHEMA = pa.schema(
    [
        ("window", pa.string()),
        ("fingerprint", pa.string()),
        ("rules", pa.string()),
        ("source_rows", pa.int64()),
        ("read", pa.int64()),
        ("kept", pa.int64()),
        ("quarantined", pa.int64()),
        ("duplicates", pa.int64()),
        ("outcomes", pa.string()),
        ("content", pa.string()),
        ("unlabelled", pa.string()),
        ("version", pa.int64()),
        ("run_id", pa.string()),
        ("written_at", pa.string()),
    ]
)
_SOURCE = Source("the ledger", "it was altered, restore an earlier version of it")


@dataclass(frozen=True, kw_only=True)
class WindowBooks:
    """What is known of one window.

    Attributes:
        window: its name.
        fingerprint: of what the source held for it.
        rules: of the transform and the expectations that its rows went through; empty where they are struck out.
        source_rows: rows that the source held, before the transform; None where an earlier sparkdl did not count them.
        read: rows that were judged, as the transform left them; where there is none, those of the source.
        kept: rows that went on to the features.
        quarantined: rows that an expectation refused.
        duplicates: rows whose key another row of the window has.
        outcomes: rows by the expectation that they failed; warnings count as kept rows too.
        content: a hash of the columns and of the rows kept, the same for the same rows in any order.
        unlabelled: the same without the labels: what predictions follow from.
        version: of the table of clean rows that holds them.
        run_id: of the run that wrote them.
    """

    window: str
    fingerprint: str
    rules: str
    read: Count
    kept: Count
    quarantined: Count
    duplicates: Count
    source_rows: Count | None = None
    outcomes: Mapping[str, Count] = field(default_factory=dict)
    content: str = ""
    unlabelled: str = ""
    version: int = -1
    run_id: str = ""

    def struck_out(self) -> WindowBooks:
        """The same of a window whose rows may be others by now, or gone: it counts as not done."""
        return replace(self, fingerprint="", rules="")

    def check(self) -> None:
        """Compare the two sides of the books.

        Raises:
            DataError: rows were lost or multiplied.
        """
        total = self.kept + self.quarantined + self.duplicates
        if total != self.read:
            raise DataError(
                f"window {self.window} has {self.read} rows that were read, and {total} of them were accounted for "
                f"({self.kept} kept, {self.quarantined} quarantined, {self.duplicates} duplicates): the source changed "
                "while it was read; run again"
            )


def transformed(books: Iterable[WindowBooks]) -> tuple[int, int] | None:
    """Rows of some windows in the source, and after the transform; None where each has as many, or is not counted."""
    counted = [(each.source_rows, each.read) for each in books if each.source_rows is not None]
    if all(before == after for before, after in counted):
        return None
    return sum(before for before, _ in counted), sum(after for _, after in counted)


@dataclass(frozen=True)
class Ledger:
    """The ledger of one pipeline.

    Attributes:
        table: where it lies.
    """

    table: Table

    def windows(self) -> dict[str, WindowBooks]:
        """All windows that were done, by name and in order.

        Raises:
            IntegrityError: a row was altered.
            StorageError: the table cannot be read.
        """
        if not self.table.exists():
            return {}
        found = {}
        for row in self.table.rows().to_pylist():
            del row["written_at"]
            row["unlabelled"] = row.get("unlabelled") or row["content"]  # an earlier sparkdl did not keep it
            row["outcomes"] = parse(str(row["outcomes"]).encode(), _SOURCE)
            books = convert(row, WindowBooks, _SOURCE)
            found[books.window] = books
        return dict(sorted(found.items()))

    def claim(self, transaction: AppTransaction) -> None:
        """Refuse from now on what earlier runs write."""
        self.table.claim(transaction, _SCHEMA)

    def write(self, books: Iterable[WindowBooks], transaction: AppTransaction | None = None) -> None:
        """Insert or replace windows, in one commit.

        Args:
            books: of the windows.
            transaction: of the run.

        Raises:
            DataError: the books of one do not balance; then none is written.
            ConflictError: another run writes them at the same time, or has taken over.
        """
        now, rows = datetime.now(UTC).isoformat(timespec="seconds"), []
        for each in books:
            each.check()
            rows.append({**vars(each), "outcomes": encode(dict(each.outcomes)).decode(), "written_at": now})
        content = pa.Table.from_pylist(rows, schema=_SCHEMA)
        if self.table.exists():
            if not {*_SCHEMA.names} <= {*self.table.columns()}:  # an earlier sparkdl made it
                self.table.append(_SCHEMA.empty_table(), new_columns=True)
            self.table.merge(content, on=["window"], transaction=transaction)
        else:
            self.table.append(content, expected_version=-1, transaction=transaction)


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The tables of one pipeline, below one folder."""

    folder: str

    def table(self, name: str) -> Table:
        """One of them: ``clean``, ``quarantine``, ``ledger``, ``receipts``, ``predictions``, ``runs``."""
        return Table(f"{self.folder}/{name}", engine="delta-rs")  # nobody else writes them, and one engine is to

    def version(self, name: str) -> int:
        """The newest version of one of them, -1 where it is not there."""
        table = self.table(name)
        return table.version() if table.exists() else -1

    @property
    def ledger(self) -> Ledger:
        """The books of all windows."""
        return Ledger(self.table("ledger"))

    def windows(self) -> dict[str, WindowBooks]:
        """What the ledger knows, as far as there are clean rows: where their table is gone, no window is done."""
        known = self.ledger.windows()
        return {name: books.struck_out() for name, books in known.items()} if self._lost(known) else known

    def check_lost(self, known: Mapping[str, WindowBooks], deleted: Sequence[str]) -> None:
        """Say that the table of clean rows is gone, where it is.

        Args:
            known: what the ledger knows.
            deleted: windows of these that the source no longer holds, and that are to stay.

        Raises:
            DataError: rows were in it that the source no longer holds.
        """
        lost, uri = self._lost(known), self.table("clean").uri
        gone = [name for name in lost if name in deleted]
        if gone:
            raise DataError(
                f"the clean rows {uri} are gone, and the source no longer holds {span(gone)} of them: restore the "
                "table, or take these windows out with source.deleted_windows=remove"
            )
        if lost:
            logger.warning("the clean rows %s are gone: all windows are taken in again", uri)

    def _lost(self, known: Mapping[str, WindowBooks]) -> list[str]:
        """The windows whose clean rows are gone with their table."""
        kept = [name for name, books in known.items() if books.kept]
        return [] if not kept or self.table("clean").exists() else kept
