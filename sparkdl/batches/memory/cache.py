"""The host's cache on the local disk, of blocks that cannot be mapped where they lie."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from sparkdl.errors import StorageError
from sparkdl.storage import storage_errors
from sparkdl.storage.local import private_folder

_TRAILER = 8
_SUFFIX, _TEMPORARY = ".block", ".tmp"
_STRIPES = 256
_STALE_SECONDS = 600.0


def default_folder() -> Path:
    """``$SPARKDL_CACHE``, or a folder of this user among the temporary files."""
    named = os.environ.get("SPARKDL_CACHE")
    if named:
        return Path(named)
    folder = Path(tempfile.gettempdir()) / f"sparkdl-cache-{os.getuid()}"
    with storage_errors(str(folder), "write"):
        return private_folder(folder)


class BlockCache:
    """A bounded folder of blocks.

    A block is fetched and decompressed once per host: all its processes share one folder. A block is one file, written
    under a temporary name and renamed, so that a reader sees it whole or not at all, whoever is killed when; it ends
    with its own hash, since a rename may outlive its bytes when the machine itself dies. The bound is kept under one
    lock file: the least recently used files go first, and whoever has one mapped keeps its bytes until he lets go.

    Args:
        folder: made if it is missing, for this user alone.
        max_bytes: bound of all files together; files being written (one a thread) come on top.

    Raises:
        StorageError: the folder cannot be made, or belongs to another user.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        with storage_errors(str(self.folder), "write"):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = self.folder.stat().st_uid
        if owner != os.getuid():
            raise StorageError(
                f"the cache {self.folder} belongs to user {owner}, not to {os.getuid()}: set cache_dir to a folder of "
                "yours"
            )

    def open(self, key: str, make: Callable[[], bytes]) -> tuple[int, int]:
        """Open the block ``key``, making it first if it is not there; of several readers one makes it, the rest wait.

        Args:
            key: names the bytes: letters, digits, ``-``.
            make: returns the bytes.

        Returns:
            an open file descriptor, which the caller closes, and the length of the bytes.
        """
        with storage_errors(str(self.folder), "write"):
            opened = self._look(key)
            if opened is not None:
                return opened
            with self._lock(f"stripe-{xxhash.xxh32_intdigest(key.encode()) % _STRIPES}"):
                opened = self._look(key)  # made by another while this one waited
                if opened is not None:
                    return opened
                return self._store(key, make())

    def discard(self, key: str) -> None:
        """Remove a block, so that it is made again."""
        with suppress(FileNotFoundError):
            self._path(key).unlink()

    def usage(self) -> int:
        """Bytes that the blocks of the folder take."""
        return sum(size for _, size, _ in self._files())

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _look(self, key: str) -> tuple[int, int] | None:
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY)
        except FileNotFoundError:
            return None
        size = os.fstat(descriptor).st_size - _TRAILER
        if size < 0:
            os.close(descriptor)
            self.discard(key)
            return None
        with suppress(OSError):
            os.utime(self._path(key))  # the age that eviction goes by
        return descriptor, size

    def _store(self, key: str, data: bytes) -> tuple[int, int]:
        temporary = self.folder / f"{uuid.uuid4().hex}{_TEMPORARY}"
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(data)
                file.write(xxhash.xxh3_64_digest(data))
            with self._lock("usage"):
                self._make_room(len(data) + _TRAILER)
                os.replace(temporary, self._path(key))
        except BaseException:
            os.close(descriptor)
            with suppress(FileNotFoundError):
                temporary.unlink()
            raise
        return descriptor, len(data)

    def _make_room(self, wanted: int) -> None:
        """Count ``wanted`` more bytes, evicting the least recently used; under the lock.

        The count in the file may be too high after a kill, never too low: it is raised before the block appears, and
        taken anew from the folder whenever the bound is reached.
        """
        counter = self.folder / "usage"
        try:
            used = int(counter.read_text() or "x")
        except (FileNotFoundError, ValueError):
            used = self.usage()
        if used + wanted > self.max_bytes:
            files = sorted(self._files())
            used = sum(size for _, size, _ in files)
            target = max(0, min(self.max_bytes - wanted, self.max_bytes * 9 // 10))
            for _, size, path in files:
                if used <= target:
                    break
                with suppress(FileNotFoundError):
                    path.unlink()
                used -= size
            self._vacuum()
        counter.write_text(str(used + wanted))

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Every block as (last use, bytes, path)."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX):
                    with suppress(FileNotFoundError):
                        facts = entry.stat()
                        yield facts.st_mtime, facts.st_size, Path(entry.path)

    def _vacuum(self) -> None:
        """Remove temporary files that a killed writer left."""
        for path in self.folder.glob(f"*{_TEMPORARY}"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """Hold a lock among threads and processes; the kernel frees it when its holder dies."""
        descriptor = os.open(self.folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
