"""Places that work will write to, tried before the work starts.

Enters: storages, by what they are for. Leaves: nothing, not in these places either, or one error that names each that
cannot be reached or written.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from sparkdl.errors import StorageError
from sparkdl.storage.failures import storage_errors
from sparkdl.storage.files import TEMPORARY, Storage

__all__ = ["check_places"]

_BLOCK = b"0" * 4096


def check_places(places: Mapping[str, Storage]) -> None:
    """Write a file to each place, or to the nearest folder above it that exists, and remove it again.

    Args:
        places: folders, by what they are called in the message.

    Raises:
        StorageError: one or more cannot be reached or written; the message has a sentence for each.
    """
    with ThreadPoolExecutor(max(1, len(places)), thread_name_prefix="sparkdl-places") as pool:
        found = list(pool.map(_problem, places.values()))
    problems = [f"{name}: {problem}" for name, problem in zip(places, found, strict=True) if problem]
    if problems:
        raise StorageError("; ".join(problems))


def _problem(place: Storage) -> str:
    try:
        _try(place)
    except StorageError as error:
        return str(error)
    return ""


def _try(place: Storage) -> None:
    path = place.local_path()
    if path is not None:
        with storage_errors(place.uri, "write"):
            while not os.path.lexists(path):
                path = path.parent
            with tempfile.TemporaryFile(dir=path) as file:
                file.write(_BLOCK)
        return
    folder = place
    while folder.renames and not folder.exists():  # an object store has no folders that must be there first
        folder = folder.parent()
    probe = folder.child(f"{TEMPORARY}{uuid.uuid4().hex}")
    try:
        probe.write_atomic(_BLOCK)
    except StorageError as error:
        raise StorageError(str(error).replace(probe.uri, place.uri)) from error
    finally:
        with suppress(StorageError):
            probe.delete()
