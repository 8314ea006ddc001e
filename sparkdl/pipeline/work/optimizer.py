"""Optimizer and learning rate of the section ``train``; ranks import this file, and so without Spark and pandas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

_OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def make_optimizer(model: nn.Module, name: str, arguments: Mapping[str, float]) -> torch.optim.Optimizer:
    """An optimizer of torch's over all parameters of ``model``, by its short name.

    Adam's step is one kernel over all parameters where these are whole tensors: of many small ones it takes a quarter
    of the time on a processor.
    """
    parameters = list(model.parameters())
    plain = all(type(parameter.data) is torch.Tensor and parameter.is_floating_point() for parameter in parameters)
    fused = {"fused": True} if name != "sgd" and plain else {}
    optimizer: torch.optim.Optimizer = _OPTIMIZERS[name](parameters, **arguments, **fused)
    return optimizer


@dataclass(frozen=True)
class Schedule:
    """The schedule of an optimizer: the rate rises for ``warmup`` steps, then falls to 0 as ``decay`` says."""

    warmup: int
    decay: str
    steps: int
    per_step: bool = True

    def __call__(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Make the scheduler."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)

    def factor(self, step: int) -> float:
        """What the rate is multiplied by at a step, from 0 on."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        if self.decay == "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        return 1 - progress if self.decay == "linear" else 1.0
