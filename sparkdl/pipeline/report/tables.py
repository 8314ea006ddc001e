"""Tables and cards of the report.

Enters: texts, numbers and ``Html``. Leaves: ``Html``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from sparkdl.pipeline.report.html import Child, Html, shown, tag

__all__ = ["MOST_WINDOWS", "cards", "chosen", "facts", "figures", "number", "section", "sentence", "share", "table"]

NONE = "-"
"""Where there is no number."""
MOST_WINDOWS = 40
"""Windows that a table shows, the newest; whoever has years of hours does not scroll through them."""
_NUMBER = re.compile(r"-|[-+]?[\d,.]+(e[-+]?\d+)?( %| s)?")


def table(header: Sequence[str], rows: Iterable[Sequence[Child]], *, note: str = "") -> Html:
    """A table; cells that are numbers stand to the right, and so do their headings.

    Args:
        header: of the columns.
        rows: as many cells each.
        note: said below it.
    """
    body = [list(row) for row in rows]
    numeric = [bool(body) and all(_is_number(row[place]) for row in body) for place in range(len(header))]
    heads = [tag("th", name, scope="col", class_="n" if numeric[place] else None) for place, name in enumerate(header)]
    lines = [
        tag("tr", [tag("td", _cell(cell), class_="n" if numeric[place] else None) for place, cell in enumerate(row)])
        for row in body
    ]
    whole = tag("table", tag("thead", tag("tr", heads)), tag("tbody", lines))
    return tag("div", whole, tag("p", note, class_="note") if note else None, class_="panel")


def facts(pairs: Iterable[tuple[str, Child]]) -> Html:
    """Names with what is known of them."""
    lines = [tag("tr", tag("th", name, scope="row"), tag("td", _cell(value))) for name, value in pairs]
    return tag("div", tag("table", tag("tbody", lines), class_="facts"), class_="panel")


def cards(found: Iterable[tuple[str, str]]) -> Html:
    """A few values in large type, each with a word below it."""
    return tag(
        "div", [tag("div", tag("b", value), tag("span", name), class_="card") for value, name in found], class_="cards"
    )


def section(title: str, *children: Child) -> Html | None:
    """A heading with what stands below it; None where that is nothing."""
    given = [child for child in children if child is not None]
    return tag("section", tag("h2", title), given) if given else None


def figures(found: Sequence[Html]) -> Html | None:
    """Figures beside each other, as far as the page is wide."""
    return tag("div", found, class_="figures") if found else None


def number(value: float | None) -> str:
    """A count with its thousands apart, any other number with four digits; a dash where there is none."""
    if value is None:
        return NONE
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1e6 else f"{value:.4g}"


def share(part: float, whole: float) -> str:
    """A part of a whole in percent."""
    if not whole:
        return NONE
    percent = 100 * part / whole
    return f"{percent:.0f} %" if percent in (0, 100) else f"{percent:.2g} %" if percent < 10 else f"{percent:.1f} %"


def sentence(text: str) -> str:
    """A reason as a sentence of its own."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def chosen(windows: Sequence[str], most: int = MOST_WINDOWS) -> tuple[Sequence[str], str]:
    """The newest windows, and a note on how many are not among them."""
    left = len(windows) - most
    return (windows, "") if left <= 0 else (windows[left:], f"{left:,} earlier windows are not shown.")


def _cell(cell: Child) -> Child:
    return shown(cell) if isinstance(cell, str) else cell


def _is_number(cell: Child) -> bool:
    if isinstance(cell, Html):
        return _NUMBER.fullmatch(re.sub("<[^>]*>", "", cell.text)) is not None
    return isinstance(cell, int | float) or (isinstance(cell, str) and _NUMBER.fullmatch(cell) is not None)
