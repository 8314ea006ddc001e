"""Commits written by hand, as another engine would make them: what delta-rs itself cannot make."""

from __future__ import annotations

import json
import os


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
