"""The loss whose minimum is a quantile (Koenker and Bassett 1978), at several levels at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from sparkdl.errors import ConfigError


class QuantileLoss(nn.Module):
    """The pinball loss, averaged over rows and levels.

    Args:
        levels: of the quantiles, each above 0 and below 1.
        reduction: ``"mean"``, or ``"none"`` for a loss a row and level.

    Shape:
        - Output: ``(rows, levels)``, label: ``(rows,)`` or ``(rows, 1)``.

    Raises:
        ConfigError: a level is out of its range, or the output has another number of them.
    """

    levels: Tensor

    def __init__(self, levels: Sequence[float], reduction: Literal["mean", "none"] = "mean") -> None:
        super().__init__()
        if not levels or not all(0 < level < 1 for level in levels):
            raise ConfigError(f"levels={list(levels)} are no quantiles: give numbers above 0 and below 1")
        if reduction not in ("mean", "none"):
            raise ConfigError(f"reduction={reduction!r} is unknown: choose 'mean' or 'none'")
        self.register_buffer("levels", torch.tensor(list(levels), dtype=torch.float32), persistent=False)
        self.reduction = reduction

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        """The loss of quantiles, see the class."""
        if output.ndim != 2 or output.shape[1] != len(self.levels):
            raise ConfigError(
                f"the output has the shape {tuple(output.shape)} for {len(self.levels)} levels: make the model return "
                "one number a level"
            )
        dtype = torch.promote_types(output.dtype, torch.float32)  # half precision would move labels and levels
        error, levels = label.reshape(-1, 1).to(dtype) - output.to(dtype), self.levels.to(dtype)
        value = torch.maximum(levels * error, (levels - 1) * error)
        return value if self.reduction == "none" else value.mean()
