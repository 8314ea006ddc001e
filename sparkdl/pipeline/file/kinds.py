"""What may stand at a place of the file, read from the annotations of the sections.

Enters: a type as msgspec describes it. Leaves: its sections and their fields, and the words that a message needs.
"""

from __future__ import annotations

from msgspec import inspect

from sparkdl.pipeline.file.tree import Node, Scalar, Section
from sparkdl.pipeline.spec.base import plain_type, section_type
from sparkdl.pipeline.spec.whole import PipelineSpec

__all__ = ["alternatives", "fields_of", "sections_of", "spelled_out", "wanted", "whole_file"]


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
