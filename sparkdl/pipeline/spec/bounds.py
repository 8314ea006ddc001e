"""Bounds of a gate: values that a metric must reach, and the fewest groups and draws that can show a gain."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from sparkdl.errors import ConfigError
from sparkdl.metrics.names import HIGHER_IS_BETTER, check_metric_name

MIN_GROUPS, RESAMPLES = 5, 2000
"""What a gate asks for if it is not told; a high confidence needs more of both."""
_FLOOR = re.compile(r"\s*(\w+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


def least_groups(confidence: float) -> int:
    """The fewest groups that can show anything: a coin wins fewer of them in a row too often."""
    return math.ceil(math.log2(1 / (1 - confidence)))


def least_resamples(confidence: float) -> int:
    """The fewest draws of which twenty or so lie beyond the bound."""
    return math.ceil(round(20 / (1 - confidence), 6))


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
        match = _FLOOR.fullmatch(text)
        if match is None:
            raise ConfigError(f"the floor {text!r} is not a metric, one of >= > <= <, and a number: see 'auc >= 0.7'")
        metric, relation, bound = match[1], match[2], float(match[3])
        check_metric_name(metric, HIGHER_IS_BETTER)
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
