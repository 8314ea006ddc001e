"""One value for a file or directory, wherever it lies."""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from sparkdl.errors import ConflictError, StorageError
from sparkdl.storage.address import is_local, local_path_of, resolved_address, spark_address
from sparkdl.storage.connect import HADOOP, OBJECT_STORES, filesystem_of, options_for, protocol_of
from sparkdl.storage.failures import http_status, storage_errors
from sparkdl.storage.local import DurableFile, leads_out, open_regular, resolved
from sparkdl.storage.names import plain_name
from sparkdl.storage.remote import Upload, copy_tree, exists, holds, listed, remove
from sparkdl.storage.sizes import Entry, check_size, entry_of, whole

TEMPORARY = ".sparkdl-tmp-"  # how the names of files begin that a writer has not yet moved into place

_IN_TURN = threading.Lock()
"""For ``memory://``, which looks for a file and makes it in two steps, of which another thread may come in between."""


@dataclass(frozen=True)
class Storage(ABC):
    """One file or directory, by its URI; cheap to make, safe to pickle.

    Local files go through ``os``, everything else through fsspec (S3 needs ``s3fs``, HDFS ``hdfs-native``, Google
    ``gcsfs``, Azure ``adlfs``). Credentials and endpoints come from fsspec's configuration, the cloud's variables or
    the session (``s3.py``); but for variables, what the driver finds travels with a pickled ``Storage``. A failure is a
    ``StorageError`` that names the remedy.
    """

    uri: str

    @staticmethod
    def of(uri: str | os.PathLike[str] | Storage, options: Mapping[str, Any] | None = None) -> Storage:
        """Make the storage of what a user gives: the one place where text becomes an address (``address.py``).

        Args:
            uri: a URI, or a plain path, which is the default filesystem's of the Spark session of this process, and
                this machine's without one; a ``pathlib.Path`` is always this machine's.
            options: fsspec's for the scheme (``{"endpoint_url": ...}``), by default those in its configuration.

        Raises:
            ConfigError: it is empty, of an unknown scheme, or no path at all.
        """
        if isinstance(uri, Storage):
            return uri
        text = os.fspath(uri)
        address = resolved_address(text if isinstance(uri, str) else f"file://{os.path.abspath(text)}")
        if is_local(address):
            return LocalStorage(address)
        protocol = protocol_of(address)
        return RemoteStorage(address, protocol, options_for(protocol, address, options))

    @abstractmethod
    def child(self, name: str) -> Storage:
        """The file or directory ``name`` below this one; ``a/b`` is two levels down.

        Every name that a document holds becomes a path here and nowhere else.

        Raises:
            IntegrityError: the name is not plain: absolute, or with ``..``, a backslash or a control character in it.
        """

    def sibling(self, name: str) -> Storage:
        """The file or directory ``name`` beside this one."""
        return self.parent().child(name)

    def parent(self) -> Storage:
        """The directory that this lies in."""
        return replace(self, uri=self.uri.rpartition("/")[0])

    @property
    def spark_uri(self) -> str:
        """The address as Spark takes it, whatever its default filesystem is."""
        return spark_address(self.uri)

    @property
    def renames(self) -> bool:
        """Whether a directory gets another name in one step."""
        return True

    @property
    @abstractmethod
    def filesystem(self) -> tuple[Any, str]:
        """Fsspec's filesystem that this lies in, and its path there: for libraries that take these."""

    @abstractmethod
    def local_path(self) -> Path | None:
        """The path on this machine, or None if the bytes lie elsewhere.

        Raises:
            IntegrityError: a link leads out of the folder that this was reached through.
        """

    @abstractmethod
    def read_bytes(self, offset: int = 0, length: int | None = None, *, at_most: int | None = None) -> bytes:
        """Read the file, or exactly ``length`` bytes of it from ``offset``.

        Args:
            offset: where to begin, bytes.
            length: how many bytes; None: to the end.
            at_most: the largest file that the caller takes, bytes; None: any.

        Raises:
            StorageError: it cannot be read, or ends too early.
            IntegrityError: it is larger than ``at_most``, no regular file, or a link that leads out of the folder that
                it was reached through.
        """

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
        """Open a regular file for reading, seekable; refuses what ``read_bytes`` refuses."""

    @abstractmethod
    def open_output(self, *, durable: bool = True) -> BinaryIO:
        """Open for writing from the start, creating directories above; closing makes the bytes durable.

        With ``durable=False`` they may be lost with the machine, which suits files that are deleted soon. On a local
        disk the growing file is visible, so this is for names that nobody looks for yet. Leaving a ``with`` block by an
        exception aborts the file.
        """

    def write_copy(self, path: Path) -> None:
        """Write what a file of this machine holds, through ``open_output``."""
        with storage_errors(self.uri, "write"), path.open("rb") as source, self.open_output() as sink:
            shutil.copyfileobj(source, sink, 4 << 20)

    @abstractmethod
    def write_atomic(self, data: bytes) -> None:
        """Write the whole file, so that a reader sees the old bytes or the new ones, never a mixture."""

    @abstractmethod
    def move_to(self, target: Storage) -> None:
        """Give the file or directory a name of the same filesystem that nobody has; one step, but for object stores."""

    @abstractmethod
    def write_if_absent(self, data: bytes) -> None:
        """Write the file unless it is there: ``ConflictError``; of writers of different bytes exactly one succeeds."""

    def _conflict(self) -> ConflictError:
        return ConflictError(f"{self.uri} exists already: another writer committed first; read it, or use another URI")


