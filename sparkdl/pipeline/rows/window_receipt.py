"""The rows of each window: how many there were, what became of them, and hashes of those that were kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sparkdl.documents.typed import Count


@dataclass(frozen=True, kw_only=True)
class WindowReceipt:
    """What is known of one window.

    Attributes:
        window: its name.
        fingerprint: of what the source held for it.
        rules: of the transform and the expectations that its rows went through.
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


def transformed(receipts: Iterable[WindowReceipt]) -> tuple[int, int] | None:
    """Rows of some windows in the source, and after the transform; None where each has as many, or is not counted."""
    row_counts = [(receipt.source_rows, receipt.read) for receipt in receipts if receipt.source_rows is not None]
    if all(source_rows == rows for source_rows, rows in row_counts):
        return None
    return sum(source_rows for source_rows, _ in row_counts), sum(rows for _, rows in row_counts)
