"""Names and sizes of files, and whether all bytes of one came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import IntegrityError, StorageError


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a directory; ``modified`` is in seconds since the epoch, None where the filesystem does not say."""

    name: str
    bytes: int
    modified: float | None
    is_dir: bool


def entry_of(info: Mapping[str, Any]) -> Entry:
    """The entry behind what fsspec says of a name."""
    modified: Any = info.get("LastModified") or info.get("mtime") or info.get("last_modified") or info.get("created")
    seconds = modified.timestamp() if hasattr(modified, "timestamp") else modified
    if "modification_time" in info:  # HDFS: milliseconds
        seconds = info["modification_time"] / 1000
    name = str(info["name"]).rstrip("/").rsplit("/", 1)[-1]
    return Entry(name, int(info.get("size") or 0), seconds, info["type"] == "directory")


def check_size(uri: str, size: int, at_most: int | None) -> None:
    """Refuse a file that is larger than the caller takes, bytes."""
    if at_most is not None and size > at_most:
        raise IntegrityError(f"{uri} has {size} bytes, at most {at_most} are expected: it was altered, write it again")


def whole(uri: str, data: bytes, offset: int, length: int | None) -> bytes:
    """Return ``data``, if it is as long as was asked for."""
    if length is not None and len(data) != length:
        end = offset + length
        raise StorageError(f"{uri} ends at byte {offset + len(data)}, before {end}: it was cut short, write it again")
    return data


def size_text(count: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
