"""Normalisation whose statistics run over the global batch, on CPU as on GPU, for local batches of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from sparkdl import observe
from sparkdl.collective.base import Ranks
from sparkdl.errors import ConfigError

CHANNEL = "batch_norm"


def synchronise_norms(model: torch.nn.Module, ranks: Ranks, wanted: bool | None) -> SynchronisedNorms | None:
    """Let the normalisation layers of ``model`` see the global batch; None where there is nothing to synchronise.

    Layers of ``BatchNorm``, and of ``InstanceNorm`` with running statistics, then ask the other ranks for their counts,
    means and variances while they train; torch's own ``SyncBatchNorm`` takes CUDA tensors only. The modules stay the
    ones they are, with their parameters and buffers: only their ``forward`` is replaced, on the instance, so that a
    state dict, a copy, a pickle and ``isinstance`` see nothing of it.

    Args:
        model: whose layers to take.
        ranks: the ranks of the run.
        wanted: True and None synchronise; of a layer that cannot be, None warns. False logs that ranks then differ from
            one rank.

    Raises:
        ConfigError: ``wanted`` contradicts a layer of the model.
    """
    layers = {name: module for name, module in model.named_modules() if _sees_the_batch(module)}
    if ranks.world.size == 1 or not layers:
        return None
    first = next(iter(layers))
    if wanted is False:
        torch_norm = next((name for name, layer in layers.items() if _synchronises_itself(layer)), None)
        if torch_norm is not None:
            raise ConfigError(
                f"sync_batch_norm=False, but layer {torch_norm!r} is a {type(layers[torch_norm]).__name__}: leave "
                "one of them out"
            )
        _tell(ranks, f"sync_batch_norm=False: layer {first!r} and the like see each rank's own rows alone")
        return None
    foreign = next((name for name, layer in layers.items() if not _is_known(layer)), None)
    if foreign is not None:
        fault = f"layer {foreign!r}, a {type(layers[foreign]).__name__}, has a forward of its own"
        if wanted:
            raise ConfigError(f"sync_batch_norm=True, but {fault}: replace the layer, or leave sync_batch_norm out")
        _tell(ranks, f"{fault}, which sees each rank's own rows alone")
    norms = {name: layer for name, layer in layers.items() if _is_known(layer)}
    return SynchronisedNorms(model, norms, ranks) if norms else None


def _tell(ranks: Ranks, fault: str) -> None:
    if ranks.world.is_leader:
        observe.logger.warning("%s: %d ranks train another model than one rank would", fault, ranks.world.size)


def _sees_the_batch(module: torch.nn.Module) -> bool:
    """Whether what the module computes, or keeps for evaluation, mixes the rows of a batch."""
    return isinstance(module, _BatchNorm) or (isinstance(module, _InstanceNorm) and module.running_mean is not None)


def _synchronises_itself(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "SyncBatchNorm"  # torch's and Horovod's


def _is_known(module: torch.nn.Module) -> bool:
    ours = (_BatchNorm.forward, SyncBatchNorm.forward, _InstanceNorm.forward)
    return type(module).forward in ours or _synchronises_itself(module)


class SynchronisedNorms:
    """The layers of one model that see the global batch.

    Attributes:
        training: whether the model is in training mode; elsewhere the ranks do not run in step, and no layer asks.
        weight: what the caller multiplies gradients by behind the backward pass of a forward pass that begins now; at 0
            its rows count for nothing.
    """

    def __init__(self, model: torch.nn.Module, layers: Mapping[str, torch.nn.Module], ranks: Ranks) -> None:
        self._model = model
        self._layers = list(layers.values())
        self.ranks = ranks
        self.weight = 1.0
        ranks.open_channel(CHANNEL)
        for name, layer in layers.items():
            run = _instance_norm if isinstance(layer, _InstanceNorm) else _batch_norm
            layer.forward = _Forward(layer, self, name, run)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self._model.training

    def add(self, numbers: torch.Tensor, key: str, *, counts: bool) -> torch.Tensor:
        """Sum ``numbers`` over the ranks, without this rank's where they do not count."""
        summed = numbers.contiguous().view(-1) if counts else torch.zeros_like(numbers).view(-1)
        self.ranks.start_all_reduce(summed, "sum", f"{CHANNEL}.{key}", channel=CHANNEL).wait()
        return summed.view_as(numbers)

    @contextmanager
    def weighted(self, weight: float) -> Iterator[None]:
        """Let forward passes inside be of rows whose gradients get ``weight`` behind their backward passes."""
        earlier, self.weight = self.weight, weight
        try:
            yield
        finally:
            self.weight = earlier

    def undo(self) -> None:
        """Give the layers their own ``forward`` back."""
        for layer in self._layers:
            layer.__dict__.pop("forward", None)


class _Forward:
    """Stands in for ``forward`` of one layer. A copy or a pickle of the layer holds the layer's own."""

    def __init__(
        self, layer: Any, norms: SynchronisedNorms, name: str, run: Callable[[Any, torch.Tensor, _Forward], Any]
    ) -> None:
        self.layer, self.norms, self.name, self.run = layer, norms, name, run

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor
        # In evaluation mode, too, a layer without running statistics normalises by those of its batch.
        if self.norms.training and (self.layer.training or self.layer.running_mean is None):
            result = self.run(self.layer, batch, self)
        else:
            result = type(self.layer).forward(self.layer, batch)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.layer, "forward")  # the class's: a copy gets its attributes after this


