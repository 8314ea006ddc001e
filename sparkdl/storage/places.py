"""Places that work will write to, tried before the work starts."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from sparkdl.errors import StorageError, StoreUnavailableError
from sparkdl.storage.executors import nearest_folder, problems_on_executors
from sparkdl.storage.failures import storage_errors
from sparkdl.storage.files import TEMPORARY, Storage

_BLOCK = b"0" * 4096


def check_places(places: Mapping[str, Storage], spark: Any = None) -> None:
    """Write a file to each place, or to the nearest folder above it that exists, and remove it again.

    Args:
        places: folders, by what they are called in the message.
        spark: the session whose executors will write there, too; a cluster's are asked, by one short job.

    Raises:
        StorageError: one or more cannot be reached or written; the message has a sentence for each.
        StoreUnavailableError: the same, where none of them answers.
        ClusterError: the executors' Python lacks a module that this needs.
    """
    with ThreadPoolExecutor(max(1, len(places)), thread_name_prefix="sparkdl-places") as pool:
        errors = dict(zip(places, pool.map(_error, places.values()), strict=True))
    problems = {name: str(error) for name, error in errors.items() if error is not None}
    if spark is not None:
        fine = {name: storage for name, storage in places.items() if name not in problems}
        problems |= problems_on_executors(fine, spark, _problem)
    if problems:
        # what one of them refuses no second try mends
        out = all(isinstance(errors[name], StoreUnavailableError) for name in problems)
        raise (StoreUnavailableError if out else StorageError)("; ".join(map(": ".join, problems.items())))


def _problem(storage: Storage) -> str:
    return str(_error(storage) or "")


def _error(storage: Storage) -> StorageError | None:
    try:
        _try(storage)
    except StorageError as error:
        return error
    return None


def _try(storage: Storage) -> None:
    path = storage.local_path()
    if path is not None:
        with storage_errors(storage.uri, "write"), tempfile.TemporaryFile(dir=nearest_folder(path)) as file:
            file.write(_BLOCK)
        return
    folder = storage
    while folder.renames and not folder.exists():  # an object store has no folders that must be there first
        folder = folder.parent()
    probe = folder.child(f"{TEMPORARY}{uuid.uuid4().hex}")
    try:
        probe.write_atomic(_BLOCK)
    except StorageError as error:
        raise type(error)(str(error).replace(probe.uri, storage.uri)) from error
    finally:
        with suppress(StorageError):
            probe.delete()
