"""A file of another machine while it is written.

Enters: fsspec's open file. Leaves: one that a failing block takes back.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from typing import Any

__all__ = ["Upload"]


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