@dataclass(frozen=True)
class LocalStorage(Storage):
    """A path of this machine, or of a filesystem mounted on it.

    ``folder`` is what the user named, which may be a link; below it no link is followed that leads out.
    """

    folder: str = field(default="", repr=False, compare=False)

    @property
    def _path(self) -> str:
        return local_path_of(self.uri)

    @property
    def _home(self) -> str:
        return self.folder or self._path

    def child(self, name: str) -> Storage:
        return LocalStorage(f"{self.uri.rstrip('/')}/{plain_name(name, self.uri)}", self._home)

    @property
    def spark_uri(self) -> str:
        return f"file://{self._path}"

    @property
    def filesystem(self) -> tuple[Any, str]:
        import fsspec

        return fsspec.filesystem("file"), str(self.local_path())

    def local_path(self) -> Path:
        resolved(self._path, self._home)
        return Path(self._path)

    def read_bytes(self, offset: int = 0, length: int | None = None, *, at_most: int | None = None) -> bytes:
        with storage_errors(self.uri, "read"), open_regular(self._path, self._home) as file:
            check_size(self.uri, os.fstat(file.fileno()).st_size, at_most)
            file.seek(offset)
            data = file.read() if length is None else file.read(length)
        return whole(self.uri, data, offset, length)

    def size(self) -> int:
        with storage_errors(self.uri, "read"):
            return os.stat(resolved(self._path, self._home)).st_size

    def exists(self) -> bool:
        with storage_errors(self.uri, "read"):
            return os.path.exists(resolved(self._path, self._home))

    def list(self) -> list[Entry]:
        listing = []
        with (
            storage_errors(self.uri, "list"),
            suppress(FileNotFoundError),
            os.scandir(resolved(self._path, self._home)) as entries,
        ):
            for entry in entries:
                if entry.is_symlink() and leads_out(f"{self._path}/{entry.name}", self._home):
                    continue
                # removed since the scan; or a link that leads nowhere, into a circle or through a file
                with suppress(OSError if entry.is_symlink() else FileNotFoundError):
                    facts, is_dir = entry.stat(), entry.is_dir()
                    listing.append(Entry(entry.name, 0 if is_dir else facts.st_size, facts.st_mtime, is_dir))
        return sorted(listing, key=lambda entry: entry.name)

    def delete(self, recursive: bool = False) -> None:
        with storage_errors(self.uri, "delete"), suppress(FileNotFoundError):
            path = self._itself()
            if recursive and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def open_input(self) -> BinaryIO:
        with storage_errors(self.uri, "read"):
            return open_regular(self._path, self._home)

    def open_output(self, *, durable: bool = True) -> BinaryIO:
        with storage_errors(self.uri, "write"):
            path = Path(resolved(self._path, self._home))
            path.parent.mkdir(parents=True, exist_ok=True)
            return DurableFile(path, durable=durable)

    def _itself(self) -> Path:
        """The path, whose last part may be a link: what is removed or replaced is the link."""
        if self._path != self._home:
            resolved(os.path.dirname(self._path), self._home)
        return Path(self._path)

    def write_atomic(self, data: bytes) -> None:
        with self._temporary(data) as temporary:
            os.replace(temporary, self._itself())

    def move_to(self, target: Storage) -> None:
        with storage_errors(target.uri, "write"):
            if (target_path := target.local_path()) is None:
                raise StorageError(f"{self.uri} cannot be moved to {target.uri}: they are of different filesystems")
            os.rename(self._itself(), target_path)

    def write_if_absent(self, data: bytes) -> None:
        with self._temporary(data) as temporary:
            try:
                os.link(temporary, Path(self._path))  # fails if the name is taken; rename would replace it
            except FileExistsError as cause:
                raise self._conflict() from cause

    @contextmanager
    def _temporary(self, data: bytes) -> Iterator[Path]:
        """A durable file beside this one for the block to move into place; gone afterwards in any case."""
        with storage_errors(self.uri, "write"):
            temporary = self._itself().with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
            try:
                temporary.parent.mkdir(parents=True, exist_ok=True)
                with DurableFile(temporary) as file:
                    file.write(data)
                yield temporary
                directory = os.open(Path(self._path).parent, os.O_RDONLY)
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
            return filesystem_of(self.protocol, self.uri, self.options)

    @property
    def _path(self) -> str:
        return self.uri if self.protocol in HADOOP else self.uri.partition("://")[2]

    def child(self, name: str) -> Storage:
        return RemoteStorage(f"{self.uri}/{plain_name(name, self.uri)}", self.protocol, self.options)

    @property
    def renames(self) -> bool:
        return self.protocol in HADOOP

    @property
    def filesystem(self) -> tuple[Any, str]:
        return self._fs, self._path

    def local_path(self) -> None:
        return None

    def read_bytes(self, offset: int = 0, length: int | None = None, *, at_most: int | None = None) -> bytes:
        end = None if length is None else offset + length
        if at_most is not None:
            check_size(self.uri, self.size(), at_most)
        with storage_errors(self.uri, "read"):
            data = bytes(self._fs.cat_file(self._path, start=offset or None, end=end))
        return whole(self.uri, data, offset, length)

    def size(self) -> int:
        with storage_errors(self.uri, "read"):
            return int(self._fs.info(self._path)["size"])

    def exists(self) -> bool:
        with storage_errors(self.uri, "read"):
            return exists(self._fs, self._path)

    def list(self) -> list[Entry]:
        with storage_errors(self.uri, "list"):
            entries = [entry_of(info) for info in listed(self._fs, self._path)]
        return sorted((entry for entry in entries if entry.name), key=lambda entry: entry.name)

    def delete(self, recursive: bool = False) -> None:
        with storage_errors(self.uri, "delete"), suppress(FileNotFoundError):
            remove(self._fs, self._path, recursive)

    def open_input(self) -> BinaryIO:
        with storage_errors(self.uri, "read"):
            return cast(BinaryIO, self._fs.open(self._path, "rb"))

    def open_output(self, *, durable: bool = True) -> BinaryIO:
        with storage_errors(self.uri, "write"):
            self._make_parent()
            return cast(BinaryIO, Upload(self._fs.open(self._path, "wb"), self.delete))

    def write_atomic(self, data: bytes) -> None:
        if self.protocol in HADOOP:
            self._write_and_move(data, overwrite=True)
            return
        with storage_errors(self.uri, "write"):
            self._make_parent()
            self._fs.pipe_file(self._path, data)

    def move_to(self, target: Storage) -> None:
        with storage_errors(target.uri, "write"):
            if not isinstance(target, RemoteStorage) or target.protocol != self.protocol:
                raise StorageError(f"{self.uri} cannot be moved to {target.uri}: they are of different filesystems")
            if self.renames:
                self._fs.mv(self._path, target._path)
                return
            copy_tree(self._fs, self._path, target._path)
        self.delete(recursive=True)

    def write_if_absent(self, data: bytes) -> None:
        if self.protocol in HADOOP:
            self._write_and_move(data, overwrite=False)
            return
        with storage_errors(self.uri, "write"), _IN_TURN if self.protocol == "memory" else nullcontext():
            self._make_parent()
            for _ in range(3):
                try:
                    self._fs.pipe_file(self._path, data, mode="create")
                    return
                except Exception as cause:
                    refusal = 412 if isinstance(cause, FileExistsError) else http_status(cause)
                    if refusal == 412 or (refusal == 409 and self.exists()):
                        if holds(self._fs, self._path, data):  # the client sent it again: the first answer was lost
                            return
                        raise self._conflict() from cause
                    if refusal != 409:  # 409: two conditional writes at the same moment, neither of which won
                        raise
            raise self._conflict()

    def _write_and_move(self, data: bytes, *, overwrite: bool) -> None:
        """HDFS shows a file while it grows, and moves one in a single step: what has its name is whole."""
        home = self.uri.rpartition("/")[0]
        temporary = replace(self, uri=f"{home}/{TEMPORARY}{uuid.uuid4().hex}")
        with storage_errors(self.uri, "write"):
            self._make_parent()
            try:
                with Upload(self._fs.open(temporary._path, "wb"), temporary.delete) as file:
                    file.write(data)
                self._fs.mv(temporary._path, self._path, overwrite=overwrite)
            except FileExistsError as cause:
                temporary.delete()
                raise self._conflict() from cause
            except BaseException:
                with suppress(StorageError):
                    temporary.delete()
                raise

    def _make_parent(self) -> None:
        if self.protocol not in OBJECT_STORES:  # which have no directories to make
            self._fs.makedirs(self._path.rsplit("/", 1)[0], exist_ok=True)
