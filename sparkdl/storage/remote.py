"""Copies, removals, uploads and reads by range where fsspec's filesystems do not do what one expects."""

from __future__ import annotations

import glob
import io
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sparkdl.storage.failures import lacks_bucket


def exists(files: Any, path: str) -> bool:
    """Whether a name is there; fsspec's own ``exists`` takes every failure for absence, and a missing bucket, too."""
    try:
        return bool(files.info(path))
    except FileNotFoundError as cause:
        if lacks_bucket(cause):
            raise
        return False


def holds(files: Any, path: str, data: bytes) -> bool:
    """Whether a file is exactly these bytes, as one is whose writer was not told that it had been written."""
    try:
        return bool(files.info(path)["size"] == len(data) and files.cat_file(path) == data)
    except FileNotFoundError:
        return False


def listed(files: Any, path: str) -> list[dict[str, Any]]:
    """What fsspec says of the names in a folder; nothing of a folder that is not there, unless its bucket is not."""
    try:
        return list(files.ls(path, detail=True))
    except FileNotFoundError as cause:
        if lacks_bucket(cause):
            raise
        return []


def copy_tree(files: Any, source: str, target: str) -> None:
    """Copy a file, or all files of a folder, one by one; fsspec's ``mv`` asks object stores for folders and fails."""
    start = len(files._strip_protocol(source))
    for path in files.find(source):
        files.cp_file(path, target + path[start:])


def remove(files: Any, path: str, recursive: bool) -> None:
    """Remove a file, or a folder with all below it; ``rm`` alone takes a name with ``*`` for a pattern."""
    if not recursive:
        files.rm_file(path)
    elif not glob.has_magic(path):
        files.rm(path, recursive=True)
    else:
        for below in files.find(path):
            files.rm_file(below)


class Upload(io.RawIOBase):
    """A remote file being written: there once closed, never there if its ``with`` block fails."""

    def __init__(self, file: Any, forget: Callable[[], None]) -> None:
        self._file, self._forget = file, forget

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, data: Any) -> int:
        """Send bytes."""
        return int(self._file.write(data))

    def close(self) -> None:
        """Publish the file."""
        if not self.closed:
            super().close()
            self._file.close()

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        """Publish the file, or take it back if the block failed."""
        if kind is not None:
            super().close()
            with suppress(Exception):  # what the block raised is the error that matters
                self._abandon()
            self._forget()
        self.close()

    def _abandon(self) -> None:
        if not hasattr(self._file, "discard"):
            self._file.close()
            return
        self._file.discard()
        self._file.closed = True  # fsspec's own files publish what they have got when they are collected


class RangeReader(io.RawIOBase):
    """A file whose every read asks for exactly these bytes, in one request: Arrow knows best what it needs.

    Args:
        size: of the file, bytes.
        read_range: returns so many bytes from an offset on; called with bytes that lie in the file alone.
    """

    def __init__(self, size: int, read_range: Callable[[int, int], bytes]) -> None:
        self._size, self._read_range, self._position = size, read_range, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Return the position, bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to ``offset`` and return it; nothing is asked for."""
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Read ``size`` bytes, fewer at the end of the file; below 0: all that are left."""
        remaining = max(0, self._size - self._position)
        length = remaining if size < 0 else min(size, remaining)
        data = self._read_range(self._position, length) if length else b""
        self._position += len(data)
        return data
