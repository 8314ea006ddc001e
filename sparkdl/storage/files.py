"""Files behind URIs: the only module that touches a filesystem API.

Enters: a URI (``s3://bucket/set``, ``hdfs://host/set``, ``file:///data/set``) or a plain local path.
Leaves: a ``Storage`` that reads, lists and commits whole files; a failure is a ``StorageError`` that names the remedy.

Local files go through ``os``, everything else through fsspec (S3 needs ``s3fs``, Google ``gcsfs``, Azure ``adlfs``,
HDFS pyarrow). Credentials and endpoints come from fsspec's configuration or the cloud's environment variables; what
the driver has in fsspec's configuration travels with a pickled ``Storage``, so that workers need none.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash

from sparkdl.errors import ConfigError, ConflictError, SparkdlError, StorageError

__all__ = ["TEMPORARY", "Entry", "Storage", "sha256_hex", "storage_errors", "xxh3_hex"]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_SAME_AS = {"s3a": "s3", "s3n": "s3", "gs": "gcs", "wasb": "abfs", "wasbs": "abfs", "abfss": "abfs"}
TEMPORARY = ".sparkdl-tmp-"  # how the names of files begin that a writer has not yet moved into place


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a directory; ``modified`` is in seconds since the epoch, None where the filesystem does not say."""

    name: str
    bytes: int
    modified: float | None
    is_dir: bool


def xxh3_hex(data: Any) -> str:
    """The 64-bit xxh3 hash of a buffer as 16 hexadecimal digits: against accidents, not attackers."""
    return xxhash.xxh3_64_hexdigest(data)


def sha256_hex(data: Any) -> str:
    """The SHA-256 hash of a buffer as 64 hexadecimal digits: the name of content in keys."""
    return hashlib.sha256(data).hexdigest()


@contextmanager
def storage_errors(uri: str, action: str) -> Iterator[None]:
    """Turn whatever a filesystem raises inside the block into ``StorageError("cannot <action> <uri>: ...")``."""
    try:
        yield
    except SparkdlError:
        raise
    except Exception as cause:
        raise StorageError(f"cannot {action} {uri}: {_explain(cause)}") from cause


def _explain(cause: Exception) -> str:
    code = getattr(cause, "errno", None)
    if code in _FULL:
        return f"the device or quota is full ({cause}): free space there or choose another target"
    if isinstance(cause, PermissionError) or code in _DENIED:
        return f"access is denied ({cause}): grant this user the right or choose another place"
    if isinstance(cause, FileNotFoundError):
        return "it does not exist: check the path, or write it first"
    if isinstance(cause, NotADirectoryError | FileExistsError):
        return f"a file stands where a directory is needed ({cause}): choose another path"
    return f"{type(cause).__name__}: {cause}: check the address, the network and the credentials"


@dataclass(frozen=True)
class Storage(ABC):
    """One file or directory, by its URI; cheap to make, safe to pickle."""

    uri: str

    @staticmethod
    def of(uri: str | os.PathLike[str] | Storage, options: Mapping[str, Any] | None = None) -> Storage:
        """Make the storage of a URI or plain path; ``ConfigError`` if it is empty or of an unknown scheme.

        ``options`` are fsspec's for the scheme (``{"endpoint_url": ...}``), by default those in its configuration.
        """
        if isinstance(uri, Storage):
            return uri
        if not (text := os.fspath(uri)).strip():
            raise ConfigError(f"the storage URI {text!r} is empty: give a path such as /data/set or s3://bucket/set")
        scheme, separator, rest = text.partition("://")
        if not separator or scheme in ("file", "local"):
            path = os.path.abspath(os.path.expanduser(rest if separator else text.removeprefix("file:")))
            return LocalStorage(path)
        import fsspec.config  # which looks for plugins everywhere: local sets do without

        protocol = _SAME_AS.get(scheme, scheme)
        if protocol not in fsspec.available_protocols():
            raise ConfigError(f"the scheme {scheme!r} of {text} is unknown: use a path, or s3, gs, abfs or hdfs")
        chosen = dict(fsspec.config.conf.get(protocol, {}) if options is None else options)
        return RemoteStorage(text.rstrip("/"), protocol, chosen)

    @abstractmethod
    def child(self, name: str) -> Storage:
        """The file or directory ``name`` below this one."""

    @abstractmethod
    def local_path(self) -> Path | None:
        """The path on this machine, or None if the bytes lie elsewhere."""

    @abstractmethod
    def read_bytes(self, offset: int = 0, length: int | None = None) -> bytes:
        """Read the file, or exactly ``length`` bytes of it from ``offset``."""

    @abstractmethod
    def size(self) -> int:
        """Size of the file in bytes."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether a file or directory of this name is there."""

    @abstractmethod
    def list(self) -> list[Entry]:
        """What a directory holds, by name, one level deep; nothing if it does not exist."""

    @abstractmethod
    def delete(self, recursive: bool = False) -> None:
        """Remove the file, or with ``recursive`` the directory and all below it; a missing one is no error."""

    @abstractmethod
    def open_input(self) -> BinaryIO:
        """Open for reading, seekable."""

    @abstractmethod
    def open_output(self) -> BinaryIO:
        """Open for writing from the start, creating directories above; closing makes the bytes durable.

        On a local disk the growing file is visible, so this is for names that nobody looks for yet. Leaving a ``with``
        block by an exception aborts the file.
        """

    @abstractmethod
    def write_atomic(self, data: bytes) -> None:
        """Write the whole file, so that a reader sees the old bytes or the new ones, never a mixture."""

    @abstractmethod
    def write_if_absent(self, data: bytes) -> None:
        """Write the whole file unless it is there: ``ConflictError``; of several writers exactly one succeeds."""

    def _conflict(self) -> ConflictError:
        return ConflictError(f"{self.uri} exists already: another writer committed first; read it, or use another URI")


