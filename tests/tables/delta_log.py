"""Commits written by hand, as another engine would make them: what delta-rs itself cannot make."""

from __future__ import annotations

import json
import os
import time

HIDDEN = (3, 4, 7, 11, 18, 29)


def commit(uri, version, *actions):
    """Write one version of a table's log."""
    with open(os.path.join(uri, "_delta_log", f"{version:020d}.json"), "w") as file:
        file.write("\n".join(json.dumps(action) for action in actions))


def actions(uri, version=0):
    """The actions of one version."""
    with open(os.path.join(uri, "_delta_log", f"{version:020d}.json")) as file:
        return [json.loads(line) for line in file]


def protocol(readers, writers):
    """The protocol of a table with these features, readers' ones among the writers'."""
    features = {"readerFeatures": [*readers], "writerFeatures": [*readers, *writers]}
    return {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}}


def edited_metadata(uri, change):
    """The first version's metadata action with a change."""
    metadata = next(action for action in actions(uri) if "metaData" in action)
    change(metadata["metaData"])
    return metadata


def remove(add):
    """The action that takes a file out of the table."""
    return {"remove": {"path": add["path"], "deletionTimestamp": int(time.time() * 1000), "dataChange": True}}


def hide_rows(uri, version, add=None):
    """Hide the rows ``HIDDEN`` of a file, by default the first one's; the vector is the protocol's own example."""
    add = add or next(action["add"] for action in actions(uri) if "add" in action)
    vector = {
        "storageType": "i",
        "pathOrInlineDv": "^Bg9^0rr910000000000iXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L",
        "sizeInBytes": 44,
        "cardinality": len(HIDDEN),
    }
    commit(uri, version, remove(add), {"add": {**add, "deletionVector": vector}})


def map_columns(metadata, mode="name", renamed=()):
    """Let a metadata action map its columns; ``renamed`` has new names of some."""
    metadata["configuration"] = {"delta.columnMapping.mode": mode, "delta.columnMapping.maxColumnId": "100"}
    schema = json.loads(metadata["schemaString"])
    for number, field in enumerate(_fields(schema), 1):
        field["metadata"] = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": field["name"]}
        field["name"] = dict(renamed).get(field["name"], field["name"])
    metadata["schemaString"] = json.dumps(schema)
    metadata["partitionColumns"] = [dict(renamed).get(name, name) for name in metadata["partitionColumns"]]


def _fields(kind):
    if isinstance(kind, dict):
        for inner in ("type", "elementType", "keyType", "valueType"):
            yield from _fields(kind.get(inner))
        for field in kind.get("fields", ()):
            yield field
            yield from _fields(field["type"])
