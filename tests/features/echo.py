"""A model that returns what it was given."""

from __future__ import annotations

import torch


class Echo(torch.nn.Module):
    """Returns its inputs; lists padded with -1 to one length."""

    def __init__(self, names: list[str], longest: int) -> None:
        super().__init__()
        self.names, self.longest = names, longest

    def forward(self, inputs):
        return {f"{name}_seen": self._seen(inputs, name) for name in self.names}

    def _seen(self, inputs, name):
        value, mask = inputs[name], inputs.get(f"{name}_mask")
        if mask is None:
            return value
        wide = value.new_full((len(value), self.longest), -1)
        wide[:, : value.shape[1]][mask] = value[mask]
        return wide
