"""Error mapping: what Spark says of a file of the source that it cannot read, as one sentence.

Enters: an error of pyspark or py4j, fifty lines long. Leaves: a ``DataError`` that names the file and the reason, with
what came in as its ``__cause__``; everything else passes as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from sparkdl.errors import DataError

__all__ = ["source_errors"]

_KIND = re.compile(r"\[(FAILED_READ_FILE|PATH_NOT_FOUND|CANNOT_READ_FILE)[.\w]*\]")
_FILE = re.compile(r"(?:reading file|file|[Pp]ath does not exist:) ((?:file:|\w[\w+.-]*:/)\S+?)\.?(?=[\s,]|$)")
_CAUSE = re.compile(r"Caused by: [\w.$]+: (.+?)(?=\n\s+at |\nCaused by: |\Z)", re.DOTALL)
_GONE = re.compile(r"FILE_NOT_EXIST|FileNotFound|PATH_NOT_FOUND|does not exist")
_LONGEST = 300


@contextmanager
def source_errors() -> Iterator[None]:
    """Raise what went wrong with a file that Spark reads in one sentence.

    Raises:
        DataError: it is gone, or is not what the source says it is.
    """
    try:
        yield
    except Exception as error:
        text = str(error) if type(error).__module__.startswith(("pyspark.", "py4j.")) else ""
        if not _KIND.search(text):
            raise
        found = _FILE.search(text)
        file = found[1] if found else "a file of the source"
        if _GONE.search(text):
            raise DataError(
                f"{file} was there when the run began and is gone: deliver what is read once, and run again"
            ) from error
        causes = _CAUSE.findall(text)
        reason = " ".join((causes[-1] if causes else text).split())[:_LONGEST].rstrip(" .:;")
        raise DataError(
            f"{file} cannot be read: {reason}; correct source, deliver the file again, or remove it"
        ) from error
