"""What a file leaves out or says relative to itself, made whole.

Enters: what a file says, and the folder it lies in. Leaves: the same with a name, a split, the columns that it
hashes, a label that judges and a registry, and with addresses that mean one place wherever they are read: a relative
path beside a local file becomes ``file:///...``.
"""

from __future__ import annotations

import os
import posixpath
from typing import Any

from msgspec.structs import replace

from sparkdl.pipeline.spec import HashSplit, PipelineSpec, TimeSplit
from sparkdl.storage.address import looks_like_a_table

__all__ = ["beside", "completed"]

_PLACES = ("tables", "shards", "registry", "runs")


def completed(spec: PipelineSpec, name: str, folder: str) -> PipelineSpec:
    """Return ``spec`` with defaults that follow from other values filled in.

    Args:
        spec: what the file says.
        name: of the pipeline, where it says none.
        folder: that the file lies in, an absolute path or a URI.
    """
    named = spec.name or name
    source = _moved(spec.source, spec.source.addresses, folder)
    root = beside(spec.root, folder)
    places = _moved(spec.places, _PLACES, folder)
    places = replace(places, **{one: getattr(places, one) or f"{root}/{named}/{one}" for one in _PLACES})
    publish = _moved(spec.publish, ("registry",), folder)
    publish = replace(
        publish,
        name=publish.name or named,
        registry=publish.registry or places.registry,
        label=publish.label or next(iter(spec.label)),
    )
    score = _moved(spec.score, ("target",), folder)
    split = spec.split or (TimeSplit() if source.when else HashSplit())
    if isinstance(split, HashSplit):
        split = replace(split, group=split.group or source.key)
    return replace(
        spec,
        name=named,
        root=root,
        places=replace(places, registry=publish.registry),
        code=spec.code if _absolute(spec.code) else _joined(folder, spec.code),
        source=source,
        split=split,
        publish=publish,
        score=replace(score, target=score.target or f"{places.tables}/predictions"),
    )


def beside(text: str, folder: str) -> str:
    """The address that ``text`` means in a file that lies in ``folder``; names of tables and whole addresses stay."""
    if looks_like_a_table(text) or _absolute(text):
        return text.rstrip("/") or "/"
    joined = _joined(folder, text)
    return joined if "://" in joined else f"file://{joined}"


def _absolute(text: str) -> bool:
    return text.startswith(("/", "~", "file:", "dbfs:")) or "://" in text


def _joined(folder: str, text: str) -> str:
    if "://" not in folder:
        return os.path.normpath(os.path.join(folder, text))
    scheme, _, rest = folder.partition("://")
    return f"{scheme}://{posixpath.normpath(posixpath.join(rest, text))}"


def _moved(section: Any, names: tuple[str, ...], folder: str) -> Any:
    moved: dict[str, Any] = {}
    for name in names:
        match getattr(section, name, None):
            case str(text):
                moved[name] = beside(text, folder)
            case tuple(texts):
                moved[name] = tuple(beside(text, folder) for text in texts)
    return replace(section, **moved)
