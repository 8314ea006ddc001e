"""The mode of a model, training or evaluation, for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def mode_of(model: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """Let ``model`` train or evaluate in the block; each of its modules is in its own mode again afterwards.

    A layer that somebody has frozen by ``eval()`` inside a model in training stays so, which ``model.train()`` behind
    the block would undo.
    """
    modes = {module: module.training for module in model.modules() if hasattr(module, "training")}
    if modes:  # a frozen script module has none, and takes none
        model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
