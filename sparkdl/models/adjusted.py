"""A trained network and what is made of its outputs afterwards: quantiles in order, logits cooled, amounts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparkdl.errors import BundleError
from sparkdl.models.folder import Adjustment
from sparkdl.nn.poisson_loss import amounts_of


class AdjustedModel(nn.Module):
    """A model whose outputs are adjusted, one by one, by constants that its bundle names.

    Args:
        model: the network; it may return one tensor, a tuple of them, or a dict.
        adjustments: one an output, in the model's order, or by name where it returns a dict.
    """

    def __init__(self, model: nn.Module, adjustments: Sequence[Adjustment]) -> None:
        super().__init__()
        self.model, self.adjustments = model, tuple(adjustments)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, adjusted."""
        outputs = self.model(*args, **kwargs)
        if isinstance(outputs, Tensor):
            return _made(outputs, self.adjustments[0])
        if isinstance(outputs, Mapping):
            by_name = {adjustment.output: adjustment for adjustment in self.adjustments}
            return {name: _made(value, by_name[name]) if name in by_name else value for name, value in outputs.items()}
        pairs = zip(outputs, self.adjustments, strict=True)
        return tuple(_made(value, adjustment) for value, adjustment in pairs)


def adjusted(model: nn.Module, adjustments: Sequence[Adjustment]) -> nn.Module:
    """The model with these adjustments in place of any that it has; as it is where they change nothing."""
    plain = model.model if isinstance(model, AdjustedModel) else model
    if all(adjustment == Adjustment(output=adjustment.output) for adjustment in adjustments):
        return plain
    return AdjustedModel(plain, adjustments).train(plain.training)


def _made(output: Tensor, adjustment: Adjustment) -> Tensor:
    if adjustment.ascending:
        if output.ndim != 2:
            raise BundleError(
                f"output {adjustment.output!r} has the shape {tuple(output.shape)}, and quantiles are "
                "(rows, levels): publish the model again"
            )
        return torch.sort(output, dim=1).values
    if adjustment.mean is not None:
        return amounts_of(output, adjustment.mean, adjustment.ceiling)
    return output if adjustment.temperature == 1.0 else output / adjustment.temperature
