"""The replacement of a saved folder by a new one: a failure leaves the old one as it was."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

from sparkdl.errors import StorageError
from sparkdl.observe import logger
from sparkdl.storage import TEMPORARY, Storage


@contextlib.contextmanager
def atomic_replace(target: Storage) -> Iterator[Storage]:
    """Yield a folder beside ``target``; when the block ends without an error, it takes the place of ``target``.

    On a local disk or HDFS that takes two renames. An object store has no renames: there the files are copied, and
    whoever reads meanwhile may find none; a failure in between puts the old ones back.

    Raises:
        StorageError: it cannot be moved into place; the old folder then stands there as before.
    """
    if not target.renames and not target.exists():
        with _emptied_after_failure(target):
            yield target
        return
    work, old = (target.sibling(f"{TEMPORARY}{uuid.uuid4().hex}") for _ in range(2))
    with _emptied_after_failure(work):
        yield work
        was_there = target.exists()
        if was_there:
            target.move_to(old)
        try:
            work.move_to(target)
        except BaseException:
            if was_there:
                _put_back(old, target)
            raise
    if was_there:
        _remove(old)


@contextlib.contextmanager
def _emptied_after_failure(folder: Storage) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _remove(folder)
        raise


def _put_back(old: Storage, target: Storage) -> None:
    try:
        target.delete(recursive=True)  # what of the new one has arrived
        old.move_to(target)
    except StorageError as error:
        logger.error("the folder that was at %s lies in %s now: move it back (%s)", target.uri, old.uri, error)


def _remove(folder: Storage) -> None:
    try:
        folder.delete(recursive=True)
    except StorageError as error:  # the work is done, or has failed for another reason that matters more
        logger.warning("%s was not removed: %s", folder.uri, error)
