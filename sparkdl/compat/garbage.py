"""Python workers whose garbage collector does not look at their libraries after every task."""

from __future__ import annotations

import functools
import gc


def freeze() -> None:
    """Collect what is garbage now, and never look again at what is not.

    Spark's Python daemon calls ``gc.collect()`` after each task (``pyspark/daemon.py`` of 4.2 and 4.3): with torch
    loaded that is some 0.1 s each time. It can go when Spark collects by need.
    """
    gc.collect()
    gc.freeze()


freeze_once = functools.cache(freeze)
"""``freeze``, done the first time alone that a process calls it."""
