"""YAML 1.2 as a tree that knows its lines, within bounds.

``no`` and ``on`` are texts, ``1e-3`` is a number, a date is a text; a key stands once; an alias repeats what it names
within the bounds of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from sparkdl.pipeline.file.problems import Problems
from sparkdl.pipeline.spec.base import spelled

MAX_BYTES = 1 << 20
MAX_DEPTH = 40
MAX_NODES = 20_000
_MAX_DIGITS = 40

_NULL = re.compile(r"|~|null|Null|NULL")
_TRUE, _FALSE = re.compile(r"true|True|TRUE"), re.compile(r"false|False|FALSE")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_STR_TAGS = ("!", "tag:yaml.org,2002:str")


class Unknown(str):
    """A text that could not be filled in; its place has been complained of already."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A text, number, truth value or nothing.

    Attributes:
        value: what it is.
        at: the place it stands at, such as ``churn.yaml:14``.
        shown: how messages show it.
        filled: the text that variables of the environment made of it; it is a text where one is wanted.
        reference: the text that names these variables, if what they hold is not to be shown.
    """

    value: str | int | float | bool | None
    at: str
    shown: str = ""
    filled: str | None = None
    reference: str = ""

    def __str__(self) -> str:
        return self.shown or _shown(self.value)


@dataclass(frozen=True, slots=True)
class Listing:
    """Several values."""

    items: tuple[Node, ...]
    at: str

    def __str__(self) -> str:
        return _cut("[" + ", ".join(map(str, self.items)) + "]")


@dataclass(frozen=True, slots=True)
class Section:
    """Values by name."""

    entries: Mapping[str, Node]
    at: str

    def __str__(self) -> str:
        return _cut("{" + ", ".join(f"{name}: {node}" for name, node in self.entries.items()) + "}")


Node = Scalar | Listing | Section


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _shown(value: object) -> str:
    if isinstance(value, str):
        return repr(_cut(value))
    return "null" if value is None else _cut(spelled(value))


def parse(data: bytes, name: str, problems: Problems) -> Node | None:
    """Read a whole file; None if nothing can be made of it.

    Args:
        data: its bytes.
        name: what messages call it.
        problems: takes what is wrong.
    """
    if len(data) > MAX_BYTES:
        problems.add(name, f"has {len(data)} bytes, above the {MAX_BYTES} of any pipeline file: name the right one")
        return None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        line = data[: cause.start].count(b"\n") + 1
        problems.add(f"{name}:{line}", f"is no UTF-8 ({cause.reason}): save the file as UTF-8")
        return None
    try:
        node = _Composer(text, lambda line: f"{name}:{line + 1}", problems).whole()
    except _TooMuch as bound:
        problems.add(f"{name}:{bound.line + 1}", bound.sentence)
        return None
    except yaml.YAMLError as cause:
        problems.add(*_syntax(cause, text, name))
        return None
    if node is None and not problems.sentences:
        problems.add(name, "is empty: write at least source, features and label")
    return node


def flow(text: str, at: str, problems: Problems) -> Node:
    """Read one value as it is given on a command line: ``3``, ``[1, 2]``, ``{type: number}``, or a text."""
    try:
        return _Composer(text, lambda line: at, problems).whole() or Scalar(None, at)
    except (yaml.YAMLError, _TooMuch):
        return Scalar(text, at)


def _syntax(cause: yaml.YAMLError, text: str, name: str) -> tuple[str, str]:
    mark = getattr(cause, "problem_mark", None) or getattr(cause, "context_mark", None)
    if mark is None:
        line = text.encode()[: getattr(cause, "position", 0)].count(b"\n") + 1
        return (
            f"{name}:{line}",
            f"holds a character that YAML does not allow ({getattr(cause, 'reason', cause)}): remove it",
        )
    at, lines = f"{name}:{mark.line + 1}", text.splitlines()
    faulty_line = lines[mark.line] if mark.line < len(lines) else ""
    if re.match(r" *\t", faulty_line):
        return at, "is indented with a tab, which YAML does not allow: use spaces"
    if re.search(r"[{\[,].*\$\{", faulty_line):
        return at, "has a ${NAME} between braces or brackets: put it into quotation marks"
    reason = getattr(cause, "problem", None) or str(cause)
    return at, f"is no YAML ({reason}) at {_cut(faulty_line.strip())!r}: correct the line"


@dataclass(eq=False)
class _TooMuch(Exception):
    line: int
    sentence: str


@dataclass
class _Composer:
    """Makes a tree of YAML's events, and counts its values, with those that aliases repeat."""

    text: str
    line_name: Any
    problems: Problems
    anchors: dict[str, tuple[Node, int]] = field(default_factory=dict)
    count: int = 0

    def whole(self) -> Node | None:
        events: Iterator[Any] = iter(yaml.parse(self.text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
        root: Node | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise _TooMuch(_line(event), "starts a second document: keep one document a file")
                root = self._node(next(events), events, ())
        return None if isinstance(root, Scalar) and root.value is None else root

    def _node(self, event: Any, events: Iterator[Any], path: tuple[str, ...]) -> Node:
        line, count_before = _line(event), self.count
        if len(path) > MAX_DEPTH:
            raise _TooMuch(line, f"is nested deeper than {MAX_DEPTH} levels: a pipeline needs no more than six")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise _TooMuch(line, f"uses *{event.anchor} before &{event.anchor} ends: write it out")
            node, count = self.anchors[event.anchor]
            self.count += count
        else:
            self.count += 1
            node = self._made(event, events, path)
            if event.anchor:
                self.anchors[event.anchor] = node, self.count - count_before
        if self.count > MAX_NODES:
            raise _TooMuch(line, f"holds more than {MAX_NODES} values, with what aliases repeat: leave some out")
        return node

    def _made(self, event: Any, events: Iterator[Any], path: tuple[str, ...]) -> Node:
        at = self.line_name(_line(event))
        if event.tag not in (None, *_STR_TAGS):
            raise _TooMuch(_line(event), f"has the tag {_cut(event.tag)!r}, and no tags are read: remove it")
        if isinstance(event, yaml.ScalarEvent):
            return Scalar(typed(event.value) if event.implicit[0] else event.value, at)  # else in quotation marks
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Node] = []
            while not isinstance(inner := next(events), yaml.SequenceEndEvent):
                items.append(self._node(inner, events, (*path, str(len(items)))))
            return Listing(tuple(items), at)
        return self._section(at, events, path)

    def _section(self, at: str, events: Iterator[Any], path: tuple[str, ...]) -> Section:
        entries: dict[str, Node] = {}
        while not isinstance(key := next(events), yaml.MappingEndEvent):
            key_at = self.line_name(_line(key))
            if not isinstance(key, yaml.ScalarEvent) or not key.value:
                raise _TooMuch(_line(key), "has a key that is no text: write `name: value`")
            key_path = (*path, key.value)
            node = self._node(next(events), events, key_path)
            if key.value in entries:
                first = entries[key.value].at
                self.problems.add(key_at, f"{'.'.join(key_path)} stands at {first} already: keep one of the two")
            elif key.value == "<<" and key.implicit[0]:
                self.problems.add(
                    key_at, f"{'.'.join(key_path)} merges keys, which YAML 1.2 does not know: write them out"
                )
            else:
                entries[key.value] = replace(node, at=key_at)  # what begins on the next line is looked for at its key
        return Section(entries, at)


def _line(event: Any) -> int:
    return int(event.start_mark.line)


def typed(text: str) -> str | int | float | bool | None:
    """What a text without quotation marks means in YAML 1.2."""
    if len(text) > _MAX_DIGITS:
        return text
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text) or _FALSE.fullmatch(text):
        return text[0] in "tT"
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
