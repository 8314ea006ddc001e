"""From the tree of a file to the values of its sections, as many of them as are sound.

Enters: a tree with its lines, and the annotations of the sections. Leaves: values, where each stands, and a sentence
for each place that is wrong: an unknown key, one that is missing, a wrong type, a bound, a contradiction in a section.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import inspect

from sparkdl.errors import ConfigError
from sparkdl.pipeline.file.problems import Problems, choices, nearest
from sparkdl.pipeline.file.tree import Listing, Node, Scalar, Section, Unknown
from sparkdl.pipeline.spec.base import Refused, Secret, bound_broken, plain_type, section_type
from sparkdl.pipeline.spec.whole import PipelineSpec

__all__ = [
    "BAD",
    "Decoder",
    "Path",
    "alternatives",
    "dotted",
    "fields_of",
    "sections_of",
    "spelled_out",
    "wanted",
    "whole_file",
]

Path = tuple[str | int, ...]


class _Bad:
    """What stands for a value that could not be made."""


BAD = _Bad()


def dotted(path: Path) -> str:
    """A path as messages write it: ``search.space.train.epochs[1]``."""
    return re.sub(r"\.\[", "[", ".".join(f"[{part}]" if isinstance(part, int) else part for part in path))


@dataclass
class Decoder:
    """Makes values of nodes.

    Attributes:
        problems: takes what is wrong.
        places: where the value of each path stands.
        references: the texts that name variables of the environment, by the path of what these made of it.
        refused: sections that are not sound, by identity: one that stands for several columns is told once.
        sound: the sound values of each mapping that holds others, too.
    """

    problems: Problems
    places: dict[Path, str] = field(default_factory=dict)
    refused: dict[int, Node] = field(default_factory=dict)
    sound: dict[Path, dict[str, Any]] = field(default_factory=dict)
    references: dict[Path, str] = field(default_factory=dict)

    def place(self, path: Path) -> str:
        """Where a path stands, or else the section around it."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, self.problems.name)

    def wrong(self, path: Path, sentence: str) -> _Bad:
        """Take a problem of the value at ``path``."""
        self.problems.add(self.place(path), f"{dotted(path)}{sentence}")
        return BAD

    def fields(self, node: Section, kind: inspect.StructType, path: Path) -> tuple[dict[str, Any], set[str]]:
        """The values of a section by field, and the names of those that are not sound."""
        known, given = fields_of(kind), {name for name in node.entries if name != kind.tag_field}
        bad: set[str] = set()
        for name in [name for name in node.entries if name in given - known.keys()]:
            self.places[*path, name] = node.entries[name].at
            names = [*known, *filter(None, [kind.tag_field])]
            absent = [one for one in names if one not in given and one not in bad]
            meant = nearest(name, absent) or nearest(name, names)
            owner = dotted(path) or "a pipeline"
            self.wrong((*path, name), f" is not a key of {owner}: {choices(name, [meant] if meant else known)}")
            bad |= {meant or name}
        for name, one in known.items():
            if one.required and name not in given and name not in bad:
                self.wrong((*path, name), f" is missing: {_about(one.type)}")
                bad.add(name)
        values = {
            name: self.value(node.entries[name], known[name].type, (*path, name)) for name in known if name in given
        }
        bad |= {name for name, value in values.items() if value is BAD}
        return {name: value for name, value in values.items() if name not in bad}, bad

    def value(self, node: Node, kind: inspect.Type, path: Path) -> Any:
        """The value of a node, or ``BAD``."""
        self._stands(node, path)
        if id(node) in self.refused or (isinstance(node, Scalar) and isinstance(node.value, Unknown)):
            return BAD
        written, node = node, spelled_out(node, kind)
        if isinstance(node, Section) and (found := sections_of(kind)):
            made = self._chosen(node, found, path)
            if made is BAD:
                self.refused[id(written)] = written
            return made
        fitting = next((one for one in alternatives(kind) if _takes(plain_type(one)[0], node)), None)
        if fitting is None and isinstance(node, Scalar) and node.filled is not None and node.filled != node.value:
            return self.value(replace(node, value=node.filled), kind, path)
        if fitting is None:
            return self.wrong(path, _mistaken(node, kind, path))
        broken = bound_broken(kind, _as_told(node)) if isinstance(node, Scalar) else None
        if broken:
            return self.wrong(path, broken)
        return self._made(node, plain_type(fitting)[0], path)

    def _stands(self, node: Node, path: Path) -> None:
        self.places[path] = node.at
        if isinstance(node, Scalar) and node.reference:
            self.references[path] = node.reference

    def _made(self, node: Node, kind: inspect.Type, path: Path) -> Any:
        if isinstance(kind, inspect.AnyType):
            return self._anything(node, path)
        if isinstance(kind, inspect.DictType):
            assert isinstance(node, Section)
            return self._all(
                {name: self.value(one, kind.value_type, (*path, name)) for name, one in node.entries.items()},
                kind,
                path,
            )
        if isinstance(kind, inspect.VarTupleType | inspect.ListType):
            items = node.items if isinstance(node, Listing) else (node,)
            return self._all(
                tuple(self.value(one, kind.item_type, (*path, i)) for i, one in enumerate(items)), kind, path
            )
        if isinstance(kind, inspect.TupleType):
            assert isinstance(node, Listing)
            pairs = zip(node.items, kind.item_types, strict=True)
            return self._all(
                tuple(self.value(one, inner, (*path, i)) for i, (one, inner) in enumerate(pairs)), kind, path
            )
        assert isinstance(node, Scalar)
        if isinstance(kind, inspect.IntType):
            return int(node.value)  # type: ignore[arg-type]
        return float(node.value) if isinstance(kind, inspect.FloatType) else node.value  # type: ignore[arg-type]

    def _all(self, values: Any, kind: inspect.Type, path: Path) -> Any:
        if any(value is BAD for value in (values.values() if isinstance(values, dict) else values)):
            if isinstance(values, dict):
                self.sound[path] = {name: value for name, value in values.items() if value is not BAD}
            return BAD
        broken = bound_broken(kind, values)
        return self.wrong(path, broken) if broken else values

    def _anything(self, node: Node, path: Path) -> Any:
        self._stands(node, path)
        if isinstance(node, Scalar) and isinstance(node.value, Unknown):
            return BAD
        if isinstance(node, Section):
            return self._all(
                {name: self._anything(one, (*path, name)) for name, one in node.entries.items()},
                inspect.AnyType(),
                path,
            )
        if isinstance(node, Listing):
            return self._all(
                [self._anything(one, (*path, i)) for i, one in enumerate(node.items)], inspect.AnyType(), path
            )
        if isinstance(node.value, float) and not math.isfinite(node.value):
            return self.wrong(path, f"={node} is no finite number: give one that is")
        return node.value

    def _chosen(self, node: Section, found: list[inspect.StructType], path: Path) -> Any:
        tag = found[0].tag_field
        if tag is None:
            return self._section(node, found[0], path)
        kinds = {str(one.tag): one for one in found}
        if tag not in node.entries:
            near = nearest(tag, node.entries, cutoff=0.7)
            if near:
                self.places[*path, near] = node.entries[near].at
                return self.wrong((*path, near), f" is not a key of {dotted(path)}: write {tag}")
            return self.wrong((*path, tag), f" is missing: write one of {', '.join(kinds)}")
        said = node.entries[tag]
        self.places[*path, tag] = said.at
        if not isinstance(said, Scalar) or said.value not in kinds:
            return self.wrong((*path, tag), f"={said} is not known: {choices(_text(said), kinds)}")
        return self._section(node, kinds[str(said.value)], path)

    def _section(self, node: Section, kind: inspect.StructType, path: Path) -> Any:
        values, bad = self.fields(node, kind, path)
        if bad:
            return BAD
        try:
            return kind.cls(**values)
        except Refused as refused:
            for name, sentence in refused.found:
                self.wrong((*path, *filter(None, name.split(".", 1))), sentence)
        except ConfigError as refused:
            name = re.match(r"\w*", str(refused))[0]  # type: ignore[index]
            sentence = str(refused)
            inside = name in values
            self.wrong((*path, name) if inside else path, sentence.removeprefix(name) if inside else f": {sentence}")
        return BAD


