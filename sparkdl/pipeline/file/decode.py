"""From the tree of a file to the values of its sections, as many of them as are valid."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
from msgspec import inspect

from sparkdl.errors import ConfigError
from sparkdl.pipeline.file.environment import Environment
from sparkdl.pipeline.file.problems import Path, Problems, choices, dotted, nearest
from sparkdl.pipeline.file.tree import Filled, Listing, Node, Section, written
from sparkdl.pipeline.spec.base import Refused, Secret, bound_broken, plain_type, section_type, spelled
from sparkdl.pipeline.spec.whole import PipelineSpec


class _NoValue:
    """What stands for a value that could not be made."""


INVALID = _NoValue()
"""Stands for a value whose problems were told."""
_OTHER_FORM = _NoValue()
"""Stands for a value of another type than the one that was tried."""


@dataclass
class Decoder:
    """Makes values of nodes.

    msgspec decodes each text, number and truth value. Sections, mappings and lists are walked here, for
    ``msgspec.convert`` stops at the first mistake, and leaves the key of a mapping out of its path
    (``$.features[...].log``).

    Attributes:
        problems: takes what is wrong.
        environment: what ``${NAME}`` stands for.
        references: the texts that name variables of the environment, by the path of what these made of it.
        valid: the valid values of each mapping that holds others, too.
        invalid_sections: by identity: one that stands for several columns is told once.
    """

    problems: Problems
    environment: Environment
    references: dict[Path, str] = field(default_factory=dict)
    valid: dict[Path, dict[str, Any]] = field(default_factory=dict)
    invalid_sections: dict[int, Section] = field(default_factory=dict)

    def fields(self, node: Section, kind: inspect.StructType, path: Path) -> tuple[dict[str, Any], set[str]]:
        """The valid values of a section by field, and the names of those that are not valid."""
        fields, written = fields_of(kind), [name for name in node if name != kind.tag_field]
        invalid: set[str] = set()
        for name in written:
            if name in fields:
                continue
            names = [*fields, *filter(None, [kind.tag_field])]
            absent = [candidate for candidate in names if candidate not in written and candidate not in invalid]
            meant = nearest(name, absent) or nearest(name, names)
            remedy = choices(name, [meant] if meant else fields)
            self._refuse((*path, name), f" is not a key of {dotted(path) or 'a pipeline'}: {remedy}")
            invalid.add(meant or name)
        for name, option in fields.items():
            if option.required and name not in written and name not in invalid:
                self._refuse((*path, name), f" is missing: {_about(option.type)}")
                invalid.add(name)
        values = {
            name: self.value(node[name], option.type, (*path, name))
            for name, option in fields.items()
            if name in written
        }
        invalid |= {name for name, value in values.items() if value is INVALID}
        return {name: value for name, value in values.items() if name not in invalid}, invalid

    def value(self, node: Node, kind: inspect.Type, path: Path) -> Any:
        """The value of a node, or ``INVALID``."""
        node = self._filled(node, path)
        if node is INVALID or id(node) in self.invalid_sections:
            return INVALID
        if isinstance(node, Filled) and not node.public:
            self.references[path] = node.reference
        section, section_types = spelled_out(node, kind), sections_of(kind)
        if isinstance(section, Section) and section_types:
            value = self._section(section, section_types, path)
            if value is INVALID:
                self.invalid_sections[id(section)] = section
            return value
        for plain in alternatives(kind):
            value = self._made(node, plain, path)
            if value is _OTHER_FORM:
                continue
            broken = value is not INVALID and bound_broken(kind, _as_shown(node, value))
            return self._refuse(path, broken) if broken else value
        if isinstance(node, Filled) and node.value != node.text:  # a number, where a text is wanted
            return self.value(replace(node, value=node.text), kind, path)
        return self._refuse(path, _mistaken(node, kind))

    def _filled(self, node: Any, path: Path) -> Any:
        """The node, with the variables that a text names filled in; ``INVALID`` where that cannot be."""
        if isinstance(node, str) and "${" in node:
            mistake = self.environment.mistake(node, path)
            if mistake:
                return self._refuse(path, f"={node!r} {mistake}")
            return self.environment.filled(node)
        return node

    def _section(self, node: Section, section_types: list[inspect.StructType], path: Path) -> Any:
        kind = self._chosen(node, section_types, path)
        if kind is None:
            return INVALID
        values, invalid = self.fields(node, kind, path)
        if invalid:
            return INVALID
        try:
            return kind.cls(**values)
        except Refused as refused:
            for name, sentence in refused.found:
                self._refuse((*path, *filter(None, name.split(".", 1))), sentence)
        except ConfigError as error:
            sentence = str(error)
            name = re.match(r"\w*", sentence)[0]  # type: ignore[index]
            if name in values:
                self._refuse((*path, name), sentence.removeprefix(name))
            else:
                self._refuse(path, f": {sentence}")
        return INVALID

    def _chosen(self, node: Section, section_types: list[inspect.StructType], path: Path) -> inspect.StructType | None:
        """The type of section that a node says it is; None where it says none that is known."""
        tag = section_types[0].tag_field
        if tag is None:
            return section_types[0]
        by_tag = {str(section_type.tag): section_type for section_type in section_types}
        if tag not in node:
            misspelt = nearest(tag, node, cutoff=0.7)
            if misspelt:
                self._refuse((*path, misspelt), f" is not a key of {dotted(path)}: write {tag}")
            else:
                self._refuse((*path, tag), f" is missing: write one of {', '.join(by_tag)}")
            return None
        named = self._filled(node[tag], (*path, tag))
        name = spelled(_meaning(named))
        if name not in by_tag and named is not INVALID:
            self._refuse((*path, tag), f"={written(named)} is not known: {choices(name, by_tag)}")
        return by_tag.get(name)

    def _made(self, node: Node, kind: inspect.Type, path: Path) -> Any:
        """What a node comes to as one plain type that is no section; ``_OTHER_FORM`` where it is of another."""
        if isinstance(node, Section):
            if not isinstance(kind, inspect.DictType | inspect.AnyType):
                return _OTHER_FORM
            inner = kind.value_type if isinstance(kind, inspect.DictType) else kind
            values = {name: self.value(entry, inner, (*path, name)) for name, entry in node.items()}
            valid = {name: value for name, value in values.items() if value is not INVALID}
            if len(valid) < len(values):
                self.valid[path] = valid
                return INVALID
            return values
        items: Any = node
        scalar = _meaning(node)
        if isinstance(kind, inspect.VarTupleType) and isinstance(scalar, str) and is_of_type(scalar, kind.item_type):
            items = [node]  # one text is a list of one
        if not isinstance(items, list):
            return _converted(scalar, kind)
        match kind:
            case inspect.AnyType():
                kinds: list[inspect.Type] = [kind] * len(items)
            case inspect.VarTupleType():
                kinds = [kind.item_type] * len(items)
            case inspect.TupleType() if len(items) == len(kind.item_types):
                kinds = list(kind.item_types)
            case _:
                return _OTHER_FORM
        elements = [
            self.value(item, inner, (*path, index))
            for index, (item, inner) in enumerate(zip(items, kinds, strict=True))
        ]
        if INVALID in elements:
            return INVALID
        return elements if isinstance(kind, inspect.AnyType) else tuple(elements)

    def _refuse(self, path: Path, sentence: str) -> _NoValue:
        self.problems.add_value(path, sentence)
        return INVALID


_SCALAR_TYPES: dict[type[inspect.Type], Any] = {
    inspect.AnyType: Any,
    inspect.StrType: str,
    inspect.IntType: int,
    inspect.FloatType: float,
    inspect.BoolType: bool,
    inspect.NoneType: None,
}


def _converted(value: Any, kind: inspect.Type) -> Any:
    literal = Literal[tuple(kind.values)] if isinstance(kind, inspect.LiteralType) else None
    if literal is None and type(kind) not in _SCALAR_TYPES:
        return _OTHER_FORM
    if isinstance(kind, inspect.IntType) and isinstance(value, float) and value.is_integer():
        return int(value)  # 1e3 is a whole number
    try:
        return msgspec.convert(value, literal or _SCALAR_TYPES[type(kind)])
    except msgspec.ValidationError:
        return _OTHER_FORM


def is_of_type(value: Any, kind: inspect.Type) -> bool:
    """Whether a text, a number or a truth value is of a type, whatever its bounds."""
    return any(_converted(value, plain) is not _OTHER_FORM for plain in alternatives(kind))


def _meaning(node: Any) -> Any:
    return node.value if isinstance(node, Filled) else node


def _as_shown(node: Node, value: Any) -> Any:
    """A value, which a sentence shows by its reference where it came from the environment."""
    if isinstance(node, Section | Listing):
        return value
    if isinstance(node, Filled) and isinstance(node.value, str) and not node.public:
        return Secret(node.value, node.reference)
    return _meaning(node)


def _about(kind: inspect.Type) -> str:
    description = str(plain_type(kind)[1].get("description", "")).rstrip(".")
    return f"{description[:1].lower()}{description[1:]}" if description else f"give {wanted(kind)}"


def _mistaken(node: Node, kind: inspect.Type) -> str:
    """The sentence for a value of another type than the one that is wanted."""
    kinds = alternatives(kind)
    words = [str(value) for literal in kinds if isinstance(literal, inspect.LiteralType) for value in literal.values]
    value = _meaning(node)
    if words and isinstance(value, str):
        return f"={written(node)} is not known: {choices(value, words)}"
    if isinstance(node, Section | Listing):
        return f"={written(node)} is {'a section' if isinstance(node, Section) else 'a list'}: give {wanted(kind)}"
    written_as = {bool: "a truth value", int: "a number", float: "a number", type(None): "empty"}
    form, in_quotes = written_as.get(type(value), "a text"), ""
    if value is not None and any(isinstance(inner, inspect.StrType) for inner in kinds):
        in_quotes = f", or '{spelled(value)}' with its quotation marks"
    return f"={written(node)} is {form}: give {wanted(kind)}{in_quotes}"


# The types of values, read from the annotations of the sections


def whole_file() -> inspect.StructType:
    """The type of the whole file."""
    return section_type(PipelineSpec)


def alternatives(kind: inspect.Type) -> list[inspect.Type]:
    """The types that may stand here, one by one, without what is said about them."""
    kind, _ = plain_type(kind)
    return [plain_type(inner)[0] for inner in (kind.types if isinstance(kind, inspect.UnionType) else [kind])]


def sections_of(kind: inspect.Type) -> list[inspect.StructType]:
    """Those of them that are sections."""
    return [section for section in alternatives(kind) if isinstance(section, inspect.StructType)]


def fields_of(section: inspect.StructType) -> dict[str, inspect.Field]:
    """The fields of a section, without the one that says its kind."""
    return {field.encode_name: field for field in section.fields}


def spelled_out(node: Any, kind: inspect.Type) -> Any:
    """A section where one is meant by a bare text: ``age: number`` is ``age: {type: number}``."""
    section_types = sections_of(kind)
    if not isinstance(_meaning(node), str) or not section_types:
        return node
    name = section_types[0].tag_field or getattr(section_types[0].cls, "short", "")
    return Section({name: node}, {}) if name else node


def wanted(kind: inspect.Type) -> str:
    """What may stand here, in words."""
    tags = [str(section_type.tag) for section_type in sections_of(kind) if section_type.tag_field]
    if tags:
        return f"one of {', '.join(tags)}"
    kinds = [inner for inner in alternatives(kind) if not isinstance(inner, inspect.NoneType)]
    return " or ".join(dict.fromkeys(map(_words, kinds)))


def _words(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.LiteralType):
        return ", ".join(map(str, kind.values[:-1])) + (" or " if kind.values[1:] else "") + str(kind.values[-1])
    if isinstance(kind, inspect.VarTupleType):
        return f"a list, each {wanted(kind.item_type)}"
    if isinstance(kind, inspect.TupleType):
        return f"a list of {len(kind.item_types)}, each {wanted(kind.item_types[0])}"
    if isinstance(kind, inspect.StructType):
        names = list(fields_of(kind))
        return f"a section with {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
    words = {
        inspect.StrType: "a text",
        inspect.IntType: "a whole number",
        inspect.FloatType: "a number",
        inspect.BoolType: "true or false",
        inspect.DictType: "a section of `name: value`",
    }
    return words.get(type(kind), "a value")
