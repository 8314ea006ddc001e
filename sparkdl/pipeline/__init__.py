"""From a table to predictions, and again tomorrow: one file says what, and what has not changed is not done again.

Enters: a pipeline file. Leaves: tables, shards, a published model, predictions, and a record of the run. ``spec/``
says what a file may hold, ``file/`` reads one; ``sources/`` brings the rows, ``rows/`` judges and divides them,
``state/`` remembers what was made and tells what is stale, ``steps/`` holds one step a file, ``work/`` what they need,
``judging/`` says whether a model is good enough. Start at ``run.py``, then ``steps/__init__.py``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkdl.pipeline.pipeline import Pipeline
    from sparkdl.pipeline.plan import Plan
    from sparkdl.pipeline.state.record import RunRecord
    from sparkdl.pipeline.status import Status

__all__ = ["Pipeline", "Plan", "RunRecord", "Status"]

_HOMES = {"Pipeline": "pipeline", "Plan": "plan", "RunRecord": "state.record", "Status": "status"}


def __getattr__(name: str) -> Any:  # loaded when it is first used
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
