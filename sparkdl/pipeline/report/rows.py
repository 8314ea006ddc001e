"""Where the rows went: windows, books, quarantine, warnings, predictions.

Enters: a record. Leaves: sections of the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sparkdl.pipeline.report.charts import bar
from sparkdl.pipeline.report.html import Html, tag
from sparkdl.pipeline.report.tables import chosen, number, section, share, table
from sparkdl.pipeline.rows.ledger import transformed
from sparkdl.pipeline.rows.parts import PARTS
from sparkdl.pipeline.state.record import RunRecord
from sparkdl.pipeline.windows import deleted_text

__all__ = ["rows_in", "rows_predicted", "rows_refused"]


def rows_in(record: RunRecord) -> Html | None:
    """Rows read = kept + quarantined + duplicates, by window."""
    rows = record.rows
    if "read" not in rows:
        return None
    told = deleted_text(record.windows.get("deleted", ()), record.windows.get("removed", ()))
    deleted = tag("p", f"Deleted in the source: {told}.") if told else None
    if not record.windows.get("ingested"):
        return section("Rows", tag("p", "No window was new or changed, so none was read."), deleted)
    total = (
        f"{rows['read']:,} rows read = {rows['kept']:,} kept + {rows['quarantined']:,} quarantined + "
        f"{rows['duplicates']:,} duplicates, in {len(record.windows['ingested']):,} windows."
    )
    before = transformed(record.books)
    if before is not None:
        total = f"{before[0]:,} rows in the source, {before[1]:,} after the transform. {total}"
    windows, note = chosen([books.window for books in record.books])
    by_name = {books.window: books for books in record.books}
    lines = [
        (name, *map(number, (by_name[name].read, by_name[name].kept, by_name[name].quarantined)),
         number(by_name[name].duplicates), share(by_name[name].quarantined, by_name[name].read))
        for name in windows
    ]  # fmt: skip
    header: tuple[str, ...] = ("window", "read", "kept", "quarantined", "duplicates", "share quarantined")
    if any(books.source_rows not in (None, books.read) for books in record.books):
        header = ("window", "in the source", *header[1:])
        lines = [(line[0], number(by_name[line[0]].source_rows), *line[1:]) for line in lines]
    shown = table(header, lines, note=note) if lines else None
    return section("Rows", tag("p", total), deleted, shown, _parts(record))


def _parts(record: RunRecord) -> Html | None:
    lines = []
    for part in PARTS:
        windows = record.windows.get(part)
        if windows:
            span = windows[0] if len(windows) == 1 else f"{windows[0]} to {windows[-1]}"
            lines.append((part, number(len(windows)), span, number(record.rows.get(part))))
    return table(("part", "windows", "from and to", "rows"), lines) if lines else None


def rows_refused(record: RunRecord) -> Html | None:
    """Quarantined rows by reason, the largest first, and broken warnings."""
    reasons: Counter[str] = Counter()
    for books in record.books:
        reasons.update(books.outcomes)
    read, most = record.rows.get("read", 0), max(reasons.values(), default=1)
    lines = [(name, number(rows), share(rows, read), bar(rows / most, "s2")) for name, rows in _largest(reasons)]
    refused = table(("reason", "rows", "of rows read", ""), lines) if lines else None
    warned = {
        name.removeprefix("warning: "): rows for name, rows in record.rows.items() if name.startswith("warning: ")
    }
    kept = [(name, number(rows), share(rows, read)) for name, rows in _largest(Counter(warned))]
    warnings = table(("warning", "rows, kept all the same", "of rows read"), kept) if kept else None
    return section("Quarantine", refused, warnings)


def _largest(counts: Counter[str]) -> Iterator[tuple[str, int]]:
    yield from sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def rows_predicted(record: RunRecord) -> Html | None:
    """Predictions that this run wrote, by window."""
    if not record.predictions:
        return None
    windows, note = chosen(sorted(record.predictions))
    rows = sum(record.predictions.values())
    version = record.model.get("champion")
    text = f"Version {version} predicted {rows:,} rows of {len(record.predictions):,} windows."
    lines = [(name, number(record.predictions[name])) for name in windows]
    return section("Predictions", tag("p", text), table(("window", "rows"), lines, note=note))
