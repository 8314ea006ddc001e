"""Several columns under one key of ``features``: ``I1..I13`` counts, ``age, income`` lists.

Enters: the section as it is written. Leaves: the same with one key a column.
"""

from __future__ import annotations

import re
from dataclasses import replace

from sparkdl.pipeline.file.problems import Problems
from sparkdl.pipeline.file.tree import Node, Section

__all__ = ["each_by_name"]

_RANGE = re.compile(r"(?P<stem>.*?)(?P<first>\d+)\.\.(?P=stem)(?P<last>\d+)")
MAX_COLUMNS = 10_000


def each_by_name(root: Section, problems: Problems) -> Section:
    """Return the file's tree with every feature under a key of its own; one that is named is no part of a range."""
    features = root.entries.get("features")
    if not isinstance(features, Section) or not any(".." in key or "," in key for key in features.entries):
        return root
    parts = [(part.strip(), node) for key, node in features.entries.items() for part in key.split(",")]
    named = {part for part, _ in parts if not _RANGE.fullmatch(part)}
    found: dict[str, Node] = {}
    for part, node in parts:
        for name in _names(part, node, problems):
            if name in named and name != part:
                continue
            if name in found:
                problems.add(node.at, f"features.{name} stands at {found[name].at} already: keep one of the two")
            found.setdefault(name, node)
        if len(found) > MAX_COLUMNS:
            problems.add(node.at, f"features.{part} makes more than {MAX_COLUMNS} features: gather them in vectors")
            break
    return replace(root, entries={**root.entries, "features": replace(features, entries=found)})


def _names(part: str, node: Node, problems: Problems) -> list[str]:
    span = _RANGE.fullmatch(part)
    if span is None:
        return [part]
    first, last = int(span["first"]), int(span["last"])
    if not 0 < last - first < MAX_COLUMNS:
        sentence = f"features.{part} counts from {first} to {last}: count upwards, by less than {MAX_COLUMNS}"
        problems.add(node.at, sentence)
        return []
    width = len(span["first"]) if span["first"].startswith("0") else 0
    return [f"{span['stem']}{number:0{width}d}" for number in range(first, last + 1)]