def _as_told(node: Scalar) -> Any:
    """The value of a node, which a sentence shows by its reference where it came from the environment."""
    if not node.reference or not isinstance(node.value, str):
        return node.value
    return node.value if isinstance(node.value, Secret) else Secret(node.value, node.reference)


def _about(kind: inspect.Type) -> str:
    said = str(plain_type(kind)[1].get("description", "")).rstrip(".")
    return f"{said[:1].lower()}{said[1:]}" if said else f"give {wanted(kind)}"


def _takes(kind: inspect.Type, node: Node) -> bool:
    """Whether a node has the form that a type needs; bounds and elements are looked at later."""
    if isinstance(kind, inspect.AnyType):
        return True
    if isinstance(node, Section):
        return isinstance(kind, inspect.DictType)
    if isinstance(node, Listing):
        fixed = len(kind.item_types) == len(node.items) if isinstance(kind, inspect.TupleType) else False
        return fixed or isinstance(kind, inspect.VarTupleType | inspect.ListType)
    value = node.value
    if isinstance(kind, inspect.LiteralType):
        return any(value == one and type(value) is type(one) for one in kind.values)
    if isinstance(kind, inspect.VarTupleType | inspect.ListType):  # one text is a list of one
        return isinstance(value, str) and any(_takes(plain_type(one)[0], node) for one in alternatives(kind.item_type))
    if isinstance(value, bool) or value is None:
        return isinstance(kind, inspect.BoolType if value is not None else inspect.NoneType)
    if isinstance(value, str):
        return isinstance(kind, inspect.StrType)
    whole = isinstance(value, int) or (math.isfinite(value) and value.is_integer())
    return isinstance(kind, inspect.FloatType) or (whole and isinstance(kind, inspect.IntType))


