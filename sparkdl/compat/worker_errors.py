"""Errors of Spark tasks whose text no UTF-8 holds."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from sparkdl.errors import SparkdlError


@contextmanager
def encodable_errors() -> Iterator[None]:
    """Raise what the block raises with its lone surrogates escaped, as names of files that are no UTF-8 have them.

    pyspark's worker (``pyspark.util.handle_worker_exception``, 4.2) encodes the traceback strictly after it has
    announced it, and Java then waits for the rest for ever. It can go when pyspark escapes them.
    """
    try:
        yield
    except Exception as error:
        try:
            traceback.format_exc().encode()
        except UnicodeEncodeError:
            kind = type(error)
            text = str(error).encode(errors="backslashreplace").decode()
            if issubclass(kind, SparkdlError):
                raise kind(text) from None
            raise RuntimeError(f"{kind.__name__}: {text}") from None
        raise
