"""What a filesystem raises, as one sentence with a remedy.

Enters: a block that touches files. Leaves: a ``StorageError`` instead of whatever was raised in it.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from sparkdl.errors import SparkdlError, StorageError

__all__ = ["http_status", "storage_errors"]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def storage_errors(uri: str, action: str) -> Iterator[None]:
    """Turn whatever a filesystem raises inside the block into ``StorageError("cannot <action> <uri>: ...")``."""
    try:
        yield
    except SparkdlError:
        raise
    except Exception as cause:
        raise StorageError(f"cannot {action} {uri}: {_explain(cause)}") from cause


def _explain(cause: Exception) -> str:
    said = _one_line(cause)
    code = getattr(cause, "errno", None)
    if code in _FULL:
        return f"the device or quota is full ({said}): free space there or choose another target"
    if isinstance(cause, PermissionError) or code in _DENIED:
        return f"access is denied ({said}): grant this user the right or choose another place"
    if isinstance(cause, FileNotFoundError):
        return "it does not exist: check the path, or write it first"
    if isinstance(cause, NotADirectoryError | FileExistsError):
        return f"a file stands where a directory is needed ({said}): choose another path"
    return f"{type(cause).__name__}: {said}: check the address, the network and the credentials"


def _one_line(cause: Exception) -> str:
    """What an error says, without the Java frames that a server sends along; those stay in ``__cause__``."""
    return re.split(r"(?:\s|\\n|\\t)+at [\w$./]+\(", str(cause), maxsplit=1)[0].replace("\n", " ").rstrip()


def http_status(cause: BaseException | None) -> int | None:
    """The status of the object store's answer behind an exception (412: the condition of a write does not hold)."""
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        cause = cause.__cause__
    return None
