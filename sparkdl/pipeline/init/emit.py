"""Values and comments as YAML that reads back as the same values, whoever wrote the texts in them.

Enters: names, texts and numbers that a stranger chose. Leaves: text of a pipeline file. Every text goes through YAML's
own emitter; a ``${`` in it stays what it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from sparkdl.pipeline.file.tree import typed

__all__ = ["comment", "flow", "key", "line"]

_PLAIN = re.compile(r"[^\W\d_](?:[\w ()%/+-]*[\w)%])?", re.ASCII)
_RESERVED = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))
_WIDTH = 160
_LONGEST = 240


def key(text: str) -> str:
    """A text as the key of a section."""
    plain = _PLAIN.fullmatch(text) and text.lower() not in _RESERVED and typed(text) == text
    if plain and not text.endswith(" "):
        return text
    found: str = yaml.safe_dump(text, default_style='"', allow_unicode=True, width=10**9)
    return found.strip("\n")


def flow(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key(name)}: {flow(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    return key(value.replace("${", "$${")) if isinstance(value, str) else repr(value)


def comment(text: str) -> str:
    """A text behind a ``#``: one line, whatever stands in it."""
    whole = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    return f"# {whole if len(whole) <= _LONGEST else whole[: _LONGEST - 3] + '...'}"


def line(name: str, value: Any, why: str = "", indent: int = 0) -> list[str]:
    """``name: value  # why``, the comment above where the line would be too long."""
    text = f"{' ' * indent}{key(name)}: {flow(value)}"
    said = comment(why) if why else ""
    if said and len(text) + 2 + len(said) > _WIDTH:
        return [f"{' ' * indent}{said}", text]
    return [f"{text}  {said}" if said else text]
