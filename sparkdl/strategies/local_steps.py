"""The interval at which ranks that train by themselves make their models one: ``LocalSteps``, or its text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import ClassVar

from sparkdl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """Each rank makes optimizer steps with its own rows; now and then all move on from the mean of their models.

    Local SGD takes the mean (Stich, ICLR 2019); DiLoCo takes the way from the last common model to the mean as a
    gradient, and steps along it with Nesterov momentum (Douillard et al., 2023), of which the mean is the case
    ``outer_lr=1, outer_momentum=0``.

    Attributes:
        every: optimizer steps between two means; the end of an epoch is one in any case.
        outer_lr: share of the way to the mean that is gone.
        outer_momentum: Nesterov momentum of these outer steps.

    Raises:
        ConfigError: an option cannot be.
    """

    every: int = 16
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    name: str = field(default="", compare=False)

    implementation: ClassVar[str] = "sparkdl.strategies.local_sgd:LocalSGD"
    needs_torch_groups: ClassVar[bool] = False
    is_data_parallel: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise ConfigError(f"every={self.every!r} is no number of steps between two means: give 1 or more")
        for option, least, below in (("outer_lr", 0.0, math.inf), ("outer_momentum", 0.0, 1.0)):
            value = getattr(self, option)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not least <= value < below or (option == "outer_lr" and value == 0):
                bounds = "above 0" if option == "outer_lr" else "of 0 and more, below 1"
                raise ConfigError(f"{option}={value!r} does not go with outer steps: give a number {bounds}")

    def filled(self, ranks: int) -> LocalSteps:
        """Return the same, for any number of ranks."""
        return self

    def __str__(self) -> str:
        """The text that it was read from, or one that gives it."""
        if self.name:
            return self.name
        options = (f"{option.name}={getattr(self, option.name)!r}" for option in fields(self) if option.name != "name")
        return f"local_sgd({', '.join(options)})"


PRESETS = {
    "local_sgd": LocalSteps(name="local_sgd"),
    "diloco": LocalSteps(every=64, outer_lr=0.7, outer_momentum=0.9, name="diloco"),
}
"""The options by the name that ``strategy=`` takes."""
