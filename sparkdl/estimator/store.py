"""Where a fit keeps what outlives a process: shards, checkpoints, logs.

Enters: a path or URI that driver and workers reach, or a ``Storage`` with credentials of its own. Leaves: a ``Store``
that names the place of everything, under Horovod's names for these places, and removes what its policy says. What its
paths mean is found out once, when it is made.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from sparkdl.errors import ConfigError
from sparkdl.storage import Storage

__all__ = ["KeepShards", "Store", "open_store"]

KeepShards = Literal["pinned", "always", "never"]

_BELOW = {"train_path": "intermediate_train_data", "val_path": "intermediate_val_data", "runs_path": "runs"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]*")


@dataclass(frozen=True, kw_only=True)
class Store:
    """A folder of a filesystem that every worker reaches.

        prefix/shards/<key>/             intermediate shard sets
        prefix/runs/<run_id>/checkpoints
        prefix/runs/<run_id>/logs        TensorBoard event files
        prefix/intermediate_train_data   Parquet for fit_on_parquet; likewise intermediate_val_data

    Attributes:
        prefix_path: path or URI of the folder; a ``Storage`` may be given.
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
        for name, place in self._places.items():
            object.__setattr__(self, name, place.uri)

    @cached_property
    def _places(self) -> dict[str, Storage]:
        """What the given paths mean."""
        root = Storage.of(self.prefix_path)
        found = {"prefix_path": root}
        for name, below in _BELOW.items():
            given = getattr(self, name)
            found[name] = Storage.of(given) if os.path.isabs(given) or ":" in given else root.child(given or below)
        return found

    @staticmethod
    def create(prefix_path: str | os.PathLike[str] | Storage, **options: Any) -> Store:
        """Make a store at a path or URI; the folder itself appears with the first file.

        Args:
            prefix_path: of a filesystem that the driver and every worker reach; ``dbfs:/x`` is its mount ``/dbfs/x``;
                ``Storage.of(uri, options)`` brings credentials of its own.
            options: ``keep_shards``, ``train_path``, ``val_path``, ``runs_path``, ``save_runs``.

        Raises:
            ConfigError: an unknown option, or a scheme that no filesystem answers to.
        """
        known = ("keep_shards", "train_path", "val_path", "runs_path", "save_runs")
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(f"Store.create takes no option {unknown[0]!r}: choose among {', '.join(known)}")
        return _made(prefix_path, **options)

    def addresses(self) -> dict[str, str]:
        """The paths, by field, as texts that mean the same place under any default filesystem."""
        return {name: place.spark_uri for name, place in self._places.items()}

    @property
    def root(self) -> Storage:
        """The folder."""
        return self._places["prefix_path"]

    def shards(self, key: str) -> Storage:
        """Where the shard set of ``key`` lies."""
        return self.root.child("shards").child(_checked("key", key))

    def run(self, run_id: str) -> Storage:
        """Where everything of one run lies."""
        return self._places["runs_path"].child(_checked("run_id", run_id))

    def checkpoints(self, run_id: str) -> Storage:
        """Where the checkpoints of one run lie."""
        return self.run(run_id).child("checkpoints")

    def logs(self, run_id: str) -> Storage:
        """Where the TensorBoard event files of one run lie."""
        return self.run(run_id).child("logs")

    def parquet(self, name: Literal["train_path", "val_path"], idx: int | None = None) -> Storage:
        """Where the Parquet files for ``fit_on_parquet`` lie."""
        place = self._places[name]
        return place if idx is None else place.sibling(f"{place.uri.rpartition('/')[2]}.{idx}")

    def shards_uri(self, key: str) -> str:
        """Where the shard set of ``key`` lies."""
        return self.shards(key).uri

    def run_uri(self, run_id: str) -> str:
        """Where everything of one run lies."""
        return self.run(run_id).uri

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Return the Parquet folder that ``fit_on_parquet`` trains on."""
        return self.parquet("train_path", idx).uri

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Return the Parquet folder that ``fit_on_parquet`` validates on."""
        return self.parquet("val_path", idx).uri

    def get_runs_path(self) -> str:
        """Return the folder of the runs."""
        return self.runs_path

    def get_run_path(self, run_id: str) -> str:
        """Return the folder of one run."""
        return self.run_uri(run_id)

    def get_checkpoint_path(self, run_id: str) -> str:
        """Return the folder of one run's checkpoints."""
        return self.checkpoints(run_id).uri

    def get_logs_path(self, run_id: str) -> str:
        """Return the folder of one run's TensorBoard event files."""
        return self.logs(run_id).uri

    def saving_runs(self) -> bool:
        """Tell whether checkpoints and logs are written."""
        return self.save_runs

    def exists(self, path: str) -> bool:
        """Tell whether a file or folder is there."""
        return Storage.of(path).exists()

    def read(self, path: str) -> bytes:
        """Return the bytes of a file."""
        return Storage.of(path).read_bytes()

    def discard_shards(self, uri: str | Storage, *, pinned: bool) -> None:
        """Delete a shard set after its fit, if the policy says so."""
        if self.keep_shards == "never" or (self.keep_shards == "pinned" and not pinned):
            _delete(Storage.of(uri))

    def close(self) -> None:
        """Remove the folder of a temporary store."""
        if self.temporary:
            _delete(self.root)


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


def _made(prefix_path: str | os.PathLike[str] | Storage, **options: Any) -> Store:
    return Store(prefix_path=cast(str, Storage.of(prefix_path)), **options)  # which is text once it is made


def _checked(what: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{what}={name!r} is no name for a folder: use letters, digits, '.', '_', '=' and '-'")
    return name


def _delete(folder: Storage) -> None:
    if folder.exists():
        folder.delete(recursive=True)