class _DurableFile(io.BufferedWriter):
    """A local file being written: durable once closed, gone if its ``with`` block fails."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path.open("wb", buffering=0))

    def close(self) -> None:
        if not self.closed:
            try:
                self.flush()
                os.fsync(self.fileno())
            finally:
                with suppress(OSError):  # a second flush of what did not fit
                    super().close()

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        if kind is None:
            self.close()
            return
        self.raw.close()
        self._path.unlink(missing_ok=True)


@dataclass(frozen=True)
class LocalStorage(Storage):
    """A path of this machine, or of a filesystem mounted on it."""

    def child(self, name: str) -> Storage:
        return LocalStorage(os.path.join(self.uri, name))

    def local_path(self) -> Path:
        return Path(self.uri)

    def read_bytes(self, offset: int = 0, length: int | None = None) -> bytes:
        with storage_errors(self.uri, "read"), Path(self.uri).open("rb") as file:
            file.seek(offset)
            data = file.read() if length is None else file.read(length)
        return _whole(self.uri, data, offset, length)

    def size(self) -> int:
        with storage_errors(self.uri, "read"):
            return Path(self.uri).stat().st_size

    def exists(self) -> bool:
        with storage_errors(self.uri, "read"):
            return Path(self.uri).exists()

    def list(self) -> list[Entry]:
        found = []
        with storage_errors(self.uri, "list"), suppress(FileNotFoundError), os.scandir(Path(self.uri)) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # removed since the scan
                    facts, is_dir = entry.stat(), entry.is_dir()
                    found.append(Entry(entry.name, 0 if is_dir else facts.st_size, facts.st_mtime, is_dir))
        return sorted(found, key=lambda entry: entry.name)

    def delete(self, recursive: bool = False) -> None:
        with storage_errors(self.uri, "delete"), suppress(FileNotFoundError):
            if recursive and Path(self.uri).is_dir():
                shutil.rmtree(self.uri)
            else:
                Path(self.uri).unlink()

    def open_input(self) -> BinaryIO:
        with storage_errors(self.uri, "read"):
            return Path(self.uri).open("rb")

    def open_output(self) -> BinaryIO:
        with storage_errors(self.uri, "write"):
            Path(self.uri).parent.mkdir(parents=True, exist_ok=True)
            return _DurableFile(Path(self.uri))

    def write_atomic(self, data: bytes) -> None:
        with self._temporary(data) as temporary:
            os.replace(temporary, Path(self.uri))

    def write_if_absent(self, data: bytes) -> None:
        with self._temporary(data) as temporary:
            try:
                os.link(temporary, Path(self.uri))  # fails if the name is taken; rename would replace it
            except FileExistsError as taken:
                raise self._conflict() from taken

    @contextmanager
    def _temporary(self, data: bytes) -> Iterator[Path]:
        """A durable file beside this one for the block to move into place; gone afterwards in any case."""
        temporary = Path(self.uri).with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        with storage_errors(self.uri, "write"):
            try:
                temporary.parent.mkdir(parents=True, exist_ok=True)
                with _DurableFile(temporary) as file:
                    file.write(data)
                yield temporary
                directory = os.open(Path(self.uri).parent, os.O_RDONLY)
                os.fsync(directory)
                os.close(directory)
            finally:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class RemoteStorage(Storage):
    """An object store, HDFS, or anything else that fsspec speaks.

    ``options`` is what fsspec needs to connect; it may hold credentials and is left out of ``repr``.
    """

    protocol: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def _fs(self) -> Any:
        with storage_errors(self.uri, "reach"):
            from fsspec import filesystem  # without a listing cache, which would hide what other processes write

            return filesystem(self.protocol, **{"use_listings_cache": False, **self.options})

    @property
    def _path(self) -> str:
        return self.uri.partition("://")[2] if self.protocol != "hdfs" else self.uri

    def child(self, name: str) -> Storage:
        return RemoteStorage(f"{self.uri}/{name}", self.protocol, self.options)

    def local_path(self) -> None:
        return None

    def read_bytes(self, offset: int = 0, length: int | None = None) -> bytes:
        end = None if length is None else offset + length
        with storage_errors(self.uri, "read"):
            data = bytes(self._fs.cat_file(self._path, start=offset or None, end=end))
        return _whole(self.uri, data, offset, length)

    def size(self) -> int:
        with storage_errors(self.uri, "read"):
            return int(self._fs.info(self._path)["size"])

    def exists(self) -> bool:
        with storage_errors(self.uri, "read"), suppress(FileNotFoundError):
            return bool(self._fs.info(self._path))  # fsspec's own exists() takes every failure for absence
        return False

    def list(self) -> list[Entry]:
        with storage_errors(self.uri, "list"):
            try:
                found = [_entry(info) for info in self._fs.ls(self._path, detail=True)]
            except FileNotFoundError:
                return []
        return sorted((entry for entry in found if entry.name), key=lambda entry: entry.name)

    def delete(self, recursive: bool = False) -> None:
        with storage_errors(self.uri, "delete"), suppress(FileNotFoundError):
            self._fs.rm(self._path, recursive=recursive)

    def open_input(self) -> BinaryIO:
        with storage_errors(self.uri, "read"):
            return cast(BinaryIO, self._fs.open(self._path, "rb"))

    def open_output(self) -> BinaryIO:
        with storage_errors(self.uri, "write"):
            self._make_parent()
            return cast(BinaryIO, _Upload(self._fs.open(self._path, "wb"), self))

    def write_atomic(self, data: bytes) -> None:
        with storage_errors(self.uri, "write"):
            self._make_parent()
            self._fs.pipe_file(self._path, data)

    def write_if_absent(self, data: bytes) -> None:
        with storage_errors(self.uri, "write"):
            self._make_parent()
            for _ in range(3):
                try:
                    self._fs.pipe_file(self._path, data, mode="create")
                    return
                except Exception as cause:
                    refusal = 412 if isinstance(cause, FileExistsError) else _http_status(cause)
                    if refusal == 412 or (refusal == 409 and self.exists()):
                        raise self._conflict() from cause
                    if refusal != 409:  # 409: two conditional writes at the same moment, neither of which won
                        raise
            raise self._conflict()

    def _make_parent(self) -> None:
        if self.protocol not in ("s3", "gcs", "abfs"):  # object stores have no directories to make
            self._fs.makedirs(self._path.rsplit("/", 1)[0], exist_ok=True)


class _Upload(io.RawIOBase):
    """A remote file being written: there once closed, never there if its ``with`` block fails."""

    def __init__(self, file: Any, target: Storage) -> None:
        self._file, self._target = file, target

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return int(self._file.write(data))

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._file.close()

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        if kind is not None:  # fsspec's own files publish what they have got when their block fails
            super().close()
            with suppress(Exception):
                self._file.discard()
            self._file.closed = True
            self._target.delete()
        self.close()


def _entry(info: Mapping[str, Any]) -> Entry:
    modified: Any = info.get("LastModified") or info.get("mtime") or info.get("last_modified") or info.get("created")
    seconds = modified.timestamp() if hasattr(modified, "timestamp") else modified
    name = str(info["name"]).rstrip("/").rsplit("/", 1)[-1]
    return Entry(name, int(info.get("size") or 0), seconds, info["type"] == "directory")


def _http_status(cause: BaseException | None) -> int | None:
    """The status of the object store's answer behind an exception (412: the condition of a write does not hold)."""
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        cause = cause.__cause__
    return None


def _whole(uri: str, data: bytes, offset: int, length: int | None) -> bytes:
    if length is not None and len(data) != length:
        end = offset + length
        raise StorageError(f"{uri} ends at byte {offset + len(data)}, before {end}: it was cut short, write it again")
    return data
