"""What a search may try, and the settings that follow from it; no torch."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

from sparkdl.errors import ConfigError

Settings = dict[str, Any]
_DRAWS_A_TRIAL = 50


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from ``low`` to ``high``, both included.

    Attributes:
        low: the least.
        high: the greatest.
        log: whether their logarithms are spread evenly, as suits a learning rate.
        whole: whether only whole numbers are drawn.

    Raises:
        ConfigError: there is no number between them, or no logarithm.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        if not all(isinstance(end, Real) for end in (self.low, self.high)):
            raise ConfigError(f"Range({self.low!r}, {self.high!r}) has an end that is no number: give two numbers")
        if not self.low < self.high or not math.isfinite(self.high - self.low):
            raise ConfigError(f"Range({self.low!r}, {self.high!r}) is empty: give a low end below the high one")
        if self.whole and math.ceil(self.low) > math.floor(self.high):
            raise ConfigError(f"Range({self.low!r}, {self.high!r}, whole=True) holds no whole number: widen it")
        if self.log and self.low <= 0:
            raise ConfigError(f"Range({self.low!r}, {self.high!r}, log=True) has no logarithm: give a low end above 0")

    def draw(self, generator: random.Random) -> float:
        """Draw a number."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        number = low + (high - low) * generator.random()
        number = min(max(math.exp(number) if self.log else number, self.low), self.high)
        return min(max(round(number), math.ceil(self.low)), math.floor(self.high)) if self.whole else number


Space = Mapping[str, Sequence[Any] | Range]
"""By name of a setting a ``Range``, or the values it may have."""


def all_settings(space: Space) -> list[Settings]:
    """All combinations of the values of a space without ranges, the last name changing fastest."""
    values = cast(Iterable[Sequence[Any]], space.values())
    return [dict(zip(space, chosen, strict=True)) for chosen in itertools.product(*values)]


def drawn_settings(space: Space, count: int, seed: int) -> list[Settings]:
    """Different settings, drawn at random and the same each time; fewer than ``count`` where there are not so many."""
    generator, trials = random.Random(seed), list[Settings]()
    for _ in range(_DRAWS_A_TRIAL * count):
        settings = {
            name: values.draw(generator) if isinstance(values, Range) else generator.choice(values)
            for name, values in space.items()
        }
        if settings not in trials:
            trials.append(settings)
        if len(trials) == count:
            break
    return trials


def settings_text(settings: Mapping[str, Any]) -> str:
    """The settings of a trial in words."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())
