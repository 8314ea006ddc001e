"""Errors that crossed from a Spark task to the driver, as the typed errors they were.

Enters: whatever Spark raised. Leaves: the ``SparkdlError`` that a task raised, if that was the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from sparkdl import errors

__all__ = ["task_errors", "task_fault"]

_RAISED = re.compile(r"^sparkdl\.errors\.(\w+): (.+?)(?=\n\s*\n|\n\s+at |\nTraceback|\Z)", re.MULTILINE | re.DOTALL)


def task_fault(cause: BaseException) -> errors.SparkdlError | None:
    """The error of ours that a task raised, read from the traceback that Spark wraps it in; None if there is none."""
    if isinstance(cause, errors.SparkdlError):
        return cause
    for name, message in reversed(_RAISED.findall(str(cause))):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, errors.SparkdlError) and kind is not errors.RankFailedError:
            return kind(message.strip())
    return None


@contextmanager
def task_errors() -> Iterator[None]:
    """Raise what a task raised, instead of Spark's wrapping of it, which stays attached as the cause."""
    try:
        yield
    except Exception as cause:
        fault = task_fault(cause)
        if fault is None or fault is cause:
            raise
        raise fault from cause
