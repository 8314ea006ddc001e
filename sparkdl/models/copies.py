"""Copies of bundles: to a registry, and to this machine for its processes; no torch."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

from sparkdl.errors import BundleError, ConflictError, IntegrityError, StorageError
from sparkdl.models.folder import (
    DOCUMENT,
    MAX_BYTES,
    BundleInfo,
    check_files,
    check_hash,
    check_size,
    file_hash,
    info_of,
    publish_folder,
    read_bundle,
    work_folder,
)
from sparkdl.storage import TEMPORARY, Storage, storage_errors
from sparkdl.storage.local import private_folder

_UNUSED_SECONDS = 30 * 86400.0
"""The seconds of disuse after which a copy on this machine goes when the next one is made."""


def copy_bundle(info: BundleInfo, uri: str | Storage) -> None:
    """Copy a bundle to ``uri``, checked against its hashes, so that it appears there whole or not at all.

    Where the same bundle is already, whole, it is left, with its age renewed; what is left of one is replaced.

    Raises:
        IntegrityError: a file differs from its hash.
        StorageError: it cannot be written there.
    """
    target = Storage.of(uri)
    folder = local_copy(info)
    text = info.folder.child(DOCUMENT).read_bytes(at_most=MAX_BYTES)
    if info_of(info.folder, text).content_hash != info.content_hash:
        raise IntegrityError(f"the bundle {info.uri} was replaced while it was copied: publish it again")
    if _is_whole(target, info):
        target.child(DOCUMENT).write_atomic(text)  # a collection of garbage spares what is young
        return
    with work_folder(target) as work:
        for name in info.files:
            with (
                folder.child(name).open_input() as source,
                storage_errors(target.uri, "write"),
                (work / name).open("xb") as sink,
            ):
                shutil.copyfileobj(source, sink, 4 << 20)
        try:
            publish_folder(work, target, text)
        except ConflictError:
            if _is_whole(target, info):  # another publisher of the same content was faster
                return
            if target.local_path() is not None:
                _set_aside(target)
                publish_folder(work, target, text)
            else:  # the files are there by now, beside another document
                target.child(DOCUMENT).write_atomic(text)


def _is_whole(target: Storage, info: BundleInfo) -> bool:
    """Whether this very bundle lies there, with all its files."""
    if not target.child(DOCUMENT).exists():
        return False
    try:
        if read_bundle(target).content_hash != info.content_hash:
            return False
        check_files(target, info)
    except (IntegrityError, BundleError):
        return False
    return True


def _set_aside(target: Storage) -> None:
    """Remove what is left of a bundle, whose name is free at once."""
    aside = target.sibling(f"{TEMPORARY}{uuid.uuid4().hex}")
    target.move_to(aside)
    aside.delete(recursive=True)


def local_copy(info: BundleInfo) -> Storage:
    """The bundle's folder on this machine, checked: itself, or a copy shared by the processes of this user.

    Raises:
        IntegrityError: a file differs from what was recorded of it.
        StorageError: it cannot be copied.
    """
    if info.folder.local_path() is not None:
        check_files(info.folder, info)
        return info.folder
    final = _cache() / info.content_hash
    copied_folder = Storage.of(final)
    if final.exists():
        with suppress(OSError):  # a copy that was damaged, or removed just now, is made again
            os.utime(final)
            check_files(copied_folder, info)
            return copied_folder
        _discard(final)
    _remove_unused(final.parent)
    _fetch(info, final)
    return copied_folder


def _fetch(info: BundleInfo, final: Path) -> None:
    """Copy a bundle's files; none that differs from its hash comes to stand under the bundle's."""
    work = Path(tempfile.mkdtemp(dir=final.parent))
    try:
        for name, facts in info.files.items():
            file = info.folder.child(name)
            check_size(file, facts)
            with file.open_input() as source, (work / name).open("xb") as sink:
                shutil.copyfileobj(source, sink, 4 << 20)
            check_hash(file, file_hash(work / name), facts)
        os.rename(work, final)
    except OSError as cause:
        if isinstance(cause, StorageError):
            raise
        if not final.exists():  # not merely another process that was faster
            raise StorageError(
                f"cannot copy the bundle {info.uri} to {final.parent}: {cause}; free space there"
            ) from cause
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_unused(cache: Path) -> None:
    """Remove copies that nobody has used for long, and what killed processes left of others."""
    for copy in cache.iterdir():
        with suppress(OSError):  # another process was faster
            if copy.lstat().st_mtime < time.time() - _UNUSED_SECONDS:
                _discard(copy)


def _discard(copy: Path) -> None:
    aside = copy.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    with suppress(OSError):
        os.rename(copy, aside)  # so that nobody finds half of it
        shutil.rmtree(aside, ignore_errors=True)


def _cache() -> Path:
    """A folder of this user's, and nobody else's, below the one for temporary files that all users share."""
    home = private_folder(Path(tempfile.gettempdir()) / f"sparkdl-{os.getuid()}")
    (home / "bundles").mkdir(mode=0o700, exist_ok=True)
    return home / "bundles"
