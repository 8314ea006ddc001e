"""Stage 3 of 6: gradients of each rank in, gradients all ranks agree on out.

Enters: a ``World``, later the gradients of one rank. Leaves: a ``Collective``, and means over all ranks in ``.grad``.
``backends/`` carry tensors between ranks that met through ``rendezvous/``; ``gradients/`` decides what travels when.
Start at ``base.py`` for what the room promises, at ``open.py`` for the way in.

The names are loaded when they are first used: the driver hosts a rendezvous of this room without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkdl.collective.base import Collective, GradientSync, ReduceOp
    from sparkdl.collective.open import open_collective

__all__ = ["Collective", "GradientSync", "ReduceOp", "open_collective"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "open" if name == "open_collective" else "base"
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
