"""Tensors of their own, in the place of views, as what the parts of a sharded model return."""

from __future__ import annotations

from typing import Any

import torch


def copy_views(module: torch.nn.Module) -> None:
    """Copy what ``module`` returns where it is a view; before ``fully_shard``, whose hooks are the later ones.

    ``fully_shard`` (torch 2.13) hooks the backward pass to what a part returns, and loses the hook where that is a
    view, as a linear layer's of rows that are sequences, which the model then changes in place (``x += y``): parameters
    are not gathered again, and torch warns, and fails. It can go when torch keeps its hook;
    ``tests/compat/test_view_outputs_integration.py`` notices that.
    """
    module.register_forward_hook(lambda module, inputs, output: _copied(output))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone() if value.requires_grad and value._is_view() else value
    if type(value) in (tuple, list):
        return type(value)(_copied(entry) for entry in value)
    if type(value) is dict:
        return {name: _copied(entry) for name, entry in value.items()}
    return value
