"""The folder of each driver process where models lie while Spark's workers score with them."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import tempfile
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl import processes
from sparkdl.errors import StorageError
from sparkdl.storage import Storage, xxh3_hex

if TYPE_CHECKING:
    from sparkdl.models.folder import BundleInfo

_PREFIX = "sparkdl-models-"
_NAME = re.compile(rf"{_PREFIX}(?P<place>[0-9a-f]{{16}})-(?P<pid>\d+)-(?P<began>\d+)-[0-9a-f]{{8}}")

_lock = threading.Lock()
_folders: dict[tuple[int, str], Storage] = {}  # by process and root: a fork has none of its parent's
_bundles: dict[tuple[str, str], BundleInfo] = {}  # by folder and content hash


def keep(root: Storage, save: Callable[[Storage], BundleInfo]) -> BundleInfo:
    """Let a bundle lie where workers read it until this process ends.

    The bundle lies in ``<root>/sparkdl-models-<process>/`` until the driver's process ends: frames are lazy, others are
    derived from them, and nobody can tell which will run again. A model that is saved twice lies there once. The folder
    is removed when the interpreter exits; those of drivers that were killed go when the next driver on the same machine
    makes a folder below the same root.

    Args:
        root: a folder that workers reach.
        save: writes the bundle to the folder that it is given.

    Returns:
        the bundle; an earlier one if that is the same.
    """
    folder = process_folder(root)
    target = folder.child(uuid.uuid4().hex)
    try:
        info = save(target)
    except BaseException:
        _remove(target)
        raise
    with _lock:
        kept_info = _bundles.setdefault((folder.uri, info.content_hash), info)
    if kept_info is not info:
        _remove(target)
    return kept_info


def process_folder(root: Storage) -> Storage:
    """This process's folder below ``root``; the first call removes what dead drivers left there."""
    with _lock:
        where = (os.getpid(), root.uri)
        if where not in _folders:
            remove_orphans(root)
            name = f"{_PREFIX}{_place()}-{os.getpid()}-{processes.started(os.getpid())}-{uuid.uuid4().hex[:8]}"
            _folders[where] = root.child(name)
            folder = _folders[where].local_path()
            if folder is not None and folder.parent == Path(tempfile.gettempdir()):  # all users of the machine share it
                folder.mkdir(mode=0o700)
        return _folders[where]


def remove_orphans(root: Storage) -> None:
    """Delete the folders below ``root`` of processes of this machine that have ended."""
    with contextlib.suppress(StorageError):
        for entry in root.list():
            match = _NAME.fullmatch(entry.name)
            if (
                match
                and match["place"] == _place()
                and processes.ended(processes.place(), int(match["pid"]), int(match["began"]))
            ):
                _remove(root.child(entry.name))


def _place() -> str:
    return xxh3_hex(processes.place().encode())


def _remove(folder: Storage) -> None:
    with contextlib.suppress(StorageError):
        folder.delete(recursive=True)


@atexit.register
def _remove_all() -> None:
    for (pid, _), folder in _folders.items():
        if pid == os.getpid():
            _remove(folder)
