"""Where a fit keeps what outlives a process: shards, checkpoints, logs.

Enters: a path or URI that driver and workers reach. Leaves: a ``Store`` that names the place of everything, under
Horovod's names for these places, and removes what its policy says.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sparkdl.errors import ConfigError
from sparkdl.storage import Storage

__all__ = ["KeepShards", "Store", "open_store"]

KeepShards = Literal["pinned", "always", "never"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]*")


@dataclass(frozen=True, kw_only=True)
class Store:
    """A folder of a filesystem that every worker reaches.

        prefix/shards/<key>/             intermediate shard sets
        prefix/runs/<run_id>/checkpoints
        prefix/runs/<run_id>/logs        TensorBoard event files
        prefix/intermediate_train_data   Parquet for fit_on_parquet; likewise intermediate_val_data

    Attributes:
        prefix_path: path or URI of the folder.
        keep_shards: ``"pinned"`` keeps the shards of a pinned table version, which the next fit on it reads again, and
            deletes the others after the fit; ``"always"`` and ``"never"`` say so for all.
        train_path: Parquet folder that ``fit_on_parquet`` trains on.
        val_path: Parquet folder that ``fit_on_parquet`` validates on.
        runs_path: folder of the runs.
        save_runs: whether checkpoints and logs are written.
        temporary: whether the whole folder goes once the fit is done.
    """

    prefix_path: str
    keep_shards: KeepShards = "pinned"
    train_path: str = ""
    val_path: str = ""
    runs_path: str = ""
    save_runs: bool = True
    temporary: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.keep_shards not in ("pinned", "always", "never"):
            raise ConfigError(f"keep_shards={self.keep_shards!r} is not one of 'pinned', 'always', 'never': choose one")
        root = Storage.of(self.prefix_path)
        for name, below in (
            ("train_path", "intermediate_train_data"),
            ("val_path", "intermediate_val_data"),
            ("runs_path", "runs"),
        ):
            given = getattr(self, name)
            whole = Storage.of(given) if os.path.isabs(given) or ":" in given else root.child(given or below)
            object.__setattr__(self, name, whole.uri)
        object.__setattr__(self, "prefix_path", root.uri)

    @staticmethod
    def create(prefix_path: str | os.PathLike[str], **options: Any) -> Store:
        """Make a store at a path or URI; the folder itself appears with the first file.

        Args:
            prefix_path: of a filesystem that the driver and every worker reach; ``dbfs:/x`` is its mount ``/dbfs/x``.
            options: ``keep_shards``, ``train_path``, ``val_path``, ``runs_path``, ``save_runs``.

        Raises:
            ConfigError: an unknown option, or a scheme that no filesystem answers to.
        """
        known = ("keep_shards", "train_path", "val_path", "runs_path", "save_runs")
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(f"Store.create takes no option {unknown[0]!r}: choose among {', '.join(known)}")
        return Store(prefix_path=Storage.of(prefix_path).uri, **options)

    def shards_uri(self, key: str) -> str:
        """Where the shard set of ``key`` lies."""
        return Storage.of(self.prefix_path).child("shards").child(_checked("key", key)).uri

    def run_uri(self, run_id: str) -> str:
        """Where everything of one run lies."""
        return Storage.of(self.runs_path).child(_checked("run_id", run_id)).uri

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Return the Parquet folder that ``fit_on_parquet`` trains on."""
        return self.train_path if idx is None else f"{self.train_path}.{idx}"

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Return the Parquet folder that ``fit_on_parquet`` validates on."""
        return self.val_path if idx is None else f"{self.val_path}.{idx}"

    def get_runs_path(self) -> str:
        """Return the folder of the runs."""
        return self.runs_path

    def get_run_path(self, run_id: str) -> str:
        """Return the folder of one run."""
        return self.run_uri(run_id)

    def get_checkpoint_path(self, run_id: str) -> str:
        """Return the folder of one run's checkpoints."""
        return Storage.of(self.run_uri(run_id)).child("checkpoints").uri

    def get_logs_path(self, run_id: str) -> str:
        """Return the folder of one run's TensorBoard event files."""
        return Storage.of(self.run_uri(run_id)).child("logs").uri

    def saving_runs(self) -> bool:
        """Tell whether checkpoints and logs are written."""
        return self.save_runs

    def exists(self, path: str) -> bool:
        """Tell whether a file or folder is there."""
        return Storage.of(path).exists()

    def read(self, path: str) -> bytes:
        """Return the bytes of a file."""
        return Storage.of(path).read_bytes()

    def discard_shards(self, uri: str, *, pinned: bool) -> None:
        """Delete a shard set after its fit, if the policy says so."""
        if self.keep_shards == "never" or (self.keep_shards == "pinned" and not pinned):
            _delete(uri)

    def close(self) -> None:
        """Remove the folder of a temporary store."""
        if self.temporary:
            _delete(self.prefix_path)


def open_store(given: str | Store | None, *, shared_disk: bool) -> Store:
    """Return the store to use for one fit.

    Args:
        given: what the estimator was given.
        shared_disk: whether the workers run on this machine and see its temporary files.

    Raises:
        ConfigError: none was given, and the workers would not see a temporary one.
    """
    if isinstance(given, Store):
        return replace(given)  # one that is older than the session takes its plain paths for the session's
    if given is not None:
        return Store.create(given)
    if not shared_disk:
        raise ConfigError(
            "store is not given, and executors do not see the driver's temporary files: give a shared path"
        )
    folder = Path(tempfile.mkdtemp(prefix="sparkdl-fit-"))
    return Store(prefix_path=Storage.of(folder).uri, save_runs=False, temporary=True)


def _checked(what: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{what}={name!r} is no name for a folder: use letters, digits, '.', '_', '=' and '-'")
    return name


def _delete(uri: str) -> None:
    folder = Storage.of(uri)
    if folder.exists():
        folder.delete(recursive=True)
