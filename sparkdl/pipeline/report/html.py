"""HTML as values: what is not markup already is escaped, so no text of a record can become markup.

Enters: texts and numbers, whatever they hold. Leaves: ``Html``. Tags are made here and nowhere else.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Child", "Html", "shown", "tag"]

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)
"""Characters that no page may hold, or that turn around what is read: they are shown by their codes."""
_VOID = frozenset({"meta", "br"})


@dataclass(frozen=True, slots=True)
class Html:
    """Markup; made by ``tag`` alone, and by whoever can answer for every character of it."""

    text: str


Child = Html | str | int | float | None | Iterable["Child"]


def tag(element: str, *children: Child, **attributes: str | int | float | None) -> Html:
    """An element.

    Args:
        element: its name, a word of the code.
        children: in order; a text is escaped, None is nothing.
        attributes: by name, ``class_`` for ``class`` and ``_`` for ``-``; one that is None is left out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_seen(_text(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if element in _VOID:
        return Html(f"<{element}{given}>")
    return Html(f"<{element}{given}>{_inner(children)}</{element}>")


def shown(text: object, most: int = 200) -> str:
    """A value as a text of at most ``most`` characters; what was cut is said."""
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[:most]}… ({len(whole):,} characters)"


def _inner(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child.text
    if isinstance(child, str | int | float):
        return html.escape(_seen(_text(child)))
    return "".join(_inner(one) for one in child)


def _text(value: str | int | float) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _seen(text: str) -> str:
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
