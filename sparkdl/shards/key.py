"""The content key of a shard set: equal keys mean equal rows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from sparkdl.columns.layout import Layout
from sparkdl.columns.spec import TensorSpec
from sparkdl.config import ShardConfig
from sparkdl.shards.manifest import WRITER_VERSION, Source
from sparkdl.storage import sha256_hex


def content_key(
    source: Source | None,
    schema: pa.Schema,
    tensors: Sequence[TensorSpec],
    layout: Layout,
    config: ShardConfig,
    plan: str = "",
) -> str:
    """The key of a set.

    It is a SHA-256 hash of everything that decides the rows and their form, so a second write is a cache hit and never
    a wrong one.

    Args:
        source: the pinned table; without one there is no key.
        schema: of the rows before they become tensors.
        tensors: as planned from it.
        layout: how columns become tensors.
        config: how shards are written.
        plan: a hash of what turns the source into the rows.

    Returns:
        64 hexadecimal digits; empty, which never hits, without a source.
    """
    if source is None:
        return ""
    decides = {
        "writer_version": WRITER_VERSION,
        "source": dataclasses.asdict(source),
        "schema": [(f.name, str(f.type)) for f in schema],
        "tensors": [dataclasses.asdict(spec) for spec in tensors],
        "layout": {f.name: _plain(getattr(layout, f.name)) for f in dataclasses.fields(layout) if f.name != "prepare"},
        **({"prepare": layout.prepare.hash} if layout.prepare is not None else {}),
        "config": dataclasses.asdict(config),
        "plan": plan,
    }
    return sha256_hex(json.dumps(decides, sort_keys=True).encode())


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