def _mistaken(node: Node, kind: inspect.Type, path: Path) -> str:
    """The sentence for a value of another type than the one that is wanted."""
    kinds = [plain_type(one)[0] for one in alternatives(kind)]
    words = [str(value) for one in kinds if isinstance(one, inspect.LiteralType) for value in one.values]
    if words and isinstance(node, Scalar) and isinstance(node.value, str):
        return f"={node} is not known: {choices(node.value, words)}"
    found = {Section: "a section", Listing: "a list"}.get(type(node))
    if isinstance(node, Scalar):
        names = {str: "a text", bool: "a truth value", int: "a number", float: "a number"}
        found = "empty" if node.value is None else names.get(type(node.value), "a text")
        hint = _hint(node, kinds)
        if hint:
            return f"={node} is {found}: write {hint}"
    shared = ""
    if found == "empty" and path[0] == "features" and len(path) == 2:  # within { } a comma ends an entry
        shared = f'; within {{ }} names that share a type are quoted together, "{path[-1]}, other": ...'
    return f"={node} is {found}: give {wanted(kind)}{shared}"


_TRUTH = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def _hint(node: Scalar, kinds: list[inspect.Type]) -> str:
    """What was most likely meant by a text where a number or a truth value is wanted, and the other way round."""
    value = node.value
    if isinstance(value, str):
        number = re.sub(r"[_,](?=\d{3}\b)", "", value.strip())
        if any(isinstance(one, inspect.IntType | inspect.FloatType) for one in kinds) and re.fullmatch(
            r"-?\d+(\.\d+)?", number
        ):
            return number.lstrip("0") or "0"
        if any(isinstance(one, inspect.BoolType) for one in kinds):
            return _TRUTH.get(value.lower(), value.lower() if value.lower() in ("true", "false") else "")
    elif value is not None and any(isinstance(one, inspect.StrType) for one in kinds):
        return f"'{_text(node)}', with quotation marks, if that is what is meant"
    return ""


def _text(node: Node) -> str:
    if not isinstance(node, Scalar) or isinstance(node.value, str):
        return str(node.value) if isinstance(node, Scalar) else str(node)
    return {True: "true", False: "false"}[node.value] if isinstance(node.value, bool) else str(node.value)


# What may stand at a place of the file, read from the annotations of the sections


def whole_file() -> inspect.StructType:
    """The type of the whole file."""
    return section_type(PipelineSpec)


def alternatives(kind: inspect.Type) -> list[inspect.Type]:
    """The types that may stand here, one by one."""
    kind, _ = plain_type(kind)
    return list(kind.types) if isinstance(kind, inspect.UnionType) else [kind]


def sections_of(kind: inspect.Type) -> list[inspect.StructType]:
    """Those of them that are sections."""
    plain = (plain_type(one)[0] for one in alternatives(kind))
    return [one for one in plain if isinstance(one, inspect.StructType)]


def fields_of(section: inspect.StructType) -> dict[str, inspect.Field]:
    """The fields of a section, without the one that says its kind."""
    return {field.encode_name: field for field in section.fields}


def spelled_out(node: Node, kind: inspect.Type) -> Node:
    """A section where one is meant by a bare text: ``age: number`` is ``age: {type: number}``."""
    found = sections_of(kind)
    if not isinstance(node, Scalar) or not isinstance(node.value, str) or not found:
        return node
    name = found[0].tag_field or getattr(found[0].cls, "short", "")
    return Section({name: node}, node.at) if name else node


def wanted(kind: inspect.Type) -> str:
    """What may stand here, in words."""
    tagged = [str(one.tag) for one in sections_of(kind) if one.tag_field]
    if tagged:
        return f"one of {', '.join(tagged)}"
    words = [_words(plain_type(one)[0]) for one in alternatives(kind) if not isinstance(one, inspect.NoneType)]
    return " or ".join(dict.fromkeys(words))


def _words(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.LiteralType):
        return ", ".join(map(str, kind.values[:-1])) + (" or " if kind.values[1:] else "") + str(kind.values[-1])
    if isinstance(kind, inspect.VarTupleType | inspect.ListType):
        return f"a list, each {wanted(kind.item_type)}"
    if isinstance(kind, inspect.TupleType):
        return f"a list of {len(kind.item_types)}, each {wanted(kind.item_types[0])}"
    if isinstance(kind, inspect.StructType):
        names = list(fields_of(kind))
        return f"a section with {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
    simple = {
        inspect.StrType: "a text",
        inspect.IntType: "a whole number",
        inspect.FloatType: "a number",
        inspect.BoolType: "true or false",
        inspect.DictType: "a section of `name: value`",
    }
    return simple.get(type(kind), "a value")
