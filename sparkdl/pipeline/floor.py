"""A bound that a metric must reach, as a person writes it.

Enters: a text such as ``auc >= 0.7``. Leaves: a ``Floor``, or a sentence that says what is wrong with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sparkdl.errors import ConfigError
from sparkdl.pipeline.metrics.measure import HIGHER_IS_BETTER, check_metric

__all__ = ["Floor"]

_FLOOR = re.compile(r"\s*(\w+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """What a metric must reach whatever the champion does, ``"auc >= 0.7"``.

    Attributes:
        metric: its name.
        relation: ``>=`` or ``>`` where higher is better, ``<=`` or ``<`` where lower is.
        bound: the number.
    """

    metric: str
    relation: str
    bound: float

    @staticmethod
    def parse(text: str) -> Floor:
        """Read a floor as a person writes it.

        Raises:
            ConfigError: it is none, its metric is unknown, or it limits the metric on its good side.
        """
        found = _FLOOR.fullmatch(text)
        if found is None:
            raise ConfigError(f"the floor {text!r} is not a metric, one of >= > <= <, and a number: see 'auc >= 0.7'")
        metric, relation, bound = found[1], found[2], float(found[3])
        check_metric(metric)
        if HIGHER_IS_BETTER[metric] != (relation[0] == ">"):
            side, turned = ("higher", ">=") if HIGHER_IS_BETTER[metric] else ("lower", "<=")
            raise ConfigError(f"the floor {text!r} refuses good models: {metric} is better when {side}, write {turned}")
        return Floor(metric=metric, relation=relation, bound=bound)

    def holds(self, value: float) -> bool:
        """Whether a value of the metric reaches it."""
        past = value > self.bound if self.relation[0] == ">" else value < self.bound
        return past or (len(self.relation) == 2 and value == self.bound)

    def __str__(self) -> str:
        return f"{self.metric} {self.relation} {self.bound:g}"
