"""YAML 1.2 as a tree that knows its lines, within bounds.

``no`` and ``on`` are texts, ``1e-3`` is a number, a date is a text; a key stands once; an alias repeats what it names
within the bounds of the file.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from sparkdl.pipeline.file.problems import Path, Problems
from sparkdl.pipeline.spec.base import spelled

MAX_BYTES = 1 << 20
MAX_DEPTH = 40
MAX_NODES = 20_000
_MAX_DIGITS = 40

_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_STR_TAGS = ("!", "tag:yaml.org,2002:str")


class Section(dict[str, Any]):
    """Values by name.

    Attributes:
        lines: where each of them stands, such as ``churn.yaml:14``, by name.
    """

    def __init__(self, entries: Mapping[str, Any], lines: Mapping[Any, str]) -> None:
        super().__init__(entries)
        self.lines = lines


class Listing(list[Any]):
    """Several values.

    Attributes:
        lines: where each of them stands, by position.
    """

    def __init__(self, items: Iterable[Any], lines: Mapping[Any, str]) -> None:
        super().__init__(items)
        self.lines = lines


@dataclass(frozen=True, slots=True)
class Filled:
    """What a text became in which variables of the environment were filled in.

    Attributes:
        value: the text, a ``Secret``, or the number or truth value that it spells.
        text: the text itself, for where one is wanted.
        reference: the text of the file, which names the variables.
        public: whether all that they hold may be shown.
    """

    value: str | int | float | bool | None
    text: str
    reference: str
    public: bool

    def __str__(self) -> str:
        if isinstance(self.value, str) and not self.public:
            return repr(self.reference)
        return f"{self.text!r} (of {self.reference})"


Node = str | int | float | bool | Filled | Section | Listing | None


def written(node: Node) -> str:
    """A value of a tree as messages show it."""
    if isinstance(node, Section):
        return _cut("{" + ", ".join(f"{name}: {written(inner)}" for name, inner in node.items()) + "}")
    if isinstance(node, Listing):
        return _cut("[" + ", ".join(map(written, node)) + "]")
    if isinstance(node, str):
        return repr(_cut(node))
    return "null" if node is None else spelled(node)


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def lines_by_path(node: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield where each value below ``path`` stands."""
    for key, inner in node.items() if isinstance(node, Section) else enumerate(node):
        if key in node.lines:
            yield (*path, key), node.lines[key]
        if isinstance(inner, Section | Listing):
            yield from lines_by_path(inner, (*path, key))


def parse(data: bytes, name: str, problems: Problems) -> Node:
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
        return _Composer(text, lambda line: at, problems).whole()
    except (yaml.YAMLError, _TooMuch):
        return text


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

    def whole(self) -> Node:
        events: Iterator[Any] = iter(yaml.parse(self.text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
        starts = (event for event in events if isinstance(event, yaml.DocumentStartEvent))
        if next(starts, None) is None:
            return None
        root = self._node(next(events), events, ())
        second = next(starts, None)
        if second is not None:
            raise _TooMuch(_line(second), "starts a second document: keep one document a file")
        return root

    def _node(self, event: Any, events: Iterator[Any], path: tuple[str, ...]) -> Node:
        line, count_before = _line(event), self.count
        if len(path) > MAX_DEPTH:
            raise _TooMuch(line, f"is nested deeper than {MAX_DEPTH} levels: a pipeline needs no more than six")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise _TooMuch(line, f"uses *{event.anchor} before &{event.anchor} ends: write it out")
            node, count = self.anchors[event.anchor]
            node = copy.copy(node)  # its mistakes are told at each of its places
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
        if event.tag not in (None, *_STR_TAGS):
            raise _TooMuch(_line(event), f"has the tag {_cut(event.tag)!r}, and no tags are read: remove it")
        if isinstance(event, yaml.ScalarEvent):
            return typed(event.value) if event.implicit[0] else str(event.value)  # else in quotation marks
        if isinstance(event, yaml.MappingStartEvent):
            return self._section(events, path)
        items: list[Node] = []
        lines: dict[int, str] = {}
        while not isinstance(inner := next(events), yaml.SequenceEndEvent):
            lines[len(items)] = self.line_name(_line(inner))
            items.append(self._node(inner, events, (*path, str(len(items)))))
        return Listing(items, lines)

    def _section(self, events: Iterator[Any], path: tuple[str, ...]) -> Section:
        entries: dict[str, Node] = {}
        lines: dict[str, str] = {}
        while not isinstance(key := next(events), yaml.MappingEndEvent):
            line = self.line_name(_line(key))
            if not isinstance(key, yaml.ScalarEvent) or not key.value:
                raise _TooMuch(_line(key), "has a key that is no text: write `name: value`")
            name, key_path = key.value, (*path, key.value)
            node = self._node(next(events), events, key_path)
            if name in entries:
                self.problems.add(line, f"{'.'.join(key_path)} stands at {lines[name]} already: keep one of the two")
            elif name == "<<" and key.implicit[0]:
                self.problems.add(
                    line, f"{'.'.join(key_path)} merges keys, which YAML 1.2 does not know: write them out"
                )
            else:
                entries[name], lines[name] = node, line
        return Section(entries, lines)


def _line(event: Any) -> int:
    return int(event.start_mark.line)


def typed(text: str) -> str | int | float | bool | None:
    """What a text without quotation marks means in YAML 1.2."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _MAX_DIGITS:
        return text
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
