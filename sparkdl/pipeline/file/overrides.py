"""Values from the command line, put into the tree of a file: ``train.epochs=3``, ``features.age.log=true``.

Enters: a tree and texts. Leaves: another tree; what an override sets stands at a place of that name.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec import inspect

from sparkdl.pipeline.file.environment import Environment, filled_in
from sparkdl.pipeline.file.kinds import alternatives, fields_of, sections_of, spelled_out, whole_file
from sparkdl.pipeline.file.problems import Problems
from sparkdl.pipeline.file.tree import Node, Section, flow
from sparkdl.pipeline.spec.base import plain_type

__all__ = ["overridden"]


def overridden(root: Section, override: str, environment: Environment, problems: Problems) -> Section:
    """Return ``root`` with one value set, as ``key.path=value`` says; the value is YAML of one line."""
    path, sign, text = override.partition("=")
    at = f"override {path.strip()}"
    if not sign or not path.strip():
        problems.add(f"override {override}", "sets nothing: write it as section.key=value")
        return root
    value = filled_in(flow(text, at, problems), environment, problems, tuple(path.strip().split(".")))
    found = _set(root, whole_file(), path.strip(), value, at, problems)
    assert isinstance(found, Section)
    return found


def _set(node: Node | None, kind: inspect.Type, path: str, value: Node, at: str, problems: Problems) -> Node:
    if not path:
        return value
    inside = {} if node is None else getattr(spelled_out(node, kind), "entries", {})
    name = _first(path, kind, inside)
    rest = path[len(name) + 1 :]
    inner = _kind_below(kind, name)
    if inner is None and not sections_of(kind):
        problems.add(at, f"sets {path} of a value that holds no keys: leave .{path} out")
        return value if node is None else node
    # an unknown key of a section is complained of with those of the file
    below = value if inner is None else _set(inside.get(name), inner, rest, value, at, problems)
    entries = {**inside, name: below}
    return replace(node, entries=entries) if isinstance(node, Section) else Section(entries, at)


def _first(path: str, kind: inspect.Type, inside: dict[str, Node]) -> str:
    """The first key of a path; keys of the user's own may have dots in them."""
    known = [name for name in inside if path == name or path.startswith(f"{name}.")]
    if known:
        return max(known, key=len)
    mapping = _mapping(kind)
    whole = (mapping is None and not sections_of(kind)) or (
        mapping is not None
        and not all(isinstance(plain_type(one)[0], inspect.StructType) for one in alternatives(mapping.value_type))
    )
    return path if whole else path.partition(".")[0]


def _mapping(kind: inspect.Type) -> inspect.DictType | None:
    plain = (plain_type(one)[0] for one in alternatives(kind))
    return next((one for one in plain if isinstance(one, inspect.DictType)), None)


def _kind_below(kind: inspect.Type, name: str) -> inspect.Type | None:
    mapping = _mapping(kind)
    if mapping is not None:
        return mapping.value_type
    if isinstance(plain_type(kind)[0], inspect.AnyType):
        return kind
    for section in sections_of(kind):
        if name == section.tag_field:
            return inspect.StrType()
        if name in fields_of(section):
            return fields_of(section)[name].type
    return None
