"""Whether a saved pickle may be loaded, which can run any code: only after an explicit word of the caller's.

Enters: a ``with allow_pickle():`` block, a setting of the session or a variable of the environment. Leaves: yes or no.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

__all__ = ["REMEDY", "allow_pickle", "pickle_allowed"]

SETTING, VARIABLE = "spark.sparkdl.allowPickle", "SPARKDL_ALLOW_PICKLE"
REMEDY = (
    f"if you trust whoever saved it, load it inside `with sparkdl.allow_pickle():`, or set {SETTING}=true in Spark or "
    f"{VARIABLE}=1 in the environment"
)

_allowed: ContextVar[bool] = ContextVar("sparkdl_allow_pickle", default=False)


@contextlib.contextmanager
def allow_pickle() -> Iterator[None]:
    """Let what is loaded inside the block bring pickles, which can run any code; also for ``PipelineModel.load``.

    Their hashes are compared first in any case.

    Example:
        >>> with sparkdl.allow_pickle():
        ...     fitted = PipelineModel.load("/models/churn")
    """
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


def pickle_allowed(spark: Any) -> bool:
    """Whether the caller, the session or the environment has said so."""
    said = [str(spark.conf.get(SETTING, "") or ""), os.environ.get(VARIABLE, "")]
    return _allowed.get() or any(word.strip().lower() in ("1", "true", "yes") for word in said)
