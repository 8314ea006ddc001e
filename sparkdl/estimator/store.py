"""The places of what outlives a process: shards, checkpoints, logs of a fit, under Horovod's names."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from sparkdl.errors import ConfigError
from sparkdl.storage import RemoteStorage, Storage, options_for

__all__ = ["DBFSLocalStore", "FilesystemStore", "HDFSStore", "KeepShards", "LocalStore", "Store", "open_store"]

KeepShards = Literal["pinned", "always", "never"]

_BELOW = {
    "train_path": "intermediate_train_data",
    "val_path": "intermediate_val_data",
    "test_path": "intermediate_test_data",
    "runs_path": "runs",
}
_OPTIONS = ("keep_shards", *_BELOW, "save_runs")
_HDFS_HOST = re.compile(r"(hdfs|viewfs)://[^/]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]*")


@dataclass(frozen=True, kw_only=True)
class Store:
    """A folder of a filesystem that every worker reaches.

        prefix/shards/<key>/             intermediate shard sets
        prefix/runs/<run_id>/checkpoints
        prefix/runs/<run_id>/logs        TensorBoard event files
        prefix/intermediate_train_data   Parquet for fit_on_parquet; likewise intermediate_val_data and _test_data

    Attributes:
        prefix_path: path or URI of the folder; a ``Storage`` may be given.
        keep_shards: ``"pinned"`` keeps the shards of a pinned table version, which the next fit on it reads again, and
            deletes the others after the fit; ``"always"`` and ``"never"`` say so for all.
        train_path: Parquet folder that ``fit_on_parquet`` trains on.
        val_path: Parquet folder that ``fit_on_parquet`` validates on.
        test_path: Parquet folder that no fit looks at.
        runs_path: folder of the runs.
        save_runs: whether checkpoints and logs are written.
        temporary: whether the whole folder goes once the fit is done.
    """

    prefix_path: str
    keep_shards: KeepShards = "pinned"
    train_path: str = ""
    val_path: str = ""
    test_path: str = ""
    runs_path: str = ""
    save_runs: bool = True
    temporary: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.keep_shards not in ("pinned", "always", "never"):
            raise ConfigError(f"keep_shards={self.keep_shards!r} is not one of 'pinned', 'always', 'never': choose one")
        for name, storage in self._places.items():
            object.__setattr__(self, name, storage.uri)

    @cached_property
    def _places(self) -> dict[str, Storage]:
        """What the given paths mean."""
        root = Storage.of(self.prefix_path)
        places = {"prefix_path": root}
        for name, below in _BELOW.items():
            path = getattr(self, name)
            elsewhere = os.path.isabs(path) or ":" in path
            places[name] = _beside(root, path) if elsewhere else root.child(path or below)
        return places

    @staticmethod
    def create(prefix_path: str | os.PathLike[str] | Storage, **options: Any) -> Store:
        """Make a store at a path or URI; the folder itself appears with the first file.

        Args:
            prefix_path: of a filesystem that the driver and every worker reach; ``dbfs:/x`` is its mount ``/dbfs/x``;
                ``Storage.of(uri, options)`` brings credentials of its own.
            options: ``keep_shards``, ``train_path``, ``val_path``, ``test_path``, ``runs_path``, ``save_runs``; and
                ``storage_options``, fsspec's for the scheme.

        Raises:
            ConfigError: an unknown option, or a scheme that no filesystem answers to.
        """
        return _created("Store.create", prefix_path, **options)

    def addresses(self) -> dict[str, str]:
        """The paths, by field, as texts that mean the same place under any default filesystem."""
        return {name: storage.spark_uri for name, storage in self._places.items()}

    @property
    def root(self) -> Storage:
        """The folder."""
        return self._places["prefix_path"]

    def shards(self, key: str) -> Storage:
        """The place of the shard set of ``key``."""
        return self.root.child("shards").child(_checked("key", key))

    def run(self, run_id: str) -> Storage:
        """The folder of one run."""
        return self._places["runs_path"].child(_checked("run_id", run_id))

    def checkpoints(self, run_id: str) -> Storage:
        """The folder of the checkpoints of one run."""
        return self.run(run_id).child("checkpoints")

    def logs(self, run_id: str) -> Storage:
        """The folder of the TensorBoard event files of one run."""
        return self.run(run_id).child("logs")

    def parquet(self, name: Literal["train_path", "val_path", "test_path"], idx: int | None = None) -> Storage:
        """The place of the Parquet files for ``fit_on_parquet``."""
        storage = self._places[name]
        return storage if idx is None else storage.sibling(f"{storage.uri.rpartition('/')[2]}.{idx}")

    def shards_uri(self, key: str) -> str:
        """The place of the shard set of ``key``."""
        return self.shards(key).uri

    def run_uri(self, run_id: str) -> str:
        """The folder of one run."""
        return self.run(run_id).uri

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Return the Parquet folder that ``fit_on_parquet`` trains on."""
        return self.parquet("train_path", idx).uri

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Return the Parquet folder that ``fit_on_parquet`` validates on."""
        return self.parquet("val_path", idx).uri

    def get_test_data_path(self, idx: int | None = None) -> str:
        """Return the Parquet folder that is left for tests."""
        return self.parquet("test_path", idx).uri

    def get_runs_path(self) -> str:
        """Return the folder of the runs."""
        return self.runs_path

    def get_run_path(self, run_id: str) -> str:
        """Return the folder of one run."""
        return self.run_uri(run_id)

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """Return the folder of one run's checkpoints; None where runs are not saved."""
        return self.checkpoints(run_id).uri if self.save_runs else None

    def get_checkpoints(self, run_id: str, suffix: str = ".json") -> list[str]:
        """Return the files of one run's checkpoints, oldest first: ``step-<n>.json``, each beside its tensors."""
        folder = self.checkpoints(run_id)
        return [f"{folder.uri}/{entry.name}" for entry in folder.list() if entry.name.endswith(suffix)]

    def get_checkpoint_filename(self) -> str:
        """Horovod's name of the one file that it writes again and again.

        Raises:
            ConfigError: there is none.
        """
        raise ConfigError(
            "checkpoints have no one file name, each step has its own: get_checkpoints(run_id) lists them, a fit with "
            "the same run_id goes on from the newest, and the fitted model's getModel() holds the weights"
        )

    def get_logs_path(self, run_id: str) -> str | None:
        """Return the folder of one run's TensorBoard event files; None where runs are not saved."""
        return self.logs(run_id).uri if self.save_runs else None

    def get_logs_subdir(self) -> str:
        """Return the name of the folder of event files in that of a run."""
        return "logs"

    def saving_runs(self) -> bool:
        """Tell whether checkpoints and logs are written."""
        return self.save_runs

    def exists(self, path: str) -> bool:
        """Tell whether a file or folder is there."""
        return _beside(self.root, path).exists()

    def read(self, path: str) -> bytes:
        """Return the bytes of a file."""
        return _beside(self.root, path).read_bytes()

    def write_text(self, path: str, text: str) -> None:
        """Write a file, whole or not at all."""
        _beside(self.root, path).write_atomic(text.encode())

    @property
    def fs(self) -> Any:
        """Fsspec's filesystem of the folder."""
        return self.root.filesystem[0]

    def get_full_path(self, path: str) -> str:
        """Return the whole address of a path, with its scheme; a plain path is of the store's HDFS, if it is on one."""
        return _beside(self.root, path).spark_uri

    def get_full_path_fn(self) -> Callable[[str], str]:
        """Return ``get_full_path``."""
        return self.get_full_path

    def get_localized_path(self, path: str) -> str:
        """Return a path without scheme and host."""
        address = _beside(self.root, path).uri
        return _HDFS_HOST.sub("", address) if _HDFS_HOST.match(address) else address.partition("://")[2] or address

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], AbstractContextManager[str]]:
        """Return a function that opens a folder of this machine's, for a block; ``sync_fn`` keeps what is in it."""
        return tempfile.TemporaryDirectory

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Return a function that copies all files below a folder of this machine's into the folder of a run."""
        run = self.run(run_id)

        def sync(local_folder: str) -> None:
            for file in sorted(Path(local_folder).rglob("*")):
                if file.is_file():
                    run.child(file.relative_to(local_folder).as_posix()).write_copy(file)

        return sync

    def is_parquet_dataset(self, path: str) -> bool:
        """Tell whether a folder can be read as Parquet."""
        try:
            self.get_parquet_dataset(path)
        except Exception:
            return False
        return True

    def get_parquet_dataset(self, path: str) -> Any:
        """Return pyarrow's ``ParquetDataset`` of a folder."""
        import pyarrow.parquet

        files, folder = _beside(self.root, path).filesystem
        return pyarrow.parquet.ParquetDataset(folder, filesystem=files)

    def discard_shards(self, uri: str | Storage, *, pinned: bool) -> None:
        """Delete a shard set after its fit, if the policy says so."""
        if self.keep_shards == "never" or (self.keep_shards == "pinned" and not pinned):
            _delete(Storage.of(uri))

    def close(self) -> None:
        """Remove the folder of a temporary store."""
        if self.temporary:
            _delete(self.root)


