"""Which epoch is the best so far, and when to stop waiting for a better one.

Enters: one value an epoch. Leaves: a judgement, equal on all ranks since the value is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["Stopping"]


@dataclass
class Stopping:
    """The best epoch so far.

    Attributes:
        mode: ``"min"`` or ``"max"``.
        patience: epochs without improvement after which to stop; None never stops.
        min_delta: a change up to this size is no improvement.
        best_value: the best value; None before the first.
        best_epoch: its epoch.
        waited: epochs since then.
    """

    mode: str
    patience: int | None
    min_delta: float
    best_value: float | None = None
    best_epoch: int | None = None
    waited: int = 0

    def judge(self, epoch: int, value: float) -> bool:
        """Take in the value of ``epoch``; return whether it is the best so far. NaN never is."""
        if self._better(value):
            self.best_value, self.best_epoch, self.waited = value, epoch, 0
            return True
        self.waited += 1
        return False

    @property
    def exhausted(self) -> bool:
        """Whether patience has run out."""
        return self.patience is not None and self.waited >= self.patience

    def _better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best_value is None:
            return True
        gain = self.best_value - value if self.mode == "min" else value - self.best_value
        return gain > self.min_delta

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen; mode and patience are settings, not state."""
        return {"best_value": self.best_value, "best_epoch": self.best_epoch, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was seen."""
        self.best_value, self.best_epoch, self.waited = state["best_value"], state["best_epoch"], state["waited"]
