"""Batch norm whose statistics run over the global batch, on CPU as on GPU, for local batches of any size.

Enters: a model with ``BatchNorm`` layers. Leaves: the same model, whose layers, while they train, ask the other ranks
for their count, mean and variance. torch's own ``SyncBatchNorm`` takes CUDA tensors only.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from sparkdl.collective.base import Ranks

__all__ = ["synchronised_batch_norm"]

CHANNEL = "batch_norm"


def synchronised_batch_norm(model: torch.nn.Module, ranks: Ranks) -> Callable[[], None]:
    """Make every ``BatchNorm`` of ``model`` use statistics of the global batch; return what undoes it.

    The modules stay the ones they are, with their parameters and buffers: only their ``forward`` is replaced, on the
    instance, so that a state dict, an EMA copy and ``isinstance`` see nothing of it.
    """
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    ranks.open_channel(CHANNEL)
    for index, layer in enumerate(layers):
        _RANKS[layer] = (ranks, f"{CHANNEL}.{index}")
        layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]

    def undo() -> None:
        for layer in layers:
            layer.__dict__.pop("forward", None)
            _RANKS.pop(layer, None)

    return undo


# Kept beside the layers, so that a deep copy of one has its weights alone: it never waits for others.
_RANKS: WeakKeyDictionary[_BatchNorm, tuple[Ranks, str]] = WeakKeyDictionary()


def _forward(layer: _BatchNorm, batch: torch.Tensor) -> torch.Tensor:
    known = _RANKS.get(layer)
    if known is None or not layer.training:
        return type(layer).forward(layer, batch)
    ranks, key = known
    layer._check_input_dim(batch)  # type: ignore[no-untyped-call]
    out, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
        batch, layer.weight, layer.bias, layer.eps, ranks, key
    )
    _track(layer, mean, variance, count)
    return out  # type: ignore[no-any-return]


@torch.no_grad()
def _track(layer: _BatchNorm, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
    """Move the running statistics, as ``torch.nn.BatchNorm`` does on one rank."""
    if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
        return
    rate = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if rate is None:
            rate = 1.0 / float(layer.num_batches_tracked)
    unbiased = variance * (count / (count - 1).clamp(min=1))
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), rate or 0.0)
    layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), rate or 0.0)


class _Normalise(torch.autograd.Function):
    """Normalise by the statistics of all ranks' rows (Ioffe and Szegedy 2015, section 3)."""

    @staticmethod
    def forward(
        ctx: Any,
        batch: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        ranks: Ranks,
        key: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        axes = [axis for axis in range(batch.dim()) if axis != 1]
        shape = [1, -1] + [1] * (batch.dim() - 2)
        wide = batch.to(torch.promote_types(batch.dtype, torch.float32))
        mean, variance, count = _global_moments(wide, axes, shape, ranks, key)
        scale = (variance + eps).rsqrt()
        normal = (wide - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, weight, scale, count)
        ctx.ranks, ctx.key, ctx.axes, ctx.shape = ranks, key, axes, shape
        ctx.mark_non_differentiable(mean, variance, count)
        out = normal if weight is None else normal * weight.view(shape)
        out = out if bias is None else out + bias.view(shape)
        return out.to(batch.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        normal, weight, scale, count = ctx.saved_tensors
        shape, axes = ctx.shape, ctx.axes
        wide = grads[0].to(normal.dtype)
        grad_bias, grad_weight = wide.sum(axes), (wide * normal).sum(axes)
        sums = torch.cat([grad_bias, grad_weight])
        ctx.ranks.start_all_reduce(sums, "sum", f"{ctx.key}.backward", channel=CHANNEL).wait()
        over_all, over_all_normal = (sums / count.clamp(min=1)).view(2, *shape)
        inner = wide - over_all - normal * over_all_normal
        factor = scale if weight is None else scale * weight
        grad_batch = (inner * factor.view(shape)).to(grads[0].dtype)
        if weight is None:
            return grad_batch, None, None, None, None, None
        return grad_batch, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None, None


def _global_moments(
    wide: torch.Tensor, axes: list[int], shape: list[int], ranks: Ranks, key: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, biased variance and count over all ranks, in one message.

    Every rank sends its count, mean and sum of squared deviations, which are merged as Chan, Golub and LeVeque (1979)
    do: a sum of squares would cancel where the mean is large.
    """
    channels, size = wide.shape[1], ranks.world.size
    rows = wide.numel() // max(1, channels)
    slots = wide.new_zeros(size, 2 * channels + 1)
    if rows:
        mean = wide.mean(axes)
        slots[ranks.world.rank, 0] = rows
        slots[ranks.world.rank, 1 : channels + 1] = mean
        slots[ranks.world.rank, channels + 1 :] = (wide - mean.view(shape)).square().sum(axes)
    ranks.start_all_reduce(slots.view(-1), "sum", f"{key}.forward", channel=CHANNEL).wait()
    counts, means, squares = slots[:, :1], slots[:, 1 : channels + 1], slots[:, channels + 1 :]
    count = counts.sum()
    mean = (counts * means).sum(0) / count.clamp(min=1)
    within = squares.sum(0) + (counts * (means - mean).square()).sum(0)
    return mean, within / count.clamp(min=1), count