def FilesystemStore(prefix_path: str, **options: Any) -> Store:
    """Make a store as Horovod's class of this name does: a path without a scheme is of this machine's disk.

    Raises:
        ConfigError: as ``Store.create``.
    """
    is_local = re.match(r"[a-z][a-z0-9+.-]*:", prefix_path) is None
    return _created("FilesystemStore", Path(prefix_path) if is_local else prefix_path, **options)


def LocalStore(prefix_path: str, **options: Any) -> Store:
    """Make a store as Horovod's class of this name does, which is its ``FilesystemStore``."""
    return FilesystemStore(prefix_path, **options)


def HDFSStore(
    prefix_path: str,
    host: str | None = None,
    port: int | None = None,
    user: str | None = None,
    kerb_ticket: str | None = None,
    driver: str = "libhdfs",
    extra_conf: Mapping[str, str] | None = None,
    **options: Any,
) -> Store:
    """Make a store on HDFS, as Horovod's class of this name does.

    Args:
        prefix_path: ``hdfs://host:port/path``, ``hdfs:///path`` or ``/path``, whose host Hadoop's configuration says.
        host: of the NameNode, where the path names none.
        port: of the NameNode.
        user: has no counterpart; HADOOP_USER_NAME says it.
        kerb_ticket: has no counterpart; KRB5CCNAME says it.
        driver: only ``"libhdfs"`` is taken, Horovod's default.
        extra_conf: settings of Hadoop's client, over those of the session.
        options: those of ``Store.create``.

    Raises:
        ConfigError: the path is of another filesystem, host or port are named twice, or an option has no counterpart.
    """
    for name, value, remedy in (("user", user, "HADOOP_USER_NAME"), ("kerb_ticket", kerb_ticket, "KRB5CCNAME")):
        if value is not None:
            raise ConfigError(f"{name}={value!r} of HDFSStore has no effect: set {remedy} in the environment instead")
    if driver != "libhdfs":
        raise ConfigError(f"driver={driver!r} of HDFSStore has no effect: leave it out")
    if not prefix_path.startswith(("hdfs://", "/")):
        raise ConfigError(f"HDFSStore takes no {prefix_path!r}: give hdfs://host:port/path, hdfs:///path or /path")
    named, slash, path = prefix_path.removeprefix("hdfs://").partition("/")
    if not slash or (named and (host or port)):
        host_and_port = f"{host or ''}{f':{port}' if port else ''}"
        raise ConfigError(
            f"HDFSStore of {prefix_path!r} and host {host_and_port!r}: name the host once, and a path below it"
        )
    if port and not host:
        raise ConfigError(f"port={port} of HDFSStore has no host: give host, too")
    address = f"hdfs://{named or host or ''}{f':{port}' if port else ''}/{path}"
    if extra_conf is None:
        return _created("HDFSStore", address, **options)
    return _created("HDFSStore", address, storage_options={**options_for("hdfs", address), **extra_conf}, **options)


