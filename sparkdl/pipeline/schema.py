"""The JSON schema of a pipeline file, for editors that complete and check while one writes.

``python -m sparkdl.pipeline.schema`` (``make schema``) writes ``docs/pipeline.schema.json``; a test compares the two. A
file names it in its first line: ``# yaml-language-server: $schema=.../docs/pipeline.schema.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect, structs

from sparkdl.pipeline.file.decode import whole_file
from sparkdl.pipeline.spec import PipelineSpec

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.schema.json"


def schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a pipeline file."""
    definitions: dict[str, Any] = msgspec.json.schema(PipelineSpec)["$defs"]
    shorts = _short_forms(definitions)
    top = definitions.pop(PipelineSpec.__name__)
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A sparkdl pipeline",
        **{key: value for key, value in top.items() if key != "title"},
        "$defs": definitions,
    }
    return dict(_relaxed(document, shorts))


def render() -> str:
    """Return the text of the schema's file."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def sections_in(described: Any) -> Iterator[inspect.StructType]:
    """Every section in a type, as msgspec describes it: its parts are structs and tuples again."""
    if isinstance(described, inspect.StructType):
        yield described
    parts = structs.astuple(described) if isinstance(described, msgspec.Struct) else described
    for part in parts if isinstance(parts, tuple) else ():
        yield from sections_in(part)


def _short_forms(definitions: dict[str, Any]) -> dict[str, Any]:
    """What a bare text may be in place of a section, by its reference: ``age: number``, ``model: module:function``."""
    short_forms: dict[str, Any] = {}
    for section in sections_in(whole_file()):
        reference, name = f"#/$defs/{section.cls.__name__}", getattr(section.cls, "short", "")
        if section.tag_field and not any(field.required for field in section.fields):
            short_forms[reference] = {"const": section.tag}
        elif name and not section.tag_field:
            short_forms[reference] = _without_null(definitions[section.cls.__name__]["properties"][name])
    return short_forms


def _without_null(described: dict[str, Any]) -> dict[str, Any]:
    kinds = [kind for kind in described.get("anyOf", [described]) if kind.get("type") != "null"]
    return {key: value for key, value in kinds[0].items() if key != "default"}


def _relaxed(node: Any, shorts: dict[str, Any]) -> Any:
    """The same schema, with short forms beside their sections, and one text beside a list of texts."""
    if isinstance(node, list):
        return [_relaxed(entry, shorts) for entry in node]
    if not isinstance(node, dict):
        return node
    relaxed = {key: _relaxed(value, shorts) for key, value in node.items() if key != "discriminator"}
    references = [entry["$ref"] for entry in node.get("anyOf", [node]) if "$ref" in entry]
    constants = [shorts[entry]["const"] for entry in references if "const" in shorts.get(entry, {})]
    bare: list[Any] = [shorts[entry] for entry in references if entry in shorts and "const" not in shorts[entry]]
    bare += [{"enum": constants}] if constants else []
    items = node.get("items")
    if node.get("type") == "array" and isinstance(items, dict) and _takes_text(items):
        bare.append(_relaxed(items, shorts))
    return _beside(relaxed, bare) if bare else relaxed


def _takes_text(items: dict[str, Any]) -> bool:
    return any(
        entry.get("type") == "string" or all(isinstance(value, str) for value in entry.get("enum", [0]))
        for entry in items.get("anyOf", [items])
    )


_SAID = ("description", "default", "examples", "title")


def _beside(relaxed: dict[str, Any], bare: list[Any]) -> dict[str, Any]:
    described = {key: value for key, value in relaxed.items() if key in _SAID}
    kinds = (
        relaxed["anyOf"] if "anyOf" in relaxed else [{key: value for key, value in relaxed.items() if key not in _SAID}]
    )
    return {**described, "anyOf": [*kinds, *bare]}


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(PAGE)
