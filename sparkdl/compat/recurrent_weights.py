"""Weights of recurrent layers, free to change places with other tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def swappable_weights(model: torch.nn.Module) -> Iterator[None]:
    """Let ``torch.utils.swap_tensors`` take the weights of ``model``'s recurrent layers inside the block.

    ``nn.RNN``, ``nn.GRU`` and ``nn.LSTM`` hold weak references to their weights, and ``swap_tensors`` refuses a tensor
    that has one (torch 2.13). It can go when either changes; ``tests/compat/test_recurrent_weights.py`` notices that.
    """
    recurrent: list[Any] = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    for layer in recurrent:
        layer._flat_weight_refs.clear()  # the list, which an earlier trace of the layer may hold
    try:
        yield
    finally:
        for layer in recurrent:
            layer._init_flat_weights()
