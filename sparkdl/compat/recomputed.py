"""Activations computed again in the backward pass, without wrapping or renaming a module."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def recompute(modules: Iterable[torch.nn.Module]) -> None:
    """Let each module compute its activations again in the backward pass, instead of keeping them.

    torch's public ``checkpoint`` wraps a call, and its wrappers change the names of parameters, so that a checkpoint of
    one run would not fit another; ``torch.distributed._composable`` (2.13) does it by hooks, as torch's own examples of
    sharded training do, and has no public name. It can go when it has one; ``tests/compat/test_recomputed.py`` notices
    when it changes.
    """
    from torch.distributed._composable import checkpoint  # type: ignore[attr-defined]

    for module in modules:
        checkpoint(module)
