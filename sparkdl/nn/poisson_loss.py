"""The loss of amounts, whose causes multiply: Poisson's, of the logarithm of their mean."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from sparkdl.errors import ConfigError

_REACH = 30.0
"""Logarithms beyond which the exponential grows no further: float32 ends at 88."""


class PoissonLoss(nn.Module):
    """Half the Poisson deviance of amounts from the exponential of the model's outputs, averaged over rows.

    The model says the logarithm of an amount over ``mean``, so that what it adds up multiplies. The minimum is the mean
    of the amounts whatever their distribution, as for squared errors; but an error counts by its share of the amount,
    and a few very large amounts do not drown the rest (Santos Silva and Tenreyro 2006, "The Log of Gravity").

    Args:
        mean: of the amounts, above 0; an output of 0 stands for it.
        ceiling: that ``amounts`` never exceeds; None sets none.
        reduction: ``"mean"``, or ``"none"`` for a loss a row.

    Shape:
        - Output: ``(rows,)`` or ``(rows, 1)``, label: ``(rows,)`` or ``(rows, 1)``.

    Raises:
        ConfigError: the mean is not above 0, or the output has several numbers a row.
    """

    def __init__(
        self, mean: float = 1.0, ceiling: float | None = None, reduction: Literal["mean", "none"] = "mean"
    ) -> None:
        super().__init__()
        if not 0 < mean < math.inf:
            raise ConfigError(f"mean={mean} is not above 0, as amounts are on average: take another loss")
        if reduction not in ("mean", "none"):
            raise ConfigError(f"reduction={reduction!r} is unknown: choose 'mean' or 'none'")
        self.mean, self.ceiling, self.reduction = mean, ceiling, reduction

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        """The loss of logarithms, see the class; 0 where all are right."""
        if output.numel() != label.numel():
            raise ConfigError(
                f"the output has the shape {tuple(output.shape)} for labels of {tuple(label.shape)}: make the model "
                "return one number a row"
            )
        dtype = torch.promote_types(output.dtype, torch.float32)
        logarithms = output.reshape(-1).to(dtype).clamp(-_REACH, _REACH)
        ratios = label.reshape(-1).to(dtype) / self.mean
        losses_of_right_answers = ratios - torch.xlogy(ratios.clamp_min(0), ratios.clamp_min(0))
        losses = logarithms.exp() - ratios * logarithms - losses_of_right_answers
        return losses if self.reduction == "none" else losses.mean()

    def amounts(self, output: Tensor) -> Tensor:
        """What outputs stand for."""
        return amounts_of(output, self.mean, self.ceiling)


def amounts_of(output: Tensor, mean: float, ceiling: float | None) -> Tensor:
    """Amounts, ``ceiling`` at most, of the logarithms of what they are over ``mean``."""
    amounts = output.exp() * mean
    return amounts if ceiling is None else amounts.clamp(max=ceiling)