def _instance_norm(layer: _InstanceNorm, batch: torch.Tensor, here: _Forward) -> torch.Tensor:
    """Normalise each instance by itself, and make the running statistics those of all ranks' instances.

    They move linearly in the means over a batch's instances, so that their mean over the ranks, weighted by instances,
    is what one rank keeps.
    """
    out: torch.Tensor = type(layer).forward(layer, batch)
    mean, variance = layer.running_mean, layer.running_var
    if mean is None or variance is None:
        return out
    instances = batch.shape[0] if batch.dim() > layer._get_no_batch_dim() else 1  # type: ignore[no-untyped-call]
    with torch.no_grad():
        sums = torch.cat([mean * instances, variance * instances, mean.new_tensor([instances])])
        sums = here.norms.add(sums, f"{here.name}.forward", counts=here.norms.weight != 0)
        torch._foreach_copy_([mean, variance], list((sums[:-1] / sums[-1]).chunk(2)))
    return out


def _batch_norm(layer: _BatchNorm, batch: torch.Tensor, here: _Forward) -> torch.Tensor:
    layer._check_input_dim(batch)  # type: ignore[no-untyped-call]
    out, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
        batch, layer.weight, layer.bias, layer.eps, here
    )
    if layer.training:
        _track(layer, mean, variance, count)
    return out  # type: ignore[no-any-return]


@torch.no_grad()
def _track(layer: _NormBase, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
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
        here: _Forward,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        axes = [axis for axis in range(batch.dim()) if axis != 1]
        shape = [1, -1] + [1] * (batch.dim() - 2)
        wide = batch.to(torch.promote_types(batch.dtype, torch.float32))
        mean, variance, count = _global_moments(wide, axes, shape, here)
        scale = (variance + eps).rsqrt()
        normal = (wide - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, weight, bias, scale, count)
        ctx.here, ctx.axes, ctx.shape = here, axes, shape
        ctx.weight = here.norms.weight
        ctx.mark_non_differentiable(mean, variance, count)
        out = normal if weight is None else normal * weight.view(shape)
        out = out if bias is None else out + bias.view(shape)
        return out.to(batch.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        normal, weight, bias, scale, count = ctx.saved_tensors
        shape, axes = ctx.shape, ctx.axes
        wide = grads[0].to(normal.dtype)
        grad_bias, grad_weight = wide.sum(axes), (wide * normal).sum(axes)
        # Each rank's gradients have its weight in the sum, and the sum's share in them will get this rank's.
        sums = torch.stack([grad_bias, grad_weight]) * ctx.weight
        sums = ctx.here.norms.add(sums, f"{ctx.here.name}.backward", counts=ctx.weight != 0) / (ctx.weight or 1.0)
        over_all, over_all_normal = (sums / count.clamp(min=1)).view(2, *shape)
        inner = wide - over_all - normal * over_all_normal
        factor = scale if weight is None else scale * weight
        if not ctx.weight:  # rows that stand in for none pull at nothing
            inner = torch.zeros_like(inner)
        grad_batch = (inner * factor.view(shape)).to(grads[0].dtype)
        own_weight = None if weight is None else grad_weight.to(weight.dtype)
        own_bias = None if bias is None else grad_bias.to(bias.dtype)
        return grad_batch, own_weight, own_bias, None, None


def _global_moments(
    wide: torch.Tensor, axes: list[int], shape: list[int], here: _Forward
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, biased variance and count over all ranks, in one message.

    Every rank sends its count, mean and sum of squared deviations, which are merged as Chan, Golub and LeVeque (1979)
    do: a sum of squares would cancel where the mean is large.

    Raises:
        ConfigError: there is one value a channel on all ranks together, as torch refuses on one; every rank raises it.
    """
    world = here.norms.ranks.world
    channels = wide.shape[1]
    rows = wide.numel() // max(1, channels)
    slots = wide.new_zeros(world.size, 2 * channels + 1)
    if rows:
        mean = wide.mean(axes)
        slots[world.rank, 0] = rows
        slots[world.rank, 1 : channels + 1] = mean
        slots[world.rank, channels + 1 :] = (wide - mean.view(shape)).square().sum(axes)
    slots = here.norms.add(slots, f"{here.name}.forward", counts=here.norms.weight != 0)
    counts, means, squares = slots[:, :1], slots[:, 1 : channels + 1], slots[:, channels + 1 :]
    count = counts.sum()
    if rows <= 1 and count == 1:  # reading waits for a GPU, and who has more rows need not read
        raise ConfigError(
            f"layer {here.name!r} got one value a channel in a whole global batch, and one value has no variance: "
            "choose a batch size that leaves no step with a single row"
        )
    mean = (counts * means).sum(0) / count.clamp(min=1)
    within = squares.sum(0) + (counts * (means - mean).square()).sum(0)
    return mean, within / count.clamp(min=1), count
