"""Places that work will write to, tried before the work starts.

Enters: storages, by what they are for. Leaves: nothing, not in these places either, or one error that names each that
cannot be reached or written, from the driver or from executors.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from sparkdl.errors import StorageError
from sparkdl.storage.executors import nearest_folder, problems_on_executors
from sparkdl.storage.failures import storage_errors
from sparkdl.storage.files import TEMPORARY, Storage

__all__ = ["check_places"]

_BLOCK = b"0" * 4096


def check_places(places: Mapping[str, Storage], spark: Any = None) -> None:
    """Write a file to each place, or to the nearest folder above it that exists, and remove it again.

    Args:
        places: folders, by what they are called in the message.
        spark: the session whose executors will write there, too; a cluster's are asked, by one short job.

    Raises:
        StorageError: one or more cannot be reached or written; the message has a sentence for each.
    """
    with ThreadPoolExecutor(max(1, len(places)), thread_name_prefix="sparkdl-places") as pool:
        problems = dict(zip(places, pool.map(_problem, places.values()), strict=True))
    if spark is not None:
        fine = {name: place for name, place in places.items() if not problems[name]}
        problems |= problems_on_executors(fine, spark, _problem)
    said = [f"{name}: {problem}" for name, problem in problems.items() if problem]
    if said:
        raise StorageError("; ".join(said))


def _problem(place: Storage) -> str:
    try:
        _try(place)
    except StorageError as error:
        return str(error)
    return ""


def _try(place: Storage) -> None:
    path = place.local_path()
    if path is not None:
        with storage_errors(place.uri, "write"), tempfile.TemporaryFile(dir=nearest_folder(path)) as file:
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
