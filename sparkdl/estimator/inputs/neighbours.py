"""Whether what a model says of a row depends on the rows beside it: then its predictions mean nothing.

Enters: a model, how it is called, and two made-up rows. Leaves: nothing, or a ``ConfigError`` with both answers and the
layer in which the rows meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sparkdl.errors import ConfigError
from sparkdl.estimator.inputs.views import Views
from sparkdl.train.objective.loss import split_outputs

__all__ = ["check_neighbours"]

Rows = Mapping[str, torch.Tensor]


def check_neighbours(
    model: torch.nn.Module, call: Callable[[Rows], Any], views: Views, batch: Rows, labels: Sequence[str]
) -> None:
    """Refuse a model whose answer to a row depends on the row beside it.

    Args:
        model: the model.
        call: calls it with the tensors of a batch, in evaluation mode.
        views: how it is called.
        batch: two rows; the first is the shorter one where lengths differ.
        labels: the label columns.

    Raises:
        ConfigError: names both answers.
    """

    def answers(rows: Rows) -> list[torch.Tensor]:
        return list(split_outputs(call(rows), labels))

    together, again = answers(batch), answers(batch)
    if not all(map(_alike, together, again)):
        return  # it draws its answers, and nothing can be said
    # The same shapes with another neighbour: the same kernels run, so that rounding is no difference.
    twice = {name: torch.cat([tensor[:1], tensor[:1]]) for name, tensor in batch.items()}
    beside = answers(twice)
    for label, one, two in zip(labels, together, beside, strict=True):
        if one.shape == two.shape and not _alike(one[:1], two[:1]):
            raise ConfigError(
                f"{type(model).__name__} answers a row with {_short(two)} for {label!r}, and with {_short(one)} when "
                f"another row is beside it, first in {_meeting(model, call, batch, twice)}: let rows meet nowhere but "
                "in the loss"
            )
    if any(view.valid for view in views.inputs):
        _check_padding(model, answers, together, _shorter_row(views, batch), labels)


def _check_padding(
    model: torch.nn.Module,
    answers: Callable[[Rows], list[torch.Tensor]],
    together: Sequence[torch.Tensor],
    row: Rows,
    labels: Sequence[str],
) -> None:
    """Refuse a model that answers the shorter row otherwise where it is padded to the length of the longer one."""
    name = type(model).__name__
    try:
        alone = answers(row)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{name} cannot be called with a shorter row by itself ({told}): use the mask or lengths in forward"
        ) from error
    for label, pair, single in zip(labels, together, alone, strict=True):
        one, two = pair[:1], single
        if one.shape != two.shape:
            raise ConfigError(
                f"{name} returns shape {tuple(two.shape[1:])} for a row of {label!r}, and {tuple(one.shape[1:])} when "
                "a longer row is beside it: return one shape for all rows"
            )
        if not _alike(one, two):
            raise ConfigError(
                f"{name} answers a row with {_short(two)} for {label!r}, and with {_short(one)} when a longer row is "
                "beside it: use the mask or lengths in forward, so that padding counts for nothing"
            )


def _alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.allclose(one.double(), two.double(), rtol=1e-3, atol=1e-4, equal_nan=True)


def _shorter_row(views: Views, batch: Rows) -> dict[str, torch.Tensor]:
    """The first row by itself: as long as it is, without padding."""
    row = {name: tensor[:1] for name, tensor in batch.items()}
    for view in views.inputs:
        if view.valid is not None:
            length = int(batch[view.valid][0].sum())
            row[view.tensor], row[view.valid] = batch[view.tensor][:1, :length], batch[view.valid][:1, :length]
    return row


def _meeting(model: torch.nn.Module, call: Callable[[Rows], Any], batch: Rows, twice: Rows) -> str:
    """The first layer whose output for the first row depends on the second one."""

    def outputs(rows: Rows) -> list[tuple[str, torch.Tensor]]:
        seen: list[tuple[str, torch.Tensor]] = []

        def note(name: str) -> Callable[..., None]:
            return lambda _module, _args, out: seen.append((name, out)) if isinstance(out, torch.Tensor) else None

        hooks = [
            module.register_forward_hook(note(f"{name} ({type(module).__name__})"))
            for name, module in model.named_modules()
            if name and not any(True for _ in module.children())
        ]
        try:
            call(rows)
        finally:
            for hook in hooks:
                hook.remove()
        return seen

    for (name, one), (_, two) in zip(outputs(batch), outputs(twice), strict=False):
        if one.shape == two.shape and one.ndim and not _alike(one[:1], two[:1]):
            return name
    return "forward"


def _short(values: torch.Tensor) -> str:
    return str([float(f"{value:.4g}") for value in values.reshape(-1)[:3].tolist()])