def DBFSLocalStore(prefix_path: str, **options: Any) -> Store:
    """Make a store on Databricks' file system, as Horovod's class of this name does.

    Args:
        prefix_path: ``dbfs:/path``, ``/dbfs/path`` or ``file:///dbfs/path``.
        options: those of ``Store.create``.

    Raises:
        ConfigError: the path is of another filesystem.
    """
    path = re.sub(r"^(dbfs:/(?!/)|file:(//)?/dbfs/|/dbfs/)", "", prefix_path)
    if path == prefix_path:
        raise ConfigError(f"DBFSLocalStore takes no {prefix_path!r}: give dbfs:/path or /dbfs/path")
    return _created("DBFSLocalStore", Path("/dbfs") / path, **options)


def open_store(given: str | Storage | Store | None, *, shared_disk: bool) -> Store:
    """Return the store to use for one fit.

    Args:
        given: what the estimator was given.
        shared_disk: whether the workers run on this machine and see its temporary files.

    Raises:
        ConfigError: none was given, and the workers would not see a temporary one.
    """
    if isinstance(given, Store):
        return given
    if given is not None:
        return Store.create(given)
    if not shared_disk:
        raise ConfigError(
            "store is not given, and executors do not see the driver's temporary files: give a shared path"
        )
    folder = Path(tempfile.mkdtemp(prefix="sparkdl-fit-"))
    return _made(folder, save_runs=False, temporary=True)


def _created(
    maker: str,
    prefix_path: str | os.PathLike[str] | Storage,
    *,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Store:
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        choices = ", ".join((*_OPTIONS, "storage_options"))
        raise ConfigError(f"{maker} takes no option {unknown[0]!r}: choose among {choices}")
    return _made(Storage.of(prefix_path, storage_options), **options)


def _beside(root: Storage, path: str) -> Storage:
    """What a path means to the store at ``root``: of its HDFS without a scheme; in its bucket with its options."""
    host = _HDFS_HOST.match(root.uri)
    storage = Storage.of(f"{host[0]}{path}" if host and path.startswith("/") else path)
    if isinstance(root, RemoteStorage) and storage.uri.split("/")[:3] == root.uri.split("/")[:3]:
        return replace(root, uri=storage.uri)
    return storage


def _made(prefix_path: str | os.PathLike[str] | Storage, **options: Any) -> Store:
    return Store(prefix_path=cast(str, Storage.of(prefix_path)), **options)  # which is text once it is made


def _checked(what: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{what}={name!r} is no name for a folder: use letters, digits, '.', '_', '=' and '-'")
    return name


def _delete(folder: Storage) -> None:
    if folder.exists():
        folder.delete(recursive=True)
