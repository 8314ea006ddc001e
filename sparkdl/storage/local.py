"""Files of this machine: opened safely, and written so that they are whole or absent."""

from __future__ import annotations

import io
import os
import stat
from contextlib import suppress
from pathlib import Path

from sparkdl.errors import IntegrityError, StorageError


def leads_out(path: str, folder: str) -> bool:
    """Whether symbolic links take ``path``, which is named below ``folder``, to a place outside of it."""
    if path == folder:  # what the user named may be a link
        return False
    home, real = os.path.realpath(folder), os.path.realpath(path)
    return os.path.commonpath((home, real)) != home


def resolved(path: str, folder: str) -> str:
    """The path without links.

    Raises:
        IntegrityError: it leads out of ``folder``.
    """
    if leads_out(path, folder):
        raise IntegrityError(
            f"{path} is a link to {os.path.realpath(path)}, outside of {folder}: put the file itself there, or name "
            "its own folder"
        )
    return os.path.realpath(path)


def private_folder(path: Path) -> Path:
    """Return a folder of this user's that nobody else writes into, made if it is not there.

    For well-known names below the folder for temporary files, which all users of a machine share: whoever comes first
    could have put a folder or a link of his own there.

    Raises:
        StorageError: it is somebody else's, a link, or open to others.
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise StorageError(f"{path} belongs to somebody else, or others may write there: remove it, or set TMPDIR")
    return path


def open_regular(path: str, folder: str) -> io.BufferedReader:
    """Open a regular file for reading; nothing that waits, and nothing without an end.

    Raises:
        IntegrityError: it leads out of ``folder``, or is a pipe, a device or a socket.
        OSError: it is not there, or is a directory, or may not be read.
    """
    real = resolved(path, folder)
    descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{path} is a directory")
    raise IntegrityError(f"{path} is no regular file but a pipe or a device: put a file there")


class DurableFile(io.BufferedWriter):
    """A local file being written: durable once closed unless it need not be, gone if its ``with`` block fails."""

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self._path, self._durable = path, durable
        super().__init__(path.open("wb", buffering=0))

    def close(self) -> None:
        """Flush to the device, then close."""
        if not self.closed:
            try:
                self.flush()
                if self._durable:
                    os.fsync(self.fileno())
            finally:
                with suppress(OSError):  # a second flush of what did not fit
                    super().close()

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        """Close, or remove the file if the block failed."""
        if kind is None:
            self.close()
            return
        self.raw.close()
        self._path.unlink(missing_ok=True)
