"""How long a model's file must stay: as long as somebody may still score with it.

Enters: a folder, its Python owner, and the frames that read it. Leaves: the folder gone, once owner and frames are. A
frame is lazy, and others are derived from it, so what counts is whether the JVM still holds its function in any plan:
plans, cached tables, views and streams alike keep it. On Spark Connect nobody can tell, and the folder stays until the
interpreter ends.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from typing import Any

from sparkdl.errors import StorageError
from sparkdl.observe import logger
from sparkdl.storage import Storage

__all__ = ["Lease", "sweep"]

_leases: set[Lease] = set()
_lock = threading.Lock()


class Lease:
    """The right of a folder to stay.

    Args:
        uri: of the folder.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._owned = True
        self._for_ever = False
        self._functions: list[Any] = []  # weak references, of the JVM, to the functions that read the folder
        with _lock:
            _leases.add(self)

    def belongs_to(self, owner: object) -> None:
        """Let the folder stay while ``owner`` lives."""
        weakref.finalize(owner, self._disown).atexit = False

    def _disown(self) -> None:
        self._owned = False

    def hold(self, frame: Any) -> None:
        """Let the folder stay while any plan holds the function of ``frame``, as ``mapInArrow`` returned it."""
        try:
            function = frame._jdf.queryExecution().logical().functionExpr().func()
            self._functions.append(frame.sparkSession._jvm.java.lang.ref.WeakReference(function))
        except Exception as error:  # Spark Connect, or a plan of another shape
            logger.debug("%s stays until the end: %s", self.uri, error)
            self._for_ever = True

    def is_over(self) -> bool:
        """Whether nobody can ask for the folder any more."""
        if self._owned or self._for_ever:
            return False
        try:
            self._functions = [function for function in self._functions if function.get() is not None]
        except Exception:  # the JVM does not answer
            return False
        return not self._functions

    def end(self) -> None:
        """Delete the folder."""
        with _lock:
            _leases.discard(self)
        with contextlib.suppress(StorageError):
            Storage.of(self.uri).delete(recursive=True)


def sweep() -> None:
    """Delete every folder that nobody can ask for; called whenever another one is made."""
    with _lock:
        known = list(_leases)
    for lease in known:
        if lease.is_over():
            lease.end()


@atexit.register
def _end_all() -> None:
    for lease in list(_leases):
        lease.end()
